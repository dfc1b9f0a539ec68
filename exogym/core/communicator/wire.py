"""The wire: which process holds which row, and the exact reduction in a fixed tree over global ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from exogym.core.base.retired import retired

CHUNK_ELEMENTS = 1 << 18  # elements of rows in one piece of a reduction, which fit into a CPU's cache
MOST_ELEMENTS = 1 << 24  # on an accelerator, where a piece costs launches and temporary memory
HALVES = (torch.float16, torch.bfloat16)


def chunk_elements(x: Tensor) -> int:
    """Return how many elements of rows to reduce at once on the device of `x`."""
    return CHUNK_ELEMENTS if x.is_cpu else MOST_ELEMENTS


def tree_sum(
    x: Tensor, ids: Sequence[int], weights: Tensor | None = None, divisor: int = 1, rows: Sequence[int] | None = None
) -> Tensor:
    """Sum the rows of `x` (n, F) pairwise in the tree over their global `ids` (ascending); return (F,).

    Each row starts at the position of its id. For each k, a level of the tree adds positions 2k and 2k+1 into position
    k of the next level. If one of these two positions is empty, the other's value passes through unchanged. The result
    depends on ids and rows only. Half-precision rows are weighted and summed in fp32 and rounded once.

    Args:
        weights: (n,) factors of the rows.
        divisor: divides the sum.
        rows: (n,) indices in `x` of the rows to sum. None means all rows of `x`.

    >>> tree_sum(torch.tensor([[1.0], [2.0], [4.0]]), [0, 1, 5])
    tensor([7.])
    """
    n, width = len(ids), x.shape[1]
    if n == 1 and weights is None:
        return x[0 if rows is None else rows[0]].clone()
    exact = _exact(x)
    shares = None if weights is None else weights[:, None].to(x.device, exact)
    out = torch.empty(width, dtype=x.dtype, device=x.device)
    step = max(1, chunk_elements(x) // n)
    dense = list(ids) == list(range(n))
    order = [] if dense else _additions(ids)
    at = None if rows is None else torch.tensor(rows, device=x.device)
    rooms: dict[tuple[int, int], Tensor] = {}  # buffers to reuse: fresh memory would be cleared each time

    def room(rows: int, columns: int) -> Tensor:
        if (rows, columns) not in rooms:
            rooms[rows, columns] = torch.empty((rows, columns), dtype=exact, device=x.device)
        return rooms[rows, columns]

    for start in range(0, width, step):  # piece by piece, so that the summed values stay in the cache
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
    """Return the additions (to, from) of rows, in order; the first row ends as the sum.

    >>> _additions([0, 1, 5])
    [(0, 1), (0, 2)]
    """
    level = dict(zip(ids, range(len(ids)), strict=True))  # position -> its row
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


class Columns:
    """Communication inside a node, between the processes that hold parts of the node's row.

    A node may have several devices. Each device is a process that holds some columns of the node's row. The processes
    of all nodes that hold the same columns form a group, and the strategy runs in each group. Numbers that depend on
    the whole row, such as a gradient's norm or a payload's bytes, are computed by the node's processes together with
    the methods of `Columns`. In this base class the node has one process, which gets its own values.

    Attributes:
        part: the number of this process among the node's processes, from 0.
        parts: how many processes the node has.
    """

    part, parts = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the node's processes, the same bits in every process. May overwrite `x`."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of `x` over the node's processes."""
        return x

    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return the tensors `x` of all processes of the node, in every process.

        Process j's tensor has `sizes[j]` elements.
        """
        return [x]

    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send the tensor `outgoing[j]` to process j of the node, for each j. Return the received tensors.

        The tensor from process j has `sizes[j]` elements.
        """
        return outgoing

    def tell(self, value: Any) -> list[Any]:
        """Return the values of all processes of the node, in every process. A `value` must be JSON-able."""
        return [value]

    def total(self, number: int) -> int:
        """Return the exact sum of `number`, a whole number, over the node's processes."""
        return number if self.parts == 1 else int(self.sum(torch.tensor([number], dtype=torch.int64)).item())

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True in any process of the node."""
        return flag if self.parts == 1 else bool(self.total(int(flag)))

    def norms(self, x: Tensor) -> Tensor:
        """Return the 2-norms of the node's whole rows. `x`, (rows,) or (), has the norms of this process's columns."""
        return x if self.parts == 1 else self.sum(x.square()).sqrt()


ALONE = Columns()  # a node on one device


class Parcel(NamedTuple):
    """A tensor of `shape` and `dtype` that node `giver` sends to node `taker`.

    If `is_swap` is True, the taker sends such a tensor back.
    """

    giver: int
    taker: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_swap: bool

    @property
    def moves(self) -> list[tuple[int, int]]:
        """The (giver, taker) pair of each tensor that moves. If giver and taker are the same node, no tensor moves."""
        if self.giver == self.taker:
            return []
        move = (self.giver, self.taker)
        return [move, move[::-1]] if self.is_swap else [move]


Move = tuple[int, int, Parcel]  # giver, taker, and their parcel


class Transfer(Protocol):
    """A call of a wire that overlaps with the caller's work.

    Attributes:
        result: the call's result. Its values are undefined until `wait` returns.
    """

    result: Tensor

    def wait(self) -> None:
        """Wait until `result` is complete. Raise the call's error if it failed."""


