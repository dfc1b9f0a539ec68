"""Send parameters of one dtype between a node's devices on one mesh axis, many in one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from exogym.communicator import Columns
from exogym.mesh.places import chunk


def gather(along: Columns, pieces: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    """All-gather: fill the tensors `wholes`. Each process gives `pieces`, its ranges of the tensors' first axes."""
    everyones = [_rows(wholes, of) for of in _ranges(along, wholes)]
    sizes = [sum(x.numel() for x in rows) for rows in everyones]
    for rows, told in zip(everyones, along.gather(_flat(pieces), sizes), strict=True):
        for x, piece in zip(rows, _like(told, rows), strict=True):
            x.copy_(piece)


def scatter_sums(along: Columns, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Reduce-scatter: sum the tensors `wholes` over all processes; return this process's range of each first axis."""
    outgoing = [_rows(wholes, of) for of in _ranges(along, wholes)]
    own = outgoing[along.part]
    sizes = [sum(x.numel() for x in own)] * along.parts
    total, *others = along.swap([_flat(rows) for rows in outgoing], sizes)
    for other in others:
        total += other
    return _like(total, own)


def hand_on(
    along: Columns, tensors: Mapping[int, Tensor], gives: Sequence[Sequence[int]], takes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    """Send numbered `tensors` to other processes; yield (number, tensor) for each received tensor.

    `gives[j]` and `takes[j]` are the numbers of the tensors to send to process j and to receive from it. A received
    tensor has the shape and dtype of this process's own tensor with that number.
    """
    named = [k for some in (*gives, *takes) for k in some]
    if not named:
        return
    nothing = tensors[named[0]].new_empty(0)
    outgoing = [_flat([nothing, *(tensors[k] for k in some)]) for some in gives]
    sizes = [sum(tensors[k].numel() for k in some) for some in takes]
    for some, told in zip(takes, along.swap(outgoing, sizes), strict=True):
        yield from zip(some, _like(told, [tensors[k] for k in some]), strict=True)


def _ranges(along: Columns, wholes: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
    """Return each process's row range in each whole tensor."""
    return [[chunk((0, len(x)), part, along.parts) for x in wholes] for part in range(along.parts)]


def _rows(wholes: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [x[start:stop] for x, (start, stop) in zip(wholes, ranges, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([x.numel() for x in tensors])
    return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]
