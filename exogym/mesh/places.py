"""Decide which elements of each parameter a node's device computes with, and which elements its row stores.

If several devices compute a layer together, each computes with a range of one axis of the layer's parameters. If shards
divide that range, each shard's row stores some indices of the first axis. If several devices need the same elements,
such as a parameter that two stages use or a norm layer in a tensor split, one device (the owner) stores them in its row
and sends them to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from exogym.fleet import Layout, Slot
from exogym.mesh import NodeMesh

Box = tuple[tuple[int, int], ...]  # (start, stop) on each axis of a parameter


class Places:
    """Find which elements of a model's parameters each device of a node computes with, and which it stores.

    Args:
        mesh: the node's mesh.
        layouts: the whole row's layouts, one per block of the fleet.
        axes: {name: axis} for the parameters that the tensor split cuts.
        stages: {name: its stages, ascending}. Other parameters are in the first stage only.
    """

    def __init__(
        self,
        mesh: NodeMesh,
        layouts: Sequence[Layout],
        axes: Mapping[str, int],
        stages: Mapping[str, Sequence[int]] | None = None,
    ):
        self.mesh, self._axes, self._stages = mesh, axes, stages or {}
        self._dealt: dict[str, int] = {}  # for an uncut parameter: its owner on the axis "tensor"
        loads = [[0] * mesh.tensor for _ in range(mesh.depth)]  # numbers per device of each stage, kept about equal
        for slot in sorted((s for layout in layouts for s in layout if s.name not in axes), key=lambda s: -s.numel):
            load = loads[self.stages(slot.name)[0]]
            self._dealt[slot.name] = load.index(min(load))
            load[self._dealt[slot.name]] += slot.numel

    def stages(self, name: str) -> Sequence[int]:
        """Return the stages that hold the parameter `name`, its owner's stage first."""
        return self._stages.get(name, (0,))

    def dealt(self, name: str) -> int | None:
        """Return the owner's coordinate on the mesh axis "tensor", or None if this axis cuts the parameter."""
        return self._dealt.get(name)

    def owns(self, name: str, part: int) -> bool:
        """Return whether device number `part` stores elements of the parameter `name` in its row."""
        at = self.mesh.coordinates(part)
        return at["stages"] == self.stages(name)[0] and self._dealt.get(name, at["tensor"]) == at["tensor"]

    def computed(self, slot: Slot, part: int) -> Box:
        """Return the elements of a parameter with which device number `part` computes, as a range for each axis."""
        box = [(0, n) for n in slot.shape]
        if slot.name in self._axes:
            axis = self._axes[slot.name]
            box[axis] = chunk(box[axis], self.mesh.coordinates(part)["tensor"], self.mesh.tensor)
        return tuple(box)

    def held(self, slot: Slot, part: int) -> Box:
        """Return the elements of a parameter that device `part` stores: its shard of those it computes with."""
        first, *others = self.computed(slot, part)
        return (chunk(first, self.mesh.coordinates(part)["shard"], self.mesh.shard), *others)

    def layout(self, whole: Layout, part: int) -> Layout:
        """Return the layout of device number `part`'s row, in the block whose layout without a split is `whole`."""
        boxes = {slot.name: self.held(slot, part) for slot in whole}
        return whole.part({n: box if self.owns(n, part) else ((0, 0), *box[1:]) for n, box in boxes.items()})


def places_in(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[tuple[nn.Module, str], str]:
    """Return where a model uses the parameters in `named`: {(module, attribute): name}, also tied ones."""
    names = {id(p): name for name, p in named.items()}
    return {
        (module, attribute): names[id(p)]
        for module in model.modules()
        for attribute, p in module.named_parameters(recurse=False)
        if id(p) in names
    }


def local_of(x: Tensor) -> Tensor:
    """Return this process's part of a tensor, which may be a DTensor, without a copy."""
    return x.to_local() if isinstance(x, DTensor) else x


def even_part(layout: Layout, part: int, parts: int) -> Layout:
    """Divide a layout into `parts` equal parts along each parameter's first axis; return part number `part`.

    >>> from exogym.fleet import layouts_of
    >>> (layout,) = layouts_of(nn.Linear(3, 5))
    >>> [even_part(layout, k, 2).numel for k in range(2)], even_part(layout, 0, 1) is layout
    ([12, 8], True)
    """
    if parts == 1:
        return layout
    wholes = {slot.name: [(0, n) for n in slot.shape] for slot in layout}
    return layout.part({name: (chunk(first, part, parts), *others) for name, (first, *others) in wholes.items()})


def box_shape(box: Box) -> torch.Size:
    """Return the shape of a box, given as a range (start, stop) for each axis."""
    return torch.Size(stop - start for start, stop in box)


def chunk(ends: tuple[int, int], at: int, parts: int) -> tuple[int, int]:
    """Return the range that torch gives to device number `at` when it shards the range `ends` over `parts` devices.

    >>> [chunk((0, 5), k, 4) for k in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = ends
    each = -(-(stop - start) // parts)
    return min(start + at * each, stop), min(start + (at + 1) * each, stop)
