"""Whether another commit trains to the same bits: weights, losses, traffic and predicted times of thirteen runs.

    python benchmarks/same_bits.py REVISION           this tree against a commit of this repository, about ten seconds
    python benchmarks/same_bits.py REVISION --rows    also which columns of the history differ, and where first

Each tree trains the same runs in a process of its own: DDP, also in fp16, DiLoCo, also with faults and with a network,
SPARTA, with top-k and 8 bits, with DiLoCo, FedAvg in islands and with sampled clients, DeMo, asynchronous DiLoCo and a
strategy written for one node; the model has dropout and batch normalisation. Compared are the SHA-256 of the weights,
the history without what was measured (wall time, throughput, memory), bytes by collective, and predicted times where
`step_seconds` is given. Columns that only one tree has are named, not compared. Exits with 1 where a run differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEASURED = {"wall_s", "examples_per_s", "device_use", "memory_bytes"}
ROOT = Path(__file__).resolve().parent.parent


def runs() -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Return name to a factory of the strategy and what `fit` is given beside it."""
    from exogym.faults import Faults
    from exogym.strategy import (
        AsyncDiLoCoStrategy,
        DeMoStrategy,
        DiLoCoStrategy,
        FedAvgStrategy,
        SimpleReduceStrategy,
        SPARTADiLoCoStrategy,
        SPARTAStrategy,
        Strategy,
    )
    from exogym.strategy.communicate import all_reduce

    class OneNode(Strategy):
        def _init_node(self, model: Any, rank: int, num_nodes: int) -> None:
            super()._init_node(model, rank, num_nodes)
            self.momentum = [p.detach().clone().zero_() for p in model.parameters()]

        def step(self) -> None:
            self.communicate_gradients()
            self.update_parameters()
            for p, m in zip(self.model.parameters(), self.momentum, strict=True):
                m.mul_(0.5).add_(p.detach(), alpha=1e-3 * (self.rank + 1))
                if self.local_step % 3 == 2:
                    all_reduce(p.data, op="mean")
            super().step()

    timed = {"network": "100Mbps,20ms", "step_seconds": [0.1, 0.1, 0.2, 0.15]}
    return {
        "ddp": (lambda: SimpleReduceStrategy(lr=0.02, max_norm=1.0), {}),
        "ddp fp16": (lambda: SimpleReduceStrategy("sgd", lr=0.1), {"precision": "fp16"}),
        "diloco": (lambda: DiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3), {}),
        "diloco faults": (
            lambda: DiLoCoStrategy(lr=0.02, H=5),
            {"faults": Faults(drop_rate=0.05, mean_outage_steps=3, lost_rate=0.1, slow={1: 0.5}, seed=3)},
        ),
        "diloco network": (lambda: DiLoCoStrategy(lr=0.02, H=5), timed),
        "sparta": (lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1), {}),
        "sparta topk 8 bit": (
            lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1, compression_method="topk", quantization_bits=8),
            {},
        ),
        "sparta diloco": (lambda: SPARTADiLoCoStrategy(lr=0.02, p_sparta=0.1, H=6), {}),
        "fedavg islands": (lambda: FedAvgStrategy(lr=0.1, H=4, island_size=2), {}),
        "fedavg sampled": (lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.5), {}),
        "demo": (lambda: DeMoStrategy(lr=0.01, compression_topk=8, compression_chunk=16), {}),
        "async diloco": (lambda: AsyncDiLoCoStrategy(lr=0.02, H=4), timed),
        "one node": (lambda: OneNode("adamw", lr=0.02), {}),
    }


def figures() -> dict[str, dict[str, Any]]:
    """Train all runs with the package that is imported; return what is compared."""
    import torch

    from exogym import LocalTrainer
    from exogym.testing import fingerprint, small_problem

    torch.set_num_threads(1)
    found = {}
    for name, (strategy, fit) in runs().items():
        model, data = small_problem()
        trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(
            strategy(), num_nodes=4, max_steps=26, batch_size=8, val_interval=8, device="cpu", progress=False, **fit
        )
        rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in trainer.history]
        found[name] = {"weights": fingerprint(model), "history": rows, "traffic": trainer.traffic}
    return found


def train_in(tree: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of the package in `tree`, from a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--figures"]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs between two runs, and where first."""
    unlike = [name for name in ("weights", "traffic") if before[name] != after[name]]
    old, new = before["history"], after["history"]
    if len(old) != len(new):
        return [*unlike, f"history: {len(old)} rows before, {len(new)} now"]
    columns = dict.fromkeys(column for row in old for column in row)
    for column in columns:
        pairs = [(row, a.get(column), b.get(column)) for row, a, b in zip(range(len(old)), old, new, strict=True)]
        apart = [pair for pair in pairs if repr(pair[1]) != repr(pair[2])]  # nan is like nan
        if apart and any(column in row for row in new):
            row, a, b = apart[0]
            unlike.append(
                f"history: {column}, first in row {row} (step {old[row].get('step')}): {a!r} before, {b!r} now"
            )
    return unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="commit, tag or branch to compare with")
    parser.add_argument("--rows", action="store_true", help="say where the histories differ")
    parser.add_argument("--figures", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.figures:
        print(json.dumps(figures(), default=str))
        return
    if given.revision is None:
        parser.error("name the commit to compare with")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", given.revision], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=packed.stdout, check=True)
        before = train_in(tree)
    after, differ = train_in(ROOT), 0
    for name in before:
        unlike = compare(before[name], after[name])
        differ += bool(unlike)
        mark = hashlib.sha256(json.dumps(after[name]).encode()).hexdigest()[:12]
        print(f"{name:20} {'the same' if not unlike else 'DIFFERS'}  {mark}")
        for line in unlike if given.rows else [u for u in unlike if not u.startswith("history")]:
            print(f"    {line}")
    columns = [
        {column for run in tree.values() for row in run["history"] for column in row} for tree in (before, after)
    ]
    for which, only in (("before", columns[0] - columns[1]), ("now", columns[1] - columns[0])):
        if only:
            print(f"columns of the history only {which}: {', '.join(sorted(only))}")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
