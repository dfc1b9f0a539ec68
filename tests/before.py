"""Folders that an earlier commit wrote, in tests/fixtures: what is in them, and how the same runs are trained again.

They are a run, two comparisons and a sweep, each of them finished and stopped, and a checkpoint of each way of training
in `RUNS` and `RETIRED`. tests/fixtures/make.py wrote them.
"""

import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.faults import Faults
from exogym.network import Network
from exogym.strategy import Averaging, DifferentialPrivacy, FedAvgStrategy, Strategy
from exogym.strategy.communicate import all_reduce
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint

PACKED = Path(__file__).parent / "fixtures" / "folders.tar.gz"
ABOUT = "about.json"
STEPS, SAVED = 12, 7  # the checkpoint is in the middle of a round, and of a schedule
SMALL = ["--nodes", "2", "--steps", "8", "--seeds", "1", "--batch-size", "4", "--val-interval", "4", "--device", "cpu"]
COMPARE = ["compare", "--strategies", "ddp,diloco:H=3,fedavg:H=3:client_fraction=0.5", *SMALL]
COMPARE_RETIRED = ["compare", "--strategies", "diloco:H=3:tuner=drift,ddp", *SMALL]
SWEEP = ["sweep", "--sweep", "H=2,3", "--strategy", "diloco", "--processes", "1", *SMALL]
RUN_DIR: dict[str, Any] = {"checkpoint_interval": 4, "val_interval": 4}
TIMED: dict[str, Any] = {"network": Network("1Mbps", "20ms"), "step_seconds": [0.1, 0.1, 0.2, 0.15]}
PRIVATE = Averaging(privacy=DifferentialPrivacy(clip=1.0, noise_multiplier=0.5))


