"""Which clients take part in federated rounds: clients and islands drawn at random, or clients that a server asks.

All draws depend only on (seed, round), so every process computes them itself and no node sends them.

A server that asks only available clients (`Participation`) works as in Bonawitz et al., `Towards Federated Learning at
Scale`, arXiv:1902.01046. The server asks k clients for their reports (the updates), and gives up a round without
reports. Client i takes t_i seconds for its local steps. Round r begins at T_r:

    asked      k of the clients available at T_r, drawn without replacement
    t_i        = (local steps) step_seconds / speed_i
    reports    of asked clients that stay available until T_r + t_i
    T_r+1      = T_r + t_i of the last report

All values follow from the seed, the round's number, the step times and the trace of availability, so runs are
reproducible and checkpoints save nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.core.fleet import Fleet
from exogym.errors import check_count, check_number
from exogym.faults import Availability
from exogym.strategy.traffic import AskedRounds


class ClientDraws:
    """Draws a round's clients and islands. `AveragingCommunicator` describes the other arguments.

    Args:
        by_chance: whether each node is a client with probability `client_fraction`, independently, as `privacy` needs.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(
        self,
        client_fraction: float = 1.0,
        island_size: int | None = None,
        by_chance: bool = False,
    ):
        if island_size is not None:
            check_count("island_size", island_size)
        check_number("client_fraction", client_fraction, over=0, most=1)
        self.client_fraction, self.island_size, self.by_chance = client_fraction, island_size, by_chance
        self.samples = client_fraction < 1 or by_chance

    def sizes(self, N: int) -> tuple[int, int]:
        """Return the number of clients in a round of N nodes, and the number of nodes in an island."""
        clients = max(math.ceil(self.client_fraction * N - 1e-9), 1)
        return clients, min(self.island_size or clients, clients)

    def couples_every(self, H: float, N: int) -> float:
        """Return the number of steps until N nodes have exchanged the whole model once, for rounds of H steps."""
        clients, island = self.sizes(N)
        rounds = 1 if island == clients else math.ceil(math.log(clients, max(island, 2)))
        return H * rounds * N / clients

    def seats(self, N: int) -> int | None:
        """Return the largest number of nodes that act in a round, or None if all do or islands have no server."""
        clients, island = self.sizes(N)
        if island < clients:
            return None
        if self.by_chance:  # practically never exceeded
            mean = self.client_fraction * N
            return min(N, math.ceil(mean + 8 * math.sqrt(mean) + 8))
        return clients if clients < N else None

    def clients(self, N: int, seed: int, round_: int) -> list[int]:
        """Return the sorted ids of a round's clients."""
        if self.by_chance:
            chance = numpy_generator(seed, "private clients", round_).random(N)
            return np.flatnonzero(chance < self.client_fraction).tolist()
        drawn = numpy_generator(seed, "clients", round_).choice(N, self.sizes(N)[0], replace=False)
        return sorted(drawn.tolist())

    def islands(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """Divide a round's `clients` into islands, which average separately."""
        if self.island_size is None or self.island_size >= len(clients):
            return [clients]
        order = numpy_generator(seed, "islands", round_).permutation(clients).tolist()
        return [sorted(order[i : i + self.island_size]) for i in range(0, len(order), self.island_size)]

    def rounds_among(self, N: int, H: int) -> AskedRounds | None:
        """Return a function that yields each round's clients, for `Plan.rounds`, or None if all N nodes are clients."""
        if self.client_fraction == 1 or N == 1:
            return None

        def rounds(step_s: np.ndarray) -> Iterator[tuple[list[list[int]], float | None]]:
            for round_ in itertools.count():
                groups = self.islands(self.clients(N, 0, round_), 0, round_)
                yield groups, None if len(groups) > 1 else 0.0

        return rounds


@dataclass(frozen=True)
class Round:
    """A round on the server's clock.

    Attributes:
        begin_s, end_s: the round's start and end in seconds.
        asked: the clients that the server asked.
        reported: the clients whose reports arrived.
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
        work: a function of a round's number that returns the clients' local steps, (N,) or one number for all.
        step_s: seconds of a step at speed 1, (N,) or one number for all.
        availability: when clients are available, and their speeds.

    >>> from exogym.faults import Devices
    >>> rounds = Participation(0, num_nodes=10, wanted=2, work=lambda r: 5, step_s=0.1, availability=Devices())
    >>> first = rounds.of(0)
    >>> len(first.asked), len(first.reported), first.end_s
    (2, 2, 10.0)
    """

    def __init__(
        self,
        seed: int,
        num_nodes: int,
        wanted: int,
        work: Callable[[int], np.ndarray | int],
        step_s: np.ndarray | float,
        availability: Availability,
    ):
        self.seed, self.num_nodes, self.wanted, self.work, self.step_s = seed, num_nodes, wanted, work, step_s
        self.availability = availability
        self._begins = [0.0]
        self._fails: list[bool] = []  # one entry per round with a known end
        self._known: dict[int, Round] = {}

    def of(self, number: int) -> Round:
        """Return round number `number` (from 0)."""
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
        """Return the server's time, failed rounds, and the last round's asked and reporting clients."""
        last = self.of(ended - 1)
        found = {"server_time_s": last.end_s, "asked": len(last.asked), "reports": len(last.reported)}
        return found | {"failed_rounds": self.failed(ended)}

    def slack_s(self, number: int, clients: Sequence[int]) -> float:
        """Return the seconds left in round `number` after the slowest of `clients` has computed at speed 1."""
        work_s = np.broadcast_to(np.asarray(self.work(number)) * self.step_s, self.num_nodes)
        held = self.of(number)
        return max(0.0, held.end_s - held.begin_s - max((float(work_s[i]) for i in clients), default=0.0))

    def _held(self, number: int) -> Round:
        begin_s = self._begins[number]
        draw = numpy_generator(self.seed, "clients", number)
        available = self.availability.at(begin_s, self.num_nodes)
        at = np.sort(draw.choice(len(available.ids), min(self.wanted, len(available.ids)), replace=False))
        asked, until_s, speed = available.ids[at], available.until_s[at], available.speed[at]
        work = np.broadcast_to(np.asarray(self.work(number)), self.num_nodes)
        takes_s = work[asked] * np.broadcast_to(self.step_s, self.num_nodes)[asked] / speed
        came = np.flatnonzero(begin_s + takes_s <= until_s)
        # If nobody is available, the round lasts as long as at speed 1.
        took_s = float(takes_s[came].max()) if len(came) else float(np.max(work) * np.max(self.step_s))
        return Round(begin_s, begin_s + took_s, asked.tolist(), asked[came].tolist())
