"""Pair waiting node programs: a send with its receive, an exchange with its partner's exchange.

Each node's program waits at a call. The processes send each other their nodes' calls (`gathered`), which are small. So
all processes find the same pairs, or raise the same error.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.core.communicator import Wire, gather
from exogym.errors import StrategyError

PAIRED = ("send", "recv", "exchange")
PEER = {"send": "dst", "recv": "src", "exchange": "partner"}
ENDED, AWAY, COLLECTIVE = "ended", "away", "collective"
KINDS = (ENDED, AWAY, COLLECTIVE, *PAIRED)
DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
MOST_DIMENSIONS = 8
NAMED = 8  # nodes that an error names


@dataclass(frozen=True)
class Stand:
    """The pending call of a node's program.

    Attributes:
        kind: one of `KINDS`.
        mark: a number. Collective calls with the same kind, shape and options have equal marks.
        peer: the partner's id in a paired call.
        shape, dtype, on_cpu: properties of the node's tensor, if the call gives a tensor.
    """

    kind: str
    mark: int = 0
    peer: int = -1
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    on_cpu: bool = True

    @classmethod
    def of(cls, kind: str, signature: Any, peer: int, tensor: Tensor | None) -> Stand:
        """Return a node's call of a `kind` with its `tensor`. Collective calls with equal `signature` match."""
        if kind not in PAIRED:
            return cls(COLLECTIVE, zlib.crc32(repr(signature).encode()))
        if tensor is None:
            return cls(kind, peer=peer)
        if tensor.dim() > MOST_DIMENSIONS:
            raise StrategyError(
                f"{kind}() takes a tensor of at most {MOST_DIMENSIONS} dimensions, not {tensor.dim()}: flatten it"
            )
        return cls(kind, 0, peer, tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

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


def pairs_of(calls: Mapping[int, Stand], blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of nodes that can continue, sorted.

    A pair is (sender, receiver), or the two partners of an exchange, with the lower id first.

    Args:
        calls: all nodes' calls.
        blocks: groups of nodes that continue together or not at all.

    Raises:
        StrategyError: a node names a missing or absent node, a send or receive names its own node, or partners have
            different shapes.
    """
    pairs = []
    for node, call in calls.items():
        if call.kind not in PAIRED:
            continue
        here = f"{call.kind}({PEER[call.kind]}={call.peer}), which node {node} calls"
        other = calls.get(call.peer)
        if other is None:
            raise StrategyError(f"{here}: there is no such node; nodes are {min(calls)} to {max(calls)}")
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
                f"{here}: this node gives {call.dtype} {call.shape}, but node {call.peer} gives {other.dtype} "
                f"{other.shape}; partners must give tensors of equal shape and dtype"
            )
        pairs.append((node, call.peer))
    while True:  # in a group, all nodes must have their partners
        found = {node for pair in pairs for node in pair}
        ready = {node for block in blocks if found.issuperset(block) for node in block}
        kept = [pair for pair in pairs if ready.issuperset(pair)]
        if len(kept) == len(pairs):
            return pairs
        pairs = kept


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
