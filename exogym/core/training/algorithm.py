"""A strategy in training, as the driver sees it: what it does with the nodes, and when.

A feature that changes which nodes act, or when, is a wrapper around an `Algorithm` (`around`): `absence`, `seating`,
`clocking`. A run gets only the wrappers that its options need.
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
    """A strategy's surroundings: this process's rows, the data, the clock, and the present nodes.

    Attributes:
        how: the way of computing, as `fit(compute=)`.
        attendance: the nodes present at each step, if faults are planned.
        timing: the virtual clock, if there is a network.
        watch: the handling of numbers that are not finite.
        around: wraps the way of computing, if a feature needs it.
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
        """Return the way of computing, with `inner` as each row's optimizer (None: the caller takes the steps).

        Args:
            bucket_bytes: size of gradient buckets that are sent while the rest is computed.
            corrections: functions that rewrite a row's own gradients before each inner step.

        Raises:
            ModelError: the model cannot be computed in this way.
        """
        optimizer = None if inner is None else InnerOptimizer(inner, self.worker, self.run.total_steps)
        if optimizer is not None:
            optimizer.corrections += corrections
        overlapping = bucket_bytes if self.attendance is None else None
        return self.around(way_of(self.how)(self.worker, self.stream, optimizer, self.watch, overlapping))


def meet(fleet: Fleet, nodes: Sequence[int]) -> None:
    """Let only `nodes` take part in communication from now on. No other code sets this."""
    fleet.comm.present = list(nodes)


class Algorithm:
    """Base of the adapters that the driver calls. A subclass implements them for its kind of strategy.

    Attributes:
        compute: takes the local steps.
        needs_gradients: nodes take every step together. The driver computes all gradients, `on_gradients` sees them,
            and then the inner steps are taken.
        leaves_out: a synchronization can leave out a node whose numbers are not finite. If False, all skip the step.
        keeps_time: it moves the clock itself.
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
        """The ids of the nodes at work: all, unless there are fewer rows than nodes."""
        return range(self.fleet.num_nodes)

    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which the algorithm must act."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """A stretch begins after `step`."""

    def work(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) each node's local steps from the fleet's step `first` to `last`; None: every step.

        Additive: work(a, b) + work(b, c) == work(a, c).
        """
        return None

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return the clients of the server's round that ends with `step`, and the seconds that it waits for others.

        None: no round ends with `step`, or the round left out no node. A round ends for all nodes.
        """
        return None

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the nodes that need a row from `step` on, if rows are fewer than nodes: (next, current) clients."""
        raise NotImplementedError

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[Span]:
        """Return the local steps in the stretch of `losses` that must be computed before `act`.

        Args:
            counts: steps of each of this process's rows in the stretch, from `work` and attendance.
        """
        left = ((row, losses.done(row), count) for row, count in enumerate(counts))
        return [Span(row, range(done, count)) for row, done, count in left if done < count]

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        """Read or rewrite the gradients of `rows` in the fleet's blocks, and return the rows that take the step.

        Args:
            skip: do not use the gradients: one overflowed in fp16, or is not finite and all nodes skip together.
        """
        raise NotImplementedError

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        """Do the communication due after `step`, among `fleet.comm.present`. Return whether nodes have synchronized.

        Args:
            losses: losses of the stretch that ends here, for local steps that are taken in between.
            before_mixing: called once before all nodes' parameters change.

        Raises:
            TrainingError: the shared state has numbers that are not finite.
        """
        raise NotImplementedError

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        """Let `nodes`, which were absent at `step`, copy state from `source`. `fleet.comm.present` includes them again.

        Args:
            forget: they copy the whole state, and keep nothing.
            as_fleet: copied step counts become the fleet's.
        """
        raise NotImplementedError

    def told(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        """End the stretch of `losses`. Return the ids of its nodes, and their mean losses (nodes, steps)."""
        return self.nodes, self.fleet.comm.wire.rows(losses.end(), self.nodes)

    def finish(self, step: int) -> None:
        """Synchronize the remaining steps at the end of training."""

    def outer(self) -> list[Tensor] | None:
        """Return the outer model, (P,) per block; None if the model is the mean of the rows."""
        return None

    def outer_buffers(self) -> dict[str, Tensor] | None:
        """Return the outer model's buffers by name; None if they are the mean of the rows' buffers."""
        return None

    def close(self) -> None:
        """Free resources."""
        self.compute.close()
