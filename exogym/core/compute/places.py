"""Which elements of each parameter a device of a node computes with, and which of these are in its row.

Of a parameter whose layer several devices compute together, each has a range of one axis; of that, where shards share
it out, some rows of the first axis. What is left may be the same on several devices: a parameter of two stages, a norm
over the axis "tensor". It is in the row of one of them, its owner, and the others take it from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from exogym.core.fleet.layout import Box, Layout, Slot
from exogym.core.mesh import NodeMesh


class Places:
    """Where a model's parameters are.

    Args:
        mesh: of the node.
        layouts: of the whole row, one per block of the fleet.
        axes: by name the axis along which a parameter is cut over the axis "tensor"; those not named are not cut.
        stages: by name the stages that hold a parameter, ascending; those not named are held by the first.
    """

    def __init__(
        self,
        mesh: NodeMesh,
        layouts: Sequence[Layout],
        axes: Mapping[str, int],
        stages: Mapping[str, Sequence[int]] | None = None,
    ):
        self.mesh, self._axes, self._stages = mesh, axes, stages or {}
        self._dealt: dict[str, int] = {}  # of a parameter that is not cut: which of the axis "tensor" owns it
        loads = [[0] * mesh.tensor for _ in range(mesh.depth)]  # of each stage, about as many numbers each
        for slot in sorted((s for layout in layouts for s in layout if s.name not in axes), key=lambda s: -s.numel):
            load = loads[self.stages(slot.name)[0]]
            self._dealt[slot.name] = load.index(min(load))
            load[self._dealt[slot.name]] += slot.numel

    def stages(self, name: str) -> Sequence[int]:
        """Return the stages that hold a parameter, its owner first."""
        return self._stages.get(name, (0,))

    def dealt(self, name: str) -> int | None:
        """Return the coordinate on the axis "tensor" of a parameter's owner; None: each there has a part of it."""
        return self._dealt.get(name)

    def owns(self, name: str, part: int) -> bool:
        """Say whether what device `part` has of a parameter is in its row."""
        at = self.mesh.coordinates(part)
        return at["stages"] == self.stages(name)[0] and self._dealt.get(name, at["tensor"]) == at["tensor"]

    def computed(self, slot: Slot, part: int) -> Box:
        """Return what of a parameter device `part` computes with: its range over the axis "tensor"."""
        box = [(0, n) for n in slot.shape]
        if slot.name in self._axes:
            axis = self._axes[slot.name]
            box[axis] = chunk(box[axis], self.mesh.coordinates(part)["tensor"], self.mesh.tensor)
        return tuple(box)

    def held(self, slot: Slot, part: int) -> Box:
        """Return what of a parameter device `part` has between steps: of what it computes with its shard's rows."""
        first, *others = self.computed(slot, part)
        return (chunk(first, self.mesh.coordinates(part)["shard"], self.mesh.shard), *others)

    def layout(self, whole: Layout, part: int) -> Layout:
        """Return what of a block is in the row of device `part`."""
        boxes = {slot.name: self.held(slot, part) for slot in whole}
        return whole.part({n: box if self.owns(n, part) else ((0, 0), *box[1:]) for n, box in boxes.items()})


def places_in(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[tuple[nn.Module, str], str]:
    """Return where in a model the parameters `named` are, (module, attribute); one that is tied, in several places."""
    names = {id(p): name for name, p in named.items()}
    return {
        (module, attribute): names[id(p)]
        for module in model.modules()
        for attribute, p in module.named_parameters(recurse=False)
        if id(p) in names
    }


def even_part(layout: Layout, part: int, parts: int) -> Layout:
    """Return of every parameter of a whole layout a range of its first axis, about as much for each of the parts.

    >>> from exogym.core.fleet.layout import layouts_of
    >>> (layout,) = layouts_of(nn.Linear(3, 5))
    >>> [even_part(layout, k, 2).numel for k in range(2)], even_part(layout, 0, 1) is layout
    ([12, 8], True)
    """
    if parts == 1:
        return layout
    wholes = {slot.name: [(0, n) for n in slot.shape] for slot in layout}
    return layout.part({name: (chunk(first, part, parts), *others) for name, (first, *others) in wholes.items()})


def box_shape(box: Box) -> torch.Size:
    """Return the shape of what is in a box."""
    return torch.Size(stop - start for start, stop in box)


def chunk(ends: tuple[int, int], at: int, parts: int) -> tuple[int, int]:
    """Return the part of a range that torch gives to the device `at` of so many.

    >>> [chunk((0, 5), k, 4) for k in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = ends
    each = -(-(stop - start) // parts)
    return min(start + at * each, stop), min(start + (at + 1) * each, stop)
