"""Time the steps around a checkpoint: written while nodes compute, and with nodes that wait, in turns.

    python benchmarks/beside.py --turns 4    about three minutes
    python benchmarks/beside.py --evaluation --turns 4    about a minute

Four nodes of a model with 5 million parameters train with DiLoCo and AdamW in one process, with a checkpoint every
`INTERVAL` steps. The script measures the seconds between the ends of two steps in the training thread, without the time
in which this thread waited for a processor (Linux's schedstat), so other programs disturb less. The steps after the
writing, in the same run, say how long a plain step takes.

- `writing`: seconds from the beginning to the end of a checkpoint's writing.
- `copy`: milliseconds for the copy in memory, during which nodes wait.
- `lost`: milliseconds per checkpoint by which steps are longer than plain ones, with the smallest and the largest.
- `beside`: the part of `lost` beside the copy, as a share of the plain time of the steps during the writing.

The first checkpoint of each run is not counted: it warms up.

With `--evaluation` the script shows what a thread for evaluations would gain, in plain torch: a thread evaluates a copy
of the model while the training thread takes steps of four nodes. `hidden` is the share of the evaluation's time that a
run would save.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.core.saving import behind, checkpoint
from exogym.core.training.standing import RunStanding
from exogym.strategy import DiLoCoStrategy

NODES, INTERVAL, CHECKPOINTS = 4, 20, 3
WAYS = {"behind": True, "blocking": False}
QUEUE = Path("/proc/thread-self/schedstat")
Moment = tuple[float, float]  # wall seconds; the same without waiting for a processor


def now() -> Moment:
    wall_s = time.perf_counter()
    return wall_s, wall_s - (int(QUEUE.read_text().split()[1]) / 1e9 if QUEUE.exists() else 0.0)


class Timed:
    """Wraps a function to record the first and the last moment of each call."""

    def __init__(self, where: Any, name: str):
        self.spans: list[tuple[Moment, Moment]] = []
        self.where, self.name, self.call = where, name, getattr(where, name)

    def __enter__(self) -> Timed:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return self.call(*args, **kwargs)
            finally:
                self.spans.append((start, now()))

        setattr(self.where, self.name, timed)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self.where, self.name, self.call)

    @property
    def seconds(self) -> list[float]:
        return [end[1] - start[1] for start, end in self.spans]


def problem(width: int) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    x = torch.randn(4096, 64)
    return model, TensorDataset(x, (x.sum(1) > 0).long())


def run(way: str, given: argparse.Namespace) -> list[dict[str, float]]:
    """Train once. Return each checkpoint's times in seconds."""
    model, data = problem(given.width)
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.cross_entropy)
    ends: list[Moment] = []
    with (
        tempfile.TemporaryDirectory(dir=given.dir) as folder, Timed(RunStanding, "_snapshot") as taking,
        Timed(behind.Writer, "start") as copying, Timed(checkpoint, "save") as writing,
    ):  # fmt: skip
        trainer.fit(
            DiLoCoStrategy("adamw", lr=1e-3, H=INTERVAL), num_nodes=NODES, max_steps=INTERVAL * (CHECKPOINTS + 2),
            batch_size=given.batch_size, device="cpu", progress=False,
            callbacks=[Every(1, lambda loop: ends.append(now()))],
            save_dir=folder, checkpoint_interval=INTERVAL, placement=Placement(overlap=WAYS[way], keep_checkpoints=1),
        )  # fmt: skip
    during_of: list[list[float]] = []
    plain: list[float] = []
    for k in range(1, CHECKPOINTS + 1):
        after = ends[(k + 1) * INTERVAL - 1 :][:INTERVAL]  # without the last step, which has the outer step
        steps = [(start[0] < writing.spans[k][1][0], stop[1] - start[1]) for start, stop in itertools.pairwise(after)]
        during_of.append([s for is_during, s in steps if is_during])
        plain += [s for is_during, s in steps if not is_during]
    found, plain_s = [], statistics.median(plain)
    for k, during in enumerate(during_of, 1):
        (began, _), (ended, _) = writing.spans[k]
        copy_s = taking.seconds[k] + copying.seconds[k] if WAYS[way] else 0.0
        lost_s = sum(during) - len(during) * plain_s
        found.append(
            {"plain": plain_s, "writing": ended - began, "copy": copy_s, "lost": lost_s,
             "beside": (lost_s - copy_s) / (len(during) * plain_s)}
        )  # fmt: skip
    return found


def evaluation(width: int, batch_size: int) -> tuple[float, float, float]:
    """Return the seconds of a plain step and of an evaluation, and the share of the evaluation that a thread hides."""
    model, data = problem(width)
    x, y = data.tensors
    nodes = [copy.deepcopy(model) for _ in range(NODES)]
    optimizers = [torch.optim.AdamW(node.parameters()) for node in nodes]

    def step(k: int) -> float:
        start = now()[1]
        at = slice(k % 32 * batch_size, (k % 32 + 1) * batch_size)
        for node, optimizer in zip(nodes, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(node(x[at]), y[at]).backward()
            optimizer.step()
        return now()[1] - start

    def evaluate() -> None:
        with torch.no_grad():
            for a in range(0, 8 * len(x), 256):
                nn.functional.cross_entropy(model(x[a % len(x) :][:256]), y[a % len(x) :][:256]).item()

    plain_s = statistics.median(step(k) for k in range(20))
    start = now()[1]
    evaluate()
    alone_s, during = now()[1] - start, []
    thread = threading.Thread(target=evaluate)
    thread.start()
    while thread.is_alive():
        during.append(step(len(during)))
    return plain_s, alone_s, 1 - (sum(during) - len(during) * plain_s) / alone_s


def evaluations(given: argparse.Namespace) -> None:
    print("| width | plain step, ms | evaluation, ms | hidden |")
    print("| --- | --- | --- | --- |")
    for width in (32, 256, given.width):
        plain_s, alone_s, hidden = zip(*(evaluation(width, given.batch_size) for _ in range(given.turns)), strict=True)
        each = ", ".join(f"{100 * share:.0f}" for share in sorted(hidden))
        print(
            f"| {width} | {1e3 * statistics.median(plain_s):.1f} | {1e3 * statistics.median(alone_s):.0f} | "
            f"{100 * statistics.median(hidden):.0f} % ({each}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--width", type=int, default=2200, help="2200: 5 million parameters")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--evaluation", action="store_true", help="measure a thread for evaluations")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="folder on the disk for checkpoints")
    given = parser.parse_args()
    size = sum(p.numel() for p in problem(given.width)[0].parameters())
    print(f"{NODES} nodes, {size:,} parameters, batch {given.batch_size}, load {os.getloadavg()[0]:.1f}\n")
    torch.set_num_threads(1)
    if given.evaluation:
        evaluations(given)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(given.turns):
        for way in WAYS:
            found[way] += run(way, given)
    print("| way | plain step, ms | writing, s | copy, ms | lost, ms | beside |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, times in found.items():
        middle = {name: statistics.median(one[name] for one in times) for name in times[0]}
        least, most = (1e3 * f(one["lost"] for one in times) for f in (min, max))
        print(
            f"| {way} | {1e3 * middle['plain']:.0f} | {middle['writing']:.2f} | {1e3 * middle['copy']:.0f} | "
            f"{1e3 * middle['lost']:.0f} ({least:.0f} to {most:.0f}) | "
            + (f"{100 * middle['beside']:.1f} % |" if WAYS[way] else "|")
        )


if __name__ == "__main__":
    main()
