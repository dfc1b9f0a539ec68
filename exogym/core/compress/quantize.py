"""Quantizers turn groups of numbers into codes of a few bits, packed into bytes, and a small fp32 table per group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.errors import ArgumentError, check_count


class Quantizer(ABC):
    """Turn groups of k numbers, (groups, k), into codes from 0 to 2^bits - 1 and a table per group, and back.

    Attributes:
        bits: bits of a code.
        table: how many fp32 numbers a group's table has.
        draws: whether rounding is random. `encode` then needs noise, uniform in [0, 1).
        sums: whether the quantizer sums over a group, so that nodes must be encoded one by one: a sum over several rows
            at once may round differently.
    """

    bits: int
    table = 1
    draws = sums = False

    @abstractmethod
    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the codes, (groups, k) int32, and the tables, (groups, table) fp32, of `x` (groups, k).

        `noise` has the shape of `x`. Only a quantizer that `draws` uses it.
        """

    @abstractmethod
    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        """Return the numbers that codes and tables encode, (groups, k) fp32."""


class Absmax(Quantizer):
    """Uniform quantization: scale = max|x| / (2^(bits-1) - 1) and code = round(x / scale). `Absmax(8)` is int8.

    The error is at most scale / 2. A group of zeros stays zero.

    >>> codes, table = Absmax(8).encode(torch.tensor([[1.0, -0.5, 0.0]]))
    >>> (codes - 127).tolist()
    [[127, -64, 0]]
    """

    def __init__(self, bits: int):
        if bits not in (2, 3, 4, 5, 6, 7, 8, 16):
            raise ArgumentError(f"quantization_bits={bits!r} must be 2 to 8, 16, or 32 (None) for no quantization")
        self.bits, self.top = bits, 2 ** (bits - 1) - 1

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale = _absmax(x) / self.top
        steps = x.float() / _nonzero(scale)
        return steps.round_().clamp_(-self.top, self.top).to(torch.int32) + self.top, scale

    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        return (codes - self.top).float() * table


class E3M0(Quantizer):
    """Quantize to 4-bit floats with a sign bit and three exponent bits (arXiv:2501.18512, section 2.4).

    Streaming DiLoCo uses this quantizer. With s = max|x| in a group, the decoded values are 0 and +-s 2^(-e) for
    e = 0, ..., 6. The exponent is rounded, and numbers with |x| < s 2^(-6.5) become 0. The paper does not define the
    scale, the zero and the rounding; ExoGym chose them. A decoded number that is not 0 is within a factor sqrt(2) of x.

    >>> q = E3M0()
    >>> q.decode(*q.encode(torch.tensor([[8.0, -3.0, 1.0, 0.0]]))).tolist()
    [[8.0, -4.0, 1.0, 0.0]]
    """

    bits = 4

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale = _absmax(x)
        mantissa, exponent = torch.frexp(x.float().abs() / _nonzero(scale))  # exact, unlike a logarithm
        codes = (exponent - (mantissa < 0.5**0.5).int() + 7).clamp_(0, 7) * (mantissa > 0)  # 0 is zero, 7 is 1
        return codes + 8 * ((x < 0) & (codes > 0)).int(), scale

    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        powers = torch.tensor([0.0, *(2.0**-e for e in range(6, -1, -1))], device=table.device)
        values = powers[(codes & 7).long()] * table
        return torch.where(codes > 7, -values, values)


class ScaledSign(Quantizer):
    """Keep one bit per number, its sign. The decoded number is this sign times the group's mean absolute value.

    A group x of k numbers becomes C(x) = (|x|_1 / k) sign(x), with sign(0) = 1. C is a delta-contraction:
    |x - C(x)|^2 = (1 - |x|_1^2 / (k |x|_2^2)) |x|^2.
    """

    bits, sums = 1, True

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (x >= 0).to(torch.int32), x.abs().mean(1, keepdim=True).float()

    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        return (2 * codes - 1).float() * table


