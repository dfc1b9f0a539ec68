r"""Compare predicted times with measured times of the same training, among real processes on slow links.

    python benchmarks/predicted.py --hosts 2,4 --rates 50mbit,100mbit,200mbit --strategies ddp,diloco:H=10
    python benchmarks/predicted.py --hosts 2 --rates 100mbit --strategies ddp --reduction native

Hosts are processes in network namespaces (see `namespaces.py`), which needs Linux, root, and Debian's iproute2. They
ask for real-time priority. Without it, other programs' work is measured, too.

**Measured.** gloo trains four linear layers of 1,002,000 parameters (4 MB). Their forward pass sleeps 100 ms, so that
hosts compute at the same time although they share the machine's cores. Rank 0 marks the time every few steps; the first
of these segments warms up, medians over the others are shown. A wrapper around the wire notes when each process enters
and leaves a collective; all processes of a machine read the same clock. *comm* is the time from the entry of the last
process to rank 0's exit, small messages included; until then rank 0 waits, which is part of *run* only.

**Predicted.** The same `fit` in one process with `network=` and `step_seconds=`; the fingerprint of the weights shows
that it is the same training. Of the links it knows the rate, the share of it that is payload, and the time of a small
message; that and the time of a step (a segment less *comm*) are measured beforehand without limits, and so is the rate
at which a process copies memory, for the copies and sums of the exact reduction. Nothing is fitted.
The share: 1,448 bytes of a packet of 1,514 (Ethernet 14, IP 20, TCP with timestamps 32), and 66 bytes back to
acknowledge every second packet (RFC 5681, section 4.2), which share the line with the data that goes that way. A ring,
which the clock reckons with, and the exact reduction cost the same on the wire.

With `--probe` the clock knows instead what `exogym doctor --measure --task` finds on the limited links, just before:
how long collectives took, both reductions, and a step on all hosts at once; no rate, no latency, no size of the model.

    python benchmarks/predicted.py --probe --hosts 2,4 --rates 50mbit,200mbit,1gbit --json predicted.json --strategies \
        ddp,diloco:H=10,streaming_diloco:H=10:num_fragments=2,sparta:p_sparta=0.1

`--json` stores each finished cell (see `cells.py`), so you can stop the command and repeat it. `--turn 200` begins no
cell after 200 seconds. Each row has the load of other programs; `--again disturbed` repeats cells with more than a
quarter of a core. The script fails if more than a share `--misses` of the cells is off by more than `--limit`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import namespaces
import torch
from cells import AGAIN, Cells
from namespaces import Hosts, enter, hosts, links, load, measured, memory_bytes_per_s
from torch import Tensor, nn

from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.network import Network
from exogym.strategy.registry import parse_strategy
from exogym.study.tasks import Task

SLEEP_S = 0.1
WIDTH = 500  # of a layer
STEPS = 4  # steps of a segment, or H if larger
LEAST, MOST = 3, 24  # measured segments, after one that is not measured
PARTS = ("comm", "run")


class Wide(nn.Module):
    """Four linear layers of `width` x `width`, whose forward pass takes `sleep_s` more."""

    def __init__(self, sleep_s: float = SLEEP_S, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.sleep_s = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), sleep_s

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self.sleep_s)
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)


def data(width: int = WIDTH) -> torch.utils.data.TensorDataset:
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.roll(1, 0))


def task() -> Task:
    """Return the task, so that others can measure its step."""
    settings = {"num_nodes": 2, "batch_size": 1, "max_steps": 10, "lr": 0.01, "H": 10, "inner_optim": "sgd"}
    return Task("wide", "four layers that sleep", "drawn", data(), data(), Wide, **settings)


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train `job`, calling `mark(loop)` after each segment. One more step follows, because it is evaluated."""
    strategy = parse_strategy(job["strategy"], inner_optim="sgd", lr=0.01)
    width = job.get("width", WIDTH)
    trainer = LocalTrainer(Wide(job["sleep_s"], width), data(width))
    trainer.fit(
        strategy, num_nodes=job["hosts"], max_steps=job["steps"] * (job["segments"] + 1) + 1, batch_size=1,
        device="cpu",
        placement=Placement(reduction=job["reduction"], overlap=job["overlap"]), final_sync=False, progress=False,
        callbacks=[Every(job["steps"], mark, may_end=False)], **options,
    )  # fmt: skip
    return trainer


