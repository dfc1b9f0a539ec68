"""Short runs that save checkpoints, and a folder of one put right after it was changed by hand."""

import contextlib
import ctypes
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.saving.checkpoint_files import file_sum, sum_of
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy, Strategy

STEPS = 12
TIMED = ("wall_s", "memory_bytes", "device_use", "examples_per_s")


def examples(count=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def trainer_of(model=None, val=True):
    val_data = examples(20, seed=1) if val else None
    return LocalTrainer(network() if model is None else model, examples(), val_data, loss_fn=F.cross_entropy)


def fit(strategy, folder=None, trainer=None, **options):
    trainer = trainer_of() if trainer is None else trainer
    options = {"num_nodes": 3, "max_steps": STEPS, "batch_size": 4, "device": "cpu"} | options
    trainer.fit(strategy, save_dir=folder, **options)
    return trainer


def rows(trainer):
    return [{k: v for k, v in row.items() if k not in TIMED} for row in trainer.history]


class ByHand(Strategy):
    """A user's strategy with a momentum of its own that lives in attributes, and random numbers."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.momentum = [torch.zeros_like(p) for p in model.parameters()]

    def step(self):
        for p, m in zip(self.model.parameters(), self.momentum, strict=True):
            m.mul_(0.9).add_(p.grad + 0.01 * torch.randn(p.shape))
            p.grad.copy_(m)
        self.communicate_gradients()
        self.update_parameters()
        super().step()


SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)
RUNS = {
    "ddp": (lambda: SimpleReduceStrategy("adamw", lr=0.02, lr_scheduler="cosine", warmup_steps=2, max_norm=1.0), {}),
    "ddp fp16": (lambda: SimpleReduceStrategy(SGD), {"precision": "fp16"}),
    "local steps fp16": (lambda: FedAvgStrategy(SGD, H=5), {"precision": "fp16", "log_interval": 3}),
    "diloco bf16": (lambda: DiLoCoStrategy("adamw", lr=0.02, H=5, lr_scheduler="cosine"), {"precision": "bf16"}),
    "pieces": (lambda: FedAvgStrategy(SGD, H=5), {"batch_size": 6, "minibatch_size": 4, "val_interval": 3}),
    "by hand": (lambda: ByHand("adamw", lr=0.02, lr_scheduler="cosine"), {}),
    "by hand fp16": (lambda: ByHand(SGD), {"precision": "fp16"}),
}


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int):
    """A file system of its own of so many bytes; skips where one cannot be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    options = f"size={size_bytes}".encode()
    if os.geteuid() != 0 or libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) != 0:
        pytest.skip("no permission to mount a small file system")
    try:
        yield
    finally:
        libc.umount2(str(folder).encode(), 2)


def sign(path, meta):
    """Give a folder's files the sums that they have, and run.json its own."""
    sums = {file.name: file_sum(file) for file in sorted(path.iterdir()) if file.name != "run.json"}
    meta = {k: v for k, v in meta.items() if k != "sha256_of_this"} | {"sha256": sums}
    (path / "run.json").write_text(json.dumps(meta | {"sha256_of_this": sum_of(meta)}))
