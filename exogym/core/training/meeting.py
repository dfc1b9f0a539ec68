"""Run one program per node, and carry out the collectives that the programs call.

Each program has its own thread, which runs alone until its program calls a collective or returns; then the next thread
runs. When all programs wait at the same collective, ExoGym carries it out on the stacked tensors, (rows, ...), and
gives each program its row, so a strategy that is written for one node runs unchanged, on the same model object and with
reproducible results. ExoGym carries out paired calls (send, recv, exchange) when all programs wait and the two partners
have called each other.

With several processes, each process tells the others where its nodes' programs wait (`Stand`), so that all processes
find the same collective and the same pairs, or raise the same error.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.core.communicator import Communicator, Parcel, Wire, gather
from exogym.errors import StrategyError
from exogym.strategy.communicate import set_place

PAIRED = ("send", "recv", "exchange")
PEER = {"send": "dst", "recv": "src", "exchange": "partner"}
ENDED, AWAY, COLLECTIVE = "ended", "away", "collective"
KINDS = (ENDED, AWAY, COLLECTIVE, *PAIRED)
DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
MOST_DIMENSIONS = 8
NAMED = 8  # nodes that an error names


class _Abandoned(BaseException):
    """Raised in a waiting thread to end it, after another node failed."""


class Meeting:
    """Run one function per block of rows, and carry out the collectives that the functions call.

    Args:
        comm: the fleet's communicator.
        enter, leave: functions that are called with a block's index whenever the block's thread starts or stops.
        rows: the rows of each block. By default, each block has one row.
        device: the device for tensors that come from another process's nodes.
    """

    def __init__(
        self,
        comm: Communicator,
        enter: Callable[[int], None],
        leave: Callable[[int], None],
        rows: Sequence[Sequence[int]] | None = None,
        device: torch.device | None = None,
    ):
        self.comm, self.enter, self.leave, self.device = comm, enter, leave, device
        self.rows = rows
        members = range(len(comm.ranks)) if rows is None else range(len(rows))
        self.places = [_Place(index, rows is not None) for index in members]
        self.before_first: Callable[[], None] | None = None  # called before the next collective that moves tensors

    def run(self, functions: Sequence[Callable[[], None] | None]) -> None:
        """Run each `functions[k]` as block k's program until all have ended. None: the block's nodes are absent."""
        for place, function in zip(self.places, functions, strict=True):
            if function is not None:
                place.begin(function)
        places = self.taking_part = [p for p, f in zip(self.places, functions, strict=True) if f is not None]
        try:
            moving = list(places)
            while True:
                for place in moving:
                    self._move(place)
                waiting = [place for place in places if not place.done]
                if not self.comm.wire.is_shared and not waiting:
                    return
                if not self.comm.wire.is_shared and self._is_one_call(waiting):
                    self._meet(waiting)
                    moving = waiting
                    continue
                calls = gathered(self.comm.wire, self._calls())
                kinds = {(call.kind, call.mark) for call in calls.values() if call.kind != AWAY}
                if kinds <= {(ENDED, 0)}:
                    return
                if pairs := pairs_of(calls):
                    moving = self._hand_over(pairs, calls)
                elif len(kinds) == 1 and all(kind not in PAIRED for kind, _ in kinds):
                    self._meet(waiting)
                    moving = waiting
                else:
                    here = {rank: place.request.text for place in waiting for rank in self._ranks(place)}
                    raise disagreement(self.comm.wire, here, calls)
        finally:
            for place in places:
                place.abandon()

    def close(self) -> None:
        """End the threads."""
        for place in self.places:
            place.close()

    def _move(self, place: _Place) -> None:
        self.enter(place.index)
        try:
            place.move()
        finally:
            self.leave(place.index)
        if place.error is not None:
            if "process group has not been initialized" in str(place.error):
                raise StrategyError(
                    "a strategy called torch.distributed, which has no process group here: use all_reduce, all_gather "
                    "and the other functions of exogym.strategy.communicate"
                ) from place.error
            raise place.error

    def _is_one_call(self, waiting: list[_Place]) -> bool:
        """Return whether all programs that take part wait at the same collective."""
        first = waiting[0].request
        alike = all(place.request.signature == first.signature for place in waiting)
        return alike and first.kind not in PAIRED and len(waiting) == len(self.taking_part)

    def _meet(self, waiting: list[_Place]) -> None:
        for place, result in zip(waiting, self._carry_out(waiting, waiting[0].request), strict=True):
            place.result = result

    def _ranks(self, place: _Place) -> list[int]:
        rows = [place.index] if self.rows is None else self.rows[place.index]
        return [self.comm.ranks[row] for row in rows]

    def _calls(self) -> dict[int, Stand]:
        """Return the pending calls of this process's programs, by node."""
        calls: dict[int, Stand] = {}
        for place in self.places:
            there = AWAY if place not in self.taking_part else ENDED if place.done else ""
            call = Stand(there) if there else place.request.call()
            calls |= dict.fromkeys(self._ranks(place), call)
        return dict(sorted(calls.items()))

    def _hand_over(self, pairs: Sequence[tuple[int, int]], calls: Mapping[int, Stand]) -> list[_Place]:
        """Exchange the tensors of `pairs`, and return this process's places that can continue."""
        self._about_to_move()
        found = {node for pair in pairs for node in pair}
        ready = {self.comm.ranks[place.index]: place for place in self.places if not place.done}
        ready = {rank: place for rank, place in ready.items() if rank in found}
        given = {rank: place.request.tensor for rank, place in ready.items() if place.request.tensor is not None}
        parcels = [
            Parcel(node, peer, calls[node].shape, calls[node].dtype, calls[node].kind == "exchange")
            for node, peer in pairs
        ]
        got = self.comm.hand_over(given, parcels)
        for rank, place in ready.items():
            place.result = self._at_home(got.get(rank), calls[calls[rank].peer])
        return list(ready.values())

    def _at_home(self, x: Tensor | None, sent: Stand) -> Tensor | None:
        """Return a received tensor on the device that `sent` states: the CPU, or the nodes' device."""
        if x is None:
            return None
        return x.clone() if sent.on_cpu or self.device is None else x.to(self.device, copy=True)

    def _about_to_move(self) -> None:
        if self.before_first is not None:
            self.before_first()
            self.before_first = None

    def _carry_out(self, waiting: list[_Place], call: _Request) -> list[Tensor | None]:
        comm, options = self.comm, call.options
        if call.kind == "barrier":
            comm.barrier()
            return [None] * len(waiting)
        if call.kind != "agree":
            self._about_to_move()
        tensors = [place.request.tensor for place in waiting]
        everyone = len(waiting) == len(self.places)
        if self.rows is not None:
            x = torch.cat(tensors)
        elif everyone:
            x = torch.stack(tensors)
        else:  # ignore rows of absent nodes
            x = tensors[0].new_zeros(len(self.places), *tensors[0].shape)
            x[[place.index for place in waiting]] = torch.stack(tensors)
        if call.kind == "agree":
            agreed = comm.wire.reduce(x.float(), comm.present, "max") > 0
            return [agreed] * len(waiting)
        result: Tensor = getattr(comm, call.kind)(x, **options)
        if call.kind == "gather":
            return [result if comm.ranks[place.index] == options["dst"] else None for place in waiting]
        if self.rows is None:
            return [result[place.index] for place in waiting]
        return [result[list(rows)] for rows in self.rows]


