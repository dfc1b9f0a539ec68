"""Compare two commits bit for bit: weights, losses, traffic and predicted times of about fifty runs.

    python benchmarks/same_bits.py REVISION           this tree against a commit of this repository, half a minute
    python benchmarks/same_bits.py REVISION --rows    also show which columns of the history differ, and the first place

Each tree trains the same runs in a process of its own: every strategy of the registry as it is built without arguments,
some with arguments that take other paths, strategies written for one node, and each feature of `fit` that may change a
run: faults, a network, sampled clients with few rows, nodes of several devices, vmap, fp16, numbers not finite, nodes
of unequal speed, two processes, a run that was stopped and goes on, callbacks. The model has dropout and batch norm.
Compared are the SHA-256 of the weights, the history without what was measured (wall time, throughput,
memory), bytes by collective, and predicted times where `step_seconds` is given. Columns and runs that only one tree has
are named, not compared. Exits with 1 where a run differs.
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


Runs = dict[str, tuple[Callable[[], Any], dict[str, Any]]]


def one_node() -> tuple[type, type]:
    """Return a strategy written for one node, with collectives, and one whose nodes talk in pairs."""
    from exogym.strategy import Strategy
    from exogym.strategy.communicate import all_reduce, exchange

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

    class Pairs(Strategy):
        def step(self) -> None:
            self.update_parameters()
            for p in self.model.parameters():
                p.data.add_(exchange(p.data, self.rank ^ 1)).mul_(0.5)
            super().step()

    return OneNode, Pairs


TIMED: dict[str, Any] = {"network": "100Mbps,20ms", "step_seconds": [0.1, 0.1, 0.2, 0.15]}


def registered() -> Runs:
    """Return a run for each strategy in the registry, with short rounds."""
    from exogym.strategy.registry import STRATEGIES, parse_strategy

    def maker(name: str) -> Callable[[], Any]:
        return lambda: parse_strategy(name, lr=0.02, H=5)

    return {
        name: (maker(name), TIMED if kind.driven_by == "clock" else {}) for name, kind in sorted(STRATEGIES.items())
    }


def runs() -> Runs:
    """Return name to a factory of the strategy and its arguments for `fit`."""
    from exogym import NodeMesh
    from exogym.balance import Balance
    from exogym.callbacks import EvaluateNodes, Every, WeightAverage
    from exogym.faults import Faults
    from exogym.strategy import (
        AsyncDiLoCoStrategy,
        DeMoStrategy,
        DiLoCoStrategy,
        FedAvgStrategy,
        SimpleReduceStrategy,
        SPARTADiLoCoStrategy,
        SPARTAStrategy,
    )

    OneNode, Pairs = one_node()

    def ddp() -> Any:
        return SimpleReduceStrategy(lr=0.02, max_norm=1.0)

    def diloco() -> Any:
        return DiLoCoStrategy(lr=0.02, H=5)

    def faults(**more: Any) -> dict[str, Any]:
        return {"faults": Faults(drop_rate=0.05, mean_outage_steps=3, seed=3, **more)}

    many = {"num_nodes": 32, "batch_size": 4}
    balance = Balance("steps", speeds=[1.0, 1.0, 0.5, 0.25])
    return {
        "ddp": (ddp, {}),
        "ddp fp16": (lambda: SimpleReduceStrategy("sgd", lr=0.1), {"precision": "fp16"}),
        "ddp faults": (ddp, faults()),
        "ddp network": (ddp, TIMED),
        "ddp vmap": (ddp, {"compute": "vmap", "plain": True}),
        "ddp node": (ddp, {"node": NodeMesh(shard=2)}),
        "ddp spoilt": (lambda: SimpleReduceStrategy("sgd", lr=0.1), {"on_nonfinite": "skip", "spoilt": True}),
        "diloco": (lambda: DiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3), {}),
        "diloco faults": (diloco, faults(lost_rate=0.1, slow={1: 0.5})),
        "diloco forgets": (diloco, faults(forget=True) | TIMED),
        "diloco attacked": (
            lambda: DiLoCoStrategy(lr=0.02, H=5, robust="median"),
            {"faults": Faults(bad_nodes=[1], attack="sign_flip", seed=3)},
        ),
        "diloco network": (diloco, TIMED),
        "diloco late": (lambda: DiLoCoStrategy(lr=0.02, H=6, delay=2), TIMED),
        "diloco vmap": (diloco, {"compute": "vmap", "plain": True}),
        "diloco node": (diloco, {"node": NodeMesh(shard=2)} | TIMED),
        "diloco balance": (diloco, {"balance": balance} | TIMED),
        "diloco spoilt": (diloco, {"on_nonfinite": "skip", "spoilt": True}),
        "diloco resumed": (diloco, {"resumed": True} | faults() | TIMED),
        "diloco processes": (diloco, {"processes": 2}),
        "diloco callbacks": (
            diloco,
            {"callbacks": [EvaluateNodes(), WeightAverage(steps=3), Every(7, lambda loop: loop.step >= 21)]},
        ),
        "diloco islands": (lambda: DiLoCoStrategy(lr=0.02, H=6, island_size=2, island_H=2), {}),
        "sparta": (lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1), {}),
        "sparta topk 8 bit": (
            lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1, compression_method="topk", quantization_bits=8),
            {},
        ),
        "sparta diloco": (lambda: SPARTADiLoCoStrategy(lr=0.02, p_sparta=0.1, H=6), {}),
        "fedavg islands": (lambda: FedAvgStrategy(lr=0.1, H=4, island_size=2), {}),
        "fedavg sampled": (lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.5), {}),
        "fedavg seats": (lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.1), many),
        "fedavg seats resumed": (lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.1), many | {"resumed": True}),
        "fedavg deadline": (
            lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.5, deadline_s=0.5, over_sampling=1.5),
            TIMED,
        ),
        "demo": (lambda: DeMoStrategy(lr=0.01, compression_topk=8, compression_chunk=16), {}),
        "async diloco": (lambda: AsyncDiLoCoStrategy(lr=0.02, H=4), TIMED),
        "async shards": (lambda: AsyncDiLoCoStrategy(lr=0.02, H=4, shard_sampling=True, grace_s=0.1), TIMED),
        "async spoilt": (
            lambda: AsyncDiLoCoStrategy(lr=0.02, H=4),
            {"on_nonfinite": "skip", "spoilt": True, "resumed": True} | TIMED,
        ),
        "one node": (lambda: OneNode("adamw", lr=0.02), {}),
        "one node faults": (lambda: OneNode("adamw", lr=0.02), faults()),
        "one node spoilt": (lambda: OneNode("sgd", lr=0.1), {"on_nonfinite": "skip", "spoilt": True}),
        "pairs": (lambda: Pairs("adamw", lr=0.02), TIMED),
    }


def figures() -> dict[str, dict[str, Any]]:
    """Train all runs with the imported package. Return the compared figures."""
    import torch

    torch.set_num_threads(1)
    everything = {f"= {name}": run for name, run in registered().items()} | runs()
    found = {}
    for name, (strategy, fit) in everything.items():
        try:
            found[name] = train(strategy, dict(fit))
        except Exception as error:
            error.add_note(f"in the run {name!r}")
            raise
    return found


def train(strategy: Callable[[], Any], fit: dict[str, Any]) -> dict[str, Any]:
    """Train one run. Return its compared figures."""
    import torch

    from exogym import LocalTrainer
    from exogym.testing import fingerprint, small_problem

    model, data = small_problem()
    if fit.pop("plain", False):  # no dropout, which vmap cannot draw
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    spoilt, resumed = fit.pop("spoilt", False), fit.pop("resumed", False)
    calls = [0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.nn.functional.mse_loss(outputs, targets) * (float("nan") if spoilt and calls[0] == 30 else 1.0)

    trainer = LocalTrainer(model, data, data, loss_fn=loss)
    common = {"num_nodes": 4, "batch_size": 8, "val_interval": 8, "device": "cpu", "progress": False} | fit
    with tempfile.TemporaryDirectory() as folder:
        if resumed:
            trainer.fit(strategy(), max_steps=13, save_dir=folder, **common)
            common |= {"save_dir": folder, "resume": True}
        trainer.fit(strategy(), max_steps=26, **common)
    rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in trainer.history]
    return {"weights": fingerprint(model), "history": rows, "traffic": trainer.traffic}


def train_in(tree: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of the package in `tree`, from its own process."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--figures"]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the differences between two runs, and their first places."""
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
        if name not in after:
            continue
        unlike = compare(before[name], after[name])
        differ += bool(unlike)
        mark = hashlib.sha256(json.dumps(after[name]).encode()).hexdigest()[:12]
        print(f"{name:22} {'the same' if not unlike else 'DIFFERS'}  {mark}")
        for line in unlike if given.rows else [u for u in unlike if not u.startswith("history")]:
            print(f"    {line}")
    columns = [
        {column for run in tree.values() for row in run["history"] for column in row} for tree in (before, after)
    ]
    for which, only in (("before", columns[0] - columns[1]), ("now", columns[1] - columns[0])):
        if only:
            print(f"columns of the history only {which}: {', '.join(sorted(only))}")
    if only_one := sorted(before.keys() ^ after.keys()):
        print(f"not compared, since only one tree has it: {', '.join(only_one)}")
    print(f"{len(before.keys() & after.keys())} runs, {differ} differ")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
