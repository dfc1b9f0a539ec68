"""`compute="compiled"` against `compute="loop"`: seconds of a node's step after compiling, and of compiling.

    python benchmarks/compiled.py            three models, in about four minutes; less with the compiler's cache
    python benchmarks/compiled.py --only gpt

One process, one intra-op thread. FedAvg with rounds of 30 local steps. The first round, which makes graphs, is left
out; the figure is the median of the others. The two ways take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from core import BATCH, digits, loss_fn, mlp
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from exogym import LocalTrainer
from exogym.models import CharGPT
from exogym.strategy import FedAvgStrategy

H, ROUNDS = 30, 4


def gpt() -> nn.Module:
    torch.manual_seed(1)
    return CharGPT(65, 32, n_layer=2, n_head=4, n_embd=64)


def letters() -> TensorDataset:
    tokens = torch.randint(0, 65, (4096, 33), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


CASES = {  # optimizer, rate, nodes, batch
    "mlp, sgd": ("sgd", 0.1, 100, BATCH),
    "mlp, adamw": ("adamw", 1e-3, 100, BATCH),
    "gpt, adamw": ("adamw", 1e-3, 10, 4),
}


def rounds(how: str, case: str, data: Dataset[object]) -> tuple[list[float], float]:
    """Return milliseconds of a node's step in each round after the first, and seconds of the first round."""
    optimizer, lr, nodes, batch = CASES[case]
    is_gpt = case.startswith("gpt")
    trainer = LocalTrainer(gpt() if is_gpt else mlp(), data, loss_fn=None if is_gpt else loss_fn)
    trainer.fit(
        FedAvgStrategy(optimizer, H=H, lr=lr), num_nodes=nodes, max_steps=H * ROUNDS, batch_size=batch, device="cpu",
        log_interval=H, compute=how, progress=False,
    )  # fmt: skip
    walls = [row["wall_s"] for row in trainer.history.rows(node=None)]
    seconds = [after - before for before, after in itertools.pairwise(walls)]
    return [1e3 * s / (nodes * H) for s in seconds[1:]], seconds[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin with this")
    parser.add_argument("--repeat", type=int, default=2)
    asked = parser.parse_args()
    print("| model, optimizer | loop (ms a step) | compiled (ms) | ratio | first round of compiled (s) |")
    print("| --- | --- | --- | --- | --- |")
    for case in (name for name in CASES if name.startswith(asked.only)):
        data = letters() if case.startswith("gpt") else digits(12_000)
        found: dict[str, list[float]] = {"loop": [], "compiled": []}
        firsts = []
        for _ in range(asked.repeat):
            for how, kept in found.items():
                times, first = rounds(how, case, data)
                kept += times
                firsts.append(first if how == "compiled" else 0.0)
        loop, compiled = (statistics.median(times) for times in found.values())
        print(f"| {case} | {loop:.3f} | {compiled:.3f} | {loop / compiled:.2f} | {max(firsts):.1f} |", flush=True)


if __name__ == "__main__":
    main()