class _Request:
    def __init__(self, kind: str, tensor: Tensor | None, options: dict[str, Any], has_rows: bool):
        self.kind, self.tensor, self.options, self.has_rows = kind, tensor, options, has_rows
        shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        alike = None if tensor is None else (tuple(tensor.shape[1:] if has_rows else tensor.shape), tensor.dtype)
        self.signature = (kind, alike, tuple(sorted(options.items())))
        given = [] if shape is None else [f"{shape[1]} {shape[0]}"]
        self.text = f"{kind}({', '.join(given + [f'{name}={value!r}' for name, value in options.items()])})"

    def call(self) -> Stand:
        """Return the pending call of each node of this block."""
        if self.kind not in PAIRED:
            return Stand(COLLECTIVE, zlib.crc32(repr(self.signature).encode()))
        peer, x = self.options[PEER[self.kind]], self.tensor
        if x is None:
            return Stand(self.kind, peer=peer)
        if x.dim() > MOST_DIMENSIONS:
            raise StrategyError(
                f"{self.kind}() accepts a tensor of at most {MOST_DIMENSIONS} dimensions, but got {x.dim()}: flatten it"
            )
        return Stand(self.kind, 0, peer, tuple(x.shape), x.dtype, x.is_cpu)


class _Place:
    """A thread, and the semaphores that let it run or stop it."""

    def __init__(self, index: int, has_rows: bool):
        self.index, self.has_rows = index, has_rows
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.function: Callable[[], None] | None = None
        self.request: Any = None
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.done, self.abandoned = True, False
        self.thread = threading.Thread(target=self._live, name=f"exogym-node-{index}", daemon=True)
        self.thread.start()

    def begin(self, function: Callable[[], None]) -> None:
        self.function, self.done, self.error, self.request = function, False, None, None

    def move(self) -> None:
        """Let the thread run until it calls a collective, ends or fails."""
        self.go.release()
        try:
            self.stopped.acquire()
        except BaseException:  # Ctrl-C: let the thread reach a call, so that it can be ended
            self.stopped.acquire()
            raise

    def abandon(self) -> None:
        """End this thread's program, if it still waits at a collective."""
        if not self.done and self.request is not None:
            self.abandoned = True
            self.move()
        self.done, self.abandoned = True, False

    def close(self) -> None:
        self.function = None
        self.go.release()
        self.thread.join()

    def meet(self, kind: str, tensor: Tensor | None, **options: Any) -> Tensor | None:
        """Give `tensor` to the collective, and wait for all other programs, or for a paired call's partner.

        Only this object's own thread may call this method. Raise StrategyError if a paired call does not name its
        partner, or comes from a strategy with `stacked = True`.
        """
        if kind in PAIRED:
            options = {PEER[kind]: self._peer(kind, options[PEER[kind]])}
        self.request = _Request(kind, tensor, options, self.has_rows)
        self.stopped.release()
        self.go.acquire()
        self.request = None
        if self.abandoned or self.function is None:
            raise _Abandoned
        return self.result

    def _peer(self, kind: str, given: Any) -> int:
        """Return the partner's number."""
        if self.has_rows:
            raise StrategyError(f"{kind}() works for one node only: leave stacked = True out")
        try:
            peer = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            peer = torch.empty(0)
        if peer.is_floating_point() or peer.dtype == torch.bool or peer.dim():
            raise StrategyError(f"{kind}() needs a node's number as {PEER[kind]}, not {given!r}")
        return int(peer)

    def _live(self) -> None:
        set_place(self)
        while True:
            self.go.acquire()
            if self.function is None:
                return
            try:
                self.function()
            except _Abandoned:
                self.error = None
            except BaseException as error:
                self.error = error
            self.done = True
            self.stopped.release()
            if self.function is None:
                return


