"""Asynchronous rounds that sample shards of the data, arXiv:2401.09135: chances, steps handed out, rates, a loop."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from problems import BATCH, Regressor, examples, factory, loss_of, run_of, same, shards, train, unlike, vector
from torch import Tensor

from exogym import LocalTrainer
from exogym.core.base.rng import numpy_generator
from exogym.core.training.by_clock import ByClock
from exogym.core.training.shards import Shards
from exogym.data.stream import Stream
from exogym.errors import ArgumentError
from exogym.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy
from exogym.strategy.registry import parse_strategy
from exogym.testing import LAWS, check_strategy

FREE = "1000000000000Gbps"
SPEEDS = [8.0, 4.0, 2.0, 1.0]  # seconds of a step


def shards_of(sizes: list[int], seed: int = 0, total_steps: int = 100) -> Shards:
    stream = Stream(factory([examples(size) for size in sizes]), len(sizes), batch_size=BATCH)
    return Shards(stream, run_of(len(sizes), seed, total_steps, sizes))


@pytest.mark.parametrize(
    ("sizes", "handed", "p"),
    [
        ([20, 20, 20, 20], [0, 0, 0, 0], [0.25] * 4),  # nothing was handed out yet
        ([20, 20, 20, 20], [3, 1, 0, 0], [0, 0, 0.5, 0.5]),  # 1/4 of all is what the second shard has had
        ([20, 60], [0, 0], [0.25, 0.75]),
        ([20, 60], [1, 1], [0, 1]),
        ([20, 60], [1, 3], [0.25, 0.75]),  # even again
        ([2, 20, 20], [6, 2, 4], [0, 384 / 432, 48 / 432]),  # 12, 8 and 16 examples: a step of the first takes 2
    ],
)
def test_the_chance_of_a_shard_is_what_it_lacks(sizes: list[int], handed: list[int], p: list[float]) -> None:
    one = shards_of(sizes)
    one.handed[:] = handed
    np.testing.assert_allclose(one.chances(), p, atol=1e-15)


def test_shards_are_drawn_by_their_chances() -> None:
    sizes, counts, draws = [20, 40, 60], np.zeros(3), 2000
    one = shards_of(sizes)
    for seed in range(draws):
        one.seed, one.handed[:] = seed, 0
        one.draw(0, 5)
        counts[one.drawn[0]] += 1
    p = np.array(sizes) / 120
    assert (abs(counts / draws - p) < 4 * np.sqrt(p * (1 - p) / draws)).all()
    assert not (abs(counts / draws - 1 / 3) < 4 * np.sqrt(2 / 9 / draws)).all()


def test_no_step_of_a_shard_is_handed_out_twice_and_none_is_left_out() -> None:
    one, work = shards_of([20, 28, 40, 24]), [3, 7, 1, 4]
    spans: list[list[tuple[int, int]]] = [[] for _ in work]
    for turn in range(60):
        node = turn * 3 % 4
        one.draw(node, work[node])
        shard, first = one.source(node, 0)
        assert one.source(node, 2) == (shard, first + 2)
        spans[shard].append((first, first + work[node]))
    for shard, taken in enumerate(spans):
        ends = [0, *(end for _, end in taken)]
        assert [first for first, _ in taken] == ends[:-1] and ends[-1] == one.handed[shard]
    assert (one.handed > 0).all()


@pytest.mark.parametrize("sizes", [[20, 20, 20, 20], [80, 20, 10, 40]])
def test_shards_get_on_alike_though_nodes_do_not(sizes: list[int]) -> None:
    """Whoever is fast begins more rounds; what a shard has had stays within two rounds of its share."""
    one, rounds, counts = shards_of(sizes), 5, np.zeros(4)
    for turn in range(8 * 20):
        for node, every in enumerate((8, 4, 2, 1)):
            if turn % every == 0:
                one.draw(node, rounds)
                counts[node] += rounds
    share = np.array(sizes) / sum(sizes)
    assert (abs(one.handed - share * counts.sum()) <= 2 * rounds).all()
    assert (abs(counts - share * counts.sum()) > 2 * rounds).any()  # the control: by nodes it is not so


def test_rates_follow_the_shard() -> None:
    """All shards end where the schedule does: one twice as large takes twice the steps for it."""
    equal = shards_of([20, 20], total_steps=9)
    assert equal.rates_at(1, 3, 4).tolist() == [3, 4, 5, 6] and equal.rates_at(0, 7, 4).tolist() == [7, 8, 8, 8]
    unequal = shards_of([20, 60], total_steps=8)  # 16 steps in all, 4 and 12 of them
    assert unequal.rates_at(0, 0, 4).tolist() == [0, 2, 4, 6]
    assert unequal.rates_at(1, 0, 12).tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]


# Beside a loop in plain torch


def by_hand(seconds: list[float], work: list[int], steps: int, rates: list[float], seed: int = 0) -> Tensor:
    """Delayed Nesterov with its draws of shards, a local step at a time; returns theta."""
    size, data = len(seconds), shards(len(seconds))
    models = [copy.deepcopy(Regressor()) for _ in data]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in models]
    theta = vector(models[0])
    m, A, t = torch.zeros_like(theta), torch.zeros_like(theta), 0
    pulled, start, done = [theta.clone() for _ in data], [0.0] * size, [0] * size
    handed, shard, first = [0] * size, [0] * size, [0] * size

    def draw(w: int) -> None:
        total = sum(handed)
        lacks = [max(1 / size - n / total, 0) if total else 1 / size for n in handed]
        lacks = [x if x > 1e-12 else 0 for x in lacks] if max(lacks) > 1e-12 else [1.0] * size
        g = numpy_generator(seed, "data shards", w, total)
        shard[w] = int(g.choice(size, p=np.array(lacks) / sum(lacks)))
        first[w] = handed[shard[w]]
        handed[shard[w]] += work[w]

    for w in range(size):
        draw(w)
    for _ in range(size * steps):
        at, w = min((start[i] + (done[i] + 1) * seconds[i], i) for i in range(size))
        k = first[w] + done[w]
        x, y = (z[k % 5 * BATCH : (k % 5 + 1) * BATCH] for z in data[shard[w]].tensors)
        optimizers[w].param_groups[0]["lr"] = rates[min(k, steps - 1)]
        optimizers[w].zero_grad()
        loss_of(models[w], x, y).backward()
        optimizers[w].step()
        done[w] += 1
        if done[w] < work[w]:
            continue
        delta = pulled[w] - vector(models[w])
        A, t = A + delta, t + 1
        m = 0.9 * m + A / size if t % size == 0 else m
        theta = theta - 0.7 * ((1 if t % size == 0 else 0) * 0.9 * m + delta / size)
        A = torch.zeros_like(A) if t % size == 0 else A
        start[w], done[w], pulled[w] = at, 0, theta.clone()
        torch.nn.utils.vector_to_parameters(theta.clone(), models[w].parameters())
        draw(w)
    return theta


@pytest.mark.parametrize("dylu", [False, True])
def test_as_a_loop_in_plain_torch(dylu: bool) -> None:
    seconds, steps = [4.0, 2.0, 1.0], 14
    given: dict[str, Any] = {"H": 4, "lr": 0.01, "dylu": dylu, "lr_scheduler": "linear"}
    fit: dict[str, Any] = {"num_nodes": 3, "steps": steps, "network": FREE, "step_seconds": seconds}
    run = train(AsyncDiLoCoStrategy("adamw", shard_sampling=True, **given), **fit)
    rates = [0.01 * (1 - t / steps) for t in range(steps)]
    work = [1, 2, 4] if dylu else [4] * 3
    same(run.model, by_hand(seconds, work, steps, rates), 1e-12)
    unlike(run.model, by_hand(seconds, work, steps, rates, seed=1))
    unlike(run.model, by_hand(seconds, work, steps, [0.01] * steps))
    unlike(run.model, train(AsyncDiLoCoStrategy("adamw", **given), **fit).model)


def test_one_node_has_one_shard() -> None:
    with_, without = (
        train(AsyncDiLoCoStrategy(H=3, lr=0.01, lr_scheduler="cosine", shard_sampling=on), num_nodes=1)
        for on in (True, False)
    )
    assert torch.equal(with_.rows, without.rows) and torch.equal(with_.model, without.model)
    same(with_.model, train(DiLoCoStrategy(H=3, lr=0.01, lr_scheduler="cosine"), num_nodes=1).model)


# What it is for


def test_what_lies_with_slow_nodes_is_learnt_as_well() -> None:
    """Each node has another distribution: without sampling theta fits those of the fast nodes better."""

    def losses(on: bool) -> list[float]:
        model = Regressor(16)
        strategy = AsyncDiLoCoStrategy("sgd", H=4, lr=0.02, outer_momentum=0.5, shard_sampling=on)
        trainer = LocalTrainer(model, factory(shards(4)), loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(
            strategy, num_nodes=4, max_steps=120, batch_size=BATCH, network=FREE, step_seconds=[1.0, 1.0, 1.0, 20.0]
        )
        with torch.no_grad():
            return [float(loss_of(model, *node.tensors)) for node in shards(4)]

    with_, without = losses(True), losses(False)
    assert with_[3] < 0.8 * without[3] and max(with_) < max(without)


# Laws


def test_the_laws_hold() -> None:
    def make() -> AsyncDiLoCoStrategy:
        return AsyncDiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", outer_lr=0.3, shard_sampling=True)

    assert set(check_strategy(make, payload_bytes=lambda row, steps: row * math.ceil(steps / 5))) == set(LAWS)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_stopped_run_goes_on_with_the_same_shards(processes: int, tmp_path: Any) -> None:
    """In the middle of rounds, on nodes of unequal speed and shards of unequal size."""

    def run(**fit: Any) -> tuple[list[float], list[int]]:
        data = [examples(12 + 8 * i, i, 0.3 * i) for i in range(4)]
        handed: list[int] = []

        def look(loop: Any) -> None:
            algorithm = loop.driver.algorithm
            assert isinstance(algorithm, ByClock) and algorithm.shards is not None
            handed[:] = algorithm.shards.handed.tolist()

        trainer = LocalTrainer(model := Regressor(), factory(data), loss_fn=torch.nn.functional.mse_loss)
        strategy = AsyncDiLoCoStrategy(H=5, lr=0.02, dylu=True, grace_s=0.5, shard_sampling=True)
        given = {"max_steps": 17, "network": "1Mbps", "step_seconds": SPEEDS, "batch_size": BATCH, "num_nodes": 4}
        trainer.fit(strategy, **given | {"callbacks": [look]} | fit)
        return vector(model).tolist(), handed

    whole = run()
    run(max_steps=7, save_dir=tmp_path, processes=processes, final_sync=False)
    assert run(save_dir=tmp_path, resume=True, processes=processes) == whole
    assert run(processes=processes) == whole and run(seed=1)[1] != whole[1]


def test_by_name_and_wrong_values() -> None:
    strategy = parse_strategy("async_diloco:H=20:shard_sampling=true")
    assert isinstance(strategy, AsyncDiLoCoStrategy) and strategy.shard_sampling
    with pytest.raises(ArgumentError, match="shard_sampling=1 must be True or False"):
        AsyncDiLoCoStrategy(shard_sampling=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="did you mean 'shard_sampling'"):
        parse_strategy("async_diloco:shard_samplin=true")
