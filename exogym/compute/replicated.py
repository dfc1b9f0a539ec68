"""A model that each device of a node holds whole, while the row, and the optimizer's state, are shared out (zero=1, 2).

After a step each process gathers what the others have made of their columns, and computes with whole parameters. With
zero=2 each gets the sum of the gradients of its own columns, with zero=1 of all, of which it takes these (Rajbhandari
et al., arXiv:1910.02054). Sent by a process per step, with k shards and P parameters of b bytes: (k-1)/k b P gathering,
and of gradients as much with zero=2, twice as much with zero=1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.base import pulse
from exogym.communicator import Inside
from exogym.compute.outputs import Loss
from exogym.errors import ModelError
from exogym.fleet.layout import Layout, layouts_of
from exogym.mesh import NodeMesh

Part = tuple[Any, float]  # of a batch, and its share of it
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Replicated:
    """As `compute.sharded.Sharded`, of a model that is the same in all processes of the node.

    Raises:
        ModelError: a parameter without an axis.
    """

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: Inside, device: torch.device):
        self.model, self.mesh, self.inside, self.device = model, mesh, inside, device
        self.part, self.size, self.shards = inside.part, inside.parts, mesh.shard
        whole = whole_layouts(model, "sharded")
        boxes = [{s.name: _box(s.shape, k, self.size) for layout in whole for s in layout} for k in range(self.size)]
        self.parts = [[layout.part(boxes[k]) for layout in whole] for k in range(self.size)]

    @property
    def evaluated(self) -> tuple[int, int]:
        """Which part of an evaluation's batch is this process's, and of how many."""
        return self.mesh.coordinates(self.part)["shard"], self.shards

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: the model can be evaluated as it is."""
        return contextlib.nullcontext()

    def split(self) -> None:
        """From here on parameters are memory of their own, which `point` fills."""
        named = dict(self.model.named_parameters())
        self._slots = [[slot for layout in layouts for slot in layout] for layouts in self.parts]
        self._held = [named[slot.name] for slot in self._slots[self.part]]
        self._homes = [p.data for p in self._held]
        for p in self._held:
            p.data = p.data.clone()

    def let_go(self) -> None:
        """Let go of the memory that parameters had before; `plain` does not bring it back."""
        self._homes = [home.new_empty(0) for home in self._homes]

    def plain(self) -> None:
        """Undo `split`."""
        for p, home in zip(self._held, self._homes, strict=True):
            p.data, p.grad = home, None

    def point(self, views: Sequence[Tensor]) -> None:
        """Let the model compute with `views`, one for each parameter, of the columns here, and with the others'."""
        self._views = list(views)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take what the other processes have made of their columns."""
        for kind in dict.fromkeys(view.dtype for view in self._views):
            these = [k for k, view in enumerate(self._views) if view.dtype == kind]
            sizes = [sum(slots[k].numel for k in these) for slots in self._slots]
            own = torch.cat([self._views[k].reshape(-1) for k in these])
            for slots, told in zip(self._slots, self.inside.gather(own, sizes), strict=True):
                pieces = told.split([slots[k].numel for k in these])
                for k, piece in zip(these, pieces, strict=True):
                    slots[k].cut(self._held[k].data).copy_(piece.view(slots[k].shape))

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        """As `passes`: gradients add up here, and are summed over processes when they are taken."""
        return passes(loss, parts, scale * self.shards, context) / self.shards

    def gradients(self) -> list[Tensor | None]:
        """Return the mean over shards of what each has, of the columns here, one for each parameter."""
        there = self.inside.sum(torch.tensor([int(p.grad is not None) for p in self._held])).tolist()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._held]
        found: list[Tensor | None] = [None] * len(grads)
        for kind in dict.fromkeys(grad.dtype for grad, needed in zip(grads, there, strict=True) if needed):
            these = [k for k, grad in enumerate(grads) if there[k] and grad.dtype == kind]
            total = self._summed(grads, these).div_(self.shards)
            pieces = total.split([self._slots[self.part][k].numel for k in these])
            for k, piece in zip(these, pieces, strict=True):
                found[k] = piece.view(self._slots[self.part][k].shape)
        for p in self._held:
            p.grad = None
        return found

    def _summed(self, grads: Sequence[Tensor], these: Sequence[int]) -> Tensor:
        """Return the sum over processes of the columns here of the gradients `these`, one after the other."""
        if self.mesh.zero == 1:
            told = self.inside.sum(torch.cat([grads[k].reshape(-1) for k in these]))
            wholes = told.split([grads[k].numel() for k in these])
            own = [self._slots[self.part][k].cut(x.view(grads[k].shape)) for k, x in zip(these, wholes, strict=True)]
            return torch.cat([x.reshape(-1) for x in own])
        outgoing = [torch.cat([slots[k].cut(grads[k]).reshape(-1) for k in these]) for slots in self._slots]
        size = outgoing[self.part].numel()
        total, *others = self.inside.swap(outgoing, [size] * self.size)
        for other in others:
            total += other
        return total


def _box(shape: torch.Size, part: int, parts: int) -> tuple[tuple[int, int], ...]:
    each = -(-shape[0] // parts)
    return ((min(part * each, shape[0]), min((part + 1) * each, shape[0])), *((0, n) for n in shape[1:]))


def whole_layouts(model: nn.Module, what: str) -> list[Layout]:
    """Return the layouts of a model that is to be split; `what` is done to its parameters, for the message.

    Raises:
        ModelError: a parameter without an axis.
    """
    whole = layouts_of(model)
    for layout in whole:
        for slot in layout:
            if not slot.shape:
                raise ModelError(
                    f"parameter {slot.name!r} is one number without an axis, which cannot be {what}: give it the shape "
                    "(1,)"
                )
    return whole


def passes(
    loss: Loss, parts: Sequence[Part], scale: float, context: Context, before: Callable[[bool], None] | None = None
) -> Tensor:
    """Add to `.grad` the gradients of `parts` of a batch, each with its share; return their loss, both `scale` times.

    Args:
        context: entered for each forward pass, as autocast.
        before: called before a backward pass; says whether it is the last one.
    """
    total = torch.zeros((), dtype=torch.float64)
    for k, (part, share) in enumerate(parts):
        with context():
            value = loss(part)
        if before is not None:
            before(k == len(parts) - 1)
        (value * (share * scale)).backward()
        pulse.step_taken()
        total += value.detach().double().cpu() * (share * scale)
    return total
