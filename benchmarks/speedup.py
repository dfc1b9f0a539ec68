"""The speed-up of several hosts over one: measured on links of limited rate, predicted, and compared with targets.

    python benchmarks/speedup.py --hosts 1,2,3,4 --links 100mbit,1gbit --json speedup.json
    python benchmarks/speedup.py --quick

Every host trains one node with the same batch size, so the speed-up of N hosts is N t(1) / t(N), where t is the time
of a step: examples per second over those of one host. The targets are 1.8 on two hosts, 2.5 on three and 3.2 on four.

Hosts are processes in network namespaces (see `namespaces.py`), which needs Linux, root, and Debian's iproute2. The
model is a GPT over characters (4 layers, width 128, 65 characters, windows of 64) on random text, since time does not
depend on what is learnt. One thread each. Medians over segments of `--steps` steps, or of a round where that is longer;
one segment more comes first and is not measured.

*computing* is the time of a step where the N hosts train at the same time, each for itself, with nobody to send to: the
same strategy and batches, no packets. All hosts share this machine's cores, so it grows with N beyond the cores.
*measured* is the time of a step of all together. The speed-up *measured* has both slow-downs in it. The one of *own
cores* has only what communicating costs: N c(1) / (m(N) - c(N) + c(1)), with c and m for computing and measured. What
hosts compute in order to communicate (copies, sums, TCP) still shares the cores in it, so for N beyond the cores it is
rather too low. A target is met where this one reaches it. A step that takes over 5 % less than computing alone was
measured while the machine had other work to do: such a row says "noise" and judges nothing.

*predicted* is the time of a step as the virtual clock has it: from the rate of the links, the share of it that is
payload, the time of a small message without limits, and the computing measured here. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import namespaces
import torch
from namespaces import Hosts, enter, hosts, load, measured

from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.models import CharGPT
from exogym.strategy.registry import parse_strategy

TARGETS = {2: 1.8, 3: 2.5, 4: 3.2}  # hosts: speed-up
NOISE = 0.05  # share of computing by which a step of all together may seem shorter
FULL = {"n_layer": 4, "n_embd": 128, "batch_size": 32}
QUICK = {"n_layer": 1, "n_embd": 64, "batch_size": 4}
CHARACTERS, WINDOW, WINDOWS = 65, 64, 512
COLUMNS = (
    *("hosts", "strategy", "reduction", "link", "computing ms", "measured ms", "predicted ms", "speed-up measured"),
    *("own cores", "target", "met"),
)


def make_model(job: dict[str, Any]) -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(CHARACTERS, WINDOW, n_layer=job["n_layer"], n_head=4, n_embd=job["n_embd"])


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train `job`, calling `mark(loop)` after each segment."""
    text = torch.randint(CHARACTERS, (WINDOWS, WINDOW + 1), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    trainer = LocalTrainer(make_model(job), data)
    trainer.fit(
        parse_strategy(job["strategy"], inner_optim="adamw", lr=1e-3), num_nodes=job["hosts"],
        max_steps=job["steps"] * (job["segments"] + 1) + 1, batch_size=job["batch_size"], device="cpu",
        placement=Placement(reduction=job["reduction"]), final_sync=False, progress=False,
        callbacks=[Every(job["steps"], mark, may_end=False)], **options,
    )  # fmt: skip
    return trainer


def jobs(count: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the jobs for `count` hosts, one for each strategy and reduction."""
    reductions = given.reductions.split(",") if count > 1 else ["none"]
    for text, reduction in itertools.product(given.strategies.split(","), reductions):
        interval = parse_strategy(text).given_arguments.get("H", 1)
        yield {
            "strategy": text, "reduction": reduction, "hosts": count, "segments": given.repeats,
            "steps": -(-given.steps // interval) * interval,
        } | (QUICK if given.quick else FULL)  # fmt: skip


def rows_of(count: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each strategy, reduction and link among `count` hosts, without the speed-ups."""
    with hosts(count, train) as group:
        for job in jobs(count, given):
            computing = computing_s(group, job)
            if count == 1:
                yield {
                    "job": job,
                    "link": "none",
                    "computing_s": computing,
                    "measured_s": computing,
                    "predicted_s": None,
                }
                continue
            group.meet()
            latency_s = group.latency_s()
            for link in given.links.split(","):
                small = job | {"batch_size": 1, "segments": 1}  # the clock's time does not depend on the batch
                clock = namespaces.predict(train, small, namespaces.links(link, latency_s), computing)
                group.limit(link)
                seen = measured(group.train(job))
                yield {
                    "job": job, "link": link, "computing_s": computing, "measured_s": seen["run_s"] / job["steps"],
                    "predicted_s": clock["run_s"] / job["steps"],
                }  # fmt: skip
            group.limit(None)
            group.part()


def computing_s(group: Hosts, job: dict[str, Any]) -> float:
    """Return the mean seconds of a step if separate hosts train at the same time."""
    answers = group.train(job | {"hosts": 1, "reduction": "tree"})
    return statistics.mean(measured([answer])["run_s"] for answer in answers) / job["steps"]


def speedups(row: dict[str, Any], alone_s: float) -> dict[str, Any]:
    """Return a row's speed-ups over one host, whose step takes `alone_s`: "speedup", "own_cores", "target", "met"."""
    count, computing, together = row["job"]["hosts"], row["computing_s"], row["measured_s"]
    own_cores = count * alone_s / (max(0.0, together - computing) + alone_s)
    target = TARGETS.get(count)
    judged = target is not None and together > (1 - NOISE) * computing
    return {
        "speedup": count * alone_s / together, "own_cores": own_cores, "target": target,
        "met": own_cores >= target if judged else None,
    }  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row in the table's form."""

    def shown(value: Any, form: str = "") -> str:
        return "" if value is None else f"{value:{form}}"

    job, times = row["job"], [row[f"{part}_s"] for part in ("computing", "measured", "predicted")]
    return [
        *(str(job["hosts"]), job["strategy"], job["reduction"], row["link"]),
        *(shown(None if s is None else 1e3 * s, ".0f") for s in times),
        *(shown(row["speedup"], ".2f"), shown(row["own_cores"], ".2f"), shown(row["target"])),
        {None: "noise" if row["target"] else "", True: "yes", False: "no"}[row["met"]],
    ]


def line(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the speed-up with own cores against the number of hosts, and the targets, one panel for each reduction."""
    from matplotlib.figure import Figure

    together = [row for row in rows if row["job"]["hosts"] > 1]
    reductions = list(dict.fromkeys(row["job"]["reduction"] for row in together))
    most = max((row["job"]["hosts"] for row in together), default=1)
    figure = Figure(figsize=(4 * max(1, len(reductions)), 3.4), layout="constrained")
    panels = figure.subplots(1, max(1, len(reductions)), sharey=True, squeeze=False)[0]
    for panel, reduction in zip(panels, reductions, strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in together:
            if row["job"]["reduction"] == reduction:
                name = f"{row['job']['strategy']}, {row['link']}"
                lines.setdefault(name, [(1, 1.0)]).append((row["job"]["hosts"], row["own_cores"]))
        for name, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        targets = [(1, 1.0), *((count, target) for count, target in TARGETS.items() if count <= most)]
        panel.plot(*zip(*targets, strict=True), "k--", label="target")
        panel.set(title=f"reduction {reduction}", xlabel="hosts", xticks=range(1, most + 1), ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("speed-up, had each host its own core")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,2,3,4", help="numbers of hosts, by commas; one is always measured")
    parser.add_argument("--links", default="100mbit,1gbit", help="rates of every cable, in tc's form")
    parser.add_argument("--strategies", default="ddp,diloco:H=10", help="strategies, as for exogym compare")
    parser.add_argument("--reductions", default="tree,native", help="tree, native or both")
    parser.add_argument("--steps", type=int, default=5, help="steps of a segment, rounded up to whole rounds")
    parser.add_argument("--repeats", type=int, default=3, help="measured segments, after one warm-up segment")
    parser.add_argument("--quick", action="store_true", help="a small model, to test the script; ignore the times")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--figure", help="file for a picture of the speed-ups with own cores, such as speedup.png")
    given = parser.parse_args()
    enter()
    model = make_model(QUICK if given.quick else FULL)
    params = sum(p.numel() for p in model.parameters())
    print(f"{params:,} parameters, {4 * params / 1e6:.1f} MB; {os.cpu_count()} cores; {load()}\n")
    print(line(list(COLUMNS)))
    print(line(["---"] * len(COLUMNS)))
    rows, alone_s = [], {}
    for count in sorted({1, *map(int, given.hosts.split(","))}):
        for row in rows_of(count, given):
            if count == 1:
                alone_s[row["job"]["strategy"]] = row["computing_s"]
            rows.append(row | speedups(row, alone_s[row["job"]["strategy"]]))
            print(line(cells(rows[-1])), flush=True)
    print(f"\n{load()}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file)
    if given.figure:
        draw(rows, given.figure)


if __name__ == "__main__":
    main()
