"""DiLoCo's relatives: delayed and eager averages, islands, a scheduled outer momentum, MuLoCo, SlowMo; each against its
rule in plain torch, and where two of them must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import (
    Regressor,
    adamw,
    average_gradients,
    examples,
    plain,
    put,
    rows_of,
    same,
    sgd,
    shards,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn

from exogym.errors import ArgumentError, StrategyError
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    MuLoCoStrategy,
    OptimSpec,
    SlowMoStrategy,
)
from exogym.strategy.muon import MuonAdamW
from exogym.strategy.registry import parse_strategy

PLAIN = OptimSpec("sgd", lr=1.0)
BALL = OptimSpec("sgd", lr=0.7, momentum=0.6)
Models = list[nn.Module]


def nesterov(theta: Tensor, v: Tensor, delta: Tensor, eta: float, mu: float) -> Tensor:
    v.mul_(mu).add_(delta)
    return theta - eta * (delta + mu * v)


# Delay


def delayed(steps: int, H: int, delay: int, num_nodes: int = 3) -> tuple[Tensor, Tensor]:
    """theta and the rows, by the rule."""
    theta = vector(Regressor())
    v, on_its_way = torch.zeros_like(theta), {}
    if delay == H:
        on_its_way[H] = torch.zeros_like(theta)

    def after(models: Models, step: int) -> None:
        nonlocal theta
        if step % H == 0:
            on_its_way[step + delay] = theta - rows_of(models).mean(0)
        if step in on_its_way:
            theta = nesterov(theta, v, on_its_way.pop(step), 0.7, 0.9)
            for m in models:
                put(m, theta)

    rows = plain(shards(num_nodes), steps, adamw, after=after)
    return theta, rows


@pytest.mark.parametrize("delay", [1, 3, 4])
def test_a_delayed_average_comes_so_many_steps_late(delay: int) -> None:
    ours = train(DiLoCoStrategy(H=4, lr=0.02, delay=delay), shards(3), 3, steps=14)
    theta, rows = delayed(14, 4, delay)
    same(ours.model, theta)
    same(ours.rows, rows)
    unlike(ours.model, delayed(14, 4, delay - 1)[0])
    assert ours.payload.tolist() == [3 * 57 * 8.0] * 3


def test_what_is_on_its_way_at_the_end_arrives_then() -> None:
    left = train(DiLoCoStrategy("sgd", PLAIN, H=4, lr=0.05, delay=2), steps=9)
    ended = train(DiLoCoStrategy("sgd", PLAIN, H=4, lr=0.05, delay=2), steps=9, final_sync=True)
    whole = train(DiLoCoStrategy("sgd", PLAIN, H=4, lr=0.05, delay=2), steps=10)
    same(ended.model, whole.model)
    unlike(left.model, ended.model)
    assert ended.payload.tolist() == left.payload.tolist()  # it had been sent
    same(ended.rows, ended.model.expand_as(ended.rows))
    late = DiLoCoStrategy("sgd", PLAIN, H=4, lr=0.05, delay=4)  # two averages: one on its way, one of two steps
    assert train(late, steps=10, final_sync=True).payload.tolist() == [3 * 57 * 8.0] * 4


def test_a_delay_must_fit_into_a_round() -> None:
    with pytest.raises(ArgumentError, match="delay=5 exceeds the H=4 steps of a round"):
        DiLoCoStrategy(H=4, delay=5)
    with pytest.raises(ArgumentError, match="rounds of one length"):
        DiLoCoStrategy(H=lambda r: 4, delay=1)
    with pytest.raises(ArgumentError, match="eager=True with delay=4"):
        DiLoCoStrategy(H=4, delay=4, eager=True)


# Eager


def eager(steps: int, H: int, num_nodes: int, own: float | None = None) -> Tensor:
    """The rows, by the rule; `own` instead of 1/N is another rule."""
    share = 1 / num_nodes if own is None else own
    theta = vector(Regressor()).expand(num_nodes, -1).clone()
    v, before = torch.zeros_like(theta), torch.zeros_like(theta)

    def after(models: Models, step: int) -> None:
        nonlocal theta, before
        if step % H == 0:
            delta = theta - rows_of(models)
            theta = nesterov(theta, v, before.mean(0) + share * (delta - before), 0.7, 0.9)
            before = delta
            for m, row in zip(models, theta, strict=True):
                put(m, row)

    return plain(shards(num_nodes), steps, adamw, after=after)


def test_eager_is_its_rule() -> None:
    ours = train(DiLoCoStrategy(H=4, lr=0.02, eager=True), shards(3), 3, steps=14)
    same(ours.rows, eager(14, 4, 3))
    same(ours.model, ours.rows.mean(0))
    unlike(ours.rows, eager(14, 4, 3, own=0.5))
    assert ours.payload.tolist() == [3 * 57 * 8.0] * 3
    assert ours.rows.std(0).max() > 1e-4  # nodes are never equal


def test_eager_shares_are_those_of_the_examples() -> None:
    data = [examples(8, 1), examples(16, 2, 0.5), examples(24, 3, -0.5)]
    start, alone = vector(Regressor()), plain(data, 6, sgd)
    shares = torch.tensor([[8.0], [16.0], [24.0]], dtype=torch.float64) / 48
    weighted = DiLoCoStrategy("sgd", PLAIN, H=6, lr=0.05, eager=True, weighting="examples")
    same(train(weighted, data, 3, steps=6).rows, start - shares * (start - alone))
    uniform = train(DiLoCoStrategy("sgd", PLAIN, H=6, lr=0.05, eager=True), data, 3, steps=6)
    unlike(uniform.rows, start - shares * (start - alone))


def test_eager_with_one_node_is_diloco_with_one_node() -> None:
    one = train(DiLoCoStrategy(H=4, lr=0.02), shards(1), 1)
    assert torch.equal(train(DiLoCoStrategy(H=4, lr=0.02, eager=True), shards(1), 1).rows, one.rows)
    assert not torch.equal(train(DiLoCoStrategy(H=4, lr=0.02, delay=4), shards(1), 1).rows, one.rows)


# Islands


def test_islands_of_everyone_at_every_step_are_one_node_of_all_batches() -> None:
    data = shards(4)
    for eta in (PLAIN, "sgd"):
        islands = train(DiLoCoStrategy("sgd", eta, H=4, lr=0.05, island_size=4, island_H=1), data)
        mean = ddp_between_outer_steps(data, eta)
        same(islands.model, mean)
    unlike(train(DiLoCoStrategy("sgd", "sgd", H=4, lr=0.05, island_size=2, island_H=1), data).model, mean)


def ddp_between_outer_steps(data: list, outer: Any) -> Tensor:
    theta = vector(Regressor())
    v = torch.zeros_like(theta)

    def after(models: Models, step: int) -> None:
        nonlocal theta
        if step % 4 == 0:
            eta, mu = (1.0, 0.0) if outer is PLAIN else (0.7, 0.9)
            theta = nesterov(theta, v, theta - rows_of(models).mean(0), eta, mu)
            for m in models:
                put(m, theta)

    plain(data, 12, sgd, before=average_gradients, after=after)
    return theta


def test_islands_by_the_rule() -> None:
    theta = vector(Regressor())
    v = torch.zeros_like(theta)

    def after(models: Models, step: int) -> None:
        nonlocal theta
        if step % 6 == 0:
            theta = nesterov(theta, v, theta - rows_of(models).mean(0), 0.7, 0.9)
            for m in models:
                put(m, theta)
        elif step % 2 == 0:
            for island in (models[:2], models[2:4], models[4:]):
                mean = rows_of(island).mean(0)
                for m in island:
                    put(m, mean)

    rows = plain(shards(5), 15, adamw, after=after)
    ours = train(DiLoCoStrategy(H=6, lr=0.02, island_size=2, island_H=2), shards(5), 5, steps=15)
    same(ours.rows, rows)
    unlike(ours.rows, train(DiLoCoStrategy(H=6, lr=0.02), shards(5), 5, steps=15).rows)
    S = 57 * 8.0
    assert ours.payload.tolist() == [(2 + 5) * S] * 4 + [2 * S]  # the fifth is alone in its island
    assert ours.tx.tolist() == pytest.approx([2 * 1.6 * S + 5 * S] * 4 + [2 * 1.6 * S])
    plan = DiLoCoStrategy(H=6, island_size=2, island_H=2).plan(57, 5, 8)
    assert sum(t.payload_bytes / t.every_steps for t in plan.traffic) == pytest.approx(S / 6 + S * 2 / 6)


def test_islands_of_one_are_diloco() -> None:
    diloco = train(DiLoCoStrategy(H=4, lr=0.02))
    alone = train(DiLoCoStrategy(H=4, lr=0.02, island_size=1, island_H=2))
    assert torch.equal(alone.rows, diloco.rows) and alone.tx.tolist() == diloco.tx.tolist()
    for wrong in ({"island_size": 2}, {"island_size": 2, "island_H": 4}):
        with pytest.raises(ArgumentError, match="island"):
            DiLoCoStrategy(H=4, **wrong)


# The outer momentum


def outer_loop(steps: int, H: int, mu: Callable[[int], float]) -> Tensor:
    theta = vector(Regressor())
    v = torch.zeros_like(theta)

    def after(models: Models, step: int) -> None:
        nonlocal theta
        if step % H == 0:
            r = step // H - 1
            theta = nesterov(theta, v, theta - rows_of(models).mean(0), 0.7, mu(r))
            for m in models:
                put(m, theta)

    plain(shards(3), steps, adamw, after=after)
    return theta


def test_the_outer_momentum_follows_the_rounds() -> None:
    options: dict[str, Any] = {"H": 2, "lr": 0.02, "outer_momentum": 0.8}
    constant = train(DiLoCoStrategy(**options), shards(3), 3).model
    same(constant, outer_loop(12, 2, lambda r: 0.8))
    falling = train(DiLoCoStrategy(**options, outer_momentum_scheduler="linear"), shards(3), 3).model
    same(falling, outer_loop(12, 2, lambda r: 0.8 * (1 - r / 6)))
    unlike(falling, constant)
    adam = {"outer_optim": "adam", "outer_lr": 0.01, "H": 2, "lr": 0.02}
    scheduled = train(DiLoCoStrategy(**adam, outer_momentum_scheduler=lambda r: 1.0), shards(3), 3).model
    assert torch.equal(scheduled, train(DiLoCoStrategy(**adam), shards(3), 3).model)
    unlike(train(DiLoCoStrategy(**adam, outer_momentum_scheduler=lambda r: 0.5), shards(3), 3).model, scheduled)


def test_wrong_outer_momenta() -> None:
    with pytest.raises(ArgumentError, match=r"outer_momentum=1\.5 must be a number from 0 to below 1"):
        DiLoCoStrategy(outer_momentum=1.5)
    with pytest.raises(ArgumentError, match="outer_momentum_scheduler='lineer' is unknown: did you mean 'linear'"):
        DiLoCoStrategy(outer_momentum_scheduler="lineer")
    with pytest.raises(ArgumentError, match="no argument 'outer_restarts': it is retired: set outer_momentum=0"):
        DiLoCoStrategy(outer_restarts=2)
    with pytest.raises(ArgumentError, match="has no momentum"):
        train(DiLoCoStrategy(H=2, outer_optim="rprop", outer_momentum_scheduler="linear"))


# MuLoCo


def test_a_task_with_another_optimizer_leaves_muloco_its_muon() -> None:
    """Otherwise a comparison's MuLoCo is DiLoCo with the task's AdamW."""
    assert parse_strategy("muloco", inner_optim="adamw", lr=0.02).inner.spec.cls is MuonAdamW
    assert parse_strategy("diloco", inner_optim="adamw", lr=0.02).inner.spec.cls is torch.optim.AdamW
    assert parse_strategy("muloco:inner_optim=adamw").inner.spec.cls is torch.optim.AdamW  # as asked


def test_muloco_is_diloco_with_muon_inside() -> None:
    outer = OptimSpec("sgd", lr=0.9, momentum=0.8, nesterov=True)
    muloco = train(MuLoCoStrategy(H=4, lr=0.02), steps=8)
    diloco = train(DiLoCoStrategy("muon", outer, H=4, lr=0.02), steps=8)
    assert torch.equal(muloco.rows, diloco.rows)
    unlike(train(DiLoCoStrategy("adamw", outer, H=4, lr=0.02), steps=8).rows,
           muloco.rows)  # fmt: skip


def test_muloco_of_one_node_with_plain_outer_sgd_is_torchs_muon() -> None:
    ours = train(MuLoCoStrategy(outer_optim=PLAIN, H=3, lr=0.02), shards(1), 1, steps=6)

    class Both(torch.optim.Optimizer):
        def __init__(self, parameters: Any):
            parameters = list(parameters)
            super().__init__(parameters, {})
            options = {"lr": 0.02, "weight_decay": 0.1}
            self.muon = torch.optim.Muon(parameters[:1], adjust_lr_fn="match_rms_adamw", **options)
            self.adamw = torch.optim.AdamW(parameters[1:], foreach=False, **options)

        def step(self, closure: Any = None) -> None:
            self.muon.step(), self.adamw.step()

    same(ours.rows, plain(shards(1), 6, Both), 1e-12)
    unlike(train(MuLoCoStrategy(H=3, lr=0.02), shards(1), 1, steps=6).rows, ours.rows)


# SlowMo


def slowmo(gammas: list[float], H: int, alpha: float, beta: float) -> Tensor:
    theta = vector(Regressor())
    u = torch.zeros_like(theta)
    optimizers: list[torch.optim.Optimizer] = []

    def before(models: Models, step: int) -> None:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = gammas[step - 1]

    def after(models: Models, step: int) -> None:
        nonlocal theta, u
        if step % H == 0:
            gamma = gammas[step - 1]
            u = beta * u + (theta - rows_of(models).mean(0)) / gamma
            theta = theta - alpha * gamma * u
            for m in models:
                put(m, theta)

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False))
        return optimizers[-1]

    return plain(shards(3), len(gammas), build, before=before, after=after)


MOMENTUM = OptimSpec("sgd", lr=0.05, momentum=0.9)


def test_slowmo_is_its_rule_with_a_rate_that_changes() -> None:
    ours = train(SlowMoStrategy(MOMENTUM, H=4, slow_lr=0.8, slow_momentum=0.6, lr_scheduler="linear"), shards(3), 3)
    same(ours.rows, slowmo([0.05 * (1 - t / 12) for t in range(12)], 4, 0.8, 0.6))
    unlike(ours.rows, slowmo([0.05] * 12, 4, 0.8, 0.6))
    assert ours.payload.tolist() == [3 * 57 * 8.0] * 3


def test_slowmo_without_momentum_is_fedavg_and_with_a_constant_rate_diloco() -> None:
    fedavg = train(FedAvgStrategy("adamw", H=4, lr=0.02)).rows
    same(train(SlowMoStrategy("adamw", H=4, lr=0.02, slow_momentum=0.0)).rows, fedavg)
    slow = train(SlowMoStrategy("adamw", H=4, lr=0.02, slow_lr=0.7, slow_momentum=0.6)).rows
    same(slow, train(DiLoCoStrategy("adamw", BALL, H=4, lr=0.02)).rows)
    unlike(slow, fedavg)
    scheduled: dict[str, Any] = {"H": 4, "lr": 0.02, "lr_scheduler": "linear"}
    slow = train(SlowMoStrategy("adamw", slow_lr=0.7, slow_momentum=0.6, **scheduled)).rows
    unlike(slow, train(DiLoCoStrategy("adamw", BALL, **scheduled)).rows)


def test_slowmo_refuses_a_rate_of_zero() -> None:
    with pytest.raises(StrategyError, match="SlowMo divides by the inner learning rate, which is 0"):
        train(SlowMoStrategy("sgd", H=4, lr=0.1, lr_scheduler=lambda t: 0.0))


# What the clock says


def test_a_delayed_average_is_hidden_by_the_steps_meanwhile() -> None:
    """A ring of four: 6 (1 ms + 57 8 / 4 bytes at 8 kbit/s) = 690 ms; a step takes 100 ms."""
    ring_s = 6 * (1e-3 + 57 * 8 / 4 * 8 / 8e3)
    options: dict[str, Any] = {"network": "8kbps,1ms", "step_seconds": 0.1, "num_nodes": 4, "steps": 16}

    def seconds(strategy: Any, **more: Any) -> float:
        return float(train(strategy, shards(4), **options | more).trainer.clock.time_s.max())

    assert seconds(DiLoCoStrategy(H=8, lr=0.02)) == pytest.approx(1.6 + 2 * ring_s)
    late = seconds(DiLoCoStrategy(H=8, lr=0.02, delay=3))
    assert late == pytest.approx(1.6 + ring_s - 0.3)  # the second is still on its way
    assert seconds(DiLoCoStrategy(H=8, lr=0.02, delay=3), steps=19) == pytest.approx(1.9 + 2 * (ring_s - 0.3))
    assert seconds(DiLoCoStrategy(H=8, lr=0.02, delay=8)) == pytest.approx(1.6)  # 800 ms hide 690
    assert seconds(DiLoCoStrategy(H=8, lr=0.02, eager=True)) == pytest.approx(1.6)
    assert seconds(DiLoCoStrategy(H=4, lr=0.02, eager=True)) == pytest.approx(1.6 + 3 * (ring_s - 0.4))
    waited = seconds(DiLoCoStrategy(H=8, lr=0.02, delay=8), final_sync=True)
    assert waited == pytest.approx(1.6 + ring_s)
