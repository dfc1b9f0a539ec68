r"""Two islands of two devices each: predict a step's time in one process, and compare it with real processes.

    python benchmarks/islands.py --json islands.json
    python benchmarks/islands.py --splits "stages=2 tensor=2" --strategies ddp,diloco:H=10 --rounds 1

An island is a network namespace with two processes, which share the model out (see `namespaces.py`: needs Linux, root,
and Debian's iproute2). They talk over its loopback; `tc tbf` limits the cable of each island. The model is a GPT over
characters (4 layers, width 128: 797,184 parameters, 3.2 MB) on random text, with AdamW, one intra-op thread each.

Four devices on two cores would measure the cores. So the layers sleep, `--sleep` for each window of the batch in all,
each device for what it has of batch and layers, and compute little beside. They ask for real-time priority; where they
do not get it, what other programs do is measured too. `--sleep 0` and a large `--batch_size` compute all the time.

**Predicted.** One process trains with `node=`, `network=` and `step_seconds=`. What it is told is measured in the same
round: a step of an island, from DiLoCo without limits, less the time in its sums; the time of a small message between
islands, without limits; the rate at which a process copies memory. Of the cables it knows the rate, and the share of it
that is payload. Nothing is fitted. What is off, the line between islands has to answer for.

**Measured.** The main process marks the time every `--steps` steps, or every H; the first of these segments warms up,
the median of the others counts. *sent* is what the first island's cable carried meanwhile, less 66 bytes a packet,
*recorded* what the history says that a node sent.

Rounds go through all cells, one after the other, and the table has medians over rounds. `--json` keeps each cell as it
is done (see `cells.py`), so the command can be stopped and given again; `--turn 200` begins no cell later than so many
seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import namespaces
import torch
from cells import AGAIN, Cells
from namespaces import Hosts, enter, hosts, links, load, measured, memory_bytes_per_s
from torch.distributed.tensor import DTensor

from exogym import LocalTrainer, NodeMesh
from exogym.callbacks import Every
from exogym.models import CharGPT
from exogym.strategy.registry import parse_strategy

ISLANDS = 2
CHARACTERS, WINDOW, WINDOWS = 65, 8, 512
LAYERS, WIDTH = 4, 128
FREE = 3  # segments in which a step without limits is measured
COLUMNS = ("split", "strategy", "link", "predicted ms", "measured ms", "off", "sent", "recorded", "off")


def make_model(sleep_s: float = 0.0) -> CharGPT:
    """Return the model. Its layers together sleep for `sleep_s` per window."""
    torch.manual_seed(0)
    model = CharGPT(CHARACTERS, WINDOW, n_layer=LAYERS, n_head=4, n_embd=WIDTH)

    def pause(block: Any, given: tuple[torch.Tensor]) -> None:
        weight: Any = block.mlp[0].weight  # of which a device that computes a part of each layer has a part
        here = (
            weight.to_local()
            if isinstance(weight, DTensor) and "tensor" in weight.device_mesh.mesh_dim_names
            else weight
        )
        if not given[0].is_meta:
            time.sleep(sleep_s / LAYERS * len(given[0]) * here.numel() / (4 * WIDTH * WIDTH))

    for block in model.blocks if sleep_s else ():
        block.register_forward_pre_hook(pause)
    return model


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train `job`, calling `mark(loop)` after each segment."""
    text = torch.randint(CHARACTERS, (WINDOWS, WINDOW + 1), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    mesh = None if job["split"] is None else NodeMesh(**job["split"])
    trainer = LocalTrainer(make_model(job["sleep_s"]), data)
    trainer.fit(
        parse_strategy(job["strategy"], inner_optim="adamw", lr=1e-3), num_nodes=job["nodes"], node=mesh,
        max_steps=job["steps"] * (job["segments"] + 1) + 1, batch_size=job["batch_size"], device="cpu",
        final_sync=False, progress=False, callbacks=[Every(job["steps"], mark, may_end=False)], **options,
    )  # fmt: skip
    return trainer


def compare(split: str, cells: Cells, given: argparse.Namespace) -> None:
    """Measure the wanted cells of a split, in all rounds."""
    sizes = (part.partition("=") for part in split.split(","))
    mesh = NodeMesh(**{name: int(size) for name, _, size in sizes})
    jobs = [
        (rate, job_of(mesh, text, given)) for rate in given.rates.split(",") for text in given.strategies.split(",")
    ]
    keys = [(r, rate, job) for r in range(given.rounds) for rate, job in jobs]
    if all(cells.has(key_of(split, *cell)) for cell in keys) or cells.is_over:
        cells.left += sum(not cells.has(key_of(split, *cell)) for cell in keys)
        return
    with hosts(ISLANDS, train, urgent=given.sleep > 0, slots=mesh.size) as group:
        known: dict[int, dict[str, Any]] = {}
        for turn, rate, job in keys:
            if not cells.wants(key_of(split, turn, rate, job)):
                continue
            if turn not in known:
                known[turn] = told(group, job)
            group.limit(rate)
            with cells.watched(group.pids) as seen:
                first = group.train(job)[0]
            row = {"split": split, "rate": rate, "strategy": job["strategy"], "known": known[turn]} | seen
            row["measured_s"] = measured([first])["run_s"] / job["steps"]
            row["sent"], row["recorded"] = (
                (b - a) / (job["steps"] * job["segments"])
                for a, b in zip(first["sent"][0], first["sent"][-1], strict=True)
            )
            row["predicted_s"] = predict(job, mesh, rate, known[turn])
            cells.put(key_of(split, turn, rate, job), row)
            print(line(cells_of([row])), f"others {row['others_cores']:.2f} cores", flush=True)


def key_of(split: str, turn: int, rate: str, job: dict[str, Any]) -> str:
    return f"{split}/{turn}/{rate}/{job['strategy']}"


def job_of(mesh: NodeMesh, text: str, given: argparse.Namespace) -> dict[str, Any]:
    interval = parse_strategy(text).given_arguments.get("H", 1)
    return {
        "strategy": text, "nodes": ISLANDS, "split": {name: size for name, size in mesh.axes.items() if size > 1},
        "steps": -(-given.steps // interval) * interval, "segments": given.segments, "batch_size": given.batch_size,
        "sleep_s": given.sleep,
    }  # fmt: skip


def told(group: Hosts, job: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction's inputs, measured without limits. Afterwards the processes have met in one world."""
    group.limit(None)
    if group.meetings:
        group.part()
    group.meet()
    free = measured(group.train(job | {"strategy": "diloco:H=10", "steps": 10, "segments": FREE}))
    return {
        "island_s": (free["run_s"] - free["comm_s"]) / 10,
        "latency_s": group.latency_s(),
        "memory_bytes_per_s": memory_bytes_per_s(),
    }


def predict(job: dict[str, Any], mesh: NodeMesh, rate: str, known: dict[str, Any]) -> float:
    """Return the clock's seconds for a step."""
    few = {"segments": 1, "sleep_s": 0.0} | ({"batch_size": mesh.size} if mesh.shard == mesh.size else {})
    network = links(rate, known["latency_s"], known["memory_bytes_per_s"])
    clock = namespaces.predict(train, job | few, network, known["island_s"])
    return clock["run_s"] / job["steps"]


def cells_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line of the table: medians over rounds."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    off = statistics.median(row["predicted_s"] / row["measured_s"] - 1 for row in rows)
    return [
        *(rows[0]["split"], rows[0]["strategy"], rows[0]["rate"]),
        *(f"{1e3 * median(name):.0f}" for name in ("predicted_s", "measured_s")),
        f"{off:+.1%}",
        *(f"{median('sent'):,.0f}", f"{median('recorded'):,.0f}"),
        f"{median('sent') / median('recorded') - 1:+.1%}",
    ]


def line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", default="shard=2", help="splits of an island with two devices, by spaces")
    parser.add_argument("--rates", default="100mbit,1gbit", help="rates of every island's cable, in tc's form")
    parser.add_argument("--strategies", default="ddp,diloco:H=10,diloco:H=50", help="strategies, as for exogym compare")
    parser.add_argument(
        "--batch_size", type=int, default=8, help=f"windows of {WINDOW} characters of an island in a step"
    )
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds for each window; 0: only compute")
    parser.add_argument("--steps", type=int, default=10, help="steps of a segment, rounded up to whole rounds")
    parser.add_argument("--segments", type=int, default=3, help="measured segments per cell, after one warm-up segment")
    parser.add_argument("--rounds", type=int, default=3, help="rounds through all cells")
    parser.add_argument("--json", metavar="FILE", help="file for measured cells; they are not measured again")
    parser.add_argument("--again", choices=AGAIN, help="cells to measure again")
    parser.add_argument("--turn", type=float, help="seconds after which no cell begins")
    given = parser.parse_args()
    enter()
    cells = Cells(given.json, given.again, turn_s=given.turn)
    size = sum(p.numel() for p in make_model().parameters())
    print(
        f"{size:,} parameters, {os.cpu_count()} cores; {load()}\n\n{line(COLUMNS)}\n{line(['---'] * len(COLUMNS))}",
        flush=True,
    )
    for split in given.splits.split():
        compare(split, cells, given)
    print(f"\n{load()}")
    if cells.left:
        raise SystemExit(f"islands: {cells.left} cells are left: give the command again")
    print(f"\nmedians of {given.rounds} rounds\n\n{line(COLUMNS)}\n{line(['---'] * len(COLUMNS))}")
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in cells.rows.values():
        found.setdefault((row["split"], row["strategy"], row["rate"]), []).append(row)
    for rows in found.values():
        print(line(cells_of(rows)))


if __name__ == "__main__":
    main()
