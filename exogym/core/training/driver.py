"""The driver, which trains the fleet with any strategy, stretch by stretch.

Between two events the nodes are independent. So one node takes all local steps of a stretch, then the next node does.
The driver has no code for absent nodes, seats and timing: these features are wrappers around its `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym.core.compute.finite import is_finite
from exogym.core.compute.spans import Losses
from exogym.core.fleet.presence import rows_of
from exogym.core.training.algorithm import Algorithm, Setting, meet

if TYPE_CHECKING:
    from exogym.core.fleet.seats import Seats


class Driver:
    """Train the fleet with an `Algorithm`.

    Args:
        algorithm: the strategy's adapter, inside its features' wrappers.
        seats: the assignment of rows to nodes, or None if every node has a row.

    Attributes:
        losses: the current stretch's losses.
        shares_model: whether between rounds every client has the server's model, without personal parameters.
        attendance: the nodes present at each step, or None if all nodes are present at every step.
        before_sync: a function that `advance` calls at its last step, before communication changes parameters. The
            training loop may set another function for every stretch.
    """

    def __init__(self, algorithm: Algorithm, setting: Setting, seats: Seats | None = None):
        self.algorithm, self.compute, self.fleet = algorithm, algorithm.compute, setting.fleet
        self.worker, self.watch, self.attendance = setting.worker, setting.watch, setting.attendance
        self.seats, self.shares_model = seats, False
        self.losses = Losses(len(self.fleet), self.worker.device)
        self.before_sync: Callable[[], None] | None = None
        self.fleet.state.register("losses", self.losses)

    def next_event(self, step: int) -> int:
        """Return the last step to which `advance` may go from `step`."""
        return self.algorithm.next_event(step)

    def lr(self, step: int) -> float:
        return self.algorithm.lr(step)

    @property
    def seated(self) -> Sequence[int]:
        """The ids of the nodes that train now. These are all nodes, unless there are fewer rows than nodes."""
        return self.algorithm.nodes

    def advance(self, first: int, last: int) -> tuple[Sequence[int], Tensor] | None:
        """Train from step `first` to `last`, and communicate if `last` is an event. No event may lie between them.

        If a stretch was stopped in the middle, it continues after the last local step whose loss is in `losses`.

        Returns:
            The nodes' ids, and their losses (nodes, last - first). A loss is the mean over a node's local steps in one
            step of the fleet, or NaN if the node took no local step. The result is None if the run must stop before the
            stretch ends.
        """
        algorithm, losses = self.algorithm, self.losses
        if not losses.under_way:
            losses.begin(first, last)
            with torch.no_grad():
                algorithm.begin(first)
        work = algorithm.work(first, last)
        counts = [last - first if work is None else int(work[rank]) for rank in self.fleet.ranks]
        if not algorithm.needs_gradients:
            self.compute.steps(algorithm.spans(losses, counts), losses)
        if self.fleet.comm.wire.agree(self.worker.should_stop()):
            return None
        if algorithm.needs_gradients:
            self._step_together(last, [row for row, count in enumerate(counts) if count])
        with torch.no_grad():
            algorithm.act(last, losses, lambda: self.before_sync() if self.before_sync is not None else None)
            found = algorithm.end_stretch(losses)
        self.fleet.comm.wire.launch()  # only now, because the losses would wait behind a transfer
        return found

    def _step_together(self, step: int, rows: Sequence[int]) -> None:
        """Take one step of all nodes together, with communication of their gradients."""
        compute = self.compute
        found = compute.gradients(rows)
        for row, loss in zip(rows, found, strict=True):
            self.losses.add(row, range(1), loss.reshape(1))
        overflowed = compute.overflowed
        if self.worker.scaled:
            overflowed = self.fleet.comm.wire.agree(overflowed)
        compute.rescale(rows, overflowed)
        with torch.no_grad():
            stepping = self.algorithm.on_gradients(step, rows, overflowed)
        compute.apply(stepping, overflowed)

    def finish(self, step: int) -> None:
        """Do the final synchronization, at the end of training.

        Raises:
            TrainingError: the final model has numbers that are not finite.
        """
        with torch.no_grad():
            self.algorithm.finish(step)
        here = rows_of(self.fleet, self.fleet.comm.present)[:1]
        held = [block.params[row] for row in here for block in self.fleet.blocks] or None
        final = self.algorithm.consensus()
        self.watch.shared(held if final is None else final, "the final model", step)

    def consensus(self) -> list[Tensor]:
        """Return the model to evaluate, (P,) per block: the outer parameters, or else the mean of all rows."""
        outer = self.algorithm.consensus()
        return self.fleet.average() if outer is None else [x.clone() for x in outer]

    def consensus_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model to evaluate, by name."""
        outer = self.algorithm.consensus_buffers()
        return self.fleet.average_buffers() if outer is None else {name: x.clone() for name, x in outer.items()}

    def meet(self, nodes: Sequence[int]) -> None:
        """Let only `nodes` take part in communication from now on."""
        meet(self.fleet, nodes)

    def meet_finite(self) -> None:
        """After a failure, let only present nodes with finite numbers take part, if this process has such nodes."""
        fleet = self.fleet
        finite = [rank for row, rank in enumerate(fleet.ranks) if all(is_finite(b.params[row]) for b in fleet.blocks)]
        meet(fleet, [i for i in fleet.comm.present if i in finite] or fleet.comm.present)

    def close(self) -> None:
        """Free the memory, threads and files that the training used."""
        self.before_sync = None
        self.algorithm.close()
