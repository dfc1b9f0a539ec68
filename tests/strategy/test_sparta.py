"""SPARTA: which indices are chosen and how often, what the average does to them, and what it costs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paths import ROOT, TESTS
from problems import MixedRegressor, Regressor, fleet_of, run_of, same, shards, train, unlike
from torch import nn

from exogym.core.base.rng import generator
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError
from exogym.strategy import SPARTADiLoCoStrategy, SPARTAStrategy
from exogym.strategy.sparta import SparseCommunicator, random_indices

P = 57
METHODS = ["random", "sequential", "partitioned", "topk"]


def wide(width: int) -> nn.Module:
    return nn.Linear(width, 1, bias=False).double()


def started(num_nodes: int, width: int, *args: Any, seed: int = 0, **options: Any) -> tuple[SparseCommunicator, Fleet]:
    fleet = fleet_of(torch.zeros(num_nodes, width, dtype=torch.float64), model=wide(width))
    module = SparseCommunicator(*args, **options)
    module.start(fleet, run_of(num_nodes, seed))
    return module, fleet


def chosen(module: SparseCommunicator, fleet: Fleet, step: int) -> list[int]:
    return module.indices(fleet.blocks[0], 0, step).tolist()


# Random sets


@pytest.mark.parametrize("p", [0.0005, 0.005, 0.1, 0.5, 0.9, 0.999])
def test_random_sets_are_independent_draws(p: float) -> None:
    """Counts of one step have a binomial's mean and variance, and each index its share of the steps."""
    total, steps = 2000, 400
    module, fleet = started(2, total, p)
    sets = [chosen(module, fleet, step) for step in range(1, steps + 1)]
    for indices in sets:
        assert indices == sorted(set(indices)) and all(0 <= i < total for i in indices)
    counts = torch.tensor([len(indices) for indices in sets], dtype=torch.float64)
    deviation = math.sqrt(total * p * (1 - p))
    assert abs(float(counts.mean()) - total * p) <= 5 * deviation / math.sqrt(steps)
    # The variance of an estimated variance: 2 sigma^4 / n, and a little for the kurtosis of rare draws.
    spread = math.sqrt(2 / steps + 1 / (steps * deviation**2))
    assert abs(float(counts.var()) / deviation**2 - 1) <= 5 * spread
    per_index = torch.zeros(total, dtype=torch.float64)
    for indices in sets:
        per_index[indices] += 1
    assert abs(float(per_index.var()) / (steps * p * (1 - p)) - 1) <= 0.35
    halves = per_index.view(2, -1).sum(1) / (steps * total / 2)
    assert (halves - p).abs().max() <= 5 * math.sqrt(p * (1 - p) / (steps * total / 2))


def test_random_sets_of_different_steps_are_independent() -> None:
    total, p, steps = 4000, 0.3, 60
    module, fleet = started(2, total, p)
    drawn = torch.zeros(steps, total, dtype=torch.float64)
    for step in range(steps):
        drawn[step, chosen(module, fleet, step + 1)] = 1
    correlation = torch.corrcoef(drawn)
    off = correlation[~torch.eye(steps, dtype=torch.bool)]
    assert off.abs().max() <= 5.5 / math.sqrt(total)
    neighbours = torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) <= 5 / math.sqrt(steps * total)  # nor do neighbours in a set
    ladder, fleet = started(2, total, p, "sequential")  # the control: sets that depend on each other
    fixed = torch.zeros(8, total, dtype=torch.float64)
    for step in range(8):
        fixed[step, chosen(ladder, fleet, step + 1)] = 1
    assert torch.corrcoef(fixed)[0, 1] < -0.2 and torch.corrcoef(fixed)[0, 4] > 0.9


