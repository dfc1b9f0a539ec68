"""Compare two commits bit for bit: weights, losses, traffic and predicted times of about a hundred runs.

    python benchmarks/same_bits.py REVISION           this tree against a commit of this repository, a minute
    python benchmarks/same_bits.py REVISION --rows    also show which columns of the history differ, and the first place

Each tree trains the same runs in a process of its own: all `METHODS` as they are built without arguments, some with
arguments that take other paths, strategies written for one node, and each feature of `fit` that may change a run:
faults, a network, sampled clients with few rows, nodes of several devices, vmap, fp16, numbers not finite, nodes of
unequal speed, two processes, a run that was stopped and goes on, callbacks. The model has dropout and batch norm.
Compared are the SHA-256 of the weights, the history without what was measured (wall time, throughput, memory), bytes by
collective, and predicted times where `step_seconds` is given. Columns of the history that only one tree has are named,
not compared. A run that one of the trees cannot train counts as a difference, unless `RETIRED` says why.
Exits with 1 where a run differs. Only public names are used, so that a tree before a move and one after it train alike.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAILED = "failed"
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

# Every method -> its class in exogym.strategy
METHODS = {
    "acco": "ACCOStrategy", "async_diloco": "AsyncDiLoCoStrategy", "choco": "CHOCOStrategy",
    "cocktail": "CocktailSGDStrategy", "ddp": "SimpleReduceStrategy", "decoupled_diloco": "DecoupledDiLoCoStrategy",
    "demo": "DeMoStrategy", "desloc": "DESLOCStrategy", "diloco": "DiLoCoStrategy", "dion": "DionStrategy",
    "ditto": "DittoStrategy", "edit": "EDiTStrategy", "ef21": "EF21Strategy", "fedasync": "FedAsyncStrategy",
    "fedavg": "FedAvgStrategy", "fedbn": "FedBNStrategy", "feddyn": "FedDynStrategy", "fednova": "FedNovaStrategy",
    "fedopt": "FedOptStrategy", "fedper": "FedPerStrategy", "fedprox": "FedProxStrategy", "fedrep": "FedRepStrategy",
    "gossip": "GossipStrategy", "gpa": "GPAStrategy", "halos": "HALoSStrategy", "heloco": "HeLoCoStrategy",
    "muloco": "MuLoCoStrategy", "noloco": "NoLoCoStrategy", "onebit_adam": "OneBitAdamStrategy",
    "pier": "PierStrategy", "post_local_sgd": "PostLocalSGDStrategy", "powersgd": "PowerSGDStrategy",
    "pulseloco": "PULSELoCoStrategy", "qfedavg": "QFedAvgStrategy", "qreduce": "QuantizedReduceStrategy",
    "qsgd": "QSGDStrategy", "scaffold": "ScaffoldStrategy", "sgp": "GradientPushStrategy",
    "signsgd": "SignSGDStrategy", "slowmo": "SlowMoStrategy", "snoo": "SNOOStrategy",
    "sparseloco": "SparseLoCoStrategy", "sparta": "SPARTAStrategy", "sparta_diloco": "SPARTADiLoCoStrategy",
    "streaming_diloco": "StreamingDiLoCoStrategy", "topk": "TopKStrategy",
}  # fmt: skip
CLOCKED = ("async_diloco", "decoupled_diloco", "fedasync", "halos", "heloco")
# Runs that one of the trees may lack -> the option that is retired
RETIRED = {
    "diloco robust": "robust= as an argument of strategies",
    "diloco secure": "secure_aggregation= as an argument of strategies",
    "diloco drift": "the tuner Drift",
    "diloco budget": "tuner= as an argument of strategies",
    "fedavg deadline": "deadline_s and over_sampling",
    "sparta transport": "transport= of strategies other than DDP, FedAvg and its relatives, and DiLoCo",
    "ddp node": "traffic inside a node in one process",
    "diloco node": "traffic inside a node in one process",
}


def made(name: str, *args: Any, **arguments: Any) -> Callable[[], Any]:
    """Return a factory of the strategy `name`. A tree that lacks it fails in this run alone."""

    def make() -> Any:
        import exogym.strategy

        kind = getattr(exogym.strategy, METHODS[name])
        given = {option: arguments[option] for option in getattr(kind, "averages", ()) if option in arguments}
        own = {option: value for option, value in arguments.items() if option not in given}
        return kind(*args, **own, **{"averaging": exogym.strategy.Averaging(**given)} if given else {})

    return make


def every_method() -> Runs:
    """Return a run for each method, with short rounds."""

    def short(name: str) -> Callable[[], Any]:
        def make() -> Any:
            import exogym.strategy

            kind = getattr(exogym.strategy, METHODS[name])
            return kind(lr=0.02, **({"H": 5} if "H" in inspect.signature(kind).parameters else {}))

        return make

    return {f"= {name}": (short(name), TIMED if name in CLOCKED else {}) for name in METHODS}


def runs() -> Runs:
    """Return name to a factory of the strategy and its arguments for `fit`."""
    from exogym import NodeMesh
    from exogym.balance import Balance
    from exogym.callbacks import EvaluateNodes, Every
    from exogym.faults import Faults
    from exogym.strategy import DifferentialPrivacy

    OneNode, Pairs = one_node()
    ddp, diloco = made("ddp", lr=0.02, max_norm=1.0), made("diloco", lr=0.02, H=5)
    sgd = made("ddp", "sgd", lr=0.1)

    def faults(**more: Any) -> dict[str, Any]:
        return {"faults": Faults(drop_rate=0.05, mean_outage_steps=3, seed=3, **more)}

    many = {"num_nodes": 32, "batch_size": 4}
    attacked = {"faults": Faults(bad_nodes=[1], attack="sign_flip", seed=3)}
    noise = DifferentialPrivacy(clip=1.0, noise_multiplier=0.5)
    balance = Balance("steps", speeds=[1.0, 1.0, 0.5, 0.25])
    return {
        "ddp": (ddp, {}),
        "ddp fp16": (sgd, {"precision": "fp16"}),
        "ddp bf16": (ddp, {"precision": "bf16"}),
        "ddp accumulation": (ddp, {"gradient_accumulation": 2, "minibatch_size": 4}),
        "ddp server": (made("ddp", lr=0.02, transport="server"), TIMED),
        "ddp faults": (ddp, faults()),
        "ddp network": (ddp, TIMED),
        "ddp vmap": (ddp, {"compute": "vmap", "plain": True}),
        "ddp node": (ddp, {"node": NodeMesh(shard=2)}),
        "ddp spoilt": (sgd, {"on_nonfinite": "skip", "spoilt": True}),
        "diloco": (made("diloco", lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3), {}),
        "diloco faults": (diloco, faults(lost_rate=0.1, slow={1: 0.5})),
        "diloco forgets": (diloco, faults(forget=True) | TIMED),
        "diloco attacked": (diloco, attacked),
        "diloco robust": (made("diloco", lr=0.02, H=5, robust="median"), attacked),
        "diloco secure": (made("diloco", lr=0.02, H=5, secure_aggregation=True), {}),
        "diloco drift": (made("diloco", lr=0.02, H=5, tuner="drift"), {}),
        "diloco budget": (made("diloco", lr=0.02, H=5, tuner=4000), {}),
        "diloco tree": (made("diloco", lr=0.02, H=5, transport="tree"), TIMED),
        "diloco network": (diloco, TIMED),
        "diloco late": (made("diloco", lr=0.02, H=6, delay=2), TIMED),
        "diloco eager": (made("diloco", lr=0.02, H=6, eager=True, outer_lr=0.4), {}),
        "diloco vmap": (diloco, {"compute": "vmap", "plain": True}),
        "diloco node": (diloco, {"node": NodeMesh(shard=2)} | TIMED),
        "diloco balance": (diloco, {"balance": balance} | TIMED),
        "diloco spoilt": (diloco, {"on_nonfinite": "skip", "spoilt": True}),
        "diloco resumed": (diloco, {"resumed": True} | faults() | TIMED),
        "diloco processes": (diloco, {"processes": 2}),
        "diloco callbacks": (
            diloco,
            {"callbacks": [EvaluateNodes(), Every(7, lambda loop: loop.step >= 21)]},
        ),
        "diloco islands": (made("diloco", lr=0.02, H=6, island_size=2, island_H=2), {}),
        "diloco parts": (made("diloco", lr=0.02, H=5, weighting="examples"), {"partitioner": "quantity:1"}),
        "streaming late": (made("streaming_diloco", lr=0.02, H=6, fragment_sync_delay=1, bits=4), TIMED),
        "sparta": (made("sparta", lr=0.02, p_sparta=0.1), {}),
        "sparta transport": (made("sparta", lr=0.02, p_sparta=0.1, transport="tree"), {}),
        "sparta topk 8 bit": (
            made("sparta", lr=0.02, p_sparta=0.1, compression_method="topk", quantization_bits=8),
            {},
        ),
        "sparta diloco": (made("sparta_diloco", lr=0.02, p_sparta=0.1, H=6), {}),
        "fedavg islands": (made("fedavg", lr=0.1, H=4, island_size=2), {}),
        "fedavg sampled": (made("fedavg", lr=0.1, H=4, client_fraction=0.5), {}),
        "fedavg private": (made("fedavg", lr=0.1, H=4, client_fraction=0.5, privacy=noise), {"plain": True}),
        "fedavg personal": (made("fedavg", lr=0.1, H=4, personal=1), {}),
        "fedavg seats": (made("fedavg", lr=0.1, H=4, client_fraction=0.1), many),
        "fedavg seats resumed": (made("fedavg", lr=0.1, H=4, client_fraction=0.1), many | {"resumed": True}),
        "fedavg deadline": (
            made("fedavg", lr=0.1, H=4, client_fraction=0.5, deadline_s=0.5, over_sampling=1.5),
            TIMED,
        ),
        "fedopt adam": (made("fedopt", lr=0.1, H=4, server_optim="adam"), {}),
        "scaffold sampled": (made("scaffold", lr=0.1, H=4, client_fraction=0.5), {}),
        "demo": (made("demo", lr=0.01, compression_topk=8, compression_chunk=16), {}),
        "async diloco": (made("async_diloco", lr=0.02, H=4), TIMED),
        "async spoilt": (
            made("async_diloco", lr=0.02, H=4),
            {"on_nonfinite": "skip", "spoilt": True, "resumed": True} | TIMED,
        ),
        "one node": (lambda: OneNode("adamw", lr=0.02), {}),
        "one node faults": (lambda: OneNode("adamw", lr=0.02), faults()),
        "one node spoilt": (lambda: OneNode("sgd", lr=0.1), {"on_nonfinite": "skip", "spoilt": True}),
        "pairs": (lambda: Pairs("adamw", lr=0.02), TIMED),
    }


def figures() -> dict[str, dict[str, Any]]:
    """Train all runs with the imported package. Return the compared figures, or `FAILED` and the error."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for name, (strategy, fit) in (every_method() | runs()).items():
        try:
            found[name] = train(strategy, dict(fit))
        except Exception as error:
            found[name] = {FAILED: f"{type(error).__name__}: {error}"}
    return found


