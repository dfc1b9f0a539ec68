"""ACCO beside the authors' loop in plain torch; what it equals, and nodes that were away."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from problems import BATCH, FEATURES, Regressor, examples, loss_of, same, shards, train, unlike, vector
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.strategy import ACCOStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False),
}
SPECS = {"adamw": OptimSpec("adamw", lr=0.02), "sgd": OptimSpec("sgd", lr=0.05, momentum=0.9, weight_decay=0.1)}


Means = list[Tensor | None]  # by parameter; None: no node used it


def loop(
    data: Sequence[TensorDataset], steps: int, name: str, limit: float = 1e9, estimates: bool = True,
    kind: Callable[[], nn.Module] = Regressor, all_step: bool = False,
) -> Any:  # fmt: skip
    """theta after `steps` steps, and the parameters at which the next gradients would be, by the authors' loop.

    Without `estimates` the round's first gradients are at theta. With `all_step`, unused parameters step, too.
    """
    model, estimate = kind(), kind()
    optimizer = OPTIMIZERS[name](model.parameters())
    B: Means | None = None
    A: Means | None = None

    def mean(parts: Sequence[Tensor | None]) -> Tensor | None:
        found = [g for g in parts if g is not None]
        return torch.stack(found).sum(0) / len(parts) if found else None

    for step in range(steps):
        at = step % 5 * BATCH
        grads = []
        for node in data:
            place = estimate if step % 2 == 0 and estimates else model
            x, y = (t[at : at + BATCH] for t in node.tensors)
            ps = list(place.parameters())
            grads.append(torch.autograd.grad(loss_of(place, x, y), ps, allow_unused=True, materialize_grads=all_step))
        means = [mean(group) for group in zip(*grads, strict=True)]
        if step % 2 == 0:
            if A is not None:
                advance(model, optimizer, A, limit)
            first, B = means, means
        else:
            assert B is not None
            estimate = copy.deepcopy(model)
            other = OPTIMIZERS[name](estimate.parameters())
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            advance(estimate, other, B, limit)
            A = [mean(pair) for pair in zip(first, means, strict=True)]
    return vector(model), vector(estimate if steps % 2 == 0 else model)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, mean: Means, limit: float) -> None:
    for p, g in zip(model.parameters(), mean, strict=True):
        p.grad = None if g is None else g.clone()
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 11, 12])
def test_acco_is_the_authors_loop(name: str, steps: int) -> None:
    ours = train(ACCOStrategy(SPECS[name], max_norm=0.7), shards(3), 3, steps)
    theta, now = loop(shards(3), steps, name, 0.7)
    same(ours.model, theta)
    same(ours.rows, now.expand_as(ours.rows))
    assert ours.payload.tolist() == [steps * 57 * 8.0] * 3
    if steps > 1:
        unlike(ours.model, loop(shards(3), steps, name, 0.7, estimates=False)[0])
        unlike(ours.model, loop(shards(3), steps, name)[0])


class Forks(Regressor):
    """A parameter that no example uses, and one that only a few batches of a few nodes use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.rare = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + x @ self.rare[:, None] if float(x[0, 0]) > 0.5 else out


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [11, 12])
def test_a_parameter_steps_only_with_means_for_which_a_node_used_it(name: str, steps: int) -> None:
    ours = train(ACCOStrategy(SPECS[name]), shards(2), 2, steps, model=Forks())
    theta, now = loop(shards(2), steps, name, kind=Forks)
    same(ours.model, theta)
    same(ours.rows, now.expand_as(ours.rows))
    unlike(ours.model, loop(shards(2), steps, name, kind=Forks, all_step=True)[0])


def test_n_nodes_are_one_node_with_n_batches() -> None:
    data = examples(3 * BATCH * 4)
    many = train(ACCOStrategy(lr=0.02), data, 3)
    one = train(ACCOStrategy(lr=0.02), data, 1, batch_size=3 * BATCH)
    same(many.rows, one.rows.expand_as(many.rows))
    same(many.model, one.model)
    unlike(train(FedAvgStrategy(H=3, lr=0.02), data, 3).model, one.model)


def test_of_gradients_that_do_not_change_it_is_ddp_with_half_the_steps() -> None:
    """One batch, and a loss that is linear in the parameters; Adam's counts show that estimates leave no trace."""
    data = examples(BATCH)

    def end(strategy: Any, steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 1).double()
        trainer = LocalTrainer(model, data, loss_fn=lambda out, y: (out * y).mean())
        trainer.fit(strategy, num_nodes=2, max_steps=steps, batch_size=BATCH, shuffle=False, device="cpu")
        return vector(model)

    ddp = end(SimpleReduceStrategy(lr=0.02), 4)
    for steps in (9, 10):
        same(end(ACCOStrategy(lr=0.02), steps), ddp)
    unlike(end(ACCOStrategy(lr=0.02), 8), ddp)
