"""Report a run to its observers while the run trains: records, events and heartbeats."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from exogym.core.communicator import Communicator
from exogym.core.record.history import History
from exogym.core.record.observers import Observer, Observers
from exogym.core.training.agenda import Agenda

SIGN_PAUSE_S = 0.05  # between signs of life in a stretch


@dataclass(frozen=True)
class Totals:
    """A run's totals so far: mean bytes per node, traffic by collective, virtual and wall seconds."""

    payload_tx_rx: tuple[float, float, float]
    sent: dict[str, dict[str, float]]
    time_s: float
    wall_s: float

    @classmethod
    def of(cls, comm: Communicator, time_s: float, wall_s: float) -> Totals:
        ledger = comm.ledger
        found = tuple(float(x.mean()) for x in (ledger.payload_bytes, ledger.tx_bytes, ledger.rx_bytes))
        return cls(found, {name: dict(row) for name, row in ledger.traffic.items()}, time_s, wall_s)  # type: ignore[arg-type]


class Reports:
    """Report a run to its `observers` (such as loggers).

    Args:
        agenda: the run's schedule.
        signs: further functions to call from time to time between two steps.
        tells_who: whether to report nodes that leave and return. False if only the clients that train now have a row.

    Attributes:
        logged: the last step that observers have received.
        examples: the number of examples that all nodes together have used since this process began to train.
    """

    def __init__(
        self, observers: Observers, comm: Communicator, agenda: Agenda, signs: Sequence[Callable[[], None]] = (),
        tells_who: bool = True,
    ):  # fmt: skip
        self.observers, self.comm, self.agenda, self.signs = observers, comm, agenda, list(signs)
        self.logged, self.examples = -1, 0
        self._there = set(comm.present)  # nodes present at the last report
        self._tells_who = tells_who

    def stretch(
        self, history: History, steps: tuple[int, int], nodes: Sequence[int], losses: Tensor,
        lr: Callable[[int], float], before: Totals, after: Totals, has_clock: bool,
    ) -> None:  # fmt: skip
        """Add a stretch to the history. `steps` is (first, last); `losses` has the shape (nodes, last - first)."""
        first, last = steps
        agenda = self.agenda
        numbers = np.arange(first + 1, last + 1)
        logged = numbers[(numbers % agenda.log_interval == 0) | (numbers == agenda.total_steps)]
        values = losses.float().cpu().numpy()
        mean = float(np.nanmean(values[:, -1])) if not np.isnan(values[:, -1]).all() else float("nan")
        self.examples += int((np.count_nonzero(~np.isnan(values), axis=1) * agenda.examples_of(nodes)).sum())
        self.observers.beat(last, {"loss": mean, "tx_bytes": after.payload_tx_rx[1]})
        payload, tx, rx = before.payload_tx_rx
        history.add_stretch(
            steps=logged, epochs=(logged - 1) // agenda.steps_per_epoch, losses=values[:, logged - first - 1],
            lr=np.array([lr(int(s) - 1) for s in logged]), nodes=nodes,
            payload_bytes=payload, tx_bytes=tx, rx_bytes=rx,
            final_bytes=after.payload_tx_rx, wall_s=(before.wall_s, after.wall_s), span=(first + 1, last),
            time_s=(before.time_s, after.time_s) if has_clock else None,
        )  # fmt: skip

    def log(self, history: History, last: int) -> None:
        """Send observers all new records up to step `last`."""
        if self.observers.reads_records:
            for record in history.rows_after(self.logged):
                if record["step"] > last:
                    break
                self.observers.log(record)
        self.logged = last

    def restore(self, history: History) -> None:
        """In a resumed run, send observers the earlier records again, up to step `logged`."""
        self.observers.restore(lambda: itertools.takewhile(lambda row: row["step"] <= self.logged, history))

    def tell(self, kind: str, step: int, **fields: Any) -> None:
        self.observers.event({"kind": kind, "step": step, **fields})

    def sent(self, step: int, before: dict[str, dict[str, float]]) -> None:
        """Report a stretch's calls and bytes by collective, over all nodes, and the nodes that left or returned."""
        for name, row in self.comm.ledger.traffic.items():
            old = before.get(name, {})
            since = {key: value - old.get(key, 0.0) for key, value in row.items()}
            if any(since.values()):
                self.tell("communication", step, collective=name, **since)
        there = set(self.comm.present) if self._tells_who else self._there
        for kind, nodes in (("away", self._there - there), ("back", there - self._there)):
            if nodes:
                self.tell(kind, step, nodes=sorted(nodes))
        self._there = there

    def between_steps(self, interrupt: Callable[[], bool], step: Callable[[], int]) -> Callable[[], bool]:
        """Return a function to call after each local step. It sends heartbeats and returns whether to stop."""
        listen = any(type(observer).beat is not Observer.beat for observer in self.observers.all)
        signs = [lambda: self.observers.beat(step(), {})] if listen else []
        signs += self.signs
        if not signs:
            return interrupt
        due = 0.0

        def should_stop() -> bool:
            nonlocal due
            if (now := time.monotonic()) >= due:  # not in each step: these would take longer than a small step
                due = now + SIGN_PAUSE_S
                for sign in signs:
                    sign()
            return interrupt()

        return should_stop
