"""Fragments: parts of the model that are synchronized at different times.

A fragment consists of whole parameters, as a list with a `Piece` for each block of the fleet. The pattern "strided"
puts layer l into fragment l mod F, for F fragments of layers, and "sequential" puts neighboring layers together.
Parameters outside of layers (embeddings, the last norm, the head) form a separate fragment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.layout import Slot
from exogym.errors import ArgumentError

_NUMBERED = re.compile(r"^(?P<stack>|.*?\.)(?P<layer>\d+)(?=\.|$)")


class Piece:
    """A fragment's part of one block: whole parameters, as columns of the block's rows.

    Attributes:
        block: the block.
        slots: names, shapes and columns of the parameters.
        ranges: (start, stop) of the parameters' columns in a row, with adjacent ranges joined.
    """

    def __init__(self, block: Block, slots: Sequence[Slot]):
        self.block, self.slots = block, list(slots)
        self.ranges: list[tuple[int, int]] = []
        for slot in self.slots:
            if self.ranges and self.ranges[-1][1] == slot.start:
                self.ranges[-1] = (self.ranges[-1][0], slot.stop)
            else:
                self.ranges.append((slot.start, slot.stop))

    def take(self, rows: Tensor) -> Tensor:
        """Return this piece's p columns of `rows`, (rows, P), as a view if they are adjacent, otherwise a copy."""
        parts = [rows[:, start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Write `values`, (rows, p), into this piece's p columns of `rows`, (rows, P)."""
        widths = [stop - start for start, stop in self.ranges]
        for (start, stop), part in zip(self.ranges, values.split(widths, 1), strict=True):
            rows[:, start:stop].copy_(part)

    def views(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view (rows, *shape)) of each parameter of this piece in `values`, (rows, p)."""
        start = 0
        for slot in self.slots:
            part = values[:, start : start + slot.numel]
            yield slot.name, part.unflatten(-1, slot.shape) if slot.shape else part[:, 0]
            start += slot.numel


Fragment = list[Piece]


def whole(blocks: Sequence[Block]) -> Fragment:
    """Return one fragment that holds all parameters."""
    return [Piece(block, list(block.layout)) for block in blocks]


def fragments(fleet: Fleet, count: int, pattern: str = "strided") -> list[Fragment]:
    """Cut the parameters of `fleet` into `count` fragments.

    Layers are the numbered modules of the largest stack ("blocks.0", "blocks.1", ...) or, if no module is numbered, the
    modules that have parameters. Parameters outside of layers form the last fragment; the others share the layers by
    `pattern`: "strided" (in turn) or "sequential" (neighboring layers together).

    Raises:
        ArgumentError: the model has fewer layers than fragments.
    """
    if count == 1:
        return [whole(fleet.blocks)]
    layers, others = layers_of(fleet.names)
    dealt = count - bool(others)
    if dealt > len(layers):
        raise ArgumentError(
            f"num_fragments={count}, but the model has {len(layers)} layers"
            + (" and parameters outside of them, which are one fragment" if others else "")
            + f": use at most {len(layers) + bool(others)}"
        )
    where = (lambda k: k % dealt) if pattern == "strided" else (lambda k: k * dealt // len(layers))
    groups: list[set[str]] = [set() for _ in range(dealt)]
    for k, layer in enumerate(layers):
        groups[where(k)].update(layer)
    return [fragment_of(fleet.blocks, group) for group in [*groups, *([set(others)] if others else [])]]


def fragment_of(blocks: Sequence[Block], names: set[str]) -> Fragment:
    """Return the fragment that holds the parameters `names`. Blocks without such a parameter have no piece."""
    slots = [[slot for slot in block.layout if slot.name in names] for block in blocks]
    return [Piece(block, mine) for block, mine in zip(blocks, slots, strict=True) if mine]


def layers_of(names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return the names of each layer's parameters, in order, and the names of parameters outside of layers.

    >>> layers_of(["embed.weight", "blocks.0.a", "blocks.0.b", "blocks.1.a", "head.weight"])
    ([['blocks.0.a', 'blocks.0.b'], ['blocks.1.a']], ['embed.weight', 'head.weight'])
    >>> layers_of(["first.weight", "first.bias", "second.weight"])
    ([['first.weight', 'first.bias'], ['second.weight']], [])
    """
    stacks: dict[str, dict[int, list[str]]] = {}
    modules: dict[str, list[str]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            stacks.setdefault(found["stack"], {}).setdefault(int(found["layer"]), []).append(name)
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    if not stacks:
        return list(modules.values()), []
    stack = max(stacks.values(), key=lambda layers: sum(map(len, layers.values())))
    layers = [stack[number] for number in sorted(stack)]
    inside = {name for layer in layers for name in layer}
    return layers, [name for name in names if name not in inside]
