"""DES-LOC: parameters and moments averaged at their own periods, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import MixedRegressor, Regressor, adamw, averaged, plain, same, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.contrib.desloc import Moments
from exogym.errors import ArgumentError
from exogym.strategy import DESLOCStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy

S = 57 * 8.0
ADAMW = OptimSpec("adamw", lr=0.02)
MOMENTUM = OptimSpec("sgd", lr=0.05, momentum=0.9)


def by_the_rule(steps: int, periods: dict[str, int], num_nodes: int = 3) -> Tensor:
    optimizers: list[torch.optim.Optimizer] = []

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(adamw(parameters))
        return optimizers[-1]

    def after(models: list[nn.Module], step: int) -> None:
        averaged(periods["theta"])(models, step)
        for name in ("exp_avg", "exp_avg_sq"):
            for states in (
                zip(*(o.state.values() for o in optimizers), strict=True) if step % periods[name] == 0 else ()
            ):
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)

    return plain(shards(num_nodes), steps, build, after=after)


def test_it_is_its_rule() -> None:
    ours = train(DESLOCStrategy(ADAMW, H=2, H_u=3, H_v=5), shards(3), 3, steps=14)
    wanted = {"theta": 2, "exp_avg": 3, "exp_avg_sq": 5}
    same(ours.rows, by_the_rule(14, wanted))
    for name in wanted:
        unlike(ours.rows, by_the_rule(14, wanted | {name: 4}))
    assert ours.payload.tolist() == [(7 + 4 + 2) * S] * 3


def test_without_averages_of_moments_it_is_fedavg() -> None:
    fedavg = train(FedAvgStrategy(ADAMW, H=4))
    never = train(DESLOCStrategy(ADAMW, H=4, H_u=99, H_v=99))
    assert torch.equal(never.rows, fedavg.rows) and never.tx.tolist() == fedavg.tx.tolist()
    unlike(train(DESLOCStrategy(ADAMW, H=4, H_u=4, H_v=99)).rows, fedavg.rows)
    unlike(train(DESLOCStrategy(ADAMW, H=4, H_u=99, H_v=4)).rows, fedavg.rows)


def test_of_sgd_with_momentum_every_step_is_ddp() -> None:
    ddp = train(SimpleReduceStrategy(MOMENTUM)).rows
    every = train(DESLOCStrategy(MOMENTUM, H=1, H_u=1))
    same(every.rows, ddp)
    unlike(train(DESLOCStrategy(MOMENTUM, H=2, H_u=1)).rows, ddp)
    adam = train(DESLOCStrategy(ADAMW, H=1, H_u=1, H_v=1)).rows  # the mean of squares is not the square of the mean
    unlike(adam, train(SimpleReduceStrategy(ADAMW)).rows)


def test_parameters_of_two_precisions_and_groups_of_an_optimizer() -> None:
    mixed = train(DESLOCStrategy(ADAMW, H=2, H_u=2, H_v=2), model=MixedRegressor())
    unlike(mixed.rows, train(FedAvgStrategy(ADAMW, H=2), model=MixedRegressor()).rows)
    train(DESLOCStrategy("muon", H=2, H_u=2, H_v=2, lr=0.02))  # momenta of Muon and of AdamW are one kind
    grouped = OptimSpec("adamw", groups=[("*bias", {"weight_decay": 0.0})], lr=0.02, weight_decay=0.0)
    plainly = OptimSpec("adamw", lr=0.02, weight_decay=0.0)
    assert torch.equal(train(DESLOCStrategy(grouped, H=2, H_u=3)).rows, train(DESLOCStrategy(plainly, H=2, H_u=3)).rows)


class HalfUsed(Regressor):
    """A weight that never has a gradient, so that its optimizer state never begins."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3, dtype=torch.float64))


def test_a_parameter_without_moments_is_left_alone() -> None:
    used = train(DESLOCStrategy(ADAMW, H=2, H_u=3, H_v=3), model=HalfUsed())
    idle = [name for name, _ in HalfUsed().named_parameters()].index("idle")
    assert idle == 0 and torch.equal(used.rows[:, :3], torch.ones(4, 3, dtype=torch.float64))
    same(used.rows[:, 3:], train(DESLOCStrategy(ADAMW, H=2, H_u=3, H_v=3)).rows)


def test_first_moments_want_second_moments_along() -> None:
    """One node has no gradient of the first input: it would divide the others' first moments by nearly nothing."""
    data = shards(4)
    data[0].tensors[0][:, 0] = 0.0
    start = vector(Regressor())

    def furthest(**periods: int) -> float:
        return float((train(DESLOCStrategy(ADAMW, H=4, **periods), data).rows - start).abs().max())

    assert furthest(H_u=6, H_v=99) > 1e4
    assert furthest(H_u=6, H_v=3) < 1 and furthest(H_u=6) < 1 and furthest() < 1


def test_what_has_no_moments_is_refused() -> None:
    with pytest.raises(ArgumentError, match="keeps no state per parameter that could be averaged: use 'adamw'"):
        DESLOCStrategy("sgd")
    with pytest.raises(ArgumentError, match=r"H_v=4 with inner_optim=.* keeps no second moments"):
        DESLOCStrategy(MOMENTUM, H_v=4)
    with pytest.raises(ArgumentError, match="H_u=0"):
        DESLOCStrategy(H_u=0)
    assert len(Moments(OptimSpec("muon", lr=0.02)).kinds) == 2


def test_equal_data_are_one_node() -> None:
    make = lambda: DESLOCStrategy(OptimSpec("adamw", lr=0.02), H=2, H_u=3, H_v=4)  # noqa: E731
    one, many = train(make(), shards(1, same=True), 1), train(make(), shards(3, same=True), 3)
    same(many.rows, one.rows.expand_as(many.rows), 1e-10)
    same(many.model, one.model, 1e-10)
    unlike(train(make(), shards(3), 3).model, one.model)
