"""What the tests of other trainers share: strategies, a model with its data, the simulated run, and worlds of nodes."""

import functools
import os
import signal

import pytest
import torch
from processes import told_in_groups
from torch import nn
from torch.nn.functional import mse_loss

from exogym import LocalTrainer
from exogym.integrations.dealing import GradientWeight
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    GossipStrategy,
    NoLoCoStrategy,
    OptimSpec,
    PowerSGDStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
    TopKStrategy,
)
from exogym.testing import fingerprint

LR, BATCH, PARTS, LONG = 0.02, 4, 2, 50
CLIPPED = {"max_norm": 0.5}
STRATEGIES = {
    "ddp": functools.partial(SimpleReduceStrategy, **CLIPPED),
    "diloco": functools.partial(DiLoCoStrategy, H=5, **CLIPPED),
    "streaming diloco": functools.partial(
        StreamingDiLoCoStrategy, H=8, num_fragments=2, fragment_sync_delay=1, **CLIPPED
    ),
    "sparta": functools.partial(SPARTAStrategy, p_sparta=0.2, **CLIPPED),
    "demo": functools.partial(DeMoStrategy, compression_topk=4, compression_chunk=8, **CLIPPED),
    "powersgd": functools.partial(PowerSGDStrategy, rank=2, start_step=2, min_rate=1.0, **CLIPPED),
    "topk": functools.partial(TopKStrategy, density=0.2, **CLIPPED),
    "gossip": functools.partial(GossipStrategy, H=2, **CLIPPED),
    "noloco": functools.partial(NoLoCoStrategy, H=4, **CLIPPED),
}

KILLED = ["diloco", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "diloco")]


class Net(nn.Module):
    """Dropout, BatchNorm and two layers with one weight; it computes its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.one, self.other, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.other.weight = self.one.weight

    def forward(self, x, labels):
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return {"loss": mse_loss(self.last(torch.relu(self.one(x)) + self.other(x)), labels)}


def examples():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=draw)
    return [{"x": a, "labels": b} for a, b in zip(x, torch.tanh(x[:, :2]), strict=True)]


def rate(step, steps):
    """A linear schedule without warm-up, as Hugging Face's."""
    return max(0.0, (steps - step) / steps)


def described(name, steps):
    """Return the strategy with its optimizer and schedule."""
    inner = () if name == "demo" else (OptimSpec("adamw", weight_decay=0.0),)
    return STRATEGIES[name](*inner, lr=LR, lr_scheduler=functools.partial(rate, steps=steps))


def simulated(name, num_nodes, steps, make=Net, data=examples):
    trainer = LocalTrainer(make(), data())
    options = {"max_steps": steps, "batch_size": BATCH, "gradient_accumulation": PARTS, "device": "cpu"}
    trainer.fit(described(name, steps), num_nodes=num_nodes, **options)
    return fingerprint(trainer.model)


class Plain(nn.Module):
    """A layer; its gradient is a mean over examples, however they are cut into batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.last = nn.Linear(6, 2)

    def forward(self, x, labels):
        return {"loss": mse_loss(self.last(x), labels)}


SHORT, SHORT_STEPS = 13, 4  # the second step of an epoch has 5 examples, in two batches of BATCH or less


def short():
    return examples()[:SHORT]


def ends_where_fit_does(train, monkeypatch):
    """Hold `train()`, which trains a `Plain` on `short()` for SHORT_STEPS steps of DDP alone, against `fit`."""
    trainer = LocalTrainer(Plain(), short())
    options = {"max_steps": SHORT_STEPS, "batch_size": BATCH, "gradient_accumulation": PARTS, "device": "cpu"}
    trainer.fit(described("ddp", SHORT_STEPS), num_nodes=1, **options)
    assert torch.allclose(train().last.weight, trainer.model.last.weight, rtol=0, atol=1e-6)
    monkeypatch.setattr(GradientWeight, "__call__", lambda *given: None)
    assert not torch.allclose(train().last.weight, trainer.model.last.weight, rtol=0, atol=1e-4)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


def schedule(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=steps))


# Worlds


def launched(rank, num_nodes):
    """The environment of torchrun."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_nodes, "LOCAL_WORLD_SIZE": num_nodes}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {name: str(value) for name, value in own.items()}


def in_world(num_nodes, folder, body):
    """Run `body(rank)` in a world of forks, each launched by torchrun; return what each rank returned, as JSON."""
    return told_in_groups(num_nodes, folder, lambda rank: [launched(rank, num_nodes), body(rank)][1])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def holds_the_law(train, names, num_nodes, steps, folder):
    """Train in a world with `train(name, rank, steps)`, which returns a fingerprint and bytes; compare with `fit`."""

    def body(rank):
        seen = []
        for name in names:
            launched(rank, num_nodes)  # each adapter hides it
            seen.append(train(name, rank, steps))
        return seen

    ranks = in_world(num_nodes, folder, body)
    for k, name in enumerate(names):
        assert [seen[k][0] for seen in ranks] == [simulated(name, num_nodes, steps)] * num_nodes, name
        assert ranks[0][k][1] > 0
