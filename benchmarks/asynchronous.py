"""Asynchronous training against synchronous DiLoCo, on four nodes, where the slowest takes eight times as long.

    python benchmarks/asynchronous.py                   an ill-conditioned regression, three seeds; about five minutes
    python benchmarks/asynchronous.py --task digits     a task of `exogym compare`
    python benchmarks/asynchronous.py --methods "naive" "delayed Nesterov + DyLU" --grid 0.1 0.4

All methods take the same total number of local steps. Each method's outer learning rate is chosen from the same grid,
by the mean final validation loss over seeds. Nothing else is tuned, as in arXiv:2401.09135. Seconds are virtual: a step
of the fastest node takes one second, messages take none. The last column is DiLoCo's loss after the same time
(interpolated between evaluations).

The regression fits a tanh network to another one, without noise, on inputs whose variances span three decades. The
inner optimizer is plain SGD without a schedule. Outer momentum helps a lot there, and staleness hurts a lot.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.errors import TrainingError
from exogym.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, Strategy
from exogym.study.tasks import Task, load_task

STEP_SECONDS = [1.0, 2.0, 4.0, 8.0]
FREE = "1000000000000Gbps"  # messages take no time
SYNCHRONOUS = "DiLoCo (synchronous)"
GRID = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


class Regressor(nn.Module):
    """One hidden layer; its output on a batch (x, y) is the loss."""

    def __init__(self, inputs: int, hidden: int = 16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)


def regression(inputs: int = 20, train: int = 2048, val: int = 512) -> Task:
    """Return the ill-conditioned regression."""
    g = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -1.5, inputs)
    x = torch.randn(train + val, inputs, generator=g) * scale
    first = torch.randn(inputs, 8, generator=g) / scale[:, None] / math.sqrt(inputs)
    y = torch.tanh(x @ first) @ torch.randn(8, 1, generator=g)
    data = [TensorDataset(x[part], y[part]) for part in (slice(train), slice(train, None))]
    return Task(
        "regression", f"regression on {inputs} ill-conditioned inputs, MLP {inputs}-16-1", "made up", *data,
        lambda: Regressor(inputs), num_nodes=4, batch_size=32, max_steps=2000, lr=0.05, H=10, inner_optim="sgd",
    )  # fmt: skip


def methods(H: int) -> dict[str, Callable[..., Strategy]]:
    """Return a function for each method that makes its strategy from `outer_lr` and the inner optimizer's arguments."""

    def asynchronous(**fixed: Any) -> Callable[..., Strategy]:
        return lambda **given: AsyncDiLoCoStrategy(H=H, **fixed, **given)

    return {
        SYNCHRONOUS: lambda **given: DiLoCoStrategy(H=H, **given),
        "naive": asynchronous(rule="nesterov", period=1),
        "naive + DyLU": asynchronous(rule="nesterov", period=1, dylu=True),
        "discount": asynchronous(rule="discount", period=1),
        "FedBuff": asynchronous(rule="fedbuff"),
        "delayed Nesterov": asynchronous(),
        "delayed Nesterov + DyLU": asynchronous(dylu=True),
        "the same, 1 s of grace": asynchronous(dylu=True, grace_s=1.0),
    }


def run(task: Task, make: Callable[..., Strategy], outer_lr: float, seed: int, steps: int) -> tuple[float, Any]:
    """Train once. Return the final validation loss (infinite if it diverged) and the curve (seconds, losses)."""
    strategy = make(
        outer_lr=outer_lr, inner_optim=task.inner_optim, lr=task.lr, max_norm=task.max_norm,
        lr_scheduler=task.lr_scheduler, warmup_steps=task.warmup_steps,
    )  # fmt: skip
    trainer = LocalTrainer(task.make_model(seed), task.train, task.val)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="overflow")  # a run on its way to infinity
            trainer.fit(
                strategy, num_nodes=len(STEP_SECONDS), max_steps=steps, batch_size=task.batch_size, seed=seed,
                partitioner=task.partitioner, val_interval=max(1, steps // 20), progress=False,
                network=FREE, step_seconds=STEP_SECONDS, log_interval=steps,
            )  # fmt: skip
    except TrainingError:
        return math.inf, None
    at, losses = trainer.history.column("val_loss")
    when, seconds = trainer.history.column("time_s")
    final = float(losses[-1])
    return (final if math.isfinite(final) else math.inf), (np.interp(at, when, seconds), losses)


def table(task: Task, names: Sequence[str], grid: Sequence[float], seeds: int, steps: int | None = None) -> list[str]:
    """Return the table's lines."""
    steps = steps or task.max_steps
    lines = [
        f"{task.description}; steps of {STEP_SECONDS} s, H = {task.H}, {steps * len(STEP_SECONDS)} local steps in all, "
        f"{seeds} seeds",
        "",
        "| | outer lr | validation loss | seconds | DiLoCo by then |",
        "| --- | --- | --- | --- | --- |",
    ]
    synchronous: list[Any] = []
    for name in names:
        make = methods(task.H)[name]
        found = {eta: [run(task, make, eta, seed, steps) for seed in range(seeds)] for eta in grid}
        means = {eta: statistics.mean(loss for loss, _ in results) for eta, results in found.items()}
        print(f"# {name}:", {eta: float(f"{mean:.4g}") for eta, mean in means.items()}, flush=True)
        eta = min(means, key=means.__getitem__)
        if math.isinf(means[eta]):
            lines.append(f"| {name} | | diverged | | |")
            continue
        losses, curves = zip(*found[eta], strict=True)
        spread = statistics.stdev(losses) if seeds > 1 else 0.0
        end = statistics.mean(seconds[-1] for seconds, _ in curves)
        synchronous = synchronous or list(curves if name == SYNCHRONOUS else [])
        by_then = [np.interp(end, *curve) for curve in synchronous]
        then = f"{np.mean(by_then):.4f} ± {np.std(by_then, ddof=min(1, seeds - 1)):.4f}" if by_then else ""
        lines.append(f"| {name} | {eta:g} | {means[eta]:.4f} ± {spread:.4f} | {end:.0f} | {then} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="regression", help="regression, digits, shakespeare, mnist or cifar10")
    parser.add_argument("--steps", type=int, help="steps of the fleet: num_nodes local steps each")
    parser.add_argument("--H", type=int, help="local steps per round of the fastest node")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--grid", type=float, nargs="+", default=GRID, help="outer learning rates to choose from")
    parser.add_argument("--methods", nargs="+", default=list(methods(1)), choices=list(methods(1)))
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = regression() if given.task == "regression" else load_task(given.task)
    task = dataclasses.replace(task, H=given.H or task.H)
    print("\n".join(table(task, given.methods, given.grid, given.seeds, given.steps)))


if __name__ == "__main__":
    main()
