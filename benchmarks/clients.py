"""The cost of sampled clients, for growing numbers: seconds to start, seconds per round, and memory.

    python benchmarks/clients.py                  all rows, about a minute
    python benchmarks/clients.py --rows 0,1       some of them

FedAvg or SCAFFOLD with an MLP 784-200-10, batches of 20, plain SGD, one intra-op thread. Each client draws 100 pictures
from its number when it first acts. A row is its own process. A round's time is the difference between a longer and a
shorter run, so the start is not included. Memory is the main process's maximum, with torch.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.strategy import FedAvgStrategy, ScaffoldStrategy

ROWS = [  # strategy, clients, sampled clients, steps per round, rounds, processes
    ("fedavg", 200, 20, 5, 40, 1),
    ("fedavg", 100_000, 20, 5, 40, 1),
    ("fedavg", 1_000_000, 20, 5, 40, 1),
    ("fedavg", 5_000, 50, 3, 30, 1),
    ("fedavg", 5_000, 50, 3, 30, 2),
    ("scaffold", 200, 20, 5, 40, 1),
    ("scaffold", 100_000, 20, 5, 40, 1),
]
STRATEGIES = {"fedavg": FedAvgStrategy, "scaffold": ScaffoldStrategy}


def seconds(name: str, clients: int, sampled: int, steps: int, rounds: int, processes: int) -> float:
    """Train for some rounds. Return the seconds."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60_000, 784, generator=generator), torch.randint(0, 10, (60_000,), generator=generator)

    def data(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        drawn = torch.randint(0, len(x), (100,), generator=torch.Generator().manual_seed(rank))
        return TensorDataset(x[drawn], y[drawn])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.cross_entropy)
    strategy = STRATEGIES[name]("sgd", H=steps, lr=0.05, client_fraction=sampled / clients, weighting="uniform")
    begin = time.perf_counter()
    trainer.fit(
        strategy, num_nodes=clients, max_steps=steps * rounds, batch_size=20, progress=False, processes=processes
    )
    return time.perf_counter() - begin


def measure(row: int) -> None:
    warnings.simplefilter("ignore")  # warnings about few rounds
    name, clients, sampled, steps, rounds, processes = ROWS[row]
    few, much = (name, clients, sampled, steps, 3, processes), (name, clients, sampled, steps, 3 + rounds, processes)
    seconds(*few)  # the first run loads modules
    short = seconds(*few)
    each = (seconds(*much) - short) / rounds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {name} | {clients:,} | {sampled} | {steps} | {processes} | {max(0.0, short - 3 * each):.2f} | "
        f"{1000 * each:.1f} | {memory:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, range(len(ROWS)))), help="numbers of rows, from 0")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.row is not None:
        measure(args.row)
        return
    print("| strategy | clients | sampled | steps | processes | start s | round ms | memory MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for row in args.rows.split(","):
        subprocess.run([sys.executable, __file__, "--row", row], check=True)


if __name__ == "__main__":
    main()
