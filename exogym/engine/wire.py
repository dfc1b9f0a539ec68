"""The wire between processes: rows of the fleet spread over a `torch.distributed` group.

The exact reduction keeps the bits of one process. Columns are cut into one slice per process; an all-to-all gives
each process its slice of every row; it sums the slice in the fixed tree over global ids; an all-gather puts the
slices together. That is the ring's number of bytes where each process holds one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from exogym.communicator import Wire


def place(num_nodes: int, processes: int) -> list[list[int]]:
    """Return the global ids of each process: contiguous, as even as possible, the first ones larger.

    >>> place(5, 2)
    [[0, 1, 2], [3, 4]]
    """
    return [part.tolist() for part in np.array_split(np.arange(num_nodes), processes)]


class ProcessWire(Wire):
    """Carries rows between the processes of a group. Every process makes the same calls in the same order.

    Args:
        placement: global ids of each process, in the group's rank order; together 0..N-1 ascending.
        group: the process group; the default one if None.
    """

    def __init__(self, placement: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None):
        self.placement = [list(ids) for ids in placement]
        self.group = group
        self.rank = dist.get_rank(group)
        super().__init__(self.placement[self.rank])
        self.owner = {i: process for process, ids in enumerate(self.placement) for i in ids}
        self.everyone = [i for ids in self.placement for i in ids]

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        ids = list(ids)
        owners = sorted({self.owner[i] for i in ids})
        parts: dict[int, Tensor] = {}
        if len(owners) == len(self.placement) and len(owners) > 1:
            most = max(len(p) for p in self.placement)
            mine = x.new_zeros(most, *x.shape[1:])
            mine[: len(x)] = x
            gathered = [torch.empty_like(mine) for _ in self.placement]
            dist.all_gather(gathered, mine, group=self.group)
            for process, rows in enumerate(gathered):
                parts |= dict(zip(self.placement[process], rows, strict=False))
        else:
            for owner in owners:
                wanted = [i for i in ids if self.owner[i] == owner]
                if owner == self.rank:
                    part = torch.stack([x[self.row_of[i]] for i in wanted])
                else:
                    part = x.new_empty(len(wanted), *x.shape[1:])
                dist.broadcast(part, self._global(owner), group=self.group)
                parts |= dict(zip(wanted, part, strict=True))
        return torch.stack([parts[i] for i in ids])

    def reduce(self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None) -> Tensor:
        width, processes = x.shape[1], len(self.placement)
        members = set(ids)
        counts = [sum(i in members for i in held) for held in self.placement]
        own = [row for i, row in self.row_of.items() if i in members]
        mine = x if len(own) == len(x) else x[own]
        cuts = np.linspace(0, width, processes + 1).astype(int)
        sizes = np.diff(cuts).tolist()
        outgoing = [mine[:, a:b].reshape(-1) for a, b in itertools.pairwise(cuts)]
        slice_ = sizes[self.rank]
        incoming = [x.new_empty(n * slice_) for n in counts]
        self._all_to_all(incoming, outgoing)
        stacked = torch.cat(incoming).view(len(members), slice_)
        part = Wire(sorted(members)).reduce(stacked, sorted(members), op, weights)
        parts = [x.new_empty(size) for size in sizes]
        self._all_gather_uneven(parts, part)
        return torch.cat(parts)

    def _all_to_all(self, incoming: list[Tensor], outgoing: list[Tensor]) -> None:
        flat = torch.cat(outgoing)
        out = flat.new_empty(sum(len(t) for t in incoming))
        got, sent = [len(t) for t in incoming], [len(t) for t in outgoing]
        dist.all_to_all_single(out, flat, got, sent, group=self.group)
        for target, piece in zip(incoming, out.split(got), strict=True):
            target.copy_(piece)

    def _all_gather_uneven(self, parts: list[Tensor], mine: Tensor) -> None:
        largest = max(len(p) for p in parts)
        padded = mine.new_zeros(largest)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(gathered, padded, group=self.group)
        for target, piece in zip(parts, gathered, strict=True):
            target.copy_(piece[: len(target)])

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)
