"""Quantisers that really pack, and the block cosine transform."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exogym.core.compress import BlockDCT, dequantize, quantize
from exogym.core.compress.dct import dct_matrix, largest_divisor
from exogym.errors import ArgumentError

BITS = [2, 3, 4, 5, 6, 7, 8, 16]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 64, 101])
def test_codes_are_packed_and_the_error_is_half_a_step(bits: int, count: int) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3, count, dtype=torch.float64).to(dtype) * torch.tensor([[1e-3], [1.0], [1e3]])
        codes, scale = quantize(x, bits)
        assert codes.dtype == torch.uint8 and codes.shape == (3, math.ceil(count * bits / 8))
        assert scale.dtype == torch.float32 and scale.shape == (3, 1)
        assert codes[0].nbytes + scale[0].nbytes == math.ceil(count * bits / 8) + 4
        back = dequantize(codes, scale, bits, count)
        assert back.shape == x.shape
        slack = 1e-6 * x.abs().amax(1, keepdim=True)  # the rounding of fp32
        assert bool(((back - x).abs() <= scale / 2 + slack).all())
        assert torch.allclose(scale[:, 0], (x.abs().amax(1) / (2 ** (bits - 1) - 1)).float())
        largest = x.abs().argmax(1, keepdim=True)
        assert torch.allclose(back.gather(1, largest), x.gather(1, largest).float(), rtol=1e-6)


def test_the_bound_is_met_by_the_worst_number() -> None:
    """A number half-way between two codes is off by half a step: fewer bits could not promise more."""
    x = torch.tensor([[7.0, 2.5, -2.5]])
    codes, scale = quantize(x, 4)
    assert scale.item() == 1.0
    assert (dequantize(codes, scale, 4, 3) - x).abs().max() == 0.5


def test_rows_are_quantised_apart_and_zeros_stay_zero() -> None:
    x = torch.stack([torch.zeros(5), torch.randn(5), torch.randn(5) * 100])
    codes, scale = quantize(x, 6)
    assert scale[0].item() == 0.0 and not dequantize(codes, scale, 6, 5)[0].any()
    for row in (1, 2):
        alone_codes, alone_scale = quantize(x[row : row + 1], 6)
        assert torch.equal(alone_codes, codes[row : row + 1]) and torch.equal(alone_scale, scale[row : row + 1])
    assert torch.equal(quantize(-x, 6)[1], scale)
    assert torch.equal(dequantize(*quantize(-x, 6), 6, 5), -dequantize(codes, scale, 6, 5))
    empty, scale = quantize(torch.zeros(2, 0), 4)
    assert empty.shape == (2, 0) and dequantize(empty, scale, 4, 0).shape == (2, 0)


@pytest.mark.parametrize("bits", [0, 1, 9, 15, 32, -4, 4.5, "8"])
def test_other_widths_are_refused(bits: object) -> None:
    with pytest.raises(ArgumentError, match="quantization_bits="):
        quantize(torch.ones(1, 3), bits)  # type: ignore[arg-type]


# The cosine transform


def dct_of(x: Tensor) -> Tensor:
    """The orthonormal DCT-II of a vector, from its definition."""
    n = len(x)
    result = []
    for k in range(n):
        total = sum(float(x[i]) * math.cos(math.pi / n * (i + 0.5) * k) for i in range(n))
        result.append(total * math.sqrt((1 if k == 0 else 2) / n))
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 64])
def test_the_matrix_is_the_orthonormal_dct(n: int) -> None:
    c = dct_matrix(n, torch.float64, torch.device("cpu"))
    x = torch.randn(n, dtype=torch.float64)
    torch.testing.assert_close(c @ x, dct_of(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(c @ c.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_largest_divisor() -> None:
    for n in range(1, 200):
        for target in (1, 2, 7, 64):
            found = largest_divisor(n, target)
            assert n % found == 0 and found <= target
            assert all(n % d for d in range(found + 1, min(n, target) + 1))


SHAPES = [(), (1,), (10,), (128,), (13,), (6, 4), (64, 128), (7, 5), (4, 3, 2), (8, 3, 3, 3), (2, 2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_blocks_are_transformed_and_come_back(shape: tuple[int, ...], chunk: int) -> None:
    t = BlockDCT(torch.Size(shape), chunk, torch.float64, torch.device("cpu"))
    n, m = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    assert (t.cut.h, t.cut.w) == (largest_divisor(n, chunk), largest_divisor(m, chunk))
    assert t.blocks * t.size == math.prod(shape)
    x = torch.randn(3, *shape, dtype=torch.float64)
    coefficients = t.encode(x)
    assert coefficients.shape == (3, t.blocks, t.size)
    torch.testing.assert_close(t.decode(coefficients), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(coefficients.flatten(1).norm(dim=1), x.reshape(3, -1).norm(dim=1))  # Parseval
    # Block (1, 1) from the front, or the only one: rows, then columns, by the definition.
    flat = x.reshape(3, n, m)
    cut = t.cut
    a, b = min(1, cut.rows - 1), min(1, cut.columns - 1)
    block = flat[2, a * cut.h : (a + 1) * cut.h, b * cut.w : (b + 1) * cut.w]
    by_hand = torch.stack([dct_of(row) for row in block])
    by_hand = torch.stack([dct_of(column) for column in by_hand.T]).T
    torch.testing.assert_close(coefficients[2, a * cut.columns + b].view(cut.h, cut.w), by_hand, rtol=1e-10, atol=1e-10)
    if chunk == 1:
        torch.testing.assert_close(coefficients.flatten(1), x.reshape(3, -1))


def test_in_fp32_it_is_within_rounding() -> None:
    t = BlockDCT(torch.Size([128, 192]), 64, torch.float32, torch.device("cpu"))
    x = torch.randn(2, 128, 192)
    assert (t.decode(t.encode(x)) - x).abs().max() <= 1e-5
    coefficients = t.encode(x)
    torch.testing.assert_close(coefficients.norm(), x.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (10,), (12,), (31, 17), (200, 784), (7, 5, 3, 3), ()])
def test_a_node_s_coefficients_do_not_depend_on_who_is_beside_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t = BlockDCT(torch.Size(shape), 64, dtype, torch.device("cpu"))
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = t.encode(x)
    assert torch.equal(together, torch.cat([t.encode(one[None]) for one in x]))
    assert torch.equal(t.decode(together), torch.cat([t.decode(one[None]) for one in together]))
