"""Cuts: which part of a tensor a process has, if a node is several processes with a part of every parameter each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exogym.core.fleet.layout import Layout, Slot


@dataclass(frozen=True)
class Cut:
    """This process's part of a tensor whose last axes are cut from lengths `shape` to lengths `here`.

    `columns` (n,) are the positions of the part's elements in the flattened last axes, ascending.
    """

    shape: tuple[int, ...]
    here: tuple[int, ...]
    columns: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return this process's part of the tensor `whole`."""
        ahead = whole.shape[: whole.dim() - len(self.shape)]
        return whole.reshape(*ahead, -1)[..., self.columns.to(whole.device)].reshape((*ahead, *self.here))

    def whole_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given this process's part `x`."""
        return (*x.shape[: x.dim() - len(self.here)], *self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether `shape` ends with the shape of the whole tensor or of the part."""
        ends = [tuple(shape[len(shape) - len(axes) :]) for axes in (self.shape, self.here)]
        return self.shape == ends[0] or self.here == ends[1]

    def ranges(self) -> Tensor:
        """Return `columns` as m ranges (start, stop), (m, 2)."""
        if not len(self.columns):
            return torch.empty(0, 2, dtype=torch.int64)
        gaps = (self.columns.diff() != 1).nonzero().flatten()
        starts = torch.cat([self.columns[:1], self.columns[gaps + 1]])
        return torch.stack([starts, torch.cat([self.columns[gaps], self.columns[-1:]]) + 1], 1)


def cut_of(layout: Layout, slots: Sequence[Slot] | None = None) -> Cut:
    """Return the `Cut` of a vector with one entry per column of `layout`, or only of the parameters in `slots`."""
    if slots is None or layout.whole is None:
        n = sum(slot.numel for slot in (layout if slots is None else slots))
        return Cut((layout.total if slots is None else n,), (n,), layout.columns if slots is None else torch.arange(n))
    place = {slot.name: slot for slot in layout.whole}
    start, found = 0, []
    for slot in slots:
        found.append(start + parameter_cut(layout, slot).columns)
        start += place[slot.name].numel
    return Cut((start,), (sum(slot.numel for slot in slots),), torch.cat(found))


def parameter_cut(layout: Layout, slot: Slot) -> Cut:
    """Return the `Cut` of a tensor with the shape of the whole parameter in `slot`."""
    if layout.whole is None:
        return Cut(tuple(slot.shape), tuple(slot.shape), torch.arange(slot.numel))
    shape = next(other.shape for other in layout.whole if other.name == slot.name)
    every = torch.arange(shape.numel()).view(shape)
    return Cut(tuple(shape), tuple(slot.shape), slot.cut(every).reshape(-1))
