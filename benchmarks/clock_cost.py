"""The cost of the virtual clock: FedAvg over 100 clients with 30 local steps each, with and without a network.

    python benchmarks/clock_cost.py --repeat 5

Both take turns in one process. The figure is the median ratio of CPU seconds. Both must end in the same bits.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.models import MLP
from exogym.strategy import FedAvgStrategy
from exogym.testing import fingerprint

NODES, LOCAL_STEPS, ROUNDS = 100, 30, 2


def run(model: MLP, data: TensorDataset, **given: Any) -> tuple[float, str]:
    model = copy.deepcopy(model)
    trainer = LocalTrainer(model, data)
    start = time.process_time()
    trainer.fit(
        FedAvgStrategy("sgd", H=LOCAL_STEPS, lr=0.05), num_nodes=NODES, max_steps=ROUNDS * LOCAL_STEPS, batch_size=20,
        device="cpu", **given,
    )  # fmt: skip
    return time.process_time() - start, fingerprint(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MLP([784, 200, 10])
    data = TensorDataset(torch.randn(60_000, 784), torch.randint(0, 10, (60_000,)))
    layouts = {
        "given": {"network": "100Mbps,5ms", "step_seconds": "10ms"},
        "measured": {"network": "100Mbps,5ms"},
    }
    run(model, data)  # warm
    for name, options in layouts.items():
        ratios = []
        for _ in range(given.repeat):
            plain, mark = run(model, data)
            timed, other = run(model, data, **options)
            assert mark == other, "other bits"
            ratios.append(timed / plain)
        print(
            f"clock on, step times {name}: {statistics.median(ratios):.3f} of the time without "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