class Wire:
    """Carry rows between processes. In this base class, a single process holds all rows.

    Every process of a run makes the same calls in the same order; the main process holds the first rows. All other
    messages between processes use the methods `rows`, `reduce`, `all_to_all`, `carry` and `agree`
    (`exogym.core.communicator.messages`).

    Args:
        ranks: the node number (global id) of each row in this process, from row 0 on.
        native: sum with torch's own operations instead of the exact tree. Each process sums its rows first; then torch
            sums these results over the processes.

    Attributes:
        placement: the ids of each process's rows.
        process: number of this process in `placement`; 0 is the main process.
        owner: the process that holds each id.
        shares_memory: whether the main process forked all processes for this run, on one machine, with shared memory
            and folders, so that only the main process shows results. Otherwise each process runs the user's script.
        overlaps: whether `begin` sums in the background.
        carries_behind: whether `start` carries rows in the background.
        columns: communication between the processes of a node that hold the parts of the node's row. If a node has
            several such processes, `process` and `placement` count groups of such processes, not single processes.
        devices: communication between all processes that compute for the node. If nodes have different numbers of
            processes, `devices` can have more processes than `columns`, because several processes hold the same
            columns. All of them except the first are copies (`is_copy`), which receive the first one's results.
        asked_to_stop: function that returns whether a process has asked all processes to stop, without waiting for
            other processes.
    """

    process, shares_memory, overlaps, carries_behind = 0, True, False, False
    columns: Columns = ALONE
    devices: Columns = ALONE

    def __init__(self, ranks: Sequence[int], native: bool = False):
        self.ranks = list(ranks)
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self.owner = dict.fromkeys(self.ranks, 0)
        self.native = native
        self.placement = [self.ranks]
        self.asked_to_stop: Callable[[], bool] = lambda: False

    def place(self, placement: Sequence[Sequence[int]]) -> None:
        """Give each process's rows to the ids in `placement`, from row 0 on. The number of rows stays the same.

        `ranks` stays the same list object, so its users see the change.
        """
        self.placement = [list(ids) for ids in placement]
        self.ranks[:] = self.placement[self.process]
        self.row_of = {rank: row for row, rank in enumerate(self.ranks)}
        self.owner = {i: process for process, ids in enumerate(self.placement) for i in ids}

    @property
    def inside(self) -> NoReturn:
        """Refuse the earlier name of `columns`."""
        raise AttributeError(f"Wire.inside: {retired('inside', 'Wire')}")

    @property
    def world(self) -> Wire:
        """The wire between all processes of the run. If nodes have several processes each, this is another object."""
        return self

    @property
    def total_rows(self) -> int:
        """Number of rows in all processes of the run."""
        return sum(map(len, self.placement))

    @property
    def is_main(self) -> bool:
        return self.world.process == 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes exist."""
        return len(self.world.placement) > 1

    @property
    def is_copy(self) -> bool:
        """Whether another process of the node holds the same rows and columns, and communicates for this copy."""
        return self.devices.part >= self.columns.parts

    @property
    def is_hidden(self) -> bool:
        """Whether the main process forked this process, and handles signals, history and callbacks for it."""
        return self.shares_memory and not self.is_main

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the rows of the nodes `ids` from all processes' `x` (rows, ...), as (len(ids), ...)."""
        if list(ids) == self.ranks:
            return x
        return x[[self.row_of[i] for i in ids]]

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        """Reduce the rows of the nodes `ids` (ascending) in `x` (rows, F) to (F,).

        `weights` (len(ids),) scale the rows first.

        With `everywhere=False` only the processes that hold a row of `ids` need the result; others may get an
        empty tensor.
        """
        if self.native:
            return reduce_native(self, x, ids, op, weights, lambda partial, op: partial)
        if op in ("sum", "mean") and list(ids) != self.ranks:
            rows = [self.row_of[i] for i in ids]
            return tree_sum(x, ids, weights, len(ids) if op == "mean" and weights is None else 1, rows)
        return reduce_rows(self.rows(x, ids), ids, op, weights)

    def all_to_all(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        """Give slice k of each row to the node `ids[k]`. `x` is (rows, n, ...) for n nodes `ids`.

        Returns (m, n, ...) for the m nodes of `ids` in this process, in the order of `ids`. Their slice k is from the
        node `ids[k]`.
        """
        return self.rows(x, ids).transpose(0, 1)[[k for k, i in enumerate(ids) if i in self.row_of]]

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        """Carry tensors between processes. Return the tensors that this process's nodes receive, by node number.

        `given` has the tensors that this process's nodes send, by node number. `moves` lists (giver, taker, parcel) for
        each tensor.
        """
        raise NotImplementedError

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is True in any process."""
        return flag

    def begin(self, x: Tensor) -> Callable[[], Any]:
        """Begin to sum `x` (F,) over the processes, in place. Return a function that waits for the sum.

        Only a wire whose `overlaps` is True has this method.
        """
        raise NotImplementedError

    def start(self, call: Callable[[Wire], Tensor], like: Tensor) -> Transfer:
        """Return a transfer that calls `call(wire)` in the background after the next `launch`.

        Other calls continue in the meantime, over other connections. Transfers end in the order of their `start`.

        Only a wire whose `carries_behind` is True has this method.

        Args:
            call: function that calls methods of its argument, a wire. Its tensors must not change until the transfer
                ends.
            like: a tensor of the result's shape, dtype and device.
        """
        raise NotImplementedError

    def aside(self) -> Wire | None:
        """Return a wire between the same processes for calls in another thread; None: there is none.

        All processes make this call at the same time. Later calls return the same wire.
        """
        return None if self.is_shared else self

    def launch(self) -> None:
        """Begin all transfers that `start` has returned, so that earlier small messages don't wait behind them."""

    def leave(self) -> None:
        """End all transfers of this wire, at the end of a run that has not failed. All processes call this method."""

    def ask_to_stop(self) -> None:
        """Ask all processes to stop, without waiting for them. Only for processes that share memory."""


def reduce_native(
    wire: Wire, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None,
    combine: Callable[[Tensor, str], Tensor],
) -> Tensor:  # fmt: skip
    """Reduce the rows of this process first, then the results of all processes.

    Up to rounding, the result equals the sum in the fixed tree.

    `combine(result, op)` returns the "sum", "max" or "min" of all processes' (F,) results.
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
    """Reduce the rows `members` (len(ids), F) exactly to (F,). `op` is "sum", "mean", "max", "min" or "trimmed K".

    "sum" and "mean" add the rows in the fixed tree over their ids. "trimmed 2" is the mean without the two largest and
    the two smallest values of each column (NaN is the largest).
    """
    if op.startswith("trimmed "):
        f, n = int(op.removeprefix("trimmed ")), len(ids)
        return tree_sum(members.sort(0).values[f : n - f], range(n - 2 * f), None, n - 2 * f)
    if op == "max":
        return members.amax(0)
    if op == "min":
        return members.amin(0)
    return tree_sum(members, ids, weights, len(ids) if op == "mean" and weights is None else 1)
