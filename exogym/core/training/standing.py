"""A run's progress. A checkpoint stores this progress beside the fleet's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.record.history import History
from exogym.core.training.agenda import Agenda
from exogym.core.training.driver import Driver
from exogym.core.training.reports import Reports

if TYPE_CHECKING:
    from exogym.core.communicator import Wire
    from exogym.core.fleet.seats import Seats
    from exogym.core.saving.behind import Writer
    from exogym.core.saving.checkpoint_files import Snapshot
    from exogym.faults import Outages


class Standing:
    """A run's progress, which `saving.snapshots` saves and loads.

    Attributes:
        step: steps done.
        epoch: the last step's epoch, from 0.
        evaluated_at: step of the last evaluation.
        history: records up to `step`.
        apart: consensus distance before this step's synchronization, or None if it was not measured.
        stopped: whether a callback has ended the training.
        outcome: the final model, or None if it is not stored yet.
        before_saving: functions to call in every process before a checkpoint is written.
        writer: writes checkpoints while nodes compute; None if nodes wait for each checkpoint.
    """

    def __init__(self, agenda: Agenda, driver: Driver, fleet: Fleet, history: History, reports: Reports):
        self.agenda, self.driver, self.fleet, self.history, self.reports = agenda, driver, fleet, history, reports
        self.step, self.evaluated_at = 0, -1
        self.apart: dict[str, float] | None = None
        self.stopped = False
        self.outcome: tuple[list[Tensor], dict[str, Tensor]] | None = None
        self.before_saving: list[Callable[[], Any]] = []
        self.writer: Writer | None = None
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

    def save(self) -> Path:
        """Write a checkpoint now, in all processes, and return its folder."""
        path = self._write(self._snapshot(), self.fleet.comm.wire)
        self._tell_written(self.step, path)
        return path

    def save_behind(self) -> None:
        """Write a checkpoint, while nodes compute if possible, otherwise now."""
        snapshot = self._snapshot()
        if self.writer is None or not self.writer.start(snapshot):
            self._tell_written(self.step, self._write(snapshot, self.fleet.comm.wire))

    def write_behind(self) -> None:
        """Let `save_behind` write while nodes compute."""
        from exogym.core.saving.behind import Writer

        self.writer = Writer(self.fleet.comm.wire, self._write, self._tell_written)

    def _snapshot(self) -> Snapshot:
        """Return the run's state for a checkpoint, after the checkpoint under way is written."""
        from exogym.core.saving.snapshots import for_disk

        if self.writer is not None:
            self.writer.finish()
        for prepare in self.before_saving:
            prepare()
        return for_disk(self)

    def _write(self, snapshot: Snapshot, wire: Wire) -> Path:
        from exogym.core.saving.checkpoint import save

        agenda = self.agenda
        return save(agenda.save_dir, snapshot, agenda.keep_checkpoints, wire, agenda.keepers)

    def _tell_written(self, step: int, path: Path) -> None:
        self.reports.tell("checkpoint", step, path=str(path))

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
            self.driver.meet(self.driver.attendance.up(self.step))

    def take_history(self, history: History) -> None:
        self.history = history

    def take_description(self, description: dict[str, Any]) -> None:
        self.agenda.description = description

    def carry_on(self, wall_s: float) -> None:
        """Set the run's wall time to `wall_s`.

        So the wall time does not shrink when the run returns to an earlier checkpoint.
        """
        self._wall_before_s = wall_s