def test_gaps_are_geometric_at_the_edges() -> None:
    assert random_indices(7, 1.0, generator(0, "x")).tolist() == list(range(7))
    assert random_indices(1, 1e-300, generator(0, "x")).tolist() == []
    hits = sum(len(random_indices(1, 0.25, generator(0, "x", k))) for k in range(4000))
    assert abs(hits - 1000) <= 5 * math.sqrt(4000 * 0.25 * 0.75)
    first = [random_indices(50, 0.4, generator(0, "y", k)).tolist() for k in range(2000)]
    start = sum(1 for indices in first if indices[:1] == [0])
    end = sum(1 for indices in first if indices[-1:] == [49])
    for hits in (start, end):  # the first and the last index are as likely as any
        assert abs(hits - 800) <= 5 * math.sqrt(2000 * 0.4 * 0.6)


# Sets in turn


@pytest.mark.parametrize("method", ["sequential", "partitioned"])
@pytest.mark.parametrize(("total", "p"), [(100, 0.25), (101, 0.3), (57, 0.1), (10, 0.05), (64, 1.0), (100, 0.7)])
def test_a_cycle_covers_all_indices_once(method: str, total: int, p: float) -> None:
    module, fleet = started(2, total, p, method)
    length = math.ceil(1 / p)
    cycles = [[chosen(module, fleet, 1 + c * length + k) for k in range(length)] for c in range(3)]
    for cycle in cycles:
        assert sorted(i for indices in cycle for i in indices) == list(range(total))
        sizes = [len(indices) for indices in cycle]
        assert max(sizes) - min(sizes) <= 1
    if length > 1:
        assert (cycles[0] == cycles[1]) == (method == "sequential")
        assert cycles[0][0] != list(range(len(cycles[0][0])))  # a random order, not the first indices first
        assert chosen(module, fleet, 1) == cycles[0][0]  # going back changes nothing


def test_with_an_interval_turns_are_counted_not_steps() -> None:
    every, fleet = started(2, 60, 0.25, "sequential")
    third, _ = started(2, 60, 0.25, "sequential", interval=3)
    assert [third.next_event(step) for step in (0, 2, 3, 4)] == [3, 3, 6, 6]
    assert [chosen(third, fleet, 3 * k) for k in range(1, 9)] == [chosen(every, fleet, k) for k in range(1, 9)]


def test_sets_are_a_function_of_seed_block_and_step() -> None:
    for method in ("random", "sequential", "partitioned"):
        one, fleet = started(2, 200, 0.2, method)
        two, _ = started(5, 200, 0.2, method)
        steps = [9, 2, 30, 7, 2]
        assert [chosen(one, fleet, s) for s in steps] == [chosen(two, fleet, s) for s in reversed(steps)][::-1]
        other, _ = started(2, 200, 0.2, method, seed=1)
        assert chosen(other, fleet, 1) != chosen(one, fleet, 1)
        block = fleet.blocks[0]
        assert one.indices(block, 0, 1).tolist() != one.indices(block, 1, 1).tolist()


def test_another_process_draws_the_same_sets() -> None:
    code = (
        "from strategy.test_sparta import started, chosen\n"
        "for method in ('random', 'sequential', 'partitioned'):\n"
        "    module, fleet = started(3, 100, 0.1, method)\n"
        "    print([chosen(module, fleet, step) for step in (1, 7, 23)])\n"
    )

    paths = os.pathsep.join([str(TESTS), str(ROOT)])
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths}
    ).stdout.splitlines()
    for method, line in zip(("random", "sequential", "partitioned"), printed, strict=True):
        module, fleet = started(3, 100, 0.1, method)
        assert line == str([chosen(module, fleet, step) for step in (1, 7, 23)])


# The average