def predict(job: dict[str, Any], network: dict[str, Any], step_s: Any) -> dict[str, Any]:
    """Return the clock's times for a job. Its forward pass does not sleep here."""
    return namespaces.predict(train, job | {"sleep_s": 0.0}, network, step_s)


def compare(count: int, cells: Cells, given: argparse.Namespace) -> None:
    """Measure the wanted cells for `count` hosts."""
    jobs = {
        f"{count}/{rate}/{reduction}/{text}{'/blocking' * given.blocking}": (
            rate,
            job_of(count, reduction, text, given),
        )
        for rate, reduction, text in itertools.product(
            given.rates.split(","), given.reduction.split(","), given.strategies.split(",")
        )
    }
    if all(cells.has(key) for key in jobs) or cells.is_over:
        cells.left += sum(not cells.has(key) for key in jobs)
        return
    with hosts(count, train, urgent=True) as group:
        group.meet()
        for key, (rate, job) in jobs.items():
            if not cells.wants(key):
                continue
            known = (probed if given.probe else told)(group, cells, rate, job)
            if known is None:
                cells.left += 1
                continue
            job["segments"] = segments(job, known, given)
            clock = predict(job, **known)
            group.limit(rate)
            with cells.watched(group.pids) as seen:
                answers = group.train(job)
            if job["reduction"] == "tree" and clock["fingerprint"] != answers[0]["fingerprint"]:
                raise SystemExit(f"predicted: {job['strategy']} ended in other weights than predicted")
            times = measured(answers)
            # what is hidden takes no time, predicted or measured
            off = {part: clock[f"{part}_s"] / (times[f"{part}_s"] or 1.0) - bool(times[f"{part}_s"]) for part in PARTS}
            row = {"job": job, "rate": rate, "known": known, "clock": clock, "measured": times, "off": off}
            cells.put(key, row | seen)
            show(row | seen)


def job_of(count: int, reduction: str, text: str, given: argparse.Namespace) -> dict[str, Any]:
    steps = max(STEPS, parse_strategy(text).given_arguments.get("H", 1))
    return {
        "strategy": text, "reduction": reduction, "hosts": count, "segments": given.repeat, "steps": steps,
        "sleep_s": SLEEP_S, "overlap": not given.blocking,
    }  # fmt: skip


def segments(job: dict[str, Any], known: dict[str, Any], given: argparse.Namespace) -> int:
    """Return the number of segments that fill a cell's time, by a simple estimate."""
    if given.repeat:
        return int(given.repeat)
    reduction_s = Network.of(known["network"]).cost("all_reduce", 4e6, job["hosts"]).seconds
    sums = job["steps"] if job["strategy"] == "ddp" else 1
    taken_s = job["steps"] * SLEEP_S + sums * reduction_s
    return max(LEAST, min(MOST, round(given.cell / taken_s)))