def train(strategy: Callable[[], Any], fit: dict[str, Any]) -> dict[str, Any]:
    """Train one run. Return its compared figures."""
    import torch

    from exogym import LocalTrainer
    from exogym.testing import fingerprint, small_problem

    model, data = small_problem()
    if fit.pop("plain", False):  # no dropout, which vmap cannot draw, and no buffers, which have no noise
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    spoilt, resumed = fit.pop("spoilt", False), fit.pop("resumed", False)
    mark = data[5][1]  # in the batch of one node in each epoch: a count of calls would depend on how a tree evaluates

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_marked = spoilt and outputs.requires_grad and bool((targets == mark).all(-1).any())
        return torch.nn.functional.mse_loss(outputs, targets) * (float("nan") if is_marked else 1.0)

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


def report(before: dict[str, Any], after: dict[str, Any], rows: bool = False) -> tuple[list[str], int]:
    """Return the lines to print for two trees' figures, and the number of runs that differ."""
    lines, differ = [], 0
    for name in before | after:
        lacks = {
            which: tree.get(name, {FAILED: "not trained"})[FAILED]
            for which, tree in (("before", before), ("now", after))
            if FAILED in tree.get(name, {FAILED: ""})
        }
        if lacks and name in RETIRED:
            lines.append(f"{name:22} retired  {RETIRED[name]}")
            continue
        mark = hashlib.sha256(json.dumps(after.get(name)).encode()).hexdigest()[:12]
        unlike = [f"cannot be trained {which}: {why}" for which, why in lacks.items()]
        unlike = unlike or compare(before[name], after[name])
        differ += bool(unlike)
        lines.append(f"{name:22} {'the same' if not unlike else 'DIFFERS'}  {mark}")
        lines += [f"    {line}" for line in unlike if rows or not line.startswith("history")]
    trained = [[run for run in tree.values() if FAILED not in run] for tree in (before, after)]
    columns = [{column for run in runs for row in run["history"] for column in row} for runs in trained]
    for which, only in (("before", columns[0] - columns[1]), ("now", columns[1] - columns[0])):
        if only:
            lines.append(f"columns of the history only {which}: {', '.join(sorted(only))}")
    lines.append(f"{len(before | after)} runs, {differ} differ")
    return lines, differ


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
    lines, differ = report(before, train_in(ROOT), given.rows)
    print("\n".join(lines))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
