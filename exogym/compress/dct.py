"""Orthonormal cosine transform of a tensor's blocks, as DeMo uses it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II matrix C (n, n): C x transforms, C^T X transforms back."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None]
    c = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    c[0] /= math.sqrt(2)
    return c.to(dtype=dtype, device=device)


def largest_divisor(n: int, target: int) -> int:
    """Return the largest divisor of `n` that is at most `target`."""
    return max(d for d in range(1, min(n, target) + 1) if n % d == 0)


class BlockDCT:
    """Cuts a tensor of one shape into blocks and transforms each.

    A 2-D tensor n x m is cut into h x w blocks, where h (w) is the largest divisor of n (m) not above `chunk`; a
    1-D tensor into blocks of w; more dimensions are folded to (first, rest). A scalar is one block of one.

    Nodes are transformed one by one, each in memory of its own: a product over several may round differently than one
    over a single node, and where a node is held must change nothing.

    >>> t = BlockDCT(torch.Size([128, 64, 3]), 64, torch.float64, torch.device("cpu"))
    >>> t.blocks, t.size
    (6, 4096)
    >>> x = torch.randn(2, 128, 64, 3, dtype=torch.float64)
    >>> torch.allclose(t.decode(t.encode(x)), x)
    True
    """

    def __init__(self, shape: torch.Size, chunk: int, dtype: torch.dtype, device: torch.device):
        self.shape = shape
        n, m = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
        self.h, self.w = largest_divisor(n, chunk), largest_divisor(m, chunk)
        self.rows, self.columns = n // self.h, m // self.w
        self.blocks, self.size = self.rows * self.columns, self.h * self.w
        self.ch, self.cw = dct_matrix(self.h, dtype, device), dct_matrix(self.w, dtype, device)

    def encode(self, x: Tensor) -> Tensor:
        """Transform `x` (nodes, *shape) to coefficients (nodes, blocks, size)."""
        return torch.stack([self._encode_one(node.clone()) for node in x])

    def decode(self, coefficients: Tensor) -> Tensor:
        """Transform coefficients (nodes, blocks, size) back to (nodes, *shape)."""
        return torch.stack([self._decode_one(node.clone()) for node in coefficients])

    def _encode_one(self, x: Tensor) -> Tensor:
        blocks = x.reshape(self.rows, self.h, self.columns, self.w).transpose(1, 2)
        return (self.ch @ blocks @ self.cw.T).reshape(self.blocks, self.size)

    def _decode_one(self, coefficients: Tensor) -> Tensor:
        blocks = coefficients.reshape(self.rows, self.columns, self.h, self.w)
        return (self.ch.T @ blocks @ self.cw).transpose(1, 2).reshape(self.shape)
