"""The gain from a second process: node-steps per second with one and two processes, with start-up; and two threads.

    python benchmarks/placement.py --seconds 60

Each run takes about `--seconds` in one process. Both layouts take turns. The ratio compares wall-clock times of the
same run. Both must end in the same bits.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.models import MLP, CharGPT, SmallCNN
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy
from exogym.testing import fingerprint

NODES = 4
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "DDP": lambda: SimpleReduceStrategy(lr=1e-3),
    "DiLoCo (H=30)": lambda: DiLoCoStrategy(lr=1e-3, H=30),
}


def problems() -> dict[str, tuple[nn.Module, TensorDataset, int]]:
    """Return name to (model that gives its loss, data, batch size)."""
    torch.manual_seed(0)
    images = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
    text = torch.randint(0, 65, (2048, 65))
    return {
        "CNN": (SmallCNN(), images, 16),
        "GPT": (CharGPT(vocab_size=65, block_size=64), TensorDataset(text[:, :-1], text[:, 1:]), 8),
    }


def run(problem: tuple[nn.Module, TensorDataset, int], strategy: Strategy, steps: int, processes: int) -> Any:
    model, data, batch_size = problem
    model = copy.deepcopy(model)
    start = time.perf_counter()
    LocalTrainer(model, data).fit(
        strategy, num_nodes=NODES, max_steps=steps, batch_size=batch_size, device="cpu", processes=processes
    )
    return time.perf_counter() - start, fingerprint(model)


def two_threads(model: nn.Module, batch: Any, seconds: float) -> float:
    """Return the gradients that two Python threads compute, over those of one thread in the same time."""

    def count(threads: int) -> float:
        done = [0] * threads
        until = time.perf_counter() + seconds

        def work(k: int, own: nn.Module) -> None:
            while time.perf_counter() < until:
                own(batch)["loss"].backward()
                own.zero_grad()
                done[k] += 1

        members = [threading.Thread(target=work, args=(k, copy.deepcopy(model))) for k in range(threads)]
        for member in members:
            member.start()
        for member in members:
            member.join()
        return sum(done) / seconds

    return statistics.median(count(2) / count(1) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | strategy | node-steps/s, one process | two processes | ratio |\n| --- | --- | --- | --- | --- |")
    for name, problem in problems().items():
        for label, make in STRATEGIES.items():
            trial, _ = run(problem, make(), 60, 1)
            steps = max(60, round(given.seconds / trial * 60))
            times: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(given.repeat):
                marks = set()
                for processes in (1, 2):
                    taken, mark = run(problem, make(), steps, processes)
                    times[processes].append(taken)
                    marks.add(mark)
                assert len(marks) == 1, "other bits"
            one, two = (statistics.median(times[p]) for p in (1, 2))
            rates = f"{NODES * steps / one:,.0f} | {NODES * steps / two:,.0f}"
            print(f"| {name} | {label} | {rates} | {one / two:.2f} |", flush=True)
    for name, (model, data, size) in problems().items():
        batch = tuple(x[:size] for x in data.tensors)
        print(f"two threads, {name}: {two_threads(model, batch, 2.0):.2f} times one")
    mlp = MLP([784, 200, 10])
    print(
        f"two threads, MLP: {two_threads(mlp, (torch.randn(20, 784), torch.randint(0, 10, (20,))), 2.0):.2f} times one"
    )


if __name__ == "__main__":
    main()
