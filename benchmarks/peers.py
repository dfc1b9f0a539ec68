"""Seconds per round and memory of federated simulators: ExoGym, pfl-research, Flower, JAX's vmap, a hand-written loop.

    python benchmarks/peers.py                            all rows, in about half an hour, most of it Flower's
    python benchmarks/peers.py --rows 0 --who ours,hand   some of them
    python benchmarks/peers.py --out DIR                  the table and the picture go there (runs/peers)

FedAvg of an MLP 784-200-10, batches of 20, plain SGD, one intra-op thread, one process. Each client draws its examples
by its number from 12,000 pictures when it is asked for the first time. Each turn of a cell is a process of its own, and
they take turns; seconds are the median of the rounds after the first; memory is the most that the process held, torch
included, of Flower that of all its processes, what they share counted once. Flower's clients compute in one process of
Ray beside the server's. JAX computes a round's clients in one compiled vmap, on one core. The peers are installed into
an environment of their own in --cache, which sees this one's torch, so only Ray is large.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PEERS = (
    "pfl==0.6.0",
    "jax==0.10.2",
    "flwr[simulation]==1.40.0",
)  # Flower's newer ones want a certifi of the month they came in
WORKLOADS = [  # clients, of which sampled, steps a round, rounds
    (100, 100, 30, 4),
    (1_000, 1_000, 3, 4),
    (5_000, 50, 3, 12),
    (100_000, 20, 5, 12),
]
LR, BATCH = 0.1, 20


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def clients(steps: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that gives client i its examples, enough for a round's steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12_000, 784, generator=generator)
    y = x[:, :10].argmax(1)

    def of(client: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(x), (steps * BATCH,), generator=torch.Generator().manual_seed(client))
        return x[drawn], y[drawn]

    return of


cached = functools.cache(clients)  # in a process that keeps this module


def ours(N: int, sampled: int, steps: int, rounds: int) -> list[float]:
    from exogym import LocalTrainer
    from exogym.strategy import FedAvgStrategy

    of = clients(steps)
    trainer = LocalTrainer(
        mlp(), lambda rank, n, is_train: TensorDataset(*of(rank)), loss_fn=nn.functional.cross_entropy
    )
    strategy = FedAvgStrategy("sgd", H=steps, lr=LR, client_fraction=sampled / N, weighting="uniform")
    trainer.fit(
        strategy, num_nodes=N, max_steps=steps * rounds, batch_size=BATCH, device="cpu", log_interval=steps,
        progress=False,
    )  # fmt: skip
    walls = [row["wall_s"] for row in trainer.history.rows(node=None)]
    return [after - before for before, after in itertools.pairwise(walls)]


def hand(N: int, sampled: int, steps: int, rounds: int) -> list[float]:
    of, model, loss_fn, seconds = clients(steps), mlp(), nn.functional.cross_entropy, []
    theta = [p.detach().clone() for p in model.parameters()]
    draws, kept = torch.Generator().manual_seed(0), dict[int, tuple[Tensor, Tensor]]()
    for _ in range(rounds):
        start = time.perf_counter()
        total = [torch.zeros_like(t) for t in theta]
        for client in torch.randperm(N, generator=draws)[:sampled].tolist():
            if client not in kept:
                kept[client] = of(client)
            x, y = kept[client]
            with torch.no_grad():
                for p, t in zip(model.parameters(), theta, strict=True):
                    p.copy_(t)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in torch.randperm(len(x), generator=draws).split(BATCH):
                optimizer.zero_grad()
                loss_fn(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, model.parameters(), strict=True):
                    t.add_(p)
        theta = [t / sampled for t in total]
        seconds.append(time.perf_counter() - start)
    return seconds


def pfl(N: int, sampled: int, steps: int, rounds: int) -> list[float]:
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.sampling import MinimizeReuseUserSampler  # type: ignore[import-not-found]
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    of, moments = clients(steps), [time.perf_counter()]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def loss(self, x: Tensor, y: Tensor, **_: object) -> Tensor:
            return nn.functional.cross_entropy(self.body(x), y)

        def metrics(self, *_: object, **__: object) -> dict[str, object]:
            return {}

    class Watching(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, object]:
            moments.append(time.perf_counter())
            return False, Metrics()

    data = FederatedDataset(lambda user: Dataset(raw_data=of(user)), MinimizeReuseUserSampler(list(range(N))))
    module = Module()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10 * rounds, sampled, 0),
        SimulatedBackend(training_data=data, val_data=data), model,
        NNTrainHyperParams(BATCH, None, LR, local_num_steps=steps), callbacks=[Watching()],
    )  # fmt: skip
    return [after - before for before, after in itertools.pairwise(moments)]


def flower(N: int, sampled: int, steps: int, rounds: int) -> list[float]:
    """Flower's simulation as delivered: messages to one Ray actor, which is a process beside the server's."""
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
    from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
    from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
    from flwr.simulation import run_simulation  # type: ignore[import-not-found]

    client, server, moments, most = ClientApp(), ServerApp(), [time.perf_counter()], [0.0]

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        import peers  # where this runs, for its cache

        torch.set_num_threads(1)
        x, y = peers.cached(steps)(int(context.node_config["partition-id"]))
        model = peers.mlp()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=peers.LR)
        for batch in torch.randperm(len(x)).split(peers.BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        told = MetricRecord({"num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told})
        return Message(content=content, reply_to=message)

    class Watching(FedAvg):  # type: ignore[misc]
        def aggregate_train(self, *args: object) -> object:
            found = super().aggregate_train(*args)
            moments.append(time.perf_counter())
            most[0] = max(most[0], family_mb())
            return found

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = Watching(fraction_train=sampled / N, fraction_evaluate=0.0, min_available_nodes=N)
        strategy.start(grid, ArrayRecord(mlp().state_dict()), num_rounds=rounds)

    init = {"num_cpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    run_simulation(server, client, N, backend_config={"init_args": init, "client_resources": {"num_cpus": 1}})
    MEMORY_MB[:] = most
    return [after - before for before, after in itertools.pairwise(moments)]


def jax_vmap(N: int, sampled: int, steps: int, rounds: int) -> list[float]:
    """A round is one compiled vmap over clients of a scan over steps; it is compiled in the first round."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA starts a thread for each core otherwise
    import jax  # type: ignore[import-not-found]
    from jax import numpy as jnp  # type: ignore[import-not-found]

    of, seconds, draws = functools.cache(clients(steps)), list[float](), torch.Generator().manual_seed(0)
    theta = [jnp.asarray(p.detach().numpy()) for p in mlp().parameters()]

    def loss(theta: list[object], x: object, y: object) -> object:
        w1, b1, w2, b2 = theta
        scores = jax.nn.relu(x @ w1.T + b1) @ w2.T + b2
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1).mean()

    def step(theta: list[object], batch: tuple[object, object]) -> tuple[list[object], None]:
        gradients = jax.grad(loss)(theta, *batch)
        return [p - LR * g for p, g in zip(theta, gradients, strict=True)], None

    @jax.jit  # type: ignore[untyped-decorator]
    def train(theta: list[object], x: object, y: object) -> list[object]:
        rows = jax.vmap(lambda *batches: jax.lax.scan(step, theta, batches)[0])(x, y)
        return [row.mean(0) for row in rows]

    for _ in range(rounds):
        start = time.perf_counter()
        xs, ys = [], []
        for client in torch.randperm(N, generator=draws)[:sampled].tolist():
            x, y = of(client)
            order = torch.randperm(len(x), generator=draws)
            xs.append(x[order].view(steps, BATCH, -1))
            ys.append(y[order].view(steps, BATCH))
        theta = jax.block_until_ready(train(theta, torch.stack(xs).numpy(), torch.stack(ys).numpy()))
        seconds.append(time.perf_counter() - start)
    return seconds


