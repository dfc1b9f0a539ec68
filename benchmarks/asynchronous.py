"""Asynchronous training against synchronous DiLoCo, on four nodes of very different speed.

    python benchmarks/asynchronous.py                     Shakespeare, a GPT of 16k parameters, three seeds
    python benchmarks/asynchronous.py --task digits

Every row takes the same number of local steps in all, and has its outer learning rate chosen by the mean of the final
validation losses over the seeds, from one grid; nothing else is tuned, as in arXiv:2401.09135. Seconds are virtual: a
step of the fastest node takes one, messages nothing; those of the last column are the seconds until the synchronous
run's final loss was reached first (interpolated between evaluations), in units of the synchronous run's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from exogym import LocalTrainer
from exogym.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, Strategy
from exogym.tasks import Task, load_task

STEP_SECONDS = [1.0, 2.0, 4.0, 8.0]
FREE = "1000000000000Gbps"  # messages that take no time
GRID = (0.05, 0.1, 0.2, 0.4, 0.7)


def rows(H: int) -> dict[str, Callable[..., Strategy]]:
    """Return a maker of each row's strategy, called with `outer_lr` and the inner optimizer's arguments."""

    def asynchronous(**fixed: Any) -> Callable[..., Strategy]:
        return lambda **given: AsyncDiLoCoStrategy(H=H, **fixed, **given)

    return {
        "DiLoCo (synchronous)": lambda **given: DiLoCoStrategy(H=H, **given),
        "naive": asynchronous(rule="nesterov", period=1),
        "naive + DyLU": asynchronous(rule="nesterov", period=1, dylu=True),
        "discount": asynchronous(rule="discount", period=1),
        "FedBuff": asynchronous(rule="fedbuff"),
        "delayed Nesterov": asynchronous(),
        "delayed Nesterov + DyLU": asynchronous(dylu=True),
    }


def run(task: Task, make: Callable[..., Strategy], outer_lr: float, seed: int, steps: int) -> tuple[float, Any]:
    """Train once; return the final validation loss and the curve (seconds, losses)."""
    strategy = make(
        outer_lr=outer_lr, inner_optim=task.inner_optim, lr=task.lr, max_norm=task.max_norm,
        lr_scheduler=task.lr_scheduler, warmup_steps=task.warmup_steps,
    )  # fmt: skip
    trainer = LocalTrainer(task.make_model(seed), task.train, task.val)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(
                strategy, num_nodes=len(STEP_SECONDS), max_steps=steps, batch_size=task.batch_size, seed=seed,
                partitioner=task.partitioner, val_interval=max(1, steps // 20), progress=False,
                network=FREE, step_seconds=STEP_SECONDS, log_interval=steps,
            )  # fmt: skip
        except ArithmeticError:
            return math.inf, None
    at, losses = trainer.history.column("val_loss")
    when, seconds = trainer.history.column("time_s")
    return float(losses[-1]), (np.interp(at, when, seconds), losses)


def seconds_to(target: float, curve: Any) -> float:
    """Return when a curve (seconds, losses) first falls to `target`, inf if it does not."""
    seconds, losses = curve
    for k in range(1, len(losses)):
        if losses[k] <= target:
            share = (losses[k - 1] - target) / max(losses[k - 1] - losses[k], 1e-12)
            return float(seconds[k - 1] + min(max(share, 0.0), 1.0) * (seconds[k] - seconds[k - 1]))
    return math.inf


def table(name: str, steps: int | None, seeds: int, grid: tuple[float, ...]) -> list[str]:
    """Return the lines of the table."""
    small = {"block_size": 32, "n_layer": 1, "n_embd": 32} if name == "shakespeare" else {}
    task = load_task(name, **small)
    steps = steps or task.steps
    lines = [
        f"{task.description}; {len(STEP_SECONDS)} nodes, a step takes {STEP_SECONDS} s, H = {task.H}, "
        f"{steps * len(STEP_SECONDS)} local steps in all, {seeds} seeds",
        "",
        "| | outer lr | validation loss | seconds | to the loss of DiLoCo |",
        "| --- | --- | --- | --- | --- |",
    ]
    reference: list[tuple[float, float]] = []
    for row, make in rows(task.H).items():
        found = {eta: [run(task, make, eta, seed, steps) for seed in range(seeds)] for eta in grid}
        print(f"# {row}:", {eta: round(statistics.mean(x for x, _ in f), 4) for eta, f in found.items()}, flush=True)
        eta = min(found, key=lambda eta: statistics.mean(loss for loss, _ in found[eta]))
        losses = [loss for loss, _ in found[eta]]
        spread = statistics.stdev(losses) if seeds > 1 else 0.0
        if not reference:
            reference = [(loss, curve[0][-1]) for loss, curve in found[eta]]
        shares = [seconds_to(goal, curve) / whole for (goal, whole), (_, curve) in zip(reference, found[eta], strict=True)]
        whole = statistics.mean(curve[0][-1] for _, curve in found[eta])
        reached = "not reached" if math.isinf(max(shares)) else f"{statistics.mean(shares):.2f}"
        lines.append(f"| {row} | {eta:g} | {statistics.mean(losses):.4f} ± {spread:.4f} | {whole:.0f} | {reached} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="shakespeare")
    parser.add_argument("--steps", type=int, help="of the fleet; a step is as many local steps as there are nodes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--grid", type=float, nargs="+", default=GRID, help="outer learning rates to choose from")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(table(given.task, given.steps, given.seeds, tuple(given.grid))))


if __name__ == "__main__":
    main()
