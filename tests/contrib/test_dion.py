"""Dion beside the authors' rule as a loop of plain torch; what it equals, what it sends, what nodes keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems import (
    BATCH,
    MixedRegressor,
    Regressor,
    average_gradients,
    examples,
    fleet_of,
    plain,
    run_of,
    same,
    shards,
    train,
    unlike,
)
from torch import Tensor, nn

from exogym.core.base.rng import generator
from exogym.errors import ArgumentError
from exogym.strategy import DionStrategy, FedAvgStrategy

Models = list[nn.Module]
RATES = {"lr": 0.01, "matrix_lr": 0.03}


# The authors' rule


class Reference:
    """Each node's momentum of the first layer's matrix, and Q, which all nodes hold; AdamW's gradients averaged."""

    def __init__(self, nodes: int, shape: tuple[int, int], fraction: float, mu: float, limit: float | None = None):
        self.flip, self.mu, self.limit = shape[0] < shape[1], mu, limit
        self.M = [torch.zeros(shape, dtype=torch.float64) for _ in range(nodes)]
        self.r = min(math.ceil(fraction * min(shape)), *shape)
        self.Q = torch.randn(min(shape), self.r, generator=generator(0, "dion", 0)).double()
        self.scale = math.sqrt(shape[0] / shape[1])

    def __call__(self, models: Models, step: int) -> None:
        for m in models if self.limit else ():
            nn.utils.clip_grad_norm_(m.parameters(), self.limit or 0.0)
        update = self.update([m.first.weight.grad for m in models])
        average_gradients(models)
        for m in models:
            m.first.weight.grad = update.clone()

    def update(self, grads: list[Tensor]) -> Tensor:
        for M, g in zip(self.M, grads, strict=True):
            M += g
        turned = [M.T if self.flip else M for M in self.M]
        Y = sum(M @ self.Q for M in turned) / len(turned)
        columns: list[Tensor] = []
        for y in Y.T:  # Gram and Schmidt, twice
            for c in 2 * columns:
                y = y - (c @ y) * c
            columns.append(y / y.norm())
        P = torch.stack(columns, 1)
        R = sum(M.T @ P for M in turned) / len(turned)
        for M in turned:
            M -= (1 - self.mu) * P @ R.T
        self.Q = R / (R.norm(dim=0) + 1e-8)
        return self.scale * (self.Q @ P.T if self.flip else P @ self.Q.T)


def reference(nodes: int, fraction: float, hidden: int = 7, mu: float = 0.95, weight_decay: float = 0.01,
              limit: float | None = None) -> Tensor:  # fmt: skip
    def optimizers(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.03 / 0.01}, {"params": rest}]
        return Both(groups, weight_decay)

    rule = Reference(nodes, (hidden, 6), fraction, mu, limit)
    return plain(shards(nodes), 12, optimizers, before=rule, model=Regressor(hidden))


class Both(torch.optim.Optimizer):
    """W (1 - 0.03 lambda) - 0.03 D for the first group, AdamW at 0.01 for the second."""

    def __init__(self, groups: Any, weight_decay: float):
        super().__init__(groups, {})
        self.adamw = torch.optim.AdamW(groups[1]["params"], 0.01, (0.9, 0.95), 1e-8, weight_decay, foreach=False)
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (W,) = self.param_groups[0]["params"]
        W.mul_(1 - 0.03 * self.weight_decay).sub_(0.03 * W.grad)
        self.adamw.step()


@pytest.mark.parametrize(("hidden", "fraction"), [(7, 0.3), (5, 0.2), (7, 1.0), (5, 1.0), (9, 0.5)])
def test_dion_is_the_authors_rule(hidden: int, fraction: float) -> None:
    """Compressed and not, tall and wide; 9 x 6 of rank 3 is compressed by a little."""
    ours = train(DionStrategy(fraction, **RATES), shards(3), 3, model=Regressor(hidden))
    same(ours.rows, reference(3, fraction, hidden), 1e-9)
    unlike(ours.rows, reference(3, fraction, hidden, mu=0.0))
    r = math.ceil(fraction * min(hidden, 6))
    matrix = min((hidden + 6) * r if fraction < 1 else math.inf, hidden * 6)
    assert ours.payload.tolist() == [12 * (matrix + 2 * hidden + 1) * 8.0] * 3


def test_clipping_and_weight_decay_act_as_the_authors_have_them() -> None:
    """Each node clips its own gradient, before the momentum."""
    options = {"mu": 0.8, "weight_decay": 0.3, "max_norm": 0.5, **RATES}
    ours = train(DionStrategy(0.3, **options), shards(3), 3)
    same(ours.rows, reference(3, 0.3, mu=0.8, weight_decay=0.3, limit=0.5), 1e-9)
    unlike(ours.rows, reference(3, 0.3, mu=0.8, weight_decay=0.3))
    unlike(ours.rows, reference(3, 0.3, mu=0.8, weight_decay=0.0, limit=0.5))


