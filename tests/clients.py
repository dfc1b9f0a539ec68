"""Sampled clients for tests: a small problem whose clients have data of their own, and strategies with a server."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from wrapped import made

from exogym import LocalTrainer
from exogym.faults import Faults
from exogym.strategy import (
    DifferentialPrivacy,
    FedAvgStrategy,
    FedOptStrategy,
    FedProxStrategy,
    OptimSpec,
    ScaffoldStrategy,
    Strategy,
)
from exogym.testing import fingerprint

CLIENTS, STEPS = 40, 23
MOMENTUM = OptimSpec(torch.optim.SGD, momentum=0.9)
SAMPLED: dict[str, Any] = {"H": 4, "lr": 0.02, "client_fraction": 0.1}
WITH_A_SERVER: dict[str, Callable[[], Strategy]] = {
    "fedavg": lambda: FedAvgStrategy("sgd", **SAMPLED),
    "fedavg, uniform": lambda: FedAvgStrategy("sgd", weighting="uniform", **SAMPLED),
    "fedavg, momentum kept": lambda: FedAvgStrategy(MOMENTUM, **SAMPLED),
    "fedavg, adamw afresh": lambda: FedAvgStrategy("adamw", keep_inner_state=False, **SAMPLED),
    "fedavg, uneven work": lambda: FedAvgStrategy("sgd", local_steps=[1 + i % 4 for i in range(CLIENTS)], **SAMPLED),
    "fedavg, rounds of many lengths": lambda: FedAvgStrategy(MOMENTUM, **SAMPLED | {"H": lambda r: 2 + r % 3}),
    "fedprox": lambda: FedProxStrategy("sgd", mu=0.1, **SAMPLED),
    "fedopt": lambda: FedOptStrategy("sgd", **SAMPLED),
    "scaffold": lambda: ScaffoldStrategy("sgd", **SAMPLED),
    "scaffold, server rate": lambda: ScaffoldStrategy("adamw", server_lr=0.7, **SAMPLED),
    "fedopt, personal": lambda: made(FedOptStrategy, "sgd", personal=["0.weight", "2.*"], **SAMPLED),
    "dp-fedavg": lambda: made(
        FedAvgStrategy, "sgd", weighting="uniform", privacy=DifferentialPrivacy(0.5, 1.0), **SAMPLED
    ),
    "secure": lambda: made(FedAvgStrategy, "sgd", weighting="uniform", secure_aggregation=True, **SAMPLED),
}
ALL_ROWS = Faults()  # nobody is ever away, but may be: so each node keeps its row


def client(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
    x = torch.randn(12 + 4 * (rank % 3), 4, generator=torch.Generator().manual_seed(1000 + rank))
    return TensorDataset(x, x.sum(1, keepdim=True) + rank % 3)


def trainer(norm: bool = False, data: Any = client) -> LocalTrainer:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    x = torch.randn(32, 4)
    val = TensorDataset(x, x.sum(1, keepdim=True))
    return LocalTrainer(nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1)), data, val, loss_fn=nn.MSELoss())


def trained(strategy: Strategy, norm: bool = False, data: Any = client, **options: Any) -> LocalTrainer:
    found = trainer(norm, data)
    given = {"num_nodes": CLIENTS, "max_steps": STEPS, "batch_size": 4, "val_interval": 6, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.fit(strategy, **given | options)
    return found


def same(one: LocalTrainer, other: LocalTrainer) -> bool:
    """Whether weights, buffers, traffic and the losses of the evaluated model are the same, bit for bit."""
    losses = [run.history.column("val_loss")[1].tolist() for run in (one, other)]
    return (
        fingerprint(one.model) == fingerprint(other.model) and one.traffic == other.traffic and losses[0] == losses[1]
    )
