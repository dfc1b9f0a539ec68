"""The wire between the processes of a `torch.distributed` group.

The exact reduction is bitwise identical to a run in one process. It cuts the columns into one slice per process: an
all-to-all gives each process its slice of every row, the process sums it in the fixed tree over node ids, and an
all-gather joins the slices. If each process holds one row, this moves as many bytes as a ring. Rows that fit into a
packet are not cut, unless there are many processes: each process gets and sums all rows. This saves the all-gather's
latencies. If only the members need the result, only their processes take part. With `native`, torch's own all-reduce
runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.devices import CPU, Device
from exogym.core.communicator import Move, Wire, barrier, reduce_rows
from exogym.core.communicator.wire import Transfer, reduce_native
from exogym.core.engine.world import new_group
from exogym.network.overheads import FIRST_WINDOW_BYTES as AT_ONCE_BYTES  # larger tensors are swapped in rounds
from exogym.network.overheads import PACKET_BYTES  # rows that fit into a packet are not cut

if TYPE_CHECKING:
    from exogym.core.engine.behind import Behind

Around = Callable[[Callable[[], Any]], Any]  # gets a call, and returns its result
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessWire(Wire):
    """Carries rows between the processes of a group. Every process makes the same calls in the same order.

    Args:
        placement: node ids of each process, in the group's rank order; together 0..N-1 ascending.
        group: the process group. None means torch's default group.
        native: whether to reduce with torch's all-reduce. Its result equals the fixed tree's result up to rounding.

    Attributes:
        around: function that makes each call that needs other processes, for example to translate its errors.
        around_aside: like `around`, for calls of the wire that `aside` returns.
    """

    shares_memory = False

    def __init__(
        self, placement: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None, native: bool = False
    ):
        self.group, self.process = group, dist.get_rank(group)
        super().__init__(placement[self.process], native)
        self.place(placement)
        self.overlaps = native and all(len(ids) == 1 for ids in placement)
        self.device = Device.of_group(group).place
        self.around: Around = _alone
        self.around_aside: Around = _alone
        self.carries_behind = group is None and self.device == CPU
        self._behind: Behind | None = None
        self._aside: ProcessWire | None = None

    def beside(self, group: dist.ProcessGroup) -> ProcessWire:
        """Return a wire between the same processes over `group`, for another thread."""
        return ProcessWire(self.placement, group, self.native)

    def start(self, call: Callable[[Wire], Tensor], like: Tensor) -> Transfer:
        if self._behind is None:
            from exogym.core.engine.behind import Behind

            self._behind = Behind(self.beside)
        return self._behind.start(call, like, self.around)

    def aside(self) -> Wire | None:
        if self._aside is None and self.carries_behind:
            self._aside = self.beside(new_group())
            self._aside.around = self.around_aside
        return self._aside

    def launch(self) -> None:
        if self._behind is not None:
            self._behind.launch()

    def leave(self) -> None:
        if self._behind is not None:
            self._behind.leave()
            self._behind = None
        if self._aside is not None:
            barrier(self._aside)  # gloo fails in a process that still receives when another process has left
            dist.destroy_process_group(self._aside.group)
            self._aside = None

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        return self._waiting(lambda: self._rows(x.to(self.device), list(ids)).to(x.device))

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        def found() -> Tensor:
            return self._reduced(x.to(self.device), ids, op, weights, everywhere).to(x.device)

        return self._waiting(found)

    def all_to_all(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        return self._waiting(lambda: self._sliced(x.to(self.device), ids).to(x.device))

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        return self._waiting(lambda: self._carried(given, moves))

    def agree(self, flag: bool) -> bool:
        def found() -> bool:
            mine = torch.tensor([flag], dtype=torch.uint8, device=self.device)
            return any(bool(x) for x in self._all_gather(mine, [1] * len(self.placement)))

        return self._waiting(found)

    def begin(self, x: Tensor) -> Callable[[], Any]:
        sent = x.to(self.device)  # gloo sends none but the CPU's memory
        work = dist.all_reduce(sent, group=self.group, async_op=True)

        def arrive() -> None:
            self.around(work.wait)
            if sent is not x:
                x.copy_(sent)

        return arrive

    def _waiting(self, call: Callable[[], Any]) -> Any:
        with pulse.at(pulse.WAITING):
            return self.around(call)

    # Rows

    def _rows(self, x: Tensor, ids: list[int]) -> Tensor:
        wanted = [[i for i in held if i in set(ids)] for held in self.placement]
        mine = [self.row_of[i] for i in wanted[self.process]]
        flat = as_bytes(x if len(mine) == len(x) else x[mine], len(mine))
        width = _width(x)
        if sum(map(bool, wanted)) == 1:
            (owner,) = (process for process, some in enumerate(wanted) if some)
            here = flat if owner == self.process else flat.new_empty(len(wanted[owner]), width)
            dist.broadcast(here, self._global(owner), group=self.group)
            parts = [here]
        else:
            sizes = [len(some) * width for some in wanted]
            gathered = self._all_gather(flat.flatten(), sizes)
            parts = [p.view(len(some), width) for p, some in zip(gathered, wanted, strict=True)]
        held = [i for some in wanted for i in some]
        moved = torch.cat(parts)
        rows = (moved.view(x.dtype) if moved.numel() else x.new_empty(0)).view(len(held), *x.shape[1:])
        return rows if held == ids else rows[[held.index(i) for i in ids]]

    def _reduced(self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None, everywhere: bool) -> Tensor:
        members = set(ids)
        counts = [sum(i in members for i in held) for held in self.placement]
        team = [process for process, count in enumerate(counts) if count]
        if self.native and len(team) == len(counts):
            return reduce_native(self, x, ids, op, weights, self._combine)
        if everywhere or len(team) == len(counts):
            team = list(range(len(counts)))
        elif self.process not in team:
            return x.new_empty(0)
        return self._reduce_in_tree(x, ids, op, weights, team, counts)

    def _reduce_in_tree(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None, team: list[int], counts: list[int]
    ) -> Tensor:
        """Reduce in the tree, among the processes of `team`. `counts`: each process's number of members."""
        width, here = x.shape[1], team.index(self.process)
        members = set(ids)
        own = [row for i, row in self.row_of.items() if i in members]
        mine = x if len(own) == len(x) else x[own]
        row_bytes = width * x.element_size()
        whole = row_bytes <= PACKET_BYTES and row_bytes * len(team) <= AT_ONCE_BYTES
        cuts = np.linspace(0, width, len(team) + 1).astype(int)
        sizes = np.diff(cuts).tolist()
        columns = width if whole else sizes[here]
        outgoing = [mine.reshape(-1)] * len(team) if whole else [mine[:, a:b].reshape(-1) for a, b in pairwise(cuts)]
        incoming = self.swap(outgoing, [counts[p] * columns for p in team], team)
        rows = torch.cat(incoming).view(len(members), columns)
        held = [i for process in team for i in self.placement[process] if i in members]
        if held != (ordered := sorted(members)):
            place = {i: k for k, i in enumerate(held)}
            rows = rows[[place[i] for i in ordered]]
        part = reduce_rows(rows, ordered, op, weights)
        if whole:
            return part
        size = part.element_size()
        parts = self._all_gather(as_bytes(part, 1).flatten(), [n * size for n in sizes], team)
        return torch.cat([p.view(part.dtype) for p in parts])

    def _sliced(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        """Send all slices for a process in one message. No slice passes through a third process."""
        places: list[list[int]] = [[] for _ in self.placement]
        for k, i in enumerate(ids):
            places[self.owner[i]].append(k)
        own = places[self.process]
        rows = [self.row_of[ids[k]] for k in own]
        mine = x if rows == list(range(len(x))) else x[rows]
        outgoing = [mine[:, theirs].reshape(-1) for theirs in places]
        slice_elements = math.prod(x.shape[2:])
        sizes = [len(own) * len(theirs) * slice_elements for theirs in places]
        result = torch.empty_like(mine)
        for theirs, got in zip(places, self.swap(outgoing, sizes, list(range(len(places)))), strict=True):
            result[:, theirs] = got.view(len(theirs), len(own), *x.shape[2:]).transpose(0, 1)
        return result

    def _carried(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        """Carry all moves at once, each between its two processes, which begin to receive before they begin to send."""
        got, calls, sends = {}, [], []
        for tag, (giver, taker, parcel) in enumerate(moves):
            if not math.prod(parcel.shape):
                if taker in self.row_of:
                    got[taker] = torch.empty(parcel.shape, dtype=parcel.dtype)
            elif taker in self.row_of:
                got[taker] = torch.empty(parcel.shape, dtype=parcel.dtype, device=self.device)
                source = self._global(self.owner[giver])
                calls.append(dist.P2POp(dist.irecv, as_bytes(got[taker], 1).flatten(), source, self.group, tag))
            elif giver in self.row_of:
                data = as_bytes(given[giver].to(self.device), 1).flatten()
                sends.append(dist.P2POp(dist.isend, data, self._global(self.owner[taker]), self.group, tag))
        for work in dist.batch_isend_irecv(calls + sends) if calls + sends else []:
            work.wait()
        return got

    def _combine(self, partial: Tensor, op: str) -> Tensor:
        total = partial.contiguous()
        dist.all_reduce(total, OPERATIONS[op], group=self.group)
        return total

    # Moving bytes

    def _all_gather(self, mine: Tensor, sizes: list[int], team: list[int] | None = None) -> list[Tensor]:
        """Send `mine` to the team. Return each process's bytes, (sizes[k],)."""
        team = list(range(len(self.placement))) if team is None else team
        return self.swap([mine] * len(team), sizes, team)

    def swap(self, outgoing: list[Tensor], sizes: list[int], team: list[int]) -> list[Tensor]:
        """Send the tensor `outgoing[k]`, (n,), to process `team[k]`, for each k. Return the received tensors.

        The tensor from process `team[k]` has `sizes[k]` elements. Tensors of at most `AT_ONCE_BYTES` move at the same
        time. Larger ones move in rounds, in which each process has one sender and one receiver.

        gloo sends nothing before the peer is ready to receive, and a ready signal takes a latency and shares the
        connection with data, so all receives begin first. NCCL needs the receives and sends of a round together.
        """
        incoming = [outgoing[0].new_empty(size) for size in sizes]
        here, n = team.index(self.process), len(team)
        incoming[here].copy_(outgoing[here])
        receives, sends = [], []
        for hop in range(1, n):
            to, source = (here + hop) % n, (here - hop) % n
            take, give = as_bytes(incoming[source], 1).flatten(), as_bytes(outgoing[to], 1).flatten()
            receives.append(self._ops(dist.irecv, take, team[source]))
            sends.append(self._ops(dist.isend, give, team[to]))
        rounds = list(zip(receives, sends, strict=True))
        if max(x.nbytes for x in (*outgoing, *incoming)) <= AT_ONCE_BYTES:
            rounds = [(list(chain(*receives)), list(chain(*sends)))]
        begun = [_begun(ops) for ops, _ in rounds] if self.device == CPU else []
        for k, (takes, gives) in enumerate(rounds):
            for work in [*_begun(gives), *begun[k]] if begun else _begun(takes + gives):
                work.wait()
        return incoming

    def _ops(self, call: Callable[..., Any], x: Tensor, process: int) -> list[dist.P2POp]:
        return [dist.P2POp(call, x, self._global(process), self.group)] if x.numel() else []

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _begun(operations: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(operations) if operations else []


def _alone(call: Callable[[], Any]) -> Any:
    return call()


def _width(x: Tensor) -> int:
    return int(np.prod(x.shape[1:])) * x.element_size()


def as_bytes(x: Tensor, rows: int) -> Tensor:
    """Return `x` as bytes, (rows, n), so that the wire can move any dtype."""
    if not x.numel():
        return x.new_empty(rows, 0).byte()
    flat = x.contiguous().as_strided((x.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).view(rows, -1)
