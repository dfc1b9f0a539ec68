"""Symmetric quantisation of rows to a few bits, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym.errors import ArgumentError


def quantize(x: Tensor, bits: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise each row of `x` (rows, k) to `bits` bits, with one scale per row.

    scale = max|x| / (2^(bits-1) - 1),  code = round(x / scale). The error is at most scale / 2; a zero row stays zero.
    With `noise` u, uniform in [0, 1), code = floor(x / scale + u): the mean over u is x, the error below scale.

    Args:
        bits: 2 to 8, or 16.
        noise: (rows, k) in fp32.

    Returns:
        (codes, scale): codes (rows, ceil(k bits / 8)) bytes, scale (rows, 1) fp32: k bits / 8 + 4 bytes per row.

    >>> codes, scale = quantize(torch.tensor([[1.0, -0.5, 0.25]]), 4)
    >>> codes.shape, dequantize(codes, scale, 4, 3).shape
    (torch.Size([1, 2]), torch.Size([1, 3]))
    """
    if bits not in (2, 3, 4, 5, 6, 7, 8, 16):
        raise ArgumentError(f"quantization_bits={bits!r} must be 2 to 8, 16, or 32 (None) for no quantisation")
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(1, keepdim=True).float() / top if x.shape[1] else x.new_zeros(len(x), 1).float()
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = x.float() / safe
    codes = (steps.round_() if noise is None else steps.add_(noise).floor_()).clamp_(-top, top).to(torch.int32) + top
    return _pack(codes, bits), scale


def dequantize(codes: Tensor, scale: Tensor, bits: int, count: int) -> Tensor:
    """Return the (rows, count) fp32 numbers that `quantize` packed."""
    top = 2 ** (bits - 1) - 1
    return (_unpack(codes, bits, count) - top).float() * scale


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return torch.stack([codes % 256, codes // 256], -1).to(torch.uint8).flatten(1)
    places = torch.arange(bits, device=codes.device)
    stream = ((codes[..., None] >> places) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 8))
    weights = 2 ** torch.arange(8, device=codes.device)
    return (stream.unflatten(1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


def _unpack(codes: Tensor, bits: int, count: int) -> Tensor:
    wide = codes.to(torch.int32)
    if bits == 8:
        return wide
    if bits == 16:
        pairs = wide.unflatten(1, (-1, 2))
        return pairs[..., 0] + 256 * pairs[..., 1]
    stream = ((wide[..., None] >> torch.arange(8, device=codes.device)) & 1).flatten(1)[:, : count * bits]
    return (stream.unflatten(1, (count, bits)) << torch.arange(bits, device=codes.device)).sum(-1)
