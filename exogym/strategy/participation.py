"""Rounds of a server that asks the clients that are available: which clients it asks, and which report.

Bonawitz et al., `Towards Federated Learning at Scale`, arXiv:1902.01046. A server asks k clients for their reports (the
updates). If no report comes, the server gives the round up. Client i takes t_i seconds for its local steps. Round r
begins at T_r:

    asked      k of the clients available at T_r, drawn without replacement
    t_i        = (local steps) step_seconds / speed_i
    reports    of asked clients that stay available until T_r + t_i
    T_r+1      = T_r + t_i of the last report

The seed, the round's number, the step times and the trace of availability determine all values. So runs repeat exactly,
and checkpoints need not save anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from exogym.core.base.draws import numpy_generator
from exogym.core.fleet import Fleet
from exogym.faults import Availability


@dataclass(frozen=True)
class Round:
    """A round on the server's clock.

    Attributes:
        begin_s, end_s: the round's begin and end, in seconds.
        asked: the clients that the server asked.
        reported: the clients whose reports came.
    """

    begin_s: float
    end_s: float
    asked: list[int]
    reported: list[int]

    def record(self, fleet: Fleet) -> None:
        """Record the bytes of the parameters that the server sent to clients that did not report."""
        in_vain = [i for i in self.asked if i not in set(self.reported)]
        for block in fleet.blocks if in_vain else ():
            fleet.comm.pull(block.params, in_vain)


class Participation:
    """All rounds of a run in which a server asks clients.

    Args:
        seed: the run's seed, from which the server draws clients.
        num_nodes: N, the number of clients.
        wanted: k, the clients that the server asks in a round.
        work: a function from a round's number to the clients' local steps, as (N,) values or one number for all
            clients.
        step_s: seconds of a step at speed 1, as (N,) values or one number for all clients.
        availability: when clients are available, and their speeds. None means that all clients are always available, at
            speed 1.

    >>> rounds = Participation(seed=0, num_nodes=10, wanted=2, work=lambda r: 5, step_s=0.1)
    >>> first = rounds.of(0)
    >>> len(first.asked), len(first.reported), first.end_s
    (2, 2, 0.5)
    """

    def __init__(
        self,
        seed: int,
        num_nodes: int,
        wanted: int,
        work: Callable[[int], np.ndarray | int],
        step_s: np.ndarray | float,
        availability: Availability | None = None,
    ):
        self.seed, self.num_nodes, self.wanted, self.work, self.step_s = seed, num_nodes, wanted, work, step_s
        self.availability = availability
        self._begins = [0.0]
        self._fails: list[bool] = []  # one entry per round with a known end
        self._known: dict[int, Round] = {}

    def of(self, number: int) -> Round:
        """Return the round with the number `number`, counted from 0."""
        while len(self._begins) <= number:
            last = len(self._begins) - 1
            held = self._known[last] if last in self._known else self._held(last)
            self._begins.append(held.end_s)
            self._fails.append(not held.reported)
        if number not in self._known:
            self._known = {r: held for r, held in self._known.items() if abs(r - number) <= 1}
            self._known[number] = self._held(number)
        return self._known[number]

    def failed(self, count: int) -> int:
        """Return how many of the first `count` rounds the server gave up."""
        self.of(count)
        return sum(self._fails[:count])

    def figures(self, ended: int) -> dict[str, float]:
        """Return figures for the history after `ended` rounds.

        These are the server's time, the clients asked and reports counted in the last round, and the number of rounds
        given up.
        """
        last = self.of(ended - 1)
        found = {"server_time_s": last.end_s, "asked": len(last.asked), "reports": len(last.reported)}
        return found | {"failed_rounds": self.failed(ended)}

    def slack_s(self, number: int, clients: Sequence[int]) -> float:
        """Return the seconds that remain in round `number` after the slowest of `clients` has computed at speed 1."""
        work_s = np.broadcast_to(np.asarray(self.work(number)) * self.step_s, self.num_nodes)
        held = self.of(number)
        return max(0.0, held.end_s - held.begin_s - max((float(work_s[i]) for i in clients), default=0.0))

    def _held(self, number: int) -> Round:
        begin_s = self._begins[number]
        draw = numpy_generator(self.seed, "clients", number)
        if self.availability is None:
            asked = np.sort(draw.choice(self.num_nodes, min(self.wanted, self.num_nodes), replace=False))
            until_s, speed = np.full(len(asked), math.inf), np.ones(len(asked))
        else:
            available = self.availability.at(begin_s, self.num_nodes)
            at = np.sort(draw.choice(len(available.ids), min(self.wanted, len(available.ids)), replace=False))
            asked, until_s, speed = available.ids[at], available.until_s[at], available.speed[at]
        work = np.broadcast_to(np.asarray(self.work(number)), self.num_nodes)
        takes_s = work[asked] * np.broadcast_to(self.step_s, self.num_nodes)[asked] / speed
        came = np.flatnonzero(begin_s + takes_s <= until_s)
        # If nobody is available, the round lasts as long as at speed 1.
        took_s = float(takes_s[came].max()) if len(came) else float(np.max(work) * np.max(self.step_s))
        return Round(begin_s, begin_s + took_s, asked.tolist(), asked[came].tolist())