def told(group: Hosts, cells: Cells, rate: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return the clock's inputs: the links' rate, and values measured without limits."""
    group.limit(None)
    latency_s, free = group.latency_s(), measured(group.train(job | {"segments": LEAST}))
    step_s = (free["run_s"] - free["comm_s"]) / job["steps"]
    memory = memory_bytes_per_s() if job["reduction"] == "tree" else 0.0
    return {"network": links(rate, latency_s, memory), "step_s": step_s}


def probed(group: Hosts, cells: Cells, rate: str, job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the clock's inputs from measurements of these hosts; None if the turn ends first."""
    step = once(f"{job['hosts']}/step", group, cells, None, lambda: {"step_s": group.steps_s("predicted:task")})
    network = once(f"{job['hosts']}/{rate}", group, cells, rate, lambda: {"network": group.probes()})
    if step is None or network is None or cells.is_over:
        return None
    return {"network": network["network"], "step_s": step["step_s"]}


def once(
    key: str, group: Hosts, cells: Cells, rate: str | None, find: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return values that are measured once for many cells, on links of one rate."""
    if not cells.has(key):
        if cells.is_over:
            return None
        group.limit(rate)
        with cells.watched(group.pids) as seen:
            found = find()
        cells.put(key, found | seen)
        print(f"{key}: probed in {seen['wall_s']:.0f} s, others took {seen['others_cores']:.2f} cores", flush=True)
    return cells.rows[key]


def show(row: dict[str, Any]) -> None:
    job, seen, clock = row["job"], row["measured"], row["clock"]
    name = (
        job["strategy"].replace("num_fragments", "F").replace("p_sparta", "p").replace("streaming_diloco", "streaming")
    )
    out = [f"{job['hosts']:5d} {row['rate']:>8s} {name:21s} {job['reduction']:9s}"]
    out += [f"{seen[f'{part}_s']:8.3f} {clock[f'{part}_s']:9.3f} {row['off'][part]:+6.1%}" for part in ("comm", "run")]
    out += [f"{seen['waiting_s']:8.3f} {seen['small_s']:7.3f} {row['others_cores']:8.2f}"]
    print(*out, "disturbed" if row["is_disturbed"] else "", flush=True)


def report(rows: Sequence[dict[str, Any]], limit: float) -> float:
    """Print how many cells are within `limit`, and the others. Return the share of the others."""
    missed = [row for row in rows if max(map(abs, row["off"].values())) > limit]
    for part in ("comm", "run"):
        held = sum(abs(row["off"][part]) <= limit for row in rows)
        worst = max(abs(row["off"][part]) for row in rows)
        print(f"{part}: {held} of {len(rows)} within {limit:.0%}, the worst {worst:.1%} off")
    print(f"both: {len(rows) - len(missed)} of {len(rows)}; disturbed: {sum(row['is_disturbed'] for row in rows)}")
    return len(missed) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts, by commas")
    parser.add_argument("--rates", default="50mbit,100mbit,200mbit", help="rates of every cable, in tc's form")
    parser.add_argument("--strategies", default="ddp,diloco:H=10", help="strategies, as for exogym compare")
    parser.add_argument("--reduction", default="tree,native", help="tree, native or both")
    parser.add_argument("--repeat", type=int, default=0, help="measured segments; 0: enough for --cell")
    parser.add_argument("--cell", type=float, default=12.0, help="seconds of a cell's segments, about")
    parser.add_argument("--blocking", action="store_true", help="wait for late averages where they are sent")
    parser.add_argument("--probe", action="store_true", help="predict from probes of the limited links, not the rate")
    parser.add_argument("--limit", type=float, default=0.10, help="largest share by which a prediction may be off")
    parser.add_argument("--misses", type=float, default=0.0, help="share of the cells that may be off by more")
    parser.add_argument("--json", metavar="FILE", help="file for measured cells; they are not measured again")
    parser.add_argument("--again", choices=AGAIN, help="cells to measure again")
    parser.add_argument("--turn", type=float, help="seconds after which no cell begins")
    given = parser.parse_args()
    enter()
    cells = Cells(given.json, given.again, given.limit, given.turn)
    print(f"seconds of a segment ({STEPS} steps, or H); {load()}")
    print("hosts     rate strategy              reduction     comm predicted    off      run predicted    off", end="")
    print("  waiting   small   others, cores")
    for count in given.hosts.split(","):
        compare(int(count), cells, given)
    print(load())
    if cells.left:
        raise SystemExit(f"predicted: {cells.left} cells are left: give the command again")
    missed = report([row for row in cells.rows.values() if "job" in row], given.limit)
    if missed > given.misses:
        raise SystemExit(f"predicted: {missed:.1%} of the cells are off, more than {given.limit:.0%}")


if __name__ == "__main__":
    main()
