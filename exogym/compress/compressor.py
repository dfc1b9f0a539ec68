"""Compressors of rows: what a node sends of its row, and what others make of it; error feedback around any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.base.rng import generator
from exogym.compress.quantize import Quantizer, pack, unpack
from exogym.errors import ArgumentError, check_count
from exogym.fleet import Fleet
from exogym.fleet.layout import Layout

Payload = list[Tensor]  # (rows, ...) each
Groups = Sequence[tuple[int, int]]  # (m, k): m groups of k numbers each, one after the other


class Compressor(ABC):
    """Turns rows of `count` numbers into what is sent, and back. Nodes are compressed one by one.

    Attributes:
        count: P, the numbers of a row.
        draws: whether `encode` wants noise, (rows, count), uniform in [0, 1); see `noise_of`.
    """

    count: int
    draws = False

    @abstractmethod
    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        """Return what the nodes send of `x` (rows, count), as tensors (rows, ...)."""

    @abstractmethod
    def decode(self, *payload: Tensor) -> Tensor:
        """Return the (rows, count) numbers that payloads stand for."""


class Quantized(Compressor):
    """Every number by a quantiser, which has one table for each of `groups` (`buckets`, `tensors`).

    Payload: ceil(count bits / 8) bytes of codes, and the table's 4-byte numbers for each group.

    >>> from exogym.compress import E3M0
    >>> c = Quantized(E3M0(), buckets(5, 2))
    >>> codes, scales = c.encode(torch.tensor([[1.0, 2.0, 8.0, -4.0, 0.1]]))
    >>> codes.shape, scales.tolist(), c.decode(codes, scales).shape
    (torch.Size([1, 3]), [[2.0, 8.0, 0.10000000149011612]], torch.Size([1, 5]))
    """

    def __init__(self, quantizer: Quantizer, groups: Groups):
        self.quantizer, self.groups, self.draws = quantizer, groups, quantizer.draws
        self.count = sum(m * k for m, k in groups)

    def _split(self, row: Tensor) -> list[Tensor]:
        return [part.view(group) for part, group in zip(row.split(self._sizes), self.groups, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        return [m * k for m, k in self.groups]

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        codes, tables = [], []
        for at, row in enumerate(x):  # a sum over several nodes may round otherwise than over one
            draws = [None] * len(self.groups) if noise is None else self._split(noise[at])
            parts = [
                self.quantizer.encode(part, draw) for part, draw in zip(self._split(row.clone()), draws, strict=True)
            ]
            codes.append(torch.cat([code.flatten() for code, _ in parts]))
            tables.append(torch.cat([table.flatten() for _, table in parts]))
        return [pack(torch.stack(codes), self.quantizer.bits), torch.stack(tables)]

    def decode(self, *payload: Tensor) -> Tensor:
        packed, tables = payload
        codes = unpack(packed, self.quantizer.bits, self.count)
        width = self.quantizer.table
        nodes = []
        for mine, table in zip(codes, tables, strict=True):
            own = table.split([m * width for m, _ in self.groups])
            parts = zip(self._split(mine), own, strict=True)
            nodes.append(torch.cat([self.quantizer.decode(c, t.view(-1, width)).flatten() for c, t in parts]))
        return torch.stack(nodes)


def buckets(count: int, size: int) -> Groups:
    """Return the groups that cut `count` numbers into buckets of `size`, the last one shorter.

    >>> buckets(1000, 512)
    [(1, 512), (1, 488)]
    """
    check_count("bucket", size)
    return [group for group in ((count // size, size), (1, count % size)) if 0 not in group]


def tensors(layout: Layout) -> Groups:
    """Return the groups that are the tensors of a row."""
    return [(1, slot.numel) for slot in layout]


class TopK(Compressor):
    """The k largest of a row by size, each with a 4-byte index; the others are zero. Payload: k (b + 4) bytes.

    >>> c = TopK(4, 2)
    >>> c.decode(*c.encode(torch.tensor([[1.0, -3.0, 0.5, 2.0]]))).tolist()
    [[0.0, -3.0, 0.0, 2.0]]
    """

    def __init__(self, count: int, k: int):
        if not 1 <= k <= count:
            raise ArgumentError(f"top-k of k={k} of {count} numbers: wanted 1 to {count}")
        self.count, self.k = count, k

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        indices = torch.stack([row.abs().topk(self.k).indices for row in x]).sort(1).values
        return [indices.int(), x.gather(1, indices)]

    def decode(self, *payload: Tensor) -> Tensor:
        indices, values = payload
        return values.new_zeros(len(values), self.count).scatter_(1, indices.long(), values)


def with_feedback(
    compressor: Compressor, error: Tensor, x: Tensor, decay: float = 1.0, noise: Tensor | None = None
) -> Payload:
    """Compress with error feedback: e <- decay e + x; send C(e); e <- e - C(e), in place. What is sent and what is kept
    add up to what came in.

    Args:
        error: e, (rows, count).
        x: (rows, count).

    >>> e = torch.zeros(1, 3)
    >>> sent = TopK(3, 1).decode(*with_feedback(TopK(3, 1), e, torch.tensor([[1.0, -3.0, 0.5]])))
    >>> sent.tolist(), e.tolist()
    ([[0.0, -3.0, 0.0]], [[1.0, 0.0, 0.5]])
    """
    error.mul_(decay).add_(x)
    payload = compressor.encode(error, noise)
    error.sub_(compressor.decode(*payload))
    return payload


def noise_of(fleet: Fleet, count: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """Return (rows, count) fp32 numbers uniform in [0, 1), each node's from a stream (seed, purpose, *ids, node)."""
    streams = [generator(seed, purpose, *ids, rank) for rank in fleet.ranks]
    return torch.stack([torch.rand(count, generator=g) for g in streams])
