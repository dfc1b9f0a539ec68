"""Which programs of nodes that wait can go on: a send with its receive, an exchange with its partner's.

Each node's program stands at a call. What decides about all of them is small and the same everywhere, so processes that
hold some nodes each tell one another where theirs stand (`gathered`) and come to the same pairs, or the same error.
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
    """Where the program of a node stands.

    Attributes:
        kind: one of `KINDS`.
        mark: of a collective, equal where the calls are.
        peer: of a call in pairs, the other node.
        shape, dtype, on_cpu: of the tensor that the node gives, if it does.
    """

    kind: str
    mark: int = 0
    peer: int = -1
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    on_cpu: bool = True

    @classmethod
    def of(cls, kind: str, signature: Any, peer: int, tensor: Tensor | None) -> Stand:
        """Return the call of a `kind` on `tensor`, a node's own; collectives are alike where `signature` is."""
        if kind not in PAIRED:
            return cls(COLLECTIVE, zlib.crc32(repr(signature).encode()))
        if tensor is None:
            return cls(kind, peer=peer)
        if tensor.dim() > MOST_DIMENSIONS:
            raise StrategyError(f"{kind}() takes {MOST_DIMENSIONS} dimensions, not {tensor.dim()}: flatten the tensor")
        return cls(kind, 0, peer, tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def numbers(self) -> list[int]:
        shape = [len(self.shape), *self.shape, *[0] * (MOST_DIMENSIONS - len(self.shape))]
        return [KINDS.index(self.kind), self.mark, self.peer, DTYPES.index(self.dtype), self.on_cpu, *shape]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Stand:
        kind, mark, peer, dtype, on_cpu, dimensions, *shape = numbers
        return cls(KINDS[kind], mark, peer, tuple(shape[:dimensions]), DTYPES[dtype], bool(on_cpu))


def gathered(wire: Wire, here: Mapping[int, Stand]) -> dict[int, Stand]:
    """Return the calls of all nodes, of which this process has those of `here`."""
    if not wire.is_shared:
        return dict(here)
    mine = torch.tensor([here[rank].numbers() for rank in wire.ranks])
    everyone = sorted(rank for ranks in wire.placement for rank in ranks)
    return dict(zip(everyone, map(Stand.from_numbers, wire.rows(mine, everyone).tolist()), strict=True))


def pairs_of(calls: Mapping[int, Stand], blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of nodes that can go on, ascending: giver and receiver, or both partners, the lower first.

    Args:
        calls: of all nodes.
        blocks: nodes that go on together or not at all.

    Raises:
        StrategyError: a node names one that is not there or itself, or partners give other shapes.
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
            raise StrategyError(f"{here}: that node is away; look at self.present, which is {there} now")
        if call.peer == node and call.kind != "exchange":
            raise StrategyError(f"{here}: that is itself; a node has its own tensor")
        if other.peer != node or call.kind == "recv" or (call.kind == "exchange" and node > call.peer):
            continue
        if other.kind != {"send": "recv", "exchange": "exchange"}[call.kind]:
            continue
        if call.kind == "exchange" and (call.shape, call.dtype) != (other.shape, other.dtype):
            raise StrategyError(
                f"{here}: it gives {call.dtype} {call.shape}, and node {call.peer} {other.dtype} {other.shape}; "
                "partners exchange tensors of equal shape and kind"
            )
        pairs.append((node, call.peer))
    while True:  # of nodes that go on together all must have found each other
        found = {node for pair in pairs for node in pair}
        ready = {node for block in blocks if found.issuperset(block) for node in block}
        kept = [pair for pair in pairs if ready.issuperset(pair)]
        if len(kept) == len(pairs):
            return pairs
        pairs = kept


def disagreement(wire: Wire, here: Mapping[int, str], calls: Mapping[int, Stand]) -> StrategyError:
    """Return the error of programs none of which can go on; `here` has what the nodes here wait at, in words."""
    told = gather(wire, list(here.items()))
    waiting = [f"node {node} waits at {text}" for texts in told for node, text in texts]
    ended = [f"node {node} has ended its step" for node, call in calls.items() if call.kind == ENDED]
    lines = [line for some in (waiting, ended) for line in [*some[:NAMED], *(["..."] if len(some) > NAMED else [])]]
    return StrategyError(
        f"no node can go on: {', '.join(lines)}. Every node must make the same collective calls in the same order, "
        "with equal shapes; a send needs the other node's recv at the same time, and an exchange its partner's exchange"
    )
