"""Post-local SGD: DDP, then local SGD; against its rule, and beside torch's own optimizer and hook on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Regressor, plain, put, same, shards, train, unlike, vector
from processes import python
from torch import Tensor, nn
from wrapped import made

from exogym.callbacks import Every
from exogym.contrib import NormCap
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import FedAvgStrategy, OptimSpec, PostLocalSGDStrategy, SimpleReduceStrategy

INNER = {"sgd": OptimSpec("sgd", lr=0.05, momentum=0.9), "adamw": OptimSpec("adamw", lr=0.02)}

# Three ranks on gloo, each with the model and the data of one of our nodes; torch's averager acts after the steps
# W + 1, W + 1 + H, ... for a warm-up of W, so W = t0 + H - 1 is our rule.
TORCHS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from problems import BATCH, Regressor, loss_of, shards, vector

def rank(r, n, file, start, H, steps, warmup, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=r, world_size=n)
    groups = [dist.new_group([i]) for i in range(n)]
    model = DistributedDataParallel(Regressor())
    state = PostLocalSGDState(process_group=None, subgroup=groups[r], start_localSGD_iter=start)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False), PeriodicModelAverager(H, warmup))
    x, y = shards(n)[r].tensors
    for step in range(steps):
        at = step % (len(x) // BATCH) * BATCH
        optimizer.zero_grad()
        loss_of(model, x[at : at + BATCH], y[at : at + BATCH]).backward()
        optimizer.step()
    torch.save(vector(model.module), f"{out}/{r}.pt")
    dist.destroy_process_group()

if __name__ == "__main__":
    folder, start, H, steps, warmup = sys.argv[1], *map(int, sys.argv[2:])
    mp.start_processes(rank, (3, f"{folder}/store", start, H, steps, warmup, folder), nprocs=3, start_method="fork")
"""


def by_torch(folder: Path, start: int, H: int, steps: int) -> Tensor:
    script = folder / "torchs.py"
    script.write_text(TORCHS)
    done = python(script, folder, start, H, steps, start + H - 1)
    assert done.returncode == 0, done.stderr
    return torch.stack([torch.load(folder / f"{r}.pt") for r in range(3)])


@pytest.mark.parametrize("start", [3, 4])
def test_it_is_torchs_post_local_sgd(start: int, tmp_path: Path) -> None:
    """Whether or not H divides t0."""
    ours = train(PostLocalSGDStrategy(INNER["sgd"], H=3, start_step=start), shards(3), 3, steps=11)
    same(ours.rows, by_torch(tmp_path, start, 3, 11))
    unlike(ours.rows, train(PostLocalSGDStrategy(INNER["sgd"], H=3, start_step=start + 1), shards(3), 3, 11).rows)


def test_rounds_of_different_lengths_begin_at_the_switch() -> None:
    late = PostLocalSGDStrategy(H=lambda r: r + 1, start_step=4).communication_modules[0]
    steps = [0]
    while steps[-1] < 14:
        steps.append(late.next_event(steps[-1]))
    assert steps == [0, 4, 5, 7, 10, 14]


def rule(steps: int, start: int, averages: set[int]) -> Tensor:
    def before(models: list[nn.Module], step: int) -> None:
        for group in zip(*(m.parameters() for m in models), strict=True):
            mean = torch.stack([p.grad for p in group]).mean(0)
            for p in group if step <= start else ():
                p.grad = mean.clone()

    def after(models: list[nn.Module], step: int) -> None:
        if step in averages:
            mean = torch.stack([vector(m) for m in models]).mean(0)
            for m in models:
                put(m, mean)

    def momentum(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)  # type: ignore[arg-type]

    return plain(shards(3), steps, momentum, before=before, after=after)


@pytest.mark.parametrize("name", INNER)
def test_before_the_switch_it_is_ddp_and_without_one_local_sgd(name: str) -> None:
    ddp = train(SimpleReduceStrategy(INNER[name]), final_sync=True)
    late = train(PostLocalSGDStrategy(INNER[name], H=5, start_step=12), final_sync=True)
    assert torch.equal(late.rows, ddp.rows) and late.tx.tolist() == ddp.tx.tolist()
    unlike(train(PostLocalSGDStrategy(INNER[name], H=5, start_step=9)).rows, ddp.rows)
    local = train(FedAvgStrategy(INNER[name], H=5))
    at_once = train(PostLocalSGDStrategy(INNER[name], H=5, start_step=0))
    assert torch.equal(at_once.rows, local.rows) and at_once.tx.tolist() == local.tx.tolist()


def test_averages_at_every_step_are_ddp_with_sgd() -> None:
    ddp = train(SimpleReduceStrategy(INNER["sgd"])).rows
    same(train(PostLocalSGDStrategy(INNER["sgd"], H=1, start_step=0)).rows, ddp)
    unlike(train(PostLocalSGDStrategy(INNER["adamw"], H=1, start_step=0)).rows, train(
        SimpleReduceStrategy(INNER["adamw"])).rows)  # fmt: skip


@pytest.mark.parametrize("faults", [None, Faults(absent={1: [(3, 5)]})])
def test_a_cap_measures_the_first_late_update_from_the_switch(faults: Faults | None) -> None:
    """Before, it was measured from the start of training, so the cap threw the model back."""
    rows, cap = {}, 0.01

    def note(loop: Any) -> None:
        rows[loop.step] = loop.rows()[0].clone()

    capped = made(PostLocalSGDStrategy, "sgd", H=3, start_step=9, lr=1.0, robust=NormCap(cap))
    train(capped, shards(3), 3, steps=12, faults=faults, callbacks=[Every(1, note)])
    assert (rows[9] - rows[9][0]).norm() < 1e-12 and (rows[9][0] - vector(Regressor())).norm() > 2 * cap
    assert 0 < (rows[12][0] - rows[9][0]).norm() <= cap * (1 + 1e-9)


def test_a_switch_must_be_a_step() -> None:
    with pytest.raises(ArgumentError, match="start_step=-1"):
        PostLocalSGDStrategy(start_step=-1)
