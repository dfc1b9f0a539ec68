"""Short runs of a small network, for the tests on the fake device and for the processes that they start."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy


def classes(count=40):
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(3, (count,), generator=draw))


def fit(model, device, loss_fn=nn.functional.cross_entropy, strategy=None, data=None, **options):
    trainer = LocalTrainer(model, data or classes(), loss_fn=loss_fn)
    options = {"num_nodes": 2, "max_steps": 6, "batch_size": 4, "progress": False} | options
    trainer.fit(strategy or DiLoCoStrategy(lr=0.05, H=3), device=device, **options)
    return trainer


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 3))


def weights_of(trainer):
    return torch.cat([p.detach().cpu().flatten() for p in trainer.model.parameters()])