@pytest.mark.parametrize("method", METHODS)
def test_the_chosen_are_averaged_and_the_others_left(method: str) -> None:
    module, fleet = started(4, 40, 0.25, method)
    x = fleet.blocks[0].params
    x.copy_(torch.randn(4, 40, dtype=torch.float64))
    before = x.clone()
    if method == "topk":  # node 0 announces at the first step; reference is what was there at the start: zeros
        indices = before[0].abs().topk(10).indices.sort().values.tolist()
    else:
        indices = chosen(module, fleet, 1)
    module.communicate(fleet, 1)
    others = [i for i in range(40) if i not in indices]
    assert len(indices) > 0 and len(others) > 0
    same(x[:, indices], before[:, indices].mean(0).expand(4, -1), 1e-14)
    assert torch.equal(x[:, others], before[:, others])
    assert torch.equal(x[:, indices], x[:1, indices].expand(4, -1))
    same(x.mean(0), before.mean(0), 1e-14)
    assert bool((x.var(0) <= before.var(0) + 1e-30).all())
    unlike(x, before)


def test_topk_is_announced_in_turn_and_measured_from_the_last_average() -> None:
    module, fleet = started(3, 10, 0.2, "topk")
    x, begun = fleet.blocks[0].params, 64.0 * torch.arange(10, dtype=torch.float64)
    x.copy_(begun)
    module.start(fleet, run_of(3))  # the first time it is measured from there
    x[0, [2, 3]] += torch.tensor([3.0, 6.0])
    x[1, [4, 5]] += torch.tensor([9.0, 12.0])
    x[2, [6, 7]] += torch.tensor([15.0, 18.0])
    for step, indices in ((1, [2, 3]), (2, [4, 5]), (3, [6, 7])):
        before = x.clone()
        module.communicate(fleet, step)
        moved = ((x - before).abs().amax(0) > 0).nonzero().flatten().tolist()
        assert moved == indices
    late = torch.tensor([0.5, 0.25], dtype=torch.float64)
    x[0, 8:] += late  # node 0 is next, and only these moved since
    module.communicate(fleet, 4)
    same(x[:, 8:], (begun[8:] + late / 3).expand(3, -1))


# Quantised


@pytest.mark.parametrize("bits", [2, 4, 5, 8, 16])
@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_average_is_within_half_a_step(bits: int, method: str) -> None:
    module, fleet = started(3, 60, 0.5, method, bits)
    x = fleet.blocks[0].params
    x.copy_(torch.randn(3, 60, dtype=torch.float64))
    before = x.clone()
    exact, plain_fleet = started(3, 60, 0.5, method)
    plain_fleet.blocks[0].params.copy_(before)
    exact.communicate(plain_fleet, 1)
    module.communicate(fleet, 1)
    expected = plain_fleet.blocks[0].params
    changed = (expected != before).any(0)
    scale = (before[:, changed].abs().amax(1) / (2 ** (bits - 1) - 1)).max()
    error = (x - expected).abs()
    assert float(error.max()) <= float(scale) / 2 + 1e-6 and float(error.max()) > 0
    assert torch.equal(x[:, changed], x[:1, changed].expand(3, -1))  # all nodes write the same bits
    assert torch.equal(x[:, ~changed], before[:, ~changed])


def test_32_bits_are_no_quantisation() -> None:
    run = train(SPARTAStrategy("adamw", 0.3, lr=0.02, quantization_bits=32))
    assert torch.equal(run.rows, train(SPARTAStrategy("adamw", 0.3, lr=0.02)).rows)
    coarse = train(SPARTAStrategy("adamw", 0.3, lr=0.02, quantization_bits=4))
    unlike(coarse.rows, run.rows)
    fine = train(SPARTAStrategy("adamw", 0.3, lr=0.02, quantization_bits=16))
    same(fine.rows, run.rows, 1e-2)


def test_buffers_stay_local_and_are_averaged_once_at_the_end() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    run = train(SPARTAStrategy("sgd", 0.5, lr=0.01), model=model)
    means = run.buffers["1.running_mean"]
    assert not torch.equal(means[0], means[1]) and not [event for event in run.events if event.tag == "buffers"]
    ended = train(SPARTAStrategy("sgd", 0.5, lr=0.01), model=model, final_sync=True)
    assert torch.equal(ended.buffers["1.running_mean"], means.mean(0).expand(4, -1))
    assert len([event for event in ended.events if event.tag == "buffers"]) == len(ended.buffers) == 3