class OneNode(Strategy):
    """A strategy of one's own, for one node."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.momentum = [torch.zeros_like(p) for p in model.parameters()]

    def step(self) -> None:
        self.update_parameters()
        for p, m in zip(self.model.parameters(), self.momentum, strict=True):
            m.mul_(0.5).add_(p.detach(), alpha=1e-3 * (self.rank + 1))
            if self.local_step % 3 == 2:
                all_reduce(p.data, op="mean")
        super().step()


class Way(NamedTuple):
    """A strategy, as text or a function that makes it, and further arguments of `fit`."""

    strategy: str | Callable[[], Strategy]
    fit: Mapping[str, Any] = MappingProxyType({})

    def make(self) -> Strategy:
        return parse_strategy(self.strategy, lr=0.02) if isinstance(self.strategy, str) else self.strategy()


RUNS = {
    "ddp": Way("ddp:lr_scheduler=cosine:warmup_steps=2:max_norm=1.0"),
    "diloco": Way("diloco:H=3:outer_momentum=0.5"),
    "streaming_diloco": Way("streaming_diloco:H=4:num_fragments=2:fragment_sync_delay=1"),
    "async_diloco": Way("async_diloco:H=3", TIMED),
    "muloco": Way("muloco:H=3"),
    "sparseloco": Way("sparseloco:H=3:topk=2:chunk=4"),
    "noloco": Way("noloco:H=3"),
    "fedavg": Way("fedavg:H=3"),
    "fedprox": Way("fedprox:H=3:mu=0.1"),
    "fedopt": Way("fedopt:H=3:server_optim=adam"),
    "scaffold": Way("scaffold:H=3"),
    "post_local_sgd": Way("post_local_sgd:H=3:start_step=4"),
    "sparta": Way("sparta:p_sparta=0.3"),
    "sparta_diloco": Way("sparta_diloco:p_sparta=0.3:H=5"),
    "demo": Way("demo:compression_topk=2:compression_chunk=4"),
    "gossip": Way("gossip:H=2"),
    "powersgd": Way("powersgd:rank=1:start_step=2:min_rate=0"),
    "topk": Way("topk:density=0.3"),
    "signsgd": Way("signsgd:error_feedback=true"),
    "qsgd": Way("qsgd:levels=4:bucket=8"),
    # their kinds that core keeps
    "diloco delay": Way("diloco:H=3:delay=2", TIMED),
    "diloco eager": Way("diloco:H=3:eager=true"),
    "diloco islands": Way("diloco:H=4:island_size=2:island_H=2"),
    "fedavg islands": Way("fedavg:H=3:island_size=2"),
    "fedavg clients": Way("fedavg:H=3:client_fraction=0.25", {"num_nodes": 16, "batch_size": 1}),
    "fedavg privacy": Way(lambda: FedAvgStrategy(lr=0.02, H=3, client_fraction=0.5, averaging=PRIVATE)),
    "fedavg personal": Way("fedavg:H=3:personal=1"),
    "fedopt transport": Way("fedopt:H=3:transport=tree"),
    "ddp transport": Way("ddp:transport=server", TIMED),
    "ddp vmap": Way("ddp", {"compute": "vmap"}),
    "ddp bf16": Way("ddp", {"precision": "bf16"}),
    "ddp accumulation": Way("ddp", {"gradient_accumulation": 2, "minibatch_size": 2}),
    "diloco faults": Way("diloco:H=3", {"faults": Faults(drop_rate=0.1, lost_rate=0.1, slow={1: 0.5}, seed=3)}),
    "fedavg parts": Way("fedavg:H=3:weighting=examples", {"partitioner": "dirichlet:0.5"}),
    "own": Way(lambda: OneNode("adamw", lr=0.02)),
}

# Ways that use an option that is going to be retired -> the option's name
RETIRED = {
    "diloco drift": (Way("diloco:H=3:tuner=drift"), "tuner"),
    "diloco autocorrelation": (Way("diloco:H=3:tuner=autocorrelation"), "tuner"),
    "diloco budget": (Way("diloco:H=3:tuner=2000"), "tuner"),
    "ddp robust": (Way("ddp:robust=median"), "robust"),
    "fedavg norm cap": (Way("fedavg:H=3:robust=norm_cap"), "robust"),
    "fedavg secure": (Way("fedavg:H=3:secure_aggregation=true"), "secure_aggregation"),
    "fedavg over sampling": (Way("fedavg:H=3:client_fraction=0.5:over_sampling=0.5", TIMED), "over_sampling"),
    "fedavg deadline": (Way("fedavg:H=3:client_fraction=0.5:deadline_s=0.5:min_reports=1", TIMED), "deadline_s"),
    "async activation": (Way("async_diloco:H=3:activation=0.2", TIMED), "activation"),
    "sparta transport": (Way("sparta:p_sparta=0.3:transport=tree"), "transport"),
    "ddp compiled": (Way("ddp", {"compute": "compiled"}), "compute"),
}
WAYS = RUNS | {name: way for name, (way, _) in RETIRED.items()}


def problem() -> tuple[nn.Module, TensorDataset]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 4, generator=g)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), TensorDataset(x, (x.sum(1) > 0).long())


def fit(way: Way, **more: Any) -> LocalTrainer:
    """Train `way`; returns the trainer, whose model is the trained one."""
    model, data = problem()
    trainer = LocalTrainer(model, data, data, loss_fn=F.cross_entropy)
    given = {"num_nodes": 4, "batch_size": 4, "device": "cpu", "val_interval": 6, "max_steps": STEPS, "progress": False}
    trainer.fit(way.make(), **{**given, **way.fit, **more})
    return trainer


def arithmetic() -> str:
    """Return the fingerprint of a few steps in plain PyTorch: where it differs, so may the last bits of every run."""
    model, data = problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x, y = data[4 * step : 4 * step + 4]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return fingerprint(model)


def checkpoints(top: Path, name: str) -> Path:
    return top / "checkpoints" / name.replace(" ", "-")


def unpack(top: Path) -> None:
    with tarfile.open(PACKED) as packed:
        packed.extractall(top, filter="data")
