"""Find nodes with NaN or infinite numbers before these numbers reach other nodes.

A NaN or infinity spreads within a row, from a gradient to the update, and from the parameters to the next loss, so it
suffices to check each step's loss, and one sum over the row at the end of a stretch. If a check fails, ExoGym finds the
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.base.devices import CPU, widest
from exogym.core.base.torch_private import norms
from exogym.core.compute.not_finite import first_in, of_gradient, of_loss, of_shared, of_update, worst
from exogym.core.compute.worker import Worker

POLICIES = ("raise", "skip", "ignore")


class Watch:
    """Check whether losses, gradients and parameters are finite, and act according to `on_nonfinite`.

    Args:
        policy: the value of `on_nonfinite` ("raise", "skip" or "ignore"). Nonfinite losses are errors even for
            "ignore".
        worker: the process's worker. It must be bound to its fleet before the first check.

    Attributes:
        raises, skips: whether the policy is "raise" or "skip".
        at_once: whether each loss is checked immediately, as on the CPU. On a GPU, where a check would wait for the
            device, the losses of a stretch are checked together.
    """

    def __init__(self, policy: str, worker: Worker):
        self.worker, self.raises, self.skips = worker, policy == "raise", policy == "skip"
        self.at_once = worker.device == CPU

    # Losses

    def is_spoilt(self, rank: int, row: int, loss: float, step: int) -> bool:
        """Return whether the node must be skipped after a nonfinite `loss` at its step `step`; raise unless "skip".

        Under "skip", the result is True if the node's parameters were not finite before the step.
        """
        where = None if self._is_ignored or self.row_is_finite(row) else first_in(self.worker.fleet, self._params(row))
        if self.skips:
            return where is not None
        if where is not None:
            raise of_update(rank, where, step - 1)
        raise of_loss(rank, loss, step)

    def losses(self, rank: int, row: int, losses: Tensor, first: int) -> Tensor:
        """Check and return the `losses` (K,) of K steps of a node, which took `first` steps before.

        Raise TrainingError if a loss is not finite. Under "skip", replace it by inf instead.
        """
        finite = torch.isfinite(losses)
        if bool(finite.all()):
            return losses
        if self.skips:
            return losses.where(finite, torch.inf)
        at = int(torch.nonzero(~finite)[0])
        if at == len(losses) - 1 == 0:
            self.is_spoilt(rank, row, float(losses[at]), first + 1)
        raise of_loss(rank, float(losses[at]), first + at + 1)

    def are_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all numbers in all of the node's processes are surely finite, with one wait for the device."""
        total = torch.stack([_sum(x).float() for x in tensors]).sum().item() if tensors else 0.0
        return not self.worker.fleet.comm.wire.columns.any(not math.isfinite(total))

    # Rows and gradients

    def row(self, rank: int, row: int, step: int) -> None:
        """Raise TrainingError under "raise" if a parameter in `row` is not finite after the node's step `step`."""
        if self.raises and not self.row_is_finite(row):
            raise of_update(rank, first_in(self.worker.fleet, self._params(row)), step)

    def row_is_finite(self, row: int) -> bool:
        return self._all_finite(self._params(row))

    def _all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all numbers are finite in all of the node's processes."""
        return not self.worker.fleet.comm.wire.columns.any(not all(map(is_finite, tensors)))

    def gradient(self, rank: int, row: int, step: int) -> bool:
        """Return whether the gradient in `row` of the fleet's `grads` is finite (always True under "ignore").

        Raise TrainingError if not, and the policy is "raise".
        """
        grads = [block.grads[row] for block in self.worker.fleet.blocks if block.grads is not None]
        if self._is_ignored or self._all_finite(grads):
            return True
        if self.raises:
            raise of_gradient(rank, first_in(self.worker.fleet, grads), step)
        return False

    def gradients(self, rank: int, grads: Sequence[Tensor | None], step: int) -> bool:
        """Return whether the gradients `grads` (None: no gradient) are finite (always True under "ignore").

        Raise TrainingError if not, and the policy is "raise".
        """
        present = [g for g in grads if g is not None]
        if self._is_ignored or not present:
            return True
        if math.isfinite(float(torch.stack([widest(n) for n in norms(present)]).sum())):
            return True
        for name, grad in zip(self.worker.names, grads, strict=True):
            if grad is not None and not is_finite(grad):
                if self.raises:
                    raise of_gradient(rank, (name, worst(grad)), step)
                return False
        return True

    def shared(self, vectors: Sequence[Tensor] | None, what: str, step: int) -> None:
        """Raise TrainingError, except under "ignore", if parameters that the strategy changes are not finite.

        Args:
            vectors: the parameters, a tensor per block. Without `vectors`, nothing is checked.
            what: the parameters' name for the message, such as "the outer parameters".
        """
        if self._is_ignored or vectors is None or self._all_finite(vectors):
            return
        raise of_shared(what, first_in(self.worker.fleet, vectors), step)

    # Skipping nodes

    def spoilt(self, nodes: Sequence[int], also: Sequence[int] = ()) -> list[int]:
        """Return which of `nodes` have parameters that are not finite or buffers with NaN, or are in `also`.

        All processes must call this method together, each with its own `also`, and get the same list.
        """
        fleet = self.worker.fleet
        flags = torch.zeros(len(fleet), fleet.num_nodes)
        for row, rank in enumerate(fleet.ranks):
            if rank in nodes and (rank in also or not self._holds_finite(row)):
                flags[row, rank] = 1.0
        found = fleet.comm.wire.reduce(flags.to(self.worker.device), list(nodes), "max") if nodes else flags[0]
        return torch.nonzero(found).flatten().tolist()

    def _holds_finite(self, row: int) -> bool:
        buffers = [rows[row] for rows in self.worker.fleet.buffers.values() if rows.is_floating_point()]
        return self.row_is_finite(row) and not any(bool(x.isnan().any()) for x in buffers)

    @property
    def _is_ignored(self) -> bool:
        return not (self.raises or self.skips)

    def _params(self, row: int) -> list[Tensor]:
        return [block.params[row] for block in self.worker.fleet.blocks]


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers in `x` are finite. Numbers are checked individually only if their sum isn't finite.

    >>> is_finite(torch.tensor([1.0, 2.0])), is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([torch.nan]))
    (True, True, False)
    """
    return math.isfinite(_sum(x).item()) or bool(torch.isfinite(x).all())