def family_mb() -> float:
    """Return the memory of this process and its children, with shared memory counted once."""
    import psutil

    me = psutil.Process()
    return sum(p.memory_full_info().pss for p in [me, *me.children(recursive=True)]) / 1e6


MEMORY_MB: list[float] = []  # where it is that of more processes than one
WHO: dict[str, Callable[[int, int, int, int], list[float]]] = {
    "ours": ours,
    "hand": hand,
    "pfl": pfl,
    "jax": jax_vmap,
    "flower": flower,
}
TITLES = {"ours": "ExoGym", "hand": "a hand-written loop", "pfl": "pfl-research", "jax": "JAX vmap", "flower": "Flower"}

APART = {"pfl", "jax", "flower"}  # in an environment of their own
ROWS = {"flower": [0, 2]}  # the others take it many minutes


def environment(cache: Path) -> Path:
    """Return the Python of an environment with the peers, which also sees this environment's packages."""
    python = cache / "bin" / "python"
    if not python.exists():
        venv.create(cache, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(cache), "platbase": str(cache)}))
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    limits = cache / "constraints.txt"
    limits.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", limits, *PEERS], check=True)
    return python


def measure(python: Path | str, who: str, row: int) -> dict[str, float]:
    command = [str(python), __file__, "--one", who, "--rows", str(row)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(who: str, row: int) -> None:
    torch.set_num_threads(1)
    seconds = WHO[who](*WORKLOADS[row])
    unit = 1e6 if sys.platform == "darwin" else 1e3
    memory_mb = max([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, *MEMORY_MB])
    print(json.dumps({"round_s": statistics.median(seconds[1:]), "memory_mb": memory_mb}))


def picture(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Draw seconds per round and memory against the number of clients."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for ax, key, label in zip(axes, ("round_s", "memory_mb"), ("seconds a round", "memory (MB)"), strict=True):
        for who, rows in found.items():
            points = sorted((WORKLOADS[row][0], values[key]) for row, values in rows.items())
            ax.plot(*zip(*points, strict=True), marker="o", label=TITLES[who])
        ax.set(xscale="log", yscale="log", xlabel="clients", ylabel=label)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", default=",".join(WHO), help="who takes part, by commas (%(default)s)")
    parser.add_argument("--rows", default="0,1,2,3", help="rows of the table, by commas (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="turns; the median counts (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "exogym-peers")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rows = [int(row) for row in asked.rows.split(",")]
    if asked.one:
        return one(asked.one, rows[0])
    names = asked.who.split(",")
    python = environment(asked.cache) if APART & set(names) else None
    found: dict[str, dict[int, dict[str, float]]] = {who: {} for who in names}
    lines = ["| clients, sampled, steps | " + " | ".join(TITLES[who] for who in names) + " |"]
    lines.append("| --- |" + " --- |" * len(names))
    for row in rows:
        turns: dict[str, list[dict[str, float]]] = {who: [] for who in names}
        for _ in range(asked.repeat):
            for who in names:
                if row in ROWS.get(who, rows):
                    turns[who].append(measure(python if who in APART and python else sys.executable, who, row))
        cells = []
        for who, each in turns.items():
            if not each:
                cells.append("not run")
                continue
            values = found[who][row] = {key: statistics.median(x[key] for x in each) for key in each[0]}
            cells.append(f"{values['round_s']:.3f} s, {values['memory_mb']:,.0f} MB")
        N, sampled, steps, _ = WORKLOADS[row]
        lines.append(f"| {N:,}, {sampled:,}, {steps} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "peers.md").write_text("\n".join(lines) + "\n")
    picture(found, asked.out / "peers.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
