"""Cut a tensor into blocks, and apply the orthonormal cosine transform (DCT-II) to each block, as in DeMo."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II matrix C (n, n): X = C x transforms a vector x, and x = C^T X is the inverse."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None]
    c = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    c[0] /= math.sqrt(2)
    return c.to(dtype=dtype, device=device)


def largest_divisor(n: int, target: int) -> int:
    """Return the largest divisor of `n` that is at most `target`."""
    return max(d for d in range(1, min(n, target) + 1) if n % d == 0)


class Blocks:
    """Cut tensors of one shape into blocks of equal size.

    A 2-D tensor n x m is cut into h x w blocks: h is the largest divisor of n that is at most `side`, and w is the
    largest such divisor of m. A 1-D tensor of m entries is cut into blocks of w entries: w is the largest divisor of m
    that is at most `line` (or at most `side` without `line`). A tensor with more dimensions counts as a matrix: n is
    its first dimension, and m the product of all others. A scalar is one block.

    >>> cut = Blocks(torch.Size([128, 64, 3]), 64)
    >>> cut.blocks, cut.size
    (6, 4096)
    >>> x = torch.randn(2, 128, 64, 3)
    >>> torch.equal(cut.join(cut.cut(x)), x)
    True
    """

    def __init__(self, shape: torch.Size, side: int, line: int | None = None):
        self.shape = shape
        flat = len(shape) < 2
        n, m = (1, math.prod(shape)) if flat else (shape[0], math.prod(shape[1:]))
        self.h, self.w = largest_divisor(n, side), largest_divisor(m, (line or side) if flat else side)
        self.rows, self.columns = n // self.h, m // self.w
        self.blocks, self.size = self.rows * self.columns, self.h * self.w

    def cut(self, x: Tensor) -> Tensor:
        """Return the blocks of `x` (nodes, *shape) as (nodes, blocks, size)."""
        blocks = x.reshape(-1, self.rows, self.h, self.columns, self.w).transpose(2, 3)
        return blocks.reshape(-1, self.blocks, self.size)

    def join(self, blocks: Tensor) -> Tensor:
        """Return the tensors (nodes, *shape), given their `blocks` (nodes, blocks, size)."""
        x = blocks.reshape(-1, self.rows, self.columns, self.h, self.w).transpose(2, 3)
        return x.reshape(-1, *self.shape)


class BlockDCT:
    """Cut tensors of one shape into `Blocks`, and apply the cosine transform to each block.

    Nodes are transformed one by one. A matrix product over several nodes may round differently, and results must not
    depend on which nodes share a process.

    >>> t = BlockDCT(torch.Size([128, 64, 3]), 64, torch.float64, torch.device("cpu"))
    >>> x = torch.randn(2, 128, 64, 3, dtype=torch.float64)
    >>> torch.allclose(t.decode(t.encode(x)), x)
    True
    """

    def __init__(self, shape: torch.Size, chunk: int, dtype: torch.dtype, device: torch.device):
        self.cut = Blocks(shape, chunk)
        self.blocks, self.size = self.cut.blocks, self.cut.size
        self.ch, self.cw = dct_matrix(self.cut.h, dtype, device), dct_matrix(self.cut.w, dtype, device)

    def encode(self, x: Tensor) -> Tensor:
        """Transform `x` (nodes, *shape) to coefficients (nodes, blocks, size)."""
        blocks = self.cut.cut(x)
        return torch.stack([self._transform(node, self.ch, self.cw.T) for node in blocks])

    def decode(self, coefficients: Tensor) -> Tensor:
        """Transform coefficients (nodes, blocks, size) back to (nodes, *shape)."""
        return self.cut.join(torch.stack([self._transform(node, self.ch.T, self.cw) for node in coefficients]))

    def _transform(self, node: Tensor, left: Tensor, right: Tensor) -> Tensor:
        blocks = node.clone().view(self.blocks, self.cut.h, self.cut.w)
        return (left @ blocks @ right).flatten(1)
