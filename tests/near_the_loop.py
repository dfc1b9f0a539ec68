"""For tests of ways of computing that are held to the loop: models, optimizers, a run, and how near it must be."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.strategy import OptimSpec

TOLERANCE = 1e-5  # of a parameter's norm, in fp32


def examples(count=160, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *(layer() for layer in layers or [nn.Tanh]), nn.Linear(8, 2))


def fit(how, strategy, model=network, data=None, **options):
    trainer = LocalTrainer(model(), data or examples(), loss_fn=F.cross_entropy)
    options = {"num_nodes": 3, "max_steps": 26, "batch_size": 4, "device": "cpu"} | options
    trainer.fit(strategy, compute=how, **options)
    return trainer


def assert_close(ours, theirs, tolerance=TOLERANCE):
    for (name, a), b in zip(theirs.model.state_dict().items(), ours.model.state_dict().values(), strict=True):
        assert float((a.double() - b.double()).norm()) <= tolerance * float(a.double().norm()), name
    for a, b in zip(ours.history, theirs.history, strict=True):
        assert (a["step"], a["node"], a["lr"]) == (b["step"], b["node"], b["lr"])
        losses = [row["train_loss"] or 0.0 for row in (a, b)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=tolerance)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.out, self.unused = nn.Linear(6, 2), nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.out(self.frozen(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()))


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.out = nn.Linear(6, 6).double(), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.a(x.double()).float())


OPTIMIZERS = {
    "sgd": OptimSpec("sgd", lr=0.1),
    "momentum": OptimSpec("sgd", lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": OptimSpec("sgd", lr=0.05, momentum=0.9, nesterov=True),
    "adam": OptimSpec("adam", lr=0.01, weight_decay=0.1),
    "adamw": OptimSpec("adamw", lr=0.01, weight_decay=0.1),
    "amsgrad, upwards": OptimSpec("adamw", lr=0.01, amsgrad=True, maximize=True),
    "groups": OptimSpec("adamw", groups=[("*.bias", {"lr": 0.1, "weight_decay": 0.0})], lr=0.01),
    "not in a graph": OptimSpec("rmsprop", lr=0.01),
}
MODELS = {
    "unused and frozen": Unused,
    "tied": Tied,
    "two types": TwoTypes,
    "BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(6), *network()),
    "dropout": functools.partial(network, functools.partial(nn.Dropout, 0.3)),
}