@dataclass(frozen=True)
class Stand:
    """The pending call of a node's program, of a kind in `KINDS`.

    Attributes:
        mark: a number that is equal for collective calls with the same kind, shape and options.
        peer: the partner's id in a paired call.
        shape, dtype, on_cpu: properties of the node's tensor, if the call has a tensor.
    """

    kind: str
    mark: int = 0
    peer: int = -1
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    on_cpu: bool = True

    def numbers(self) -> list[int]:
        shape = [len(self.shape), *self.shape, *[0] * (MOST_DIMENSIONS - len(self.shape))]
        return [KINDS.index(self.kind), self.mark, self.peer, DTYPES.index(self.dtype), self.on_cpu, *shape]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Stand:
        kind, mark, peer, dtype, on_cpu, dimensions, *shape = numbers
        return cls(KINDS[kind], mark, peer, tuple(shape[:dimensions]), DTYPES[dtype], bool(on_cpu))


def gathered(wire: Wire, here: Mapping[int, Stand]) -> dict[int, Stand]:
    """Return all nodes' calls, by node. `here` holds the calls of this process's nodes."""
    if not wire.is_shared:
        return dict(here)
    mine = torch.tensor([here[rank].numbers() for rank in wire.ranks])
    everyone = sorted(rank for ranks in wire.placement for rank in ranks)
    return dict(zip(everyone, map(Stand.from_numbers, wire.rows(mine, everyone).tolist()), strict=True))


def pairs_of(calls: Mapping[int, Stand]) -> list[tuple[int, int]]:
    """Return the pairs of nodes that can continue, sorted. `calls` holds all nodes' calls.

    A pair is (sender, receiver), or the two partners of an exchange, with the lower id first. Raise StrategyError if a
    node names a missing or absent node, a send or receive names its own node, or partners have different shapes.
    """
    pairs = []
    for node, call in calls.items():
        if call.kind not in PAIRED:
            continue
        here = f"{call.kind}({PEER[call.kind]}={call.peer}), which node {node} calls"
        other = calls.get(call.peer)
        if other is None:
            raise StrategyError(f"{here}: no such node; the nodes are {min(calls)} to {max(calls)}")
        if other.kind == AWAY:
            there = [rank for rank, one in calls.items() if one.kind != AWAY]
            raise StrategyError(f"{here}: that node is absent; choose among self.present, which is {there} now")
        if call.peer == node and call.kind != "exchange":
            raise StrategyError(f"{here}: a node cannot be its own partner")
        if other.peer != node or call.kind == "recv" or (call.kind == "exchange" and node > call.peer):
            continue
        if other.kind != {"send": "recv", "exchange": "exchange"}[call.kind]:
            continue
        if call.kind == "exchange" and (call.shape, call.dtype) != (other.shape, other.dtype):
            raise StrategyError(
                f"{here}: this node passes {call.dtype} {call.shape}, but node {call.peer} passes {other.dtype} "
                f"{other.shape}; partners must pass tensors of equal shape and dtype"
            )
        pairs.append((node, call.peer))
    return pairs


def disagreement(wire: Wire, here: Mapping[int, str], calls: Mapping[int, Stand]) -> StrategyError:
    """Return the error to raise if no program can continue. `here` holds the calls of this process's nodes, as text."""
    told = gather(wire, list(here.items()))
    waiting = [f"node {node} waits at {text}" for texts in told for node, text in texts]
    ended = [f"node {node} has ended its step" for node, call in calls.items() if call.kind == ENDED]
    lines = [line for some in (waiting, ended) for line in [*some[:NAMED], *(["..."] if len(some) > NAMED else [])]]
    return StrategyError(
        f"no node can continue: {', '.join(lines)}. Every node must make the same collective calls in the same order, "
        "with equal shapes. A send needs the other node's recv at the same time; an exchange needs a partner's exchange"
    )