def test_both_rates_follow_the_schedule() -> None:
    options = {"weight_decay": 0.0, "lr_scheduler": lambda step: 0.5, "lr": 0.02, "matrix_lr": 0.06}
    ours = train(DionStrategy(0.3, **options), shards(3), 3)
    same(ours.rows, reference(3, 0.3, weight_decay=0.0), 1e-9)


# What it equals


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_n_nodes_are_one_node_with_n_batches(fraction: float) -> None:
    data = examples(3 * BATCH * 4)
    many = train(DionStrategy(fraction, **RATES), data, 3)
    one = train(DionStrategy(fraction, **RATES), data, 1, batch_size=3 * BATCH)
    same(many.rows, one.rows.expand_as(many.rows), 1e-9)
    assert torch.equal(many.rows, many.rows[:1].expand_as(many.rows))
    local = train(FedAvgStrategy(H=3, lr=0.01), data, 3)
    unlike(local.rows, one.rows.expand_as(local.rows))


def begun(nodes: int, *given: Any, model: nn.Module | None = None, **options: Any) -> Any:
    model = Regressor() if model is None else model
    P = sum(p.numel() for p in model.parameters())
    fleet = fleet_of(torch.zeros(nodes, P, dtype=torch.float64), model=model)
    return fleet, DionStrategy(*given, **options).on(fleet, run_of(nodes))


def first_matrix(row: Tensor) -> Tensor:
    return row[:42].view(7, 6)


def test_the_sum_of_gradients_is_what_was_taken_out_and_what_is_kept() -> None:
    """P R^T is what P P^T leaves of the mean momentum, and P has the directions' columns."""
    fleet, acting = begun(3, 0.3, mu=0.9)
    (block,), (kept,) = fleet.blocks, acting.gradients[0].row_state.values()
    given, taken = torch.zeros(7, 6).double(), torch.zeros(7, 6).double()
    for step in range(1, 7):
        g = torch.randn(3, 57, generator=torch.Generator().manual_seed(step)).double()
        momentum = first_matrix(kept.mean(0) + g.mean(0))
        block.own_grads().copy_(g)
        acting.transform_gradients(step, 0.1)
        U = torch.linalg.svd(first_matrix(block.grads[0]))[0][:, :2]  # spans P
        given += first_matrix(g.mean(0))
        taken += 0.1 * U @ U.T @ momentum
    same(taken + first_matrix(kept.mean(0)), given, 1e-10)
    unlike(first_matrix(kept.mean(0)), given)


def test_under_a_constant_gradient_the_direction_becomes_orthonormal() -> None:
    """U V^T of the gradient's singular value decomposition, where Muon's steps go."""
    g = torch.randn(57, generator=torch.Generator().manual_seed(1)).double()
    U, _, Vh = torch.linalg.svd(first_matrix(g), full_matrices=False)
    fleet, acting = begun(1, 1.0, mu=0.9)
    for step in range(1, 101):
        fleet.blocks[0].own_grads().copy_(g)
        acting.transform_gradients(step, 0.1)
        direction = first_matrix(fleet.blocks[0].grads[0]) / math.sqrt(7 / 6)
        if step == 1:
            unlike(direction, U @ Vh)
    same(direction, U @ Vh, 1e-6)


# Absent nodes, no gradients, several dtypes


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_a_matrix_without_a_gradient_rests(fraction: float) -> None:
    """As a parameter whose .grad is None; and gradients of zero move nothing as long as there is no momentum."""
    fleet, acting = begun(2, fraction)
    (block,), (module,) = fleet.blocks, acting.gradients
    g = torch.randn(2, 57, generator=torch.Generator().manual_seed(1)).double()
    for step, factor in ((1, 0.0), (2, 1.0), (3, 0.0)):
        block.own_grads().copy_(factor * g)
        block.has_grad[:] = step != 3
        before = {name: x.clone() for name, x in (module.row_state | module.shared_state).items()}
        acting.transform_gradients(step, 0.1)
        after = module.row_state | module.shared_state
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        assert bool(moved) == (step == 2) and bool(first_matrix(block.grads[0]).any()) == (step == 2)
        assert block.has_grad.all() == (step != 3)


def test_a_model_of_two_dtypes_and_one_without_hidden_matrices() -> None:
    mixed = train(DionStrategy(0.3, **RATES), shards(3), 3, model=MixedRegressor())
    assert torch.equal(mixed.rows, mixed.rows[:1].expand_as(mixed.rows)) and falls(mixed.losses)
    with pytest.raises(ArgumentError, match="dion finds no hidden matrix"):
        train(DionStrategy(), shards(2), 2, model=nn.Linear(6, 1).double())


def falls(losses: Any) -> bool:
    return bool(losses[:, -3:].mean() < losses[:, :3].mean())


def test_dion_refuses_numbers_that_make_no_sense() -> None:
    wrong: list[dict[str, Any]] = [{"rank_fraction": 0}, {"rank_fraction": 1.5}, {"mu": -0.1}, {"mu": 1.1}]
    for option in [*wrong, {"matrix_lr": -1}, {"weight_decay": -1}]:
        with pytest.raises(ArgumentError, match=next(iter(option))):
            DionStrategy(**option)
