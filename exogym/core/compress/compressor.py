"""Compressors encode a node's row as a message and decode it. All of them can be used with error feedback."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exogym.core.base.rng import generator
from exogym.core.compress.dct import Blocks
from exogym.core.compress.quantize import Quantizer, pack, unpack
from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Layout
from exogym.errors import ArgumentError, check_count

Payload = list[Tensor]  # (rows, ...) each
Groups = Sequence[tuple[int, int]]  # (m, k): m consecutive groups of k numbers each


class Compressor(ABC):
    """Encode rows of `count` numbers as messages, and decode them. Each row is compressed on its own.

    Attributes:
        count: the length of a row.
        draws: whether `encode` needs noise: (rows, count) random numbers, uniform in [0, 1). `noise_of` makes them.
    """

    count: int
    draws = False

    @abstractmethod
    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        """Return a message for each row of `x` (rows, count), as a list of tensors (rows, ...)."""

    @abstractmethod
    def decode(self, *payload: Tensor) -> Tensor:
        """Return the rows, (rows, count), given the tensors that `encode` returned."""


class Quantized(Compressor):
    """Quantize every number of a row. Each group of numbers has its own table.

    With codes of `bits` bits, the payload is ceil(count bits / 8) bytes of codes, and the table's 4-byte numbers for
    each group.

    Args:
        quantizer: turns a group's numbers into codes and a table.
        groups: the groups of a row, from `buckets` or `tensors`.

    >>> from exogym.compress import E3M0
    >>> c = Quantized(E3M0(), buckets(5, 2))
    >>> codes, scales = c.encode(torch.tensor([[1.0, 2.0, 8.0, -4.0, 0.1]]))
    >>> codes.shape, scales.tolist(), c.decode(codes, scales).shape
    (torch.Size([1, 3]), [[2.0, 8.0, 0.10000000149011612]], torch.Size([1, 5]))
    """

    def __init__(self, quantizer: Quantizer, groups: Groups):
        self.quantizer, self.groups, self.draws = quantizer, groups, quantizer.draws
        self.count = sum(m * k for m, k in groups)

    @property
    def share_bytes(self) -> float:
        """The payload bytes of a row that is one device's share of a longer row.

        It can be a fraction, because the codes of all devices are packed together.
        """
        return self.count * self.quantizer.bits / 8 + 4 * self.quantizer.table * sum(m for m, _ in self.groups)

    def _split(self, x: Tensor) -> list[Tensor]:
        """Cut (rows, count) into groups, (rows m, k) each."""
        parts = x.split([m * k for m, k in self.groups], 1)
        return [part.reshape(len(x) * m, k) for part, (m, k) in zip(parts, self.groups, strict=True)]

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        if self.quantizer.sums and len(x) > 1:
            alone = [self.encode(x[i : i + 1], None if noise is None else noise[i : i + 1]) for i in range(len(x))]
            return [torch.cat(parts) for parts in zip(*alone, strict=True)]
        parts = self._split(x.clone(memory_format=torch.contiguous_format) if self.quantizer.sums else x)
        draws = [None] * len(parts) if noise is None else self._split(noise)
        encoded = [self.quantizer.encode(part, draw) for part, draw in zip(parts, draws, strict=True)]
        codes = torch.cat([code.view(len(x), -1) for code, _ in encoded], 1)
        return [pack(codes, self.quantizer.bits), torch.cat([table.view(len(x), -1) for _, table in encoded], 1)]

    def decode(self, *payload: Tensor) -> Tensor:
        packed, tables = payload
        rows, width = len(packed), self.quantizer.table
        own = tables.split([m * width for m, _ in self.groups], 1)
        parts = zip(self._split(unpack(packed, self.quantizer.bits, self.count)), own, strict=True)
        return torch.cat([self.quantizer.decode(c, t.reshape(-1, width)).view(rows, -1) for c, t in parts], 1)


def buckets(count: int, size: int) -> Groups:
    """Return groups that divide `count` numbers into buckets of `size` numbers. The last bucket may be shorter.

    >>> buckets(1000, 512)
    [(1, 512), (1, 488)]
    """
    check_count("bucket", size)
    return [group for group in ((count // size, size), (1, count % size)) if 0 not in group]


def tensors(layout: Layout) -> Groups:
    """Return groups that divide a row into its tensors, one group per tensor."""
    return [(1, slot.numel) for slot in layout]


class TopK(Compressor):
    """Send a row's k largest numbers by absolute value, each with a 4-byte index. The others become zero.

    For numbers of b bytes the payload is k (b + 4) bytes.

    >>> c = TopK(4, 2)
    >>> c.decode(*c.encode(torch.tensor([[1.0, -3.0, 0.5, 2.0]]))).tolist()
    [[0.0, -3.0, 0.0, 2.0]]
    """

    def __init__(self, count: int, k: int):
        if not 1 <= k <= count:
            raise ArgumentError(f"k={k} must be 1 to {count}, the length of a row")
        self.count, self.k = count, k

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        indices = torch.stack([row.abs().topk(self.k).indices for row in x]).sort(1).values
        return [indices.int(), x.gather(1, indices)]

    def decode(self, *payload: Tensor) -> Tensor:
        indices, values = payload
        return values.new_zeros(len(values), self.count).scatter_(1, indices.long(), values)


class ChunkTopK(Compressor):
    """Divide each tensor into chunks, and send each chunk's entries with the largest absolute values.

    A chunk is a block of side x side entries with side^2 = chunk, or `chunk` entries of a vector. `Blocks` may cut
    smaller chunks from a small tensor. A chunk of s entries sends k' = max(1, round(k s / chunk)) entries, as values
    and as packed indices of ceil(log2 s) bits. A tensor with c chunks has the payload ceil(c k' ceil(log2 s) / 8) bytes
    of indices, and c k' b bytes of values with b bytes each. With a quantizer the values take ceil(c k' bits / 8) bytes
    and one table.

    Args:
        layout: the layout of a row.
        k: number of entries that a whole chunk sends.
        chunk: number of entries in a whole chunk, a square number.
        quantizer: quantizes the sent values, with one table per tensor. None: the values are sent unchanged.
    """

    def __init__(self, layout: Layout, k: int, chunk: int, quantizer: Quantizer | None):
        side = math.isqrt(chunk)
        if side * side != chunk or not 1 <= k <= chunk:
            raise ArgumentError(
                f"topk={k} and chunk={chunk}: chunk must be a square number, such as 4096 = 64 x 64, and topk from 1 "
                "to chunk"
            )
        self.count, self.quantizer = layout.numel, quantizer
        self.slots = list(layout)
        self.cuts = [Blocks(slot.shape, side, chunk) for slot in layout]
        self.kept = [max(1, round(k * cut.size / chunk)) for cut in self.cuts]
        self.index_bits = [(cut.size - 1).bit_length() for cut in self.cuts]

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        payload: Payload = []
        for slot, cut, k, bits in zip(self.slots, self.cuts, self.kept, self.index_bits, strict=True):
            blocks = cut.cut(slot.of(x))
            indices = blocks.abs().topk(k, dim=-1).indices.sort(-1).values
            values = blocks.gather(-1, indices).flatten(1)
            payload += [pack(indices.flatten(1).int(), bits)] if bits else []
            payload += self._values(values.shape[1]).encode(values) if self.quantizer else [values]
        return payload

    def decode(self, *payload: Tensor) -> Tensor:
        return self._scattered(payload, lambda values: values)

    def mask(self, *payload: Tensor) -> Tensor:
        """Return (rows, count) numbers: 1 where a message has an entry, 0 elsewhere."""
        return self._scattered(payload, torch.ones_like)

    def _scattered(self, payload: Sequence[Tensor], what: Callable[[Tensor], Tensor]) -> Tensor:
        parts, out = iter(payload), []
        for cut, k, bits in zip(self.cuts, self.kept, self.index_bits, strict=True):
            shape = (-1, cut.blocks, k)
            indices = unpack(next(parts), bits, cut.blocks * k).long().view(shape) if bits else None
            given = self._values(cut.blocks * k).decode(next(parts), next(parts)) if self.quantizer else next(parts)
            values = what(given).view(shape)
            if indices is None:  # chunks of one entry
                indices = torch.zeros_like(values, dtype=torch.int64)
            dense = values.new_zeros(len(values), cut.blocks, cut.size)
            out.append(cut.join(dense.scatter_(-1, indices, values)).reshape(len(values), -1))
        return torch.cat(out, 1)

    def _values(self, count: int) -> Quantized:
        assert self.quantizer is not None
        return Quantized(self.quantizer, [(1, count)])


def chunked_bytes(shape: Sequence[int], k: int, chunk: int, quantizer: Quantizer | None, b: float) -> float:
    """Return the bytes that `ChunkTopK` sends of a tensor with this shape, if a value has b bytes.

    >>> chunked_bytes((64, 128), 64, 4096, None, 4.0)  # two chunks, 64 entries each, with indices of 12 bits
    704.0
    """
    cut = Blocks(torch.Size(shape), math.isqrt(chunk), chunk)
    count = cut.blocks * max(1, round(k * cut.size / chunk))
    indices = math.ceil(count * (cut.size - 1).bit_length() / 8)
    return indices + (count * b if quantizer is None else math.ceil(count * quantizer.bits / 8) + 4 * quantizer.table)


def with_feedback(
    compressor: Compressor, error: Tensor, x: Tensor, decay: float = 1.0, noise: Tensor | None = None
) -> Payload:
    """Compress rows with error feedback, and return the messages.

    With the error e and the compressor C, a call adds x (e <- decay e + x), sends C(e), and keeps e <- e - C(e). With
    decay = 1 the sent values and the new error add up to x and the old error.

    Args:
        error: e, (rows, count); changed in place.
        x: the rows to send, (rows, count).
        decay: factor of the old error.
        noise: the random numbers that `Compressor.encode` gets.

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
    """Return (rows, count) random fp32 numbers, uniform in [0, 1), for `Compressor.encode`.

    A node's numbers depend only on (seed, purpose, *ids) and the node's rank.
    """
    streams = [generator(seed, purpose, *ids, rank) for rank in fleet.ranks]
    return torch.stack([torch.rand(count, generator=g) for g in streams])