# Bytes


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [None, 3, 8])
def test_bytes(num_nodes: int, method: str, bits: int | None) -> None:
    p, steps = 0.3, 7
    cases: list[tuple[nn.Module, list[tuple[int, int]]]] = [
        (Regressor(), [(P, 8)]),
        (MixedRegressor(), [(35, 8), (6, 4)]),
    ]
    for model, blocks in cases:
        run = train(
            SPARTAStrategy("sgd", p, lr=0.01, compression_method=method, quantization_bits=bits), shards(num_nodes),
            num_nodes, steps, model,
        )  # fmt: skip
        module = SparseCommunicator(p, method, bits)
        fleet = fleet_of(torch.zeros(num_nodes, sum(w for w, _ in blocks), dtype=torch.float64), model=model)
        module.start(fleet, run_of(num_nodes))
        values, indices = 0.0, 0.0
        for step in range(1, steps + 1):
            for b, (width, size) in enumerate(blocks):
                k = round(p * width) if method == "topk" else len(module.indices(fleet.blocks[b], b, step))
                values += 0 if k == 0 else k * size if bits is None else math.ceil(k * bits / 8) + 4
                indices += 4 * k if method == "topk" else 0
        others = num_nodes - 1
        ring = 2 * others / num_nodes if bits is None else others
        assert sum(run.tx) == pytest.approx(num_nodes * ring * values + others * indices)
        assert sum(run.rx) == pytest.approx(sum(run.tx))
        if method != "topk":  # the index sets cost nothing
            assert run.payload.tolist() == [values if others else 0] * num_nodes
            assert run.tx == pytest.approx(ring * values)
            kinds = {"all_reduce" if bits is None else "all_gather"} if others else set()
            assert {event.kind for event in run.events} == kinds


def test_the_last_average_is_counted_and_synchronises() -> None:
    for steps in (5, 6):
        apart = train(SPARTAStrategy("adamw", 0.1, lr=0.02), steps=steps)
        run = train(SPARTAStrategy("adamw", 0.1, lr=0.02), steps=steps, final_sync=True)
        same(run.rows, apart.rows.mean(0).expand_as(run.rows), 1e-14)
        same(run.model, apart.model, 1e-14)  # what is evaluated is the mean in any case
        assert (run.payload - apart.payload).tolist() == [P * 8.0] * 4


def test_with_diloco_the_last_synchronisation_is_an_outer_step_or_none() -> None:
    build: Callable[[], SPARTADiLoCoStrategy] = lambda: SPARTADiLoCoStrategy("adamw", H=4, p_sparta=0.1, lr=0.02)  # noqa: E731
    for steps, left in ((8, 0), (10, 1)):
        apart = train(build(), steps=steps)
        run = train(build(), steps=steps, final_sync=True)
        assert (run.payload - apart.payload).tolist() == [left * P * 8.0] * 4
        assert torch.equal(run.rows, run.model.expand_as(run.rows))
        if left:
            unlike(run.model, apart.model)
        else:
            assert torch.equal(run.model, apart.model)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p_sparta": -0.1}, "p_sparta=-0.1 must be a number of at least 0 and at most 1"),
        ({"p_sparta": 1.5}, "p_sparta=1.5 must be a number of at least 0 and at most 1"),
        ({"p_sparta": float("nan")}, "p_sparta=nan must be a number of at least 0 and at most 1"),
        ({"compression_method": "rand"}, "did you mean 'random'"),
        ({"quantization_bits": 1}, "quantization_bits=1"),
        ({"quantization_bits": 9}, "quantization_bits=9"),
        ({"rounding": "stochastic"}, "no argument 'rounding': it is retired: use more quantization_bits"),
        ({"interval": 0}, "interval=0"),
        ({"p_spart": 0.1}, "did you mean 'p_sparta'"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SPARTAStrategy(**arguments)
