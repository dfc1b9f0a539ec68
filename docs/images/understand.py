"""The figures of docs/understand/: small trainings on digits, a minute in all; names as arguments pick some."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")

import matplotlib.pyplot as plt
import torch
from PIL import Image

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.clock import StepTime
from exogym.strategy import Strategy
from exogym.strategy.registry import parse_strategy
from exogym.tasks import digits_task

HERE = Path(__file__).parent / "understand"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"]
TASK = digits_task()


def run(
    text: str, nodes: int = 8, steps: int = 200, every: int = 10, batch_size: int = 8, **options: Any
) -> LocalTrainer:
    """Train a strategy, given as on the command line, from the same weights as all others."""
    trainer = LocalTrainer(TASK.make_model(seed=0), TASK.train, TASK.val)
    strategy: Strategy = parse_strategy(text, lr=TASK.lr)
    trainer.fit(
        strategy, num_nodes=nodes, max_steps=steps, batch_size=batch_size, val_interval=every, device="cpu", **options
    )
    return trainer


def draw(name: str, x: str, y: str, lines: Iterable[tuple[str, Any, Any]], **axes: Any) -> None:
    """Write a figure with a line for each (label, x values, y values)."""
    figure, panel = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for colour, (label, xs, ys) in zip(COLOURS, lines, strict=False):
        panel.plot(xs, ys, color=colour, label=label, linewidth=1.6)
    panel.set(xlabel=x, ylabel=y, **axes)
    save(name, figure)


def save(name: str, figure: Any) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.25)
    write(name, figure)


def write(name: str, figure: Any) -> None:
    """Write a figure in 64 colours, which is a third of the bytes."""
    HERE.mkdir(exist_ok=True)
    figure.savefig(HERE / f"{name}.png", dpi=110)
    plt.close(figure)
    with Image.open(HERE / f"{name}.png") as picture:
        picture.convert("RGB").quantize(64).save(HERE / f"{name}.png", optimize=True)


def against_bytes(texts: dict[str, str], **options: Any) -> Iterable[tuple[str, Any, Any]]:
    for label, text in texts.items():
        history = run(text, **options).history
        evaluated = [row for row in history.rows(node=None) if row["val_loss"] is not None and row["tx_bytes"]]
        rows = {row["tx_bytes"] / 1e3: row["val_loss"] for row in evaluated}  # the last of each number of bytes
        yield label, [*rows], [*rows.values()]


def apart(texts: dict[str, str], **options: Any) -> Iterable[tuple[str, Any, Any]]:
    for label, text in texts.items():
        yield label, *run(text, every=1, **options).history.column("consensus_distance")


def matrix() -> None:
    """The rows of 8 nodes under DiLoCo, less their mean, before and after the outer step."""
    seen: dict[int, Any] = {}

    def look(loop: Any) -> None:
        rows = loop.rows()[0][:, 400:480]
        seen[loop.step] = rows - rows.mean(0)

    run("diloco:H=20", steps=40, callbacks=[Every(1, look)])
    figure, panels = plt.subplots(1, 3, figsize=(6.4, 1.9), layout="constrained", sharey=True)
    for panel, step in zip(panels, (5, 19, 20), strict=True):
        panel.imshow(seen[step], aspect="auto", cmap="RdBu", vmin=-0.02, vmax=0.02, interpolation="nearest")
        panel.set(title=f"after step {step}", xlabel="80 of P columns")
        panel.title.set_fontsize(9)
    panels[0].set_ylabel("node")
    write("matrix", figure)


def local_steps() -> None:
    texts = {"DDP": "ddp"} | {f"DiLoCo, H = {H}": f"diloco:H={H}:outer_lr=0.7" for H in (5, 20, 50)}
    texts |= {"FedAvg, H = 20": "fedavg:H=20:inner_optim=adamw"}
    draw("local_steps", "kB sent per node", "validation loss", against_bytes(texts), xscale="log")


def drift() -> None:
    texts = {
        "DiLoCo, H = 20": "diloco:H=20",
        "FedAvg, H = 20": "fedavg:H=20:inner_optim=adamw",
        "DiLoCo, H = 50": "diloco:H=50",
    }
    draw("drift", "step", "distance of the nodes to their mean", apart(texts))


def compressed() -> None:
    texts = {"DDP": "ddp", "8 bits": "qreduce", "PowerSGD, rank 2": "powersgd:start_step=10"}
    texts |= {"top 2 %": "topk:density=0.02:lr=0.5", "1 bit": "signsgd:lr=0.001", "DeMo": "demo:lr=0.002"}
    draw("compressed", "kB sent per node", "validation loss", against_bytes(texts), xscale="log")


def shared_parts() -> None:
    texts = {f"p = {p:g}": f"sparta:p_sparta={p:g}" for p in (0.001, 0.01, 0.1)}
    draw("shared_parts", "step", "distance of the nodes to their mean", apart(texts, partitioner="dirichlet:0.3"))


def decentralised() -> None:
    texts = {
        f"gossip, {graph}": f"gossip:graph={graph}:H=5:inner_optim=adamw"
        for graph in ("ring", "torus", "exponential", "complete")
    }
    draw(
        "decentralised",
        "step",
        "distance of the nodes to their mean",
        apart(texts, partitioner="dirichlet:0.3"),
    )


def asynchronous() -> None:
    lines = []
    speeds = StepTime("10ms", speeds=[1.0, 1.0, 0.5, 0.25])
    for label, text in {
        "DiLoCo": "diloco:H=10:outer_lr=0.4",
        "Asynchronous DiLoCo": "async_diloco:H=10:outer_lr=0.4:dylu=true",
    }.items():
        history = run(text, nodes=4, network="100Mbps,20ms", step_seconds=speeds, final_sync=False).history
        rows = [row for row in history.rows(node=None) if row["val_loss"] is not None]
        lines.append((label, [row["time_s"] for row in rows], [row["val_loss"] for row in rows]))
    draw("asynchronous", "predicted seconds", "validation loss", lines)


def federated() -> None:
    texts = {
        "FedAvg": "fedavg:H=20",
        "FedProx": "fedprox:H=20:mu=0.1",
        "SCAFFOLD": "scaffold:H=20",
        "FedAdam": "fedopt:H=20:server_lr=0.03",
    }
    lines = []
    for label, text in texts.items():
        history = run(f"{text}:inner_optim=sgd:lr=0.1", steps=600, every=20, partitioner="shards:2").history
        lines.append((label, *history.column("val_loss")))
    draw("federated", "step", "validation loss", lines, yscale="log")


def scaling() -> None:
    """The same number of examples for 1 to 16 nodes: batch of a node 8, so steps fall as 1/N. Means of three seeds."""
    counts, lines = [1, 2, 4, 8, 16], []
    for label, text in {"DDP": "ddp", "DiLoCo, H = 5": "diloco:H=5", "DiLoCo, H = 20": "diloco:H=20"}.items():
        text += "" if text == "ddp" else ":outer_lr=0.4"
        means = []
        for n in counts:
            last = [run(text, nodes=n, steps=1600 // n, every=400, seed=s).history.last["val_loss"] for s in range(3)]
            means.append(sum(last) / len(last))
        lines.append((label, counts, means))
    axes = {"xscale": "log", "xticks": counts, "xticklabels": counts}
    draw("scaling", "nodes, for the same number of examples in all", "last validation loss", lines, **axes)


FIGURES: list[Callable[[], None]] = [
    matrix, local_steps, drift, compressed, shared_parts, decentralised, asynchronous, federated, scaling,
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    for figure in FIGURES:
        if not wanted or figure.__name__ in wanted:
            figure()
            print(figure.__name__)
