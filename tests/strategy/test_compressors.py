"""Quantisers and top-k as a node's payload: bytes, errors, and what is sent and kept, no node beside another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from problems import Regressor, fleet_of
from torch import Tensor

from exogym.core.communicator import Event
from exogym.core.compress import (
    E3M0,
    Absmax,
    Compressor,
    Quantized,
    Quantizer,
    ScaledSign,
    Stochastic,
    TopK,
    buckets,
    noise_of,
    tensors,
    with_feedback,
)
from exogym.core.compress.quantize import pack, unpack
from exogym.core.fleet.dealing import described, together
from exogym.core.fleet.layout import layouts_of
from exogym.errors import ArgumentError

COUNTS = (1, 7, 8, 101, 512, 1030)
QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "int8": lambda: Absmax(8),
    "3 bits": lambda: Absmax(3),
    "e3m0": E3M0,
    "sign": ScaledSign,
    "qsgd 1": lambda: Stochastic(1),
    "qsgd 16": lambda: Stochastic(16),
    "qsgd fine": lambda: Stochastic(2**20),
}


def normal(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(seed))


def uniform(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(seed))


def there_and_back(c: Compressor, x: Tensor, noise: Tensor | None = None) -> Tensor:
    return c.decode(*c.encode(x, uniform(*x.shape) if c.draws and noise is None else noise))


@pytest.mark.parametrize("bits", range(1, 23))
@pytest.mark.parametrize("count", [1, 8, 13])
def test_codes_of_any_width_are_one_stream_of_bits(bits: int, count: int) -> None:
    if bits == 16:
        count = 2 * count
    codes = torch.randint(0, 2**bits, (2, count), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (2, math.ceil(count * bits / 8))
    assert torch.equal(unpack(packed, bits, count).int(), codes)
    stream = int.from_bytes(bytes(packed[1].tolist()), "little")
    assert [(stream >> (k * bits)) % 2**bits for k in range(count)] == codes[1].tolist()


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_payload_is_its_codes_and_a_scale_for_each_group(name: str, count: int) -> None:
    quantizer = QUANTIZERS[name]()
    for size in (64, 512):
        c = Quantized(quantizer, buckets(count, size))
        payload = c.encode(normal(3, count), uniform(3, count))
        assert c.count == count and c.draws == quantizer.draws
        assert sum(x[0].nbytes for x in payload) == math.ceil(count * quantizer.bits / 8) + 4 * math.ceil(count / size)
        assert c.decode(*payload).shape == (3, count)


def test_the_bytes_of_the_parts_of_a_row_add_up_to_those_of_the_row() -> None:
    """Of processes of a node that have some tensors each, whose bits fill whole bytes only together."""
    (layout,) = layouts_of(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)))
    whole = Quantized(ScaledSign(), tensors(layout)).encode(torch.ones(1, layout.numel))
    size = sum(x.numel() * x.element_size() for x in whole)
    parts = [layout.part({slot.name: tuple((0, n) for n in slot.shape)}) for slot in layout]
    sizes = [Quantized(ScaledSign(), tensors(part)).share_bytes for part in parts]
    assert sum(map(math.ceil, sizes)) > size == math.ceil(sum(sizes))
    told = [
        [described(Event("all_gather", "ring", (0, 1), x, *[np.full(2, x)] * 2, "parameters", (0, 1)))] for x in sizes
    ]
    (event,) = together(told)
    assert (event.payload_bytes, event.tx_bytes.tolist()) == (size, [size, size])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_node_sees_another(name: str) -> None:
    c = Quantized(QUANTIZERS[name](), buckets(1000, 300))
    x, noise = normal(5, 1000), uniform(5, 1000)
    together = c.encode(x, noise)
    alone = [c.encode(x[i : i + 1], noise[i : i + 1]) for i in range(5)]
    for part, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(part, torch.cat(parts))
    assert torch.equal(c.decode(*together), torch.cat([c.decode(*one) for one in alone]))


@pytest.mark.parametrize("name", [*QUANTIZERS, "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_stays_nothing_and_each_group_has_a_scale_of_its_own(name: str, dtype: torch.dtype) -> None:
    c = TopK(40, 3) if name == "topk" else Quantized(QUANTIZERS[name](), buckets(40, 10))
    x = normal(2, 40).to(dtype)
    x[0] = 0
    back = there_and_back(c, x)
    assert not back[0].any() and back.isfinite().all()
    assert there_and_back(c, torch.zeros_like(x)).eq(0).all()
    if name != "topk":
        x[1, :10] *= 2.0**20  # a power of two: the other buckets keep their bits
        scaled = there_and_back(c, x)
        assert torch.equal(scaled[:, 10:], back[:, 10:]) and torch.equal(scaled[1, :10], back[1, :10] * 2.0**20)


def test_int8_is_off_by_half_a_step_and_not_by_less() -> None:
    c = Quantized(Absmax(8), buckets(1000, 100))
    x = normal(4, 1000).double()
    codes, scale = c.encode(x)
    steps = scale.repeat_interleave(100, 1)
    off = (c.decode(codes, scale) - x).abs() / steps
    assert 0.49 < off.max() <= 0.5 + 1e-5
    exact = torch.arange(-127.0, 128)[None] * 0.25
    assert torch.equal(there_and_back(Quantized(Absmax(8), buckets(255, 255)), exact), exact)


# E3M0


def e3m0_by_hand(x: float, s: float) -> float:
    """The nearest of +-s 2^-e, e = 0..6, in the exponent; zero under s 2^-6.5."""
    if x == 0 or abs(x) < s * 2**-6.5:
        return 0.0
    return math.copysign(min((s * 2**-e for e in range(7)), key=lambda v: abs(math.log2(v / abs(x)))), x)


def test_e3m0_is_the_nearest_power_of_two_below_the_largest() -> None:
    x = normal(1, 2000) * torch.logspace(-3, 0, 2000)
    back = there_and_back(Quantized(E3M0(), [(1, 2000)]), x)
    s = x.abs().max().item()
    assert back[0].tolist() == pytest.approx([e3m0_by_hand(v, s) for v in x[0].tolist()], rel=1e-6)
    kept = back != 0
    ratio = back[kept] / x[kept]
    assert (ratio > 2**-0.5 - 1e-5).all() and (ratio < 2**0.5 + 1e-5).all() and ratio.max() > 1.3
    assert x[~kept].abs().max() < s * 2**-6.5 and x[kept].abs().min() >= s * 2**-6.5 * (1 - 1e-5)
    codes, _ = E3M0().encode(torch.cat([x, -x], 1))
    assert set(codes.flatten().tolist()) == set(range(16)) - {8}  # one pair is spent on zero, and -0 is not used


def test_e3m0_reproduces_its_own_numbers() -> None:
    values = torch.tensor([[s * 3.0 * 2.0**-e for s in (1, -1) for e in range(7)] + [0.0]])
    assert torch.equal(there_and_back(Quantized(E3M0(), [(1, 15)]), values), values)
    assert not torch.equal(there_and_back(Quantized(E3M0(), [(1, 15)]), values * 1.1 + 0.1), values * 1.1 + 0.1)


# Signs and levels


def test_the_scaled_sign_contracts_by_exactly_what_is_said() -> None:
    x = normal(3, 500).double()
    off = (there_and_back(Quantized(ScaledSign(), [(1, 500)]), x) - x).square().sum(1)
    share = 1 - x.abs().sum(1).square() / (500 * x.square().sum(1))
    torch.testing.assert_close(off, share * x.square().sum(1), rtol=1e-6, atol=0)
    assert (share < 0.5).all()


def test_levels_are_right_in_the_mean_and_within_the_bound_of_the_variance() -> None:
    draws, k = 20_000, 12
    x = normal(1, k, 3)
    for levels in (1, 4):
        quantizer = Stochastic(levels)
        back = quantizer.decode(*quantizer.encode(x.expand(draws, k), uniform(draws, k, levels)))
        standard_error = back.std(0) / math.sqrt(draws)
        assert ((back.mean(0) - x[0]).abs() <= 4 * standard_error + 1e-6).all()
        variance = (back - x).square().sum(1).mean() / x.square().sum()
        assert 0.05 < variance / min(k / levels**2, math.sqrt(k) / levels) <= 1
        nearest = quantizer.decode(*quantizer.encode(x.expand(draws, k), torch.full((draws, k), 0.5)))
        assert ((nearest.mean(0) - x[0]).abs() > 0.05).any()  # the control: without draws it is biased


def test_numbers_on_the_levels_are_reproduced() -> None:
    x = torch.tensor([[3.0, -4.0, 0.0]])  # norm 5
    assert torch.equal(there_and_back(Quantized(Stochastic(5), [(1, 3)]), x), x)
    assert not torch.equal(there_and_back(Quantized(Stochastic(4), [(1, 3)]), x), x)


def test_each_node_draws_for_itself() -> None:
    fleet = fleet_of(torch.zeros(3, sum(p.numel() for p in Regressor().parameters())), ranks=[2, 0, 1])
    noise = noise_of(fleet, 10, 0, "test", 4)
    assert len({tuple(row.tolist()) for row in noise}) == 3
    ordered = fleet_of(torch.zeros(3, sum(p.numel() for p in Regressor().parameters())))
    assert torch.equal(noise_of(ordered, 10, 0, "test", 4)[[2, 0, 1]], noise)
    assert not torch.equal(noise_of(fleet, 10, 0, "test", 5), noise)


# Top-k and error feedback


@pytest.mark.parametrize(("count", "k"), [(1, 1), (9, 2), (9, 9), (300, 7)])
def test_top_k_sends_the_largest(count: int, k: int) -> None:
    c, x = TopK(count, k), normal(3, count)
    indices, values = c.encode(x)
    assert indices.dtype == torch.int32 and sum(p[0].nbytes for p in (indices, values)) == 8 * k
    back = c.decode(indices, values)
    for row, sent in zip(x, back, strict=True):
        largest = sorted(range(count), key=lambda j, row=row: -abs(row[j]))[:k]  # type: ignore[misc]
        assert set(sent.nonzero().flatten().tolist()) == set(largest)
        assert torch.equal(sent[largest], row[largest])
    assert torch.equal(back, x) == (k == count)


WITH_FEEDBACK: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(60, 6),
    "sign": lambda: Quantized(ScaledSign(), [(1, 50), (1, 10)]),
    "e3m0": lambda: Quantized(E3M0(), [(1, 60)]),
    "qsgd": lambda: Quantized(Stochastic(4), [(1, 60)]),
}


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_sent_and_what_is_kept_add_up_to_what_came_in(name: str, dtype: torch.dtype) -> None:
    c = WITH_FEEDBACK[name]()
    error, total, sent = (torch.zeros(3, 60, dtype=dtype) for _ in range(3))
    for step in range(6):
        x = normal(3, 60, step).to(dtype)
        total += x
        sent += c.decode(*with_feedback(c, error, x, noise=uniform(3, 60, step)))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert (sent + error - total).abs().max() <= tolerance * total.abs().max()
    assert error.abs().max() > 0.1
    forgetful = torch.zeros(3, 60, dtype=dtype)
    gone = sum(
        c.decode(*with_feedback(c, forgetful, normal(3, 60, s).to(dtype), 0.9, uniform(3, 60))) for s in range(6)
    )
    assert (gone + forgetful - total).abs().max() > 0.01  # the control: what decays is lost


def test_the_groups_of_a_row_are_its_tensors() -> None:
    (block,) = fleet_of(torch.zeros(1, sum(p.numel() for p in Regressor().parameters()))).blocks
    assert [k for _, k in tensors(block.layout)] == [p.numel() for p in Regressor().parameters()]
    for count, size in itertools.product((1, 5, 12, 13), (1, 4, 12, 100)):
        assert sum(m * k for m, k in buckets(count, size)) == count
        assert sum(m for m, _ in buckets(count, size)) == math.ceil(count / size)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(4, 5), "k=5 must be 1 to 4"),
        (lambda: Stochastic(0), "levels=0"),
        (lambda: Stochastic(2**23), "under 2\\^23"),
        (lambda: buckets(10, 0), "bucket=0"),
    ],
)
def test_what_cannot_be_is_said(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
