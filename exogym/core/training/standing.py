"""A run's schedule (`Agenda`), its reports to observers (`Reports`), and its progress (`RunStanding`).

The schedule says in fleet steps when stretches end, and when evaluations, checkpoints and callbacks are due. Reports
are records, events and heartbeats. A checkpoint stores the progress beside the fleet's state.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from exogym.core.communicator import Communicator
from exogym.core.fleet import Fleet
from exogym.core.record.history import History
from exogym.core.record.observers import Observer, Observers
from exogym.core.training.driver import Driver, meet

if TYPE_CHECKING:
    from exogym.callbacks import Callback
    from exogym.core.fleet.seats import Seats
    from exogym.core.training.resuming import Kept
    from exogym.faults import Outages

SIGN_PAUSE_S = 0.05  # between signs of life in a stretch


@dataclass
class Agenda:
    """The training loop's schedule.

    Attributes:
        val_interval: steps between evaluations, or None for an evaluation after each epoch.
        checkpoint_interval: steps between checkpoints, or None if none is written before the end.
        evaluates: whether the run has a validation set.
        description: all values that decide the run's result.
        examples_of: a function from node ids to the number of examples that each of these nodes uses per step.

    >>> agenda = Agenda(total_steps=100, steps_per_epoch=40, evaluates=True)
    >>> [agenda.stretch_end(step, next_event=step + 30) for step in (0, 30, 75)]
    [30, 40, 80]
    """

    total_steps: int
    steps_per_epoch: int
    val_interval: int | None = None
    log_interval: int = 1
    checkpoint_interval: int | None = None
    final_sync: bool = True
    max_stretch: int | None = None
    description: dict[str, Any] = field(default_factory=dict)
    examples_of: Callable[[Sequence[int]], Any] = lambda nodes: 1
    evaluates: bool = False
    callbacks: Sequence[Callback] = ()

    def stretch_end(self, step: int, next_event: int) -> int:
        """Return the last step at which a stretch that begins at `step` may end."""
        ends = [self.total_steps, next_event]
        intervals = [self._evaluation_interval, self.checkpoint_interval]
        intervals += [callback.steps for callback in self.callbacks]
        ends += [(step // n + 1) * n for n in intervals if n]
        if self.max_stretch is not None:
            ends.append(step + self.max_stretch)
        return min(ends)

    @property
    def _evaluation_interval(self) -> int | None:
        return (self.val_interval or self.steps_per_epoch) if self.evaluates else None

    def evaluation_due(self, step: int) -> bool:
        return divides(self._evaluation_interval, step)

    def may_be_evaluated(self, step: int) -> bool:
        """Return whether the run may evaluate after `step`: an evaluation is due, or a callback may end training."""
        if step == self.total_steps or self.evaluation_due(step):
            return True
        return any(callback.may_end and divides(callback.steps, step) for callback in self.callbacks)


def divides(interval: int | None, step: int) -> bool:
    return bool(interval) and step % interval == 0  # type: ignore[operator]


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
        tells_who: whether to report nodes that leave and return. False if only the clients that train now have a row.

    Attributes:
        signs: further functions to call from time to time between two steps.
        logged: the last step that observers have received.
        examples: the number of examples that all nodes together have used since this process began to train.
    """

    def __init__(self, observers: Observers, comm: Communicator, agenda: Agenda, tells_who: bool = True):
        self.observers, self.comm, self.agenda = observers, comm, agenda
        self.signs: list[Callable[[], None]] = []
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


class RunStanding:
    """A run's progress, which `saving.snapshots` saves and loads.

    Attributes:
        step: steps done.
        epoch: the last step's epoch, from 0.
        evaluated_at: step of the last evaluation.
        history: records up to `step`.
        apart: consensus distance before this step's synchronization, or None if it was not measured.
        stopped: whether a callback has ended the training.
        outcome: the final model, or None if it is not stored yet.
        kept: the run's checkpoint folder; None if the run writes no checkpoints.
    """

    def __init__(self, agenda: Agenda, driver: Driver, fleet: Fleet, history: History, reports: Reports):
        self.agenda, self.driver, self.fleet, self.history, self.reports = agenda, driver, fleet, history, reports
        self.step, self.evaluated_at = 0, -1
        self.apart: dict[str, float] | None = None
        self.stopped = False
        self.outcome: tuple[list[Tensor], dict[str, Tensor]] | None = None
        self.kept: Kept | None = None
        self._wall_before_s = self._start = 0.0

    @property
    def epoch(self) -> int:
        return max(0, self.step - 1) // self.agenda.steps_per_epoch

    @property
    def description(self) -> dict[str, Any]:
        """The run's description: everything that decides its result."""
        return self.agenda.description

    @property
    def outages(self) -> Outages | None:
        """Unplanned absences (lost hosts), by node and step. None if absences are planned or impossible."""
        there = self.driver.attendance
        if there is None:
            return None
        from exogym.faults import Outages

        return there.faults if isinstance(there.faults, Outages) else None

    @property
    def seats(self) -> Seats | None:
        """The assignment of rows to nodes, or None if every node has a row."""
        return self.driver.seats

    def may_be_away(self, node: int, step: int) -> bool:
        """Return whether a node was absent at `step`. If it was, perhaps no process holds the node's row."""
        there = self.driver.attendance
        return there is not None and node not in there.up(step)

    # The time

    def start_clock(self) -> None:
        """Start to measure the run's wall time."""
        self._start = time.perf_counter()

    def wall_s(self) -> float:
        """Return the seconds that the run has trained, including the seconds before it was resumed."""
        return self._wall_before_s + self.span_s()

    def span_s(self) -> float:
        """Return the seconds that the run has trained since this process called `start_clock`."""
        return time.perf_counter() - self._start if self._start else 0.0

    # Saved, and put back

    def counters(self) -> dict[str, Any]:
        """Return the run's counters, as JSON values. Checkpoints store the fleet's state and the history separately."""
        losses = self.driver.losses
        return {
            "step": self.step,
            "begun_end": losses.last if losses.under_way else None,
            "logged": self.reports.logged,
            "evaluated": self.evaluated_at,
            "apart": self.apart,
            "wall_s": self.wall_s(),
        }

    def stand(self, counters: dict[str, Any]) -> None:
        """Load counters that `counters` returned. The caller then loads the fleet's state and the history."""
        losses, end = self.driver.losses, counters["begun_end"]
        losses.forget()
        if end is not None:
            losses.begin(counters["step"], end)
        self.step, self.reports.logged, self.evaluated_at = (counters[name] for name in ("step", "logged", "evaluated"))
        self._wall_before_s, self.apart = counters["wall_s"], counters.get("apart")
        self.outcome, self.stopped = None, False
        if self.driver.attendance is not None:
            meet(self.fleet, self.driver.attendance.up(self.step))

    def take_history(self, history: History) -> None:
        self.history = history

    def take_description(self, description: dict[str, Any]) -> None:
        self.agenda.description = description

    def carry_on(self, wall_s: float) -> None:
        """Set the run's wall time, so that it does not shrink when the run returns to an earlier checkpoint."""
        self._wall_before_s = wall_s