class Stochastic(Quantizer):
    """QSGD (arXiv:1610.02132): unbiased random rounding to multiples of the group's 2-norm / s.

    For a number x_j in a group x of k numbers, and s = `levels`: let a = |x_j| s / |x|_2. The level is floor(a), or
    floor(a) + 1 with probability a - floor(a). The decoded number is Q(x_j) = |x|_2 sign(x_j) level / s. So
    E Q(x) = x, and E|Q(x) - x|^2 <= min(k / s^2, sqrt(k) / s) |x|^2. A code has 1 + ceil(log2(s + 1)) bits.
    """

    draws = sums = True

    def __init__(self, levels: int):
        check_count("levels", levels)
        if levels >= 2**23:
            raise ArgumentError(f"levels={levels} must be under 2^23, because fp32 cannot represent more levels")
        self.levels, self.bits = levels, 1 + math.ceil(math.log2(levels + 1))

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert noise is not None
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).float()
        steps = x.float().abs() * (self.levels / _nonzero(norm))
        levels = steps.add_(noise).floor_().clamp_(max=self.levels).to(torch.int32)
        return levels + 2 ** (self.bits - 1) * (x < 0).int(), norm

    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        levels = codes % 2 ** (self.bits - 1)
        values = levels.float() * (table / self.levels)
        return torch.where(codes >= 2 ** (self.bits - 1), -values, values)


class Statistical(Quantizer):
    """Quantize to bins over 6 standard deviations of a group, as SparseLoCo (arXiv:2508.15706).

    With n = 2^bits bins, the group's standard deviation sigma and step = 6 sigma / n, a number x gets the code
    clamp(round((x - mean) / step) + n / 2, 0, n - 1). A group's table has the mean of the numbers in each bin. So the
    decoded numbers and the group have the same mean. sigma^2 is the mean square; the published code divides by one less
    than the group's size, which gives slightly larger steps.

    >>> q = Statistical(2)
    >>> q.decode(*q.encode(torch.tensor([[1.0, 5.0, 1.0, 5.0]]))).tolist()
    [[1.0, 5.0, 1.0, 5.0]]
    """

    sums = True

    def __init__(self, bits: int):
        if bits not in range(1, 9):
            raise ArgumentError(f"bits={bits!r} must be 1 to 8, or 32 for no quantization")
        self.bits, self.table = bits, 2**bits

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = widest(x)
        off = x - x.mean(1, keepdim=True)
        step = 6 * off.square().mean(1, keepdim=True).sqrt() / self.table
        codes = ((off / _nonzero(step)).round_() + self.table // 2).clamp_(0, self.table - 1).long()
        totals = x.new_zeros(len(x), self.table).scatter_add_(1, codes, x)
        members = torch.zeros_like(totals).scatter_add_(1, codes, torch.ones_like(x))
        return codes.to(torch.int32), (totals / members.clamp(min=1)).float()

    def decode(self, codes: Tensor, table: Tensor) -> Tensor:
        return table.gather(1, codes.long())


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x` (rows, k) to `bits` bits, 2 to 8 or 16, with `Absmax`, with one scale per row.

    Returns:
        (codes, scale): codes are (rows, ceil(k * bits / 8)) bytes, and scale is (rows, 1) in fp32, 4 bytes per row.

    >>> codes, scale = quantize(torch.tensor([[1.0, -0.5, 0.25]]), 4)
    >>> codes.shape, dequantize(codes, scale, 4, 3).shape
    (torch.Size([1, 2]), torch.Size([1, 3]))
    """
    codes, scale = Absmax(bits).encode(x)
    return pack(codes, bits), scale


def dequantize(codes: Tensor, scale: Tensor, bits: int, count: int) -> Tensor:
    """Return the numbers, (rows, count) fp32, given the results of `quantize`."""
    return Absmax(bits).decode(unpack(codes, bits, count), scale)


def _absmax(x: Tensor) -> Tensor:
    return (x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_zeros(len(x), 1)).float()


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` (rows, k) of `bits` bits each into (rows, ceil(k bits / 8)) bytes, lowest bits first."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return torch.stack([codes % 256, codes // 256], -1).to(torch.uint8).flatten(1)
    stream, each = codes, bits
    if 8 % bits:
        stream, each = ((codes[..., None] >> torch.arange(bits, device=codes.device)) & 1).flatten(1), 1
    per_byte = 8 // each
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
    return (stream << torch.arange(0, 8, each, device=codes.device)).sum(-1).to(torch.uint8)


def unpack(codes: Tensor, bits: int, count: int) -> Tensor:
    """Return the (rows, count) codes of `bits` bits each, given the bytes that `pack` returned."""
    wide = codes.to(torch.int32)
    if bits == 8:
        return wide
    if bits == 16:
        pairs = wide.unflatten(1, (-1, 2))
        return pairs[..., 0] + 256 * pairs[..., 1]
    each = 1 if 8 % bits else bits
    shifts = torch.arange(0, 8, each, device=codes.device)
    stream = ((wide[..., None] >> shifts) & (2**each - 1)).flatten(1)
    if each == bits:
        return stream[:, :count]
    places = torch.arange(bits, device=codes.device)
    return (stream[:, : count * bits].unflatten(1, (count, bits)) << places).sum(-1)
