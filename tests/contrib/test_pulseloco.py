"""PULSELoCo against a plain loop of the authors' rule, where it must be DiLoCo, what is sent and kept, its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import (
    MixedRegressor,
    Regressor,
    dyadic,
    fleet_of,
    plain,
    put,
    run_of,
    same,
    shards,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn
from wrapped import made

from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, OptimSpec, PULSELoCoStrategy

P = sum(p.numel() for p in Regressor().parameters())
RATE = 2e-4  # moves most entries less than BF16 sees
PLAIN = OptimSpec("sgd", lr=1.0)


def rounded(x: Tensor, bits: int) -> Tensor:
    """The nearest numbers with so many binary digits, of two equally near ones the even one."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round(), exponent - bits)


def loop(n: int, H: int, steps: int, bits: int = 8, keeps: bool = True, rounds: bool = False) -> tuple[Any, ...]:
    """theta, the rows, and each round's largest number of sent entries, by the rule, one node and entry after another.

    `bits` are the binary digits of the forward pass, 8 in BF16. Without `keeps` nodes forget what they do not send.
    With `rounds` they send the differences of the rounded values, as an earlier version of the authors' code did.
    """
    theta, v = vector(Regressor()), torch.zeros(P, dtype=torch.float64)
    errors, largest = [torch.zeros(P, dtype=torch.float64) for _ in range(n)], []

    def after(models: list[nn.Module], step: int) -> None:
        nonlocal theta
        if step % H:
            return
        seen, total, counts = rounded(theta, bits), torch.zeros_like(theta), []
        for e, m in zip(errors, models, strict=True):
            s = e + theta - vector(m)
            counts.append(0)
            for j in range(P):
                new = rounded(theta[j] - s[j], bits)
                is_sent = bool(new != seen[j])
                sent = (seen[j] - new if rounds else s[j]) if is_sent else 0.0
                total[j] += sent
                e[j] = s[j] - sent if keeps else 0.0
                counts[-1] += is_sent
        largest.append(max(1, *counts))
        delta = total / n
        v.mul_(0.9).add_(delta)
        theta = theta - 0.7 * (delta + 0.9 * v)
        for m in models:
            put(m, theta)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, foreach=False)

    rows = plain(shards(n), steps, adamw, after=after)
    return theta, rows, largest


@pytest.mark.parametrize("n", [1, 3])
def test_it_is_the_authors_loop(n: int) -> None:
    ours = train(PULSELoCoStrategy(H=3, lr=RATE), shards(n), n, steps=14)
    theta, rows, largest = loop(n, 3, 14)
    same(ours.model, theta)
    same(ours.rows, rows)
    assert [e.payload_bytes for e in ours.events[1::2]] == [0 if n == 1 else K * (8 + 4) for K in largest]
    assert all(K < P for K in largest) and len(set(largest)) > 1
    moved = theta - vector(Regressor())
    for other in ({"bits": 11}, {"keeps": False}, {"rounds": True}):
        unlike(loop(n, 3, 14, **other)[0] - vector(Regressor()), moved)
    fp16 = train(PULSELoCoStrategy(H=3, lr=RATE, cast="fp16"), shards(n), n, steps=14)
    same(fp16.model, loop(n, 3, 14, bits=11)[0])


@pytest.mark.parametrize("outer", [{}, {"outer_lr": 0.5, "outer_momentum": 0.0}, {"outer_optim": "adam"}])
def test_where_every_change_is_sent_it_is_diloco_bit_for_bit(outer: dict[str, Any]) -> None:
    for model in (Regressor(), MixedRegressor()):
        diloco = train(DiLoCoStrategy(H=4, lr=RATE, **outer), steps=14, model=model, final_sync=True)
        ours = train(PULSELoCoStrategy(H=4, lr=RATE, cast=None, **outer), steps=14, model=model, final_sync=True)
        assert torch.equal(ours.rows, diloco.rows) and torch.equal(ours.model, diloco.model)
        bf16 = train(PULSELoCoStrategy(H=4, lr=RATE, **outer), steps=14, model=model, final_sync=True)
        assert not torch.equal(bf16.model, diloco.model)


def begun(num_nodes: int, start: Tensor, model: nn.Module | None = None) -> Any:
    fleet = fleet_of(start, model=model)
    return fleet, PULSELoCoStrategy("sgd", PLAIN, 1).on(fleet, run_of(num_nodes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_sent_and_what_is_kept_add_up_to_all_differences(dtype: torch.dtype) -> None:
    fleet, acting = begun(4, torch.ones(4, P), Regressor(dtype=dtype))
    (block,), module = fleet.blocks, acting.strategy.communication_modules[0]
    given = torch.zeros(P, dtype=dtype)
    for step in range(1, 8):
        moved = dyadic(4, P, step, dtype) / 2**12  # below 2^-9: multiples of 2^-15, so sums are exact
        given += moved.mean(0)
        block.params.add_(moved)
        acting.communicate(step)
    (theta,) = acting.consensus()
    kept = module.row_state["error.0"]
    assert torch.equal(theta - 1 - kept.mean(0), given)
    assert kept.abs().max() > 1e-3 and (theta != 1).any() and (theta == 1).any()  # the controls


def test_errors_and_sums_are_in_fp32_where_parameters_are_in_half_precision() -> None:
    """Half of 2^-8 alone would be a tie, which goes back to 1."""
    fleet, acting = begun(2, torch.ones(2, P), Regressor(dtype=torch.bfloat16))
    (block,), error = fleet.blocks, acting.strategy.communication_modules[0].row_state["error.0"]
    assert error.dtype == torch.float32
    error[0] = 2**-10
    block.params[0] -= 2**-8
    acting.communicate(1)
    assert not error.any()
    assert torch.equal(block.params, torch.full((2, P), 1 - 2**-8).bfloat16())  # the nearest to 1 - (2^-8 + 2^-10) / 2


def test_a_node_that_comes_back_to_nothing_sends_nothing() -> None:
    """The smallest round: 8 bytes of a count, one empty place of an index and a value."""
    still = train(PULSELoCoStrategy("sgd", H=2, lr=0.0), steps=4)
    assert still.payload.tolist() == [2 * (8 + 12)] * 4
    assert torch.equal(still.model, vector(Regressor()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cast": "bf17"}, "cast='bf17' is not one of 'bf16', 'fp16': did you mean 'bf16'"),
        ({"cast": 16}, "cast=16 is not one of"),
        ({"H": 0}, "H=0"),
        ({"outer_lr": -1.0}, "outer_lr=-1.0"),
        ({"robust": "median"}, "was not tested with a wrapper"),
        ({"weighting": "examples"}, "weighting"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(PULSELoCoStrategy, **arguments)
