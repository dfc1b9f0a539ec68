"""The wire: who holds which row, and the exact reduction in a fixed tree over global ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exogym.core.communicator.inside import ALONE, Inside

CHUNK_ELEMENTS = 1 << 18  # of a row that go through a reduction at a time
HALVES = (torch.float16, torch.bfloat16)


def tree_sum(
    x: Tensor, ids: Sequence[int], weights: Tensor | None = None, divisor: int = 1, rows: Sequence[int] | None = None
) -> Tensor:
    """Sum the rows of `x` (n, F) pairwise in the tree over their global `ids` (ascending); return (F,).

    Leaves stand at their ids; at each level positions 2k and 2k+1 are added, and a position whose
    sibling is absent passes through. The result depends on ids and rows only. Rows are multiplied by `weights` (n,)
    first, and the sum is divided by `divisor`. Half-precision rows are weighted and summed in fp32 and rounded once.
    With `rows` (n,) it is these rows of `x`, which then may have more.

    >>> tree_sum(torch.tensor([[1.0], [2.0], [4.0]]), [0, 1, 5])
    tensor([7.])
    """
    n, width = len(ids), x.shape[1]
    if n == 1 and weights is None:
        return x[0 if rows is None else rows[0]].clone()
    exact = _exact(x)
    shares = None if weights is None else weights[:, None].to(x.device, exact)
    out = torch.empty(width, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK_ELEMENTS // n) if x.device.type == "cpu" else width
    dense = list(ids) == list(range(n))
    order = [] if dense else _additions(ids)
    at = None if rows is None else torch.tensor(rows, device=x.device)
    rooms: dict[tuple[int, int], Tensor] = {}  # taken once: memory that is given back is cleared when taken again

    def room(rows: int, columns: int) -> Tensor:
        if (rows, columns) not in rooms:
            rooms[rows, columns] = torch.empty((rows, columns), dtype=exact, device=x.device)
        return rooms[rows, columns]

    for start in range(0, width, step):  # gathered piece by piece, so that what is summed is in the cache
        part = x[:, start : start + step]
        own = at is not None or shares is not None or not dense
        if at is not None and exact == x.dtype:
            part = torch.index_select(part, 0, at, out=room(n, part.shape[1]))
        elif own:
            part = room(n, part.shape[1]).copy_(part if at is None else part.index_select(0, at))
        part = part if shares is None else part.mul_(shares)
        total = _tree_dense(part.to(exact), room) if dense else _tree_sparse(part, order)
        out[start : start + step] = total if divisor == 1 else total.div_(divisor)
    return out


def _tree_dense(x: Tensor, room: Callable[[int, int], Tensor]) -> Tensor:
    while len(x) > 1:
        pairs = len(x) // 2
        level = room((len(x) + 1) // 2, x.shape[1])
        torch.add(x[0 : 2 * pairs : 2], x[1 : 2 * pairs : 2], out=level[:pairs])
        if len(x) % 2:
            level[pairs] = x[-1]
        x = level
    return x[0]


def _additions(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return which row is added to which, (to, from), in order; the first row ends as the sum.

    >>> _additions([0, 1, 5])
    [(0, 1), (0, 2)]
    """
    level = dict(zip(ids, range(len(ids)), strict=True))  # position to the row that stands for it
    found = []
    while len(level) > 1:
        above: dict[int, int] = {}
        for position, row in level.items():
            if (parent := position // 2) in above:
                found.append((above[parent], row))
            else:
                above[parent] = row
        level = above
    return found


def _tree_sparse(x: Tensor, additions: Sequence[tuple[int, int]]) -> Tensor:
    """Add rows of `x` in place, as `_additions` says."""
    rows = x.unbind(0)
    for to, source in additions:
        rows[to].add_(rows[source])
    return rows[0]


class Parcel(NamedTuple):
    """A tensor of `shape` and `dtype` that node `giver` gives to `taker`, and, where it `is_swap`, gets one like it."""

    giver: int
    taker: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_swap: bool

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(giver, taker) of each tensor that moves; a node keeps its own."""
        if self.giver == self.taker:
            return []
        there = (self.giver, self.taker)
        return [there, there[::-1]] if self.is_swap else [there]


Move = tuple[int, int, Parcel]  # giver, taker, and what moves


class Wire:
    """Carries rows between blocks: `rows`, `reduce`, `carry` and `agree`. In one process every row is here.

    Every process of a run makes the same calls in the same order; the main one holds the first rows. All else that
    processes say to each other is built on the four (`exogym.core.communicator.messages`).

    Args:
        ranks: global ids of the rows here, of row 0 first.
        native: reduce by torch's own sums, each process its rows and then all together, instead of the exact tree.

    Attributes:
        placement: the ids of each process; `process`: which of them this is, 0 being the main one.
        owner: the process of each id.
        shares_memory: whether all processes share the memory and the folders of one machine, made by the main one for
            this run alone; else each is a script's own, and somebody may look at what it comes to.
        overlaps: whether `begin` sums while the caller goes on.
        inside: the processes that hold the parts of a row, where a node is several; `process` is then one of nodes.
        devices: the processes that compute for the node. More than `inside` where nodes differ in size: then several
            hold the same columns, and all but the first ones are copies (`is_copy`), which hear what these find.
        asked_to_stop: says whether a process asked all to stop, without meeting them.
        waited_s: seconds spent in it, where somebody watches.
    """

    process, shares_memory, overlaps = 0, True, False
    waited_s = 0.0
    inside: Inside = ALONE
    devices: Inside = ALONE

    def __init__(self, ranks: Sequence[int], native: bool = False):
        self.ranks = list(ranks)
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self.owner = dict.fromkeys(self.ranks, 0)
        self.native = native
        self.placement = [self.ranks]
        self.asked_to_stop: Callable[[], bool] = lambda: False

    def place(self, placement: Sequence[Sequence[int]]) -> None:
        """From now on rows belong to these ids, of row 0 first, in each process; as many as before.

        `ranks` stays the list that it is, so that those who hold it see the change.
        """
        self.placement = [list(ids) for ids in placement]
        self.ranks[:] = self.placement[self.process]
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self.owner = {i: process for process, ids in enumerate(self.placement) for i in ids}

    @property
    def world(self) -> Wire:
        """The wire between all processes; another one where nodes are several processes each."""
        return self

    @property
    def total_rows(self) -> int:
        """How many rows the run has, in all processes."""
        return sum(map(len, self.placement))

    @property
    def is_main(self) -> bool:
        return self.world.process == 0

    @property
    def is_shared(self) -> bool:
        """Whether there are other processes."""
        return len(self.world.placement) > 1

    @property
    def is_copy(self) -> bool:
        """Whether another process of the node holds the same rows and columns, and is the one that says so."""
        return self.devices.part >= self.inside.parts

    @property
    def is_hidden(self) -> bool:
        """Whether this process leaves signals, history and callbacks to the main one, which made it."""
        return self.shares_memory and not self.is_main

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the rows of `x` (rows, ...) that belong to global `ids`, as (len(ids), ...)."""
        if list(ids) == self.ranks:
            return x
        return x[[self.row_of[i] for i in ids]]

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        """Reduce rows `ids` (ascending) of `x` (rows, F) to (F,); `weights` (len(ids),) scale the rows first.

        With `everywhere=False` only the processes that hold a row of `ids` need the result; others may get an
        empty tensor.
        """
        if self.native:
            return reduce_native(self, x, ids, op, weights, lambda partial, op: partial)
        if op in ("sum", "mean") and list(ids) != self.ranks:
            rows = [self.row_of[i] for i in ids]
            return tree_sum(x, ids, weights, len(ids) if op == "mean" and weights is None else 1, rows)
        return reduce_rows(self.rows(x, ids), ids, op, weights)

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        """Return what nodes here get by `moves`, all of them from one process to another; `given`: what these give."""
        raise NotImplementedError

    def agree(self, flag: bool) -> bool:
        """Return whether any process says True."""
        return flag

    def begin(self, x: Tensor) -> Any:
        """Begin to sum `x` (F,) over the processes in place; the result has `wait()`. Where `overlaps`."""
        raise NotImplementedError

    def ask_to_stop(self) -> None:
        """Ask all processes to stop, without meeting them, where they share memory."""


def reduce_native(
    wire: Wire, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None,
    combine: Callable[[Tensor, str], Tensor],
) -> Tensor:  # fmt: skip
    """Reduce the rows here, then those results over the processes: equal to the tree up to rounding.

    `combine` gives "sum", "max" or "min" of the (F,) results of every process.
    """
    if op.startswith("trimmed "):
        return reduce_rows(wire.rows(x, ids), ids, op)
    here = [k for k, i in enumerate(ids) if i in wire.row_of]
    mine = x[[wire.row_of[ids[k]] for k in here]]
    if op in ("max", "min"):
        info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        nobody = x.new_full(x.shape[1:], info.min if op == "max" else info.max)
        return combine((mine.amax(0) if op == "max" else mine.amin(0)) if here else nobody, op)
    if weights is not None:
        return combine((mine * weights[here, None].to(x.device, _exact(x))).sum(0).to(x.dtype), "sum")
    total = combine(mine.sum(0), "sum")
    return total.div_(len(ids)) if op == "mean" else total


def _exact(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALVES else x.dtype


def reduce_rows(members: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None) -> Tensor:
    """Reduce `members` (len(ids), F) to (F,) exactly: "sum" and "mean" in the tree over their ids, "max", "min".

    "trimmed 2" is the mean without the two largest and the two smallest values of each column (NaN is the largest).
    """
    if op.startswith("trimmed "):
        f, n = int(op.removeprefix("trimmed ")), len(ids)
        return tree_sum(members.sort(0).values[f : n - f], range(n - 2 * f), None, n - 2 * f)
    if op == "max":
        return members.amax(0)
    if op == "min":
        return members.amin(0)
    return tree_sum(members, ids, weights, len(ids) if op == "mean" and weights is None else 1)
