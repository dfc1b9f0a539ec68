"""Nodes that return: after a batch with NaN, and after an absence with old parameters.

Over every strategy of the core, and over the methods of `exogym.contrib` that list the feature in `tried`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from strategies import CONTRIB, CORE, STRATEGIES
from torch import Tensor
from torch.utils.data import TensorDataset
from wrapped import made

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.fleet.fleet import rows_of
from exogym.faults import Faults
from exogym.strategy import FedAvgStrategy, FedOptStrategy, Strategy, communicate_optimize
from exogym.strategy.registry import parse_strategy
from exogym.testing import small_problem

NODES, STEPS, BATCH, BAD = 4, 12, 4, 2
FURTHER: dict[str, Callable[[], Strategy]] = {
    "fedavg personal": lambda: made(FedAvgStrategy, lr=0.02, H=4, personal=1),
    "fedopt personal": lambda: made(FedOptStrategy, lr=0.02, H=4, personal=1),
}


def tried_with(feature: str) -> dict[str, Callable[[], Strategy]]:
    """Return the strategies that a run may have with a feature."""
    makers = {name: entry.make for name, entry in (STRATEGIES | CONTRIB).items()} | FURTHER
    return {name: make for name, make in makers.items() if (tried := make().tried) is None or feature in tried}


ABSENT, SKIPPING = tried_with("faults"), tried_with('on_nonfinite="skip"')
ALONE = ("gossip by hand", "stacked")  # programs that cannot go on without a node
CLOCKED = [name for name, kind in CORE.items() if kind.driven_by == "clock"]


def train(strategy: Strategy, nan_at: int | None = None, after: Any = None, **options: Any) -> LocalTrainer:
    """Train the small problem, each node on its own examples in order; node BAD's example of step `nan_at` is NaN."""
    model, data = small_problem()
    x, y = data.tensors

    def shard(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        mine = slice(rank * STEPS * BATCH, (rank + 1) * STEPS * BATCH)
        xs, ys = x.repeat(4, 1)[mine].clone(), y.repeat(4, 1)[mine].clone()
        if rank == BAD and nan_at is not None and is_train:
            xs[(nan_at - 1) * BATCH] = torch.nan
        return TensorDataset(xs, ys)

    trainer = LocalTrainer(model, shard, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(
        strategy, num_nodes=NODES, max_steps=STEPS, batch_size=BATCH, shuffle=False, device="cpu", progress=False,
        callbacks=[Every(1, after, may_end=False)] if after else [], **options,
    )  # fmt: skip
    return trainer


def are_finite(tensors: Any) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors)


@pytest.mark.parametrize("name", [*SKIPPING, *CLOCKED])
def test_after_one_nan_batch_all_is_finite_again(name: str) -> None:
    make = SKIPPING.get(name, lambda: parse_strategy(name, lr=0.02, H=4))
    for step in (2, 4):  # inside a round, and at its end
        rows: list[Tensor] = []
        keep = functools.partial(_keep, rows)
        trainer = train(make(), step, keep, on_nonfinite="skip", val_interval=1)
        assert are_finite(trainer.model.state_dict().values()) and are_finite(rows)
        losses = trainer.history.column("val_loss")[1]
        assert len(losses) == STEPS + 1 and np.isfinite(losses).all()


def _keep(rows: list[Tensor], loop: Any) -> None:
    rows[:] = loop.rows()


@pytest.mark.parametrize("name", [name for name in ABSENT if name not in ALONE])
def test_what_a_node_receives_when_it_returns_does_not_depend_on_its_old_parameters(name: str) -> None:
    for back in (6, 7, 9):  # in both halves of a round, and at its beginning
        undisturbed, disturbed = (returned(ABSENT[name](), back, shift) for shift in (0.0, 100.0))
        assert all(map(torch.equal, undisturbed, disturbed))


def test_old_parameters_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicate_optimize, "take_rows", lambda *given: None)
    undisturbed, disturbed = (returned(ABSENT["diloco"](), 7, shift) for shift in (0.0, 100.0))
    assert not all(map(torch.equal, undisturbed, disturbed))


def returned(strategy: Strategy, back: int, shift: float) -> list[Tensor]:
    """Train, and add `shift` to the parameters of node BAD while it is absent. Return all that must not change."""
    samples, seen = strategy.given_arguments.get("client_fraction", 1.0) < 1, []

    def disturb(loop: Any) -> None:
        if loop.step == 4:
            for row in rows_of(loop.fleet, [BAD]):
                for block in loop.fleet.blocks:
                    block.params[row] += shift
        if loop.step >= back and not samples:  # a sampled client has its old row until it is a client again
            seen.extend(rows.clone() for rows in loop.rows())

    trainer = train(strategy, None, disturb, faults=Faults(absent={BAD: [(3, back)]}), val_interval=1)
    return [*seen, *trainer.model.state_dict().values(), torch.tensor(trainer.history.column("val_loss")[1])]
