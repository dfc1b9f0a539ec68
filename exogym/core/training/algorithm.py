"""A strategy in training, as the one driver sees it: what it does with nodes, and when.

A feature that changes who acts, or when, is a wrapper around an `Algorithm` (`around`), put on where it was asked for:
`absence`, `seating`, `clocking`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import Correction, InnerOptimizer
from exogym.core.compute.spans import Compute, Losses, Span, way_of
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.data.stream import Stream
from exogym.strategy.strategy import Inner, Run, Strategy

if TYPE_CHECKING:
    from exogym.core.training.timing import Timing
    from exogym.faults import Attendance


@dataclass
class Setting:
    """What a strategy is put into: the rows here, data, the clock, and who is there.

    Attributes:
        how: the way of computing, as `fit(compute=)`.
        attendance: who is there, where faults are planned; timing: the virtual clock, where there is a network.
        watch: what is done about numbers that are not finite.
        around: wraps the way of computing, where a feature asks for that.
    """

    fleet: Fleet
    worker: Worker
    stream: Stream
    run: Run
    how: str
    attendance: Attendance | None
    timing: Timing | None
    watch: Watch
    around: Callable[[Compute], Compute] = lambda compute: compute

    def compute(
        self, inner: Inner | None, bucket_bytes: int | None = None, corrections: Sequence[Correction] = ()
    ) -> Compute:
        """Return the way of computing, with `inner` as each row's optimizer (None: somebody else takes the steps).

        `bucket_bytes`: of gradients that may be sent while the rest is computed. `corrections` rewrite a row's own
        gradients before each inner step.

        Raises:
            ModelError: the model cannot be computed so.
        """
        optimizer = None if inner is None else InnerOptimizer(inner, self.worker, self.run.total_steps)
        if optimizer is not None:
            optimizer.corrections += corrections
        overlapping = bucket_bytes if self.attendance is None else None
        return self.around(way_of(self.how)(self.worker, self.stream, optimizer, self.watch, overlapping))


def meet(fleet: Fleet, nodes: Sequence[int]) -> None:
    """From now on `nodes` take part in communication; the one place that says so."""
    fleet.comm.present = list(nodes)


class Algorithm:
    """What the driver asks; a subclass says how its kind of strategy does it.

    Attributes:
        compute: takes the local steps.
        needs_gradients: whether nodes take every step together: the driver computes all gradients, `on_gradients` sees
            them, and only then are the inner steps taken.
        leaves_out: whether a meeting can go on without a node whose numbers are not finite. Where not, all skip a step.
        keeps_time: whether it moves the clock itself.
    """

    needs_gradients = False
    leaves_out = False
    keeps_time = False
    compute: Compute

    def __init__(self, strategy: Strategy, setting: Setting):
        self.fleet = setting.fleet
        self.schedule = strategy.inner.schedule(setting.run.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of the step after `step`."""
        return self.schedule.lr(step)

    @property
    def nodes(self) -> Sequence[int]:
        """The ids of the nodes that count: all, or those at work where there are fewer rows than nodes."""
        return range(self.fleet.num_nodes)

    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which it must act."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """A stretch begins after `step`."""

    def work(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) local steps that it asks of each node from step `first` to `last` of the fleet; None: every one.

        Additive: from a to b and from b to c is from a to c.
        """
        return None

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return the clients of a server's round that ends with `step`, and the seconds it goes on waiting for others.

        None: no round ends with `step`, or nobody is left out of it. A round ends for all nodes.
        """
        return None

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return who must have a row from `step` on, where there are fewer than nodes: who acts next, who acts now."""
        raise NotImplementedError

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[Span]:
        """Return the local steps of the stretch of `losses` that are still to be computed before `act`.

        Args:
            counts: steps of each row here in the stretch, from `work` and who is there.
        """
        left = ((row, losses.done(row), count) for row, count in enumerate(counts))
        return [Span(row, range(done, count)) for row, done, count in left if done < count]

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        """Look at, or rewrite, the gradients of `rows` in the fleet's blocks; return those that are to step so.

        Args:
            skip: they are not to be used: one of them overflowed in fp16, or is not finite where all skip together.
        """
        raise NotImplementedError

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        """Do what is due after `step`, among those in `fleet.comm.present`; return whether nodes have met.

        Args:
            losses: of the stretch that ends here, for local steps that are taken in between.
            before_mixing: to be called once before parameters of all nodes are changed.

        Raises:
            TrainingError: what nodes share has numbers that are not finite.
        """
        raise NotImplementedError

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        """Let `nodes`, which were away at `step`, take what `source` holds; `fleet.comm.present` are those there now.

        Args:
            forget: they take all of it, as nodes that keep nothing of their own.
            as_fleet: their count of steps becomes the fleet's, where they take over such counts.
        """
        raise NotImplementedError

    def told(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        """End the stretch of `losses`; return the ids of the nodes in it, and their (nodes, steps) mean losses."""
        return self.nodes, self.fleet.comm.wire.rows(losses.end(), self.nodes)

    def finish(self, step: int) -> None:
        """Synchronise what is left at the end of training."""

    def outer(self) -> list[Tensor] | None:
        """Return the model that nodes have in common, (P,) per block; None where it is the mean of the rows."""
        return None

    def outer_buffers(self) -> dict[str, Tensor] | None:
        """Return the buffers of that model, by name; None where they are the mean of the rows'."""
        return None

    def close(self) -> None:
        """Leave nothing behind."""
        self.compute.close()
