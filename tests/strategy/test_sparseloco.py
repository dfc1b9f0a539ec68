"""SparseLoCo against a plain loop written from the update rule, what it is equal to, what is kept, and its bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from problems import (
    FEATURES,
    Regressor,
    adamw,
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
from torch.utils.data import TensorDataset

from exogym.core.compress import ChunkTopK, Statistical
from exogym.core.fleet.layout import layouts_of
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, OptimSpec, SparseLoCoStrategy, TopKStrategy

P = sum(p.numel() for p in Regressor().parameters())
ADAMW = OptimSpec("adamw", lr=0.02)


# What it is equal to


@pytest.mark.parametrize("eta", [1.0, 0.7])
def test_everything_sent_is_diloco_with_plain_outer_sgd_bit_by_bit(eta: float) -> None:
    diloco = train(DiLoCoStrategy(ADAMW, OptimSpec("sgd", lr=eta), H=4))
    for decay in (0.0, 0.95, 1.0):  # nothing is kept that could decay
        ours = train(SparseLoCoStrategy(ADAMW, 4, 4096, bits=32, error_decay=decay, outer_lr=eta))
        assert torch.equal(ours.rows, diloco.rows) and torch.equal(ours.model, diloco.model)
    unlike(train(SparseLoCoStrategy(ADAMW, 4, 1024, bits=32, outer_lr=eta)).rows, diloco.rows)
    unlike(train(SparseLoCoStrategy(ADAMW, 4, 4096, bits=2, outer_lr=eta)).rows, diloco.rows)


def test_every_step_it_is_top_k_with_error_feedback() -> None:
    """A model of one chunk, so that both choose among the same entries."""
    line = nn.Linear(FEATURES, 1, bias=False).double()
    every_step = {"lr": 0.05, "error_decay": 1.0, "bits": 32, "chunk": 36}
    ours = train(SparseLoCoStrategy("sgd", 1, 12, **every_step), model=line).rows  # 2 of 6
    same(ours, train(TopKStrategy("sgd", 1 / 3, lr=0.05), model=line).rows)
    unlike(ours, train(TopKStrategy("sgd", 1 / 3, lr=0.05, error_feedback=False), model=line).rows)
    unlike(ours, train(SparseLoCoStrategy("sgd", 1, 12, **every_step | {"error_decay": 0.5}), model=line).rows)


def divisor(n: int, target: int) -> int:
    return next(d for d in range(min(n, target), 0, -1) if n % d == 0)


def binned(values: Tensor) -> Tensor:
    """Two bits: four bins over six standard deviations, each member replaced by the mean of its bin, in fp32."""
    shift, sigma = values.mean(), values.std(correction=0)
    codes = ((values - shift) / (6 * sigma / 4) if sigma > 0 else 0 * values).round().add(2).clamp(0, 3)
    return torch.stack([values[codes == c].mean().float().double() for c in codes])


def sent_of(e: Tensor, k: int, side: int) -> Tensor:
    """What one tensor sends, block by block."""
    flat = e.dim() < 2
    matrix = e.reshape(1, -1) if flat else e.reshape(len(e), -1)
    h, w = (
        (1, divisor(e.numel(), side**2)) if flat else (divisor(matrix.shape[0], side), divisor(matrix.shape[1], side))
    )
    kept = max(1, round(k * h * w / side**2))
    mask = torch.zeros_like(matrix, dtype=torch.bool)
    for top in range(0, matrix.shape[0], h):
        for left in range(0, matrix.shape[1], w):
            at = (slice(top, top + h), slice(left, left + w))
            block = matrix[at].abs()
            mask[at] = block >= block.flatten().sort(descending=True).values[kept - 1]
    out = torch.zeros_like(matrix)
    out[mask] = binned(matrix[mask])
    return out.view(e.shape)


@pytest.mark.parametrize("aggregation", ["mean", "contributors"])
def test_it_is_the_published_loop(aggregation: str) -> None:
    data, H, k, side, beta, eta = shards(3), 4, 5, 4, 0.9, 0.8
    server, errors = Regressor(), [copy.deepcopy(list(Regressor().parameters())) for _ in data]
    for p in [p for node in errors for p in node]:
        p.data.zero_()

    def outer(models: list[nn.Module], step: int) -> None:
        if step % H:
            return
        for index, theta in enumerate(server.parameters()):
            sent = []
            for node, m in zip(errors, models, strict=True):
                e = node[index].data
                e.mul_(beta).add_(theta - list(m.parameters())[index])
                sent.append(sent_of(e, k, side))
                e.sub_(sent[-1])
            count = torch.stack([x != 0 for x in sent]).sum(0).clamp(min=1) if aggregation == "contributors" else 3
            theta.data -= eta * torch.stack(sent).sum(0) / count
        for m in models:
            put(m, vector(server))

    rows = plain(data, 14, adamw, after=outer)
    given: dict[str, Any] = {"error_decay": beta, "outer_lr": eta, "aggregation": aggregation}
    ours = train(SparseLoCoStrategy(ADAMW, H, k, side**2, **given), data, 3, steps=14)
    same(ours.rows, rows, 1e-9)
    same(ours.model, vector(server), 1e-9)
    for change in ({"error_decay": 1.0}, {"outer_lr": 1.0}, {"bits": 3}):
        unlike(train(SparseLoCoStrategy(ADAMW, H, k, side**2, **given | change), data, 3, steps=14).rows, rows)


# What is sent and what is kept


def begun(num_nodes: int, **options: Any) -> Any:
    fleet = fleet_of(torch.zeros(num_nodes, P, dtype=torch.float64))
    strategy = SparseLoCoStrategy("sgd", 1, 4, 16, **options)
    return fleet, strategy.on(fleet, run_of(num_nodes))


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 0.0), (2, 1e-12)])
def test_what_is_sent_and_what_is_kept_add_up_to_all_differences(bits: int, tolerance: float) -> None:
    fleet, acting = begun(4, bits=bits, error_decay=1.0)
    (block,), module = fleet.blocks, acting.strategy.communication_modules[0]
    given = torch.zeros(P, dtype=torch.float64)
    for step in range(1, 8):
        moved = dyadic(4, P, step)  # multiples of 1/8: a mean over four is exact
        given += moved.mean(0)
        block.params.add_(moved)
        acting.communicate(step)
    (theta,) = acting.consensus()
    kept = module.row_state["error.0"].mean(0)
    assert (theta - kept - given).abs().max() <= tolerance * given.abs().max()
    assert kept.abs().max() > 0.1  # the control


def test_a_lost_round_is_measured_against_the_theta_last_received() -> None:
    fleet, acting = begun(2, bits=32, error_decay=1.0)
    (block,), module = fleet.blocks, acting.strategy.communication_modules[0]
    block.params += dyadic(2, P, 1)
    lost = block.params[1].clone()
    fleet.comm.present = [0]
    acting.communicate(1)
    assert torch.equal(block.params[1], lost) and not module.row_state["error.0"][1].any()
    assert torch.equal(block.params[0], acting.consensus()[0])
    before, kept = acting.consensus()[0].clone(), module.row_state["error.0"][0].clone()
    fleet.comm.present = [0, 1]
    acting.communicate(2)
    sent = -2 * (acting.consensus()[0] - before)
    same(sent + module.row_state["error.0"].sum(0), kept - lost)  # of node 1 all that it did since it received zeros
    fleet.comm.present = [0]
    acting.bring_back([1], 0, 3)
    assert not module.row_state["error.0"][1].any() and module.row_state["error.0"][0].any()
    assert torch.equal(module.row_state["received.0"][1], acting.consensus()[0])


# The values


def test_values_take_at_most_four_sizes_and_keep_their_mean() -> None:
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    back = Statistical(2).decode(*Statistical(2).encode(x))
    assert [len(set(row.tolist())) for row in back] == [4, 4, 4]
    torch.testing.assert_close(back.double().mean(1), x.mean(1), rtol=1e-5, atol=1e-7)
    assert (back - x).square().mean() < 0.2 * x.square().mean()
    for values in ([3.0], [2.0, 2.0], [1.0, -5.0, 1.0], [0.0, 0.0]):
        few = torch.tensor([values])
        assert torch.equal(Statistical(2).decode(*Statistical(2).encode(few)), few)
    five = torch.arange(5.0)[None]
    assert not torch.equal(Statistical(2).decode(*Statistical(2).encode(five)), five)
    assert torch.equal(Statistical(8).decode(*Statistical(8).encode(five)), five)  # as many bins as are needed


def test_the_last_place_of_a_chunk_is_found_again() -> None:
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(()))]
    )
    (layout,) = layouts_of(model)
    x = torch.zeros(2, layout.numel)
    x[0, [64 * 128 - 1, -2, -1]], x[1, [63, -2, -1]] = torch.tensor([3.0, -2.0, 1.0]), torch.tensor([5.0, 1.0, 4.0])
    c = ChunkTopK(layout, 1, 4096, None)
    assert torch.equal(c.decode(*c.encode(x)), x)
    assert c.mask(*c.encode(x)).sum(1).tolist() == [2 + 1 + 1] * 2


# Bytes


def test_bytes_of_small_chunks_by_hand() -> None:
    """One entry of each tensor. Indices of 12 bits, as into whole chunks, would take 3 * 20 + 19 bytes."""
    data = [TensorDataset(*(t.float() for t in d.tensors)) for d in shards(2)]
    result = train(SparseLoCoStrategy("sgd", 1, lr=0.01), data, 2, steps=1, model=Regressor(dtype=torch.float32))
    matrix = 1 + 1 + 16  # 6 bits of an index into 7 x 6 = 42 entries, 2 bits of a value, four means in fp32
    assert result.payload.tolist() == [matrix + (1 + 1 + 16) + (1 + 1 + 16) + (0 + 1 + 16)] * 2 == [71] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk": 4095}, "must be a square number"),
        ({"topk": 0}, "topk=0 must be a whole number of at least 1"),
        ({"topk": 5000}, "topk=5000 and chunk=4096"),
        ({"bits": 12}, "bits=12 must be 1 to 8, or 32"),
        ({"error_decay": 1.5}, "error_decay=1.5"),
        ({"outer_lr": -1.0}, "outer_lr=-1.0"),
        ({"aggregation": "median"}, "aggregation='median'"),
        ({"H": 0}, "H=0"),
        ({"top_k": 3}, "did you mean 'topk'"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        train(SparseLoCoStrategy(**arguments), steps=1)
