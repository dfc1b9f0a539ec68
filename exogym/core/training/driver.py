"""The one driver: takes any strategy through training, stretch by stretch.

Between two events nodes are independent, so each takes its whole stretch of local steps before the next one does. Who
is present, what is timed, losses under way, the agreement on fp16's scale and on numbers that are not finite are looked
after here, for every kind of strategy alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from exogym.core.compute.finite import is_finite
from exogym.core.compute.spans import Losses, Span
from exogym.core.fleet.presence import rows_of
from exogym.core.fleet.seats import Seats
from exogym.core.training.algorithm import Algorithm, Setting
from exogym.errors import TrainingError

AGREEMENTS = 2  # of processes in a stretch: whether to stop, and the losses; where gradients meet, whose there are
Item = TypeVar("Item", Span, int)


class Driver:
    """Takes an `Algorithm` through training.

    Attributes:
        losses: of the stretch under way.
        attendance: who is there, where faults are planned.
        seats: who has a row, where there are fewer rows than nodes.
        before_sync: called in `advance` at its last step, before communication changes any parameters there; may be
            set anew for every stretch.
    """

    def __init__(self, algorithm: Algorithm, setting: Setting):
        self.algorithm, self.compute, self.fleet = algorithm, algorithm.compute, setting.fleet
        self.worker, self.watch, self.attendance = setting.worker, setting.watch, setting.attendance
        self.timing = None if algorithm.keeps_time else setting.timing
        self.losses = Losses(len(self.fleet), self.worker.device)
        self.before_sync: Callable[[], None] | None = None
        self._skips = self.watch.skips and algorithm.leaves_out
        self.fleet.state.register("losses", self.losses)
        self._told: tuple[Sequence[int], Tensor] | None = None
        self.seats: Seats | None = None
        if setting.store is not None:
            self.seats = Seats(self.fleet, setting.store, setting.arrived)
            self._seat(0)

    def next_event(self, step: int) -> int:
        """Return the last step up to which `advance` may go from `step`."""
        event = self.algorithm.next_event(step)
        return event if self.attendance is None else min(event, self.attendance.next_change(step))

    def lr(self, step: int) -> float:
        return self.algorithm.lr(step)

    def advance(self, first: int, last: int) -> tuple[Sequence[int], Tensor] | None:
        """Train from step `first` to `last`, at most up to the next event, and communicate if it is one.

        A stretch that was stopped in the middle goes on where it stands in `losses`.

        Returns:
            The ids of nodes, and (nodes, last - first) the mean loss of the local steps that each took in each step of
            the fleet, NaN where it took none; None where the run is to stop before the stretch is done.
        """
        if not self.losses.under_way:
            self._begin(first, last)
        work = self._work(first, last)
        counts = [last - first if work is None else int(work[rank]) for rank in self.fleet.ranks]
        left_out: list[int] = []
        if self.algorithm.needs_gradients:
            if self.fleet.comm.wire.agree(self.worker.should_stop()):
                return None
            left_out = self._step_together(last, [row for row, count in enumerate(counts) if count], work)
        else:
            for spans in self._timed(self.algorithm.spans(self.losses, counts)):
                self.compute.steps(spans, self.losses)
            if self.fleet.comm.wire.agree(self.worker.should_stop()):
                return None
            self._charge(first, last, work)
        with torch.no_grad():
            self._act(last, left_out)
        told, self._told = self._told or self._losses(), None
        return told

    def _losses(self) -> tuple[Sequence[int], Tensor]:
        """End the losses of the stretch; return those of all nodes that have a row, with their ids."""
        losses = self.losses.end()
        losses = losses.where(losses != torch.inf, torch.nan) if self.watch.skips else losses
        return self.seated, self.fleet.comm.wire.rows(losses, self.seated)

    def finish(self, step: int) -> None:
        """Synchronise what is left at the end of training.

        Raises:
            TrainingError: the model that is left has numbers that are not finite.
        """
        there = self._up(step)
        spoilt = self.watch.spoilt(there) if self._skips else []
        present = there if self.attendance is None else self.attendance.present(step)
        with torch.no_grad():
            self.meet([i for i in present if i not in spoilt])
            self._seat(step)
            with self._round(step, waits=False):
                self.algorithm.finish(step)
            if spoilt:
                self._take_in(spoilt, there, step)
        there = self._up(step)
        self.meet(there)
        here = rows_of(self.fleet, there)[:1]
        held = [block.params[row] for row in here for block in self.fleet.blocks] or None
        final = self.algorithm.outer()
        self.watch.shared(held if final is None else final, "the final model", step)

    def consensus(self) -> list[Tensor]:
        """Return the model to evaluate: the outer parameters where there are some, else the mean; (P,) per block."""
        outer = self.algorithm.outer()
        return self.fleet.average() if outer is None else [x.clone() for x in outer]

    def consensus_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model to evaluate, by name."""
        outer = self.algorithm.outer_buffers()
        return self.fleet.average_buffers() if outer is None else {name: x.clone() for name, x in outer.items()}

    def close(self) -> None:
        """Leave nothing behind."""
        self.before_sync = None
        self.algorithm.close()
        if self.seats is not None:
            self.seats.store.close()

    # Who is present

    def meet(self, nodes: Sequence[int]) -> None:
        """From now on `nodes` take part in communication; the one place that says so."""
        self.fleet.comm.present = list(nodes)

    def meet_finite(self) -> None:
        """After a failure in one process: go on with those present whose numbers are finite, if there are any."""
        fleet = self.fleet
        finite = [rank for row, rank in enumerate(fleet.ranks) if all(is_finite(b.params[row]) for b in fleet.blocks)]
        self.meet([i for i in fleet.comm.present if i in finite] or fleet.comm.present)

    @property
    def seated(self) -> Sequence[int]:
        """The ids of the nodes that count: all, or those at work where there are fewer rows than nodes."""
        return range(self.fleet.num_nodes) if self.seats is None else self.seats.working

    def _up(self, step: int) -> list[int]:
        return list(self.seated) if self.attendance is None else self.attendance.up(step)

    def _seat(self, step: int) -> None:
        """Where there are fewer rows than nodes, seat those who act next beside those who have come to `step`."""
        if self.seats is not None:
            self.seats.take(*self.algorithm.seated(step))
            self.meet(self.seats.nodes)

    def _begin(self, first: int, last: int) -> None:
        """Begin a stretch; nodes that were away at `first` and are there now take over what the others hold."""
        self.losses.begin(first, last)
        if self.attendance is None:
            if self.watch.skips:  # those left out of an evaluation are to be there again
                self.meet(self._up(first))
            return
        self.meet(self.attendance.up(first + 1))
        nodes, source = self.attendance.returning(first + 1)
        if source is not None:
            with torch.no_grad():
                self.algorithm.rejoin(nodes, source, first, self.attendance.faults.forget, as_fleet=True)

    def _take_in(self, spoilt: list[int], there: list[int], step: int) -> None:
        """Let the nodes `spoilt`, of those `there`, take all that another holds: they took no part after `step`."""
        if len(spoilt) == len(there):
            raise TrainingError(
                f"after step {step} no node is left whose numbers are finite, so none can take what another holds: "
                "lower the learning rate, clip gradients (max_norm=1.0), or look at the data"
            )
        source = next(iter(self.fleet.comm.present), min(set(there) - set(spoilt)))
        self.meet(there)
        self.algorithm.rejoin(spoilt, source, step, forget=True, as_fleet=self.algorithm.needs_gradients)

    # What is done

    def _work(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) local steps of each node from step `first` to `last`; None: all."""
        if self.attendance is None:
            return self.algorithm.work(first, last)
        return self.attendance.steps_between(first, last, self.algorithm.work)

    def _step_together(self, step: int, rows: list[int], work: np.ndarray | None) -> list[int]:
        """Take one step of all nodes, whose gradients meet; return the nodes here that were left out of it."""
        fleet, compute, overflowed, spoilt = self.fleet, self.compute, False, list[int]()
        if self.attendance is not None:
            self.meet(self.attendance.present(step))
        for part in self._timed(rows):
            found = compute.gradients(part)
            for row, loss in zip(part, found, strict=True):
                self.losses.add(row, range(1), loss.reshape(1))
            overflowed = overflowed or compute.overflowed
            spoilt += compute.spoilt
        if self.worker.scaled:
            overflowed = fleet.comm.wire.agree(overflowed)
        compute.rescale(rows, overflowed)
        self._charge(step - 1, step, work)
        left_out = [] if overflowed else [fleet.ranks[row] for row in spoilt]
        skip = overflowed
        if self._skips and not overflowed:
            everywhere = self.watch.spoilt(self._up(step), left_out)
            self.meet([i for i in fleet.comm.present if i not in everywhere])
            left_out = [rank for rank in everywhere if rank in fleet.ranks]
        elif self.watch.skips and not self.algorithm.leaves_out:
            skip = fleet.comm.wire.agree(overflowed or bool(spoilt))
        with torch.no_grad():
            stepping = self.algorithm.on_gradients(step, rows, skip)
        for part in self._timed([row for row in stepping if fleet.ranks[row] not in left_out]):
            compute.apply(part, skip)
        return left_out

    def _act(self, step: int, left_out: list[int]) -> None:
        """Let the algorithm act after `step`, with those who are present and whose numbers are finite."""
        there = self._up(step)
        spoilt = self.watch.spoilt(there, left_out) if self._skips else []
        present = there if self.attendance is None else self.attendance.present(step)
        meeting = [i for i in present if i not in spoilt]

        def before_mixing() -> None:
            if self.before_sync is not None:
                self.meet([i for i in there if i not in spoilt])
                self.before_sync()
                self.meet(meeting)
            if self.seats is not None:
                self._told = self._losses()
                self._seat(step)

        self.meet(meeting)
        with self._round(step):
            met = self.algorithm.act(step, self.losses, before_mixing)
        if met and spoilt:
            self._take_in(spoilt, there, step)
        else:
            self.meet([i for i in (there if self.seats is None else self.seats.working) if i not in spoilt])

    # What it takes

    def _timed(self, items: list[Item]) -> Iterator[list[Item]]:
        """Yield `items` in parts; where the clock measures, what the caller does with a part is timed."""
        if self.timing is None or not self.timing.is_measured or not items:
            yield items
            return
        for part in [items] if self.compute.together else [[item] for item in items]:
            begin = time.perf_counter()
            yield part
            self.timing.took([(x, 1) if isinstance(x, int) else (x.row, len(x.columns)) for x in part], begin)

    def _charge(self, first: int, last: int, work: np.ndarray | None) -> None:
        """Tell the clock of the steps from `first` to `last`, (N,) of the nodes where they differ."""
        if self.timing is not None:
            agreements = AGREEMENTS + self.algorithm.needs_gradients
            self.timing.computed(last - first if work is None else work, agreements)

    @contextlib.contextmanager
    def _round(self, step: int, waits: bool = True) -> Iterator[None]:
        """Where a server ends a round after `step`: inside its clients send, and afterwards all nodes wait for that."""
        round_ = None if self.timing is None else self.algorithm.server_round(step)
        if self.timing is None or round_ is None:
            yield
            return
        clock, (clients, wait_s) = self.timing.clock, round_
        until_s = clock.last_s + wait_s if waits else 0.0
        clock.meet(until_s, clients)
        yield
        clock.meet(until_s)
