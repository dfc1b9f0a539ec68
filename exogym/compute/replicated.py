"""A model that each device of a node holds whole, while the row, and the optimizer's state, are shared out (zero=1, 2).

After a step each process gathers what the others have made of their columns, and computes with whole parameters. With
zero=2 each gets the sum of the gradients of its own columns, with zero=1 of all, of which it takes these (Rajbhandari
et al., arXiv:1910.02054). Sent by a process per step, with k shards and P parameters of b bytes: (k-1)/k b P gathering,
and of gradients as much with zero=2, twice as much with zero=1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exogym.communicator import Inside
from exogym.compute.outputs import Loss
from exogym.compute.split import Context, InPlace, Part, even_part, passes, whole_layouts
from exogym.fleet.layout import Slot
from exogym.mesh import NodeMesh


class Replicated(InPlace):
    """A `Split` of a model that is the same in all processes of the node.

    Raises:
        ModelError: a parameter without an axis.
    """

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: Inside, device: torch.device):
        super().__init__(model, mesh, inside, device)
        self.shards = mesh.shard
        whole = whole_layouts(model, "sharded")
        self.parts = [[even_part(layout, k, self.size) for layout in whole] for k in range(self.size)]

    def point(self, views: Sequence[Tensor]) -> None:
        self._views = list(views)
        self.refresh()

    def _slots_of_all(self) -> list[list[Slot]]:
        return [[slot for layout in layouts for slot in layout] for layouts in self.parts]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take what the other processes have made of their columns."""
        for kind in dict.fromkeys(view.dtype for view in self._views):
            these = [k for k, view in enumerate(self._views) if view.dtype == kind]
            everyones = self._slots_of_all()
            sizes = [sum(slots[k].numel for k in these) for slots in everyones]
            own = torch.cat([self._views[k].reshape(-1) for k in these])
            for slots, told in zip(everyones, self.inside.gather(own, sizes), strict=True):
                pieces = told.split([slots[k].numel for k in these])
                for k, piece in zip(these, pieces, strict=True):
                    slots[k].cut(self._held[k].data).copy_(piece.view(slots[k].shape))

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        return passes(loss, parts, scale * self.shards, context) / self.shards

    def gradients(self) -> list[Tensor | None]:
        there = self._there()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._held]
        found: list[Tensor | None] = [None] * len(grads)
        for kind in dict.fromkeys(grad.dtype for grad, needed in zip(grads, there, strict=True) if needed):
            these = [k for k, grad in enumerate(grads) if there[k] and grad.dtype == kind]
            total = self._summed(grads, these).div_(self.shards)
            pieces = total.split([self._slots[k].numel for k in these])
            for k, piece in zip(these, pieces, strict=True):
                found[k] = piece.view(self._slots[k].shape)
        for p in self._held:
            p.grad = None
        return found

    def _summed(self, grads: Sequence[Tensor], these: Sequence[int]) -> Tensor:
        """Return the sum over processes of the columns here of the gradients `these`, one after the other."""
        if self.mesh.zero == 1:
            told = self.inside.sum(torch.cat([grads[k].reshape(-1) for k in these]))
            wholes = told.split([grads[k].numel() for k in these])
            own = [self._slots[k].cut(x.view(grads[k].shape)) for k, x in zip(these, wholes, strict=True)]
            return torch.cat([x.reshape(-1) for x in own])
        outgoing = [torch.cat([slots[k].cut(grads[k]).reshape(-1) for k in these]) for slots in self._slots_of_all()]
        size = outgoing[self.part].numel()
        total, *others = self.inside.swap(outgoing, [size] * self.size)
        for other in others:
            total += other
        return total
