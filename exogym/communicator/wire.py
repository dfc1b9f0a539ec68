"""The wire: who holds which row, and the exact reduction in a fixed tree over global ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18


def tree_sum(x: Tensor, ids: Sequence[int]) -> Tensor:
    """Sum the rows of `x` (n, F) pairwise in the tree over their global `ids` (ascending); return (F,).

    Leaves stand at their ids; at each level positions 2k and 2k+1 are added, and a position whose
    sibling is absent passes through. The result depends on ids and rows only.

    >>> tree_sum(torch.tensor([[1.0], [2.0], [4.0]]), [0, 1, 5])
    tensor([7.])
    """
    n, width = x.shape
    if n == 1:
        return x[0].clone()
    out = torch.empty(width, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK_ELEMENTS // n) if x.device.type == "cpu" else width
    dense = list(ids) == list(range(n))
    for start in range(0, width, step):
        part = x[:, start : start + step]
        out[start : start + step] = _tree_dense(part) if dense else _tree_sparse(part, ids)
    return out


def _tree_dense(x: Tensor) -> Tensor:
    while len(x) > 1:
        pairs = len(x) // 2
        level = torch.empty((len(x) + 1) // 2, x.shape[1], dtype=x.dtype, device=x.device)
        torch.add(x[0 : 2 * pairs : 2], x[1 : 2 * pairs : 2], out=level[:pairs])
        if len(x) % 2:
            level[pairs] = x[-1]
        x = level
    return x[0]


def _tree_sparse(x: Tensor, ids: Sequence[int]) -> Tensor:
    level = dict(zip(ids, x, strict=True))
    while len(level) > 1:
        above: dict[int, Tensor] = {}
        for position, value in level.items():
            parent = position // 2
            above[parent] = above[parent] + value if parent in above else value
        level = above
    (total,) = level.values()
    return total


class Wire:
    """What carries rows between blocks. In one process every row is here, so nothing moves."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = list(ranks)
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the rows of `x` (rows, ...) that belong to global `ids`, as (len(ids), ...)."""
        if list(ids) == self.ranks:
            return x
        return x[[self.row_of[i] for i in ids]]

    def reduce(self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None) -> Tensor:
        """Reduce rows `ids` of `x` (rows, F) to (F,); `weights` (len(ids),) scale the rows first."""
        members = self.rows(x, ids)
        if op == "max":
            return members.amax(0)
        if op == "min":
            return members.amin(0)
        if weights is not None:
            return tree_sum(members * weights[:, None].to(members), ids)
        total = tree_sum(members, ids)
        return total.div_(len(ids)) if op == "mean" else total
