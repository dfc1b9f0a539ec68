"""Leave nodes out of a step if planned faults make them absent, or if their numbers are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.core.compute.finite import Watch
from exogym.core.compute.spans import Losses
from exogym.core.training.around import Around
from exogym.core.training.driver import Algorithm, meet
from exogym.errors import TrainingError
from exogym.faults import Attendance


class Absence(Around):
    """Exclude absent and nonfinite nodes from an algorithm. When a node returns, it copies another node's state.

    Args:
        attendance: the nodes present at each step, or None if all nodes are present at every step.
        watch: finds nodes with numbers that are not finite. With `on_nonfinite="skip"` these nodes count as absent.
    """

    def __init__(self, within: Algorithm, attendance: Attendance | None, watch: Watch):
        super().__init__(within)
        self.attendance, self.watch = attendance, watch
        self._skips = watch.skips and within.leaves_out
        self._left_out: list[int] = []  # this process's nodes whose gradient in this step was not finite

    def up(self, step: int) -> list[int]:
        """Return the nodes that are present at `step`."""
        return list(self.nodes) if self.attendance is None else self.attendance.up(step)

    def _reached(self, step: int) -> list[int]:
        """Return the present nodes that do not lose the synchronization after `step`."""
        return self.up(step) if self.attendance is None else self.attendance.present(step)

    def next_event(self, step: int) -> int:
        event = self.within.next_event(step)
        return event if self.attendance is None else min(event, self.attendance.next_change(step))

    def begin(self, step: int) -> None:
        """Begin a stretch. Nodes that return after `step` copy the state of one present node."""
        self.within.begin(step)
        meet(self.fleet, self.up(step + 1))  # also nodes that an evaluation left out
        if self.attendance is None:
            return
        nodes, source = self.attendance.returning(step + 1)
        if source is not None:
            self.within.rejoin(nodes, source, step, self.attendance.faults.forget, as_fleet=True)

    def work(self, first: int, last: int) -> np.ndarray | None:
        if self.attendance is None:
            return self.within.work(first, last)
        return self.attendance.steps_between(first, last, self.within.work)

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        fleet = self.fleet
        if self.attendance is not None:
            meet(fleet, self._reached(step))
        self._left_out = [] if skip else [fleet.ranks[row] for row in self.compute.spoilt]
        if self._skips and not skip:
            everywhere = self.watch.spoilt(self.up(step), self._left_out)
            meet(fleet, [i for i in fleet.comm.present if i not in everywhere])
            self._left_out = [rank for rank in everywhere if rank in fleet.ranks]
        elif self.watch.skips and not self.leaves_out:
            skip = fleet.comm.wire.agree(skip or bool(self._left_out))
        stepping = self.within.on_gradients(step, rows, skip)
        return [row for row in stepping if fleet.ranks[row] not in self._left_out]

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        """Let the algorithm communicate after `step`, among the nodes that are present, reachable and finite."""
        there = self.up(step)
        spoilt = self.watch.spoilt(there, self._left_out) if self._skips else []
        finite = [i for i in there if i not in spoilt]
        meeting = [i for i in self._reached(step) if i not in spoilt]

        def with_all_there() -> None:
            meet(self.fleet, finite)
            before_mixing()
            meet(self.fleet, meeting)

        meet(self.fleet, meeting)
        met = self.within.act(step, losses, with_all_there)
        if met and spoilt:
            self._take_in(spoilt, there, step)
        else:
            meet(self.fleet, finite)
        return met

    def end_stretch(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        nodes, found = self.within.end_stretch(losses)
        return nodes, found.where(found != torch.inf, torch.nan) if self.watch.skips else found

    def finish(self, step: int) -> None:
        there = self.up(step)
        spoilt = self.watch.spoilt(there) if self._skips else []
        meet(self.fleet, [i for i in self._reached(step) if i not in spoilt])
        self.within.finish(step)
        if spoilt:
            self._take_in(spoilt, there, step)
        meet(self.fleet, there)

    def _take_in(self, spoilt: list[int], there: list[int], step: int) -> None:
        """Copy a healthy node's whole state into the nodes `spoilt` among `there`, which took no part at `step`.

        Raise TrainingError if no node is healthy.
        """
        if len(spoilt) == len(there):
            raise TrainingError(
                f"after step {step} no node has finite numbers, so there is no healthy state to copy: lower the "
                "learning rate, clip gradients (max_norm=1.0), or look at the data"
            )
        source = next(iter(self.fleet.comm.present), min(set(there) - set(spoilt)))
        meet(self.fleet, there)
        self.within.rejoin(spoilt, source, step, forget=True, as_fleet=self.needs_gradients)
