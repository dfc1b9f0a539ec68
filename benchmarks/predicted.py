r"""Times that the clock predicts against times of the same training among real processes on links of limited rate.

    python benchmarks/predicted.py --hosts 2,4 --rates 50mbit,100mbit,200mbit --strategies ddp,diloco:H=10
    python benchmarks/predicted.py --hosts 2 --rates 100mbit --strategies ddp --reduction native

Hosts are processes in network namespaces (see `namespaces.py`), which needs Linux, root, and Debian's iproute2. They
ask for real-time priority; where they do not get it, what other programs do is measured too.

**Measured.** gloo trains a linear model of 1,001,000 parameters (4 MB). Its forward pass sleeps for `--step`, so that
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

With `--probe` the clock knows instead how long gloo's all-reduces of four sizes took on the limited links, just before;
the latency and the rate are then not told. All strategies and rates that a prediction should hold for:

    python benchmarks/predicted.py --probe --hosts 2,4 --rates 50mbit,100mbit,200mbit,500mbit,1gbit --strategies \
        ddp,diloco:H=10,streaming_diloco:H=10:num_fragments=1,sparta:p_sparta=0.1 --json predicted.json

The script fails where they differ by more than `--limit`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import namespaces
import torch
from namespaces import bits_per_s, enter, hosts, load, measured, memory_bytes_per_s
from torch import Tensor, nn

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.network import parse_seconds
from exogym.strategy.registry import parse_strategy

PROBES = (4_000, 400_000, 1_000_000, 4_004_000)  # bytes; the last is the model
STEPS = 4  # of a segment, or H where that is more


class Wide(nn.Module):
    """One linear layer of 1000 x 1000, whose forward pass takes `step_s` more."""

    def __init__(self, step_s: float):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step_s = nn.Linear(1000, 1000), step_s

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(self.step_s)
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train as `job` says, calling `mark(loop)` after each segment; the last step is after them, as it is evaluated."""
    strategy = parse_strategy(job["strategy"], inner_optim="sgd", lr=0.01)
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    trainer = LocalTrainer(Wide(job["step_s"]), torch.utils.data.TensorDataset(x, x.roll(1, 0)))
    trainer.fit(
        strategy, num_nodes=job["hosts"], max_steps=job["steps"] * (job["segments"] + 1) + 1, batch_size=1,
        device="cpu",
        reduction=job["reduction"], final_sync=False, progress=False,
        callbacks=[Every(job["steps"], mark, may_end=False)], **options,
    )  # fmt: skip
    return trainer


def predict(job: dict[str, Any], rate_bps: float, latency_s: float, step_s: float, **known: Any) -> dict[str, Any]:
    """Return what the clock says of a job, whose forward pass does not sleep here."""
    return namespaces.predict(train, job | {"step_s": 0.0}, rate_bps, latency_s, step_s, **known)


def compare(count: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each reduction, strategy and rate among `count` hosts."""
    with hosts(count, train, urgent=True) as group:
        group.meet()
        for reduction, text in itertools.product(given.reduction.split(","), given.strategies.split(",")):
            job = {"strategy": text, "reduction": reduction, "hosts": count, "segments": given.repeat}
            job["step_s"] = parse_seconds(given.step, "--step")
            job["steps"] = max(STEPS, parse_strategy(text).given_arguments.get("H", 1))
            group.limit(None)
            latency_s, free = group.latency_s(), measured(group.train(job))
            own_step_s = (free["run_s"] - free["comm_s"]) / job["steps"]
            for rate in given.rates.split(","):
                known = {"rate_bps": bits_per_s(rate), "latency_s": latency_s, "step_s": own_step_s}
                if reduction == "tree":
                    known["memory_bytes_per_s"] = memory_bytes_per_s()
                group.limit(rate)
                if given.probe:
                    known["probes"] = group.probes(PROBES)
                clock = predict(job, **known)
                answers = group.train(job)
                if reduction == "tree" and clock["fingerprint"] != answers[0]["fingerprint"]:
                    raise SystemExit(f"predicted: {text} ended in other weights than predicted")
                seen = measured(answers)
                off = {part: clock[f"{part}_s"] / seen[f"{part}_s"] - 1 for part in ("comm", "run")}
                yield {
                    "job": job, "rate": rate, "known": known, "clock": clock, "measured": seen, "free": free, "off": off
                }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    job, seen, clock, known = row["job"], row["measured"], row["clock"], row["known"]
    cells = [f"{job['hosts']:5d} {row['rate']:>8s} {job['strategy']:12s} {job['reduction']:9s}"]
    cells += [
        f"{seen[f'{part}_s']:8.3f} {clock[f'{part}_s']:9.3f} {row['off'][part]:+6.1%}" for part in ("comm", "run")
    ]
    cells += [f"{seen['waiting_s']:8.3f} {seen['small_s']:7.3f}"]
    cells += [f"{1e3 * known['latency_s']:10.2f} {1e3 * known['step_s']:7.1f}"]
    print(*cells, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="how many, by commas")
    parser.add_argument("--rates", default="50mbit,100mbit,200mbit", help="of every cable, as tc writes them")
    parser.add_argument("--strategies", default="ddp,diloco:H=10", help="as exogym compare reads them")
    parser.add_argument("--reduction", default="tree,native", help="tree, native or both")
    parser.add_argument("--repeat", type=int, default=5, help="segments measured, after one that is not")
    parser.add_argument("--probe", action="store_true", help="predict from probes of the limited links, not the rate")
    parser.add_argument("--step", default="30ms", help="how long the forward pass sleeps")
    parser.add_argument("--limit", type=float, default=0.10, help="share by which a prediction may be off")
    parser.add_argument("--json", help="file for the rows with all that was measured")
    given = parser.parse_args()
    enter()
    print(f"seconds of a segment ({STEPS} steps, or H); {load()}")
    print("hosts     rate strategy     reduction     comm predicted    off      run predicted    off", end="")
    print("  waiting   small message ms step ms")
    rows = []
    for count in given.hosts.split(","):
        for row in compare(int(count), given):
            rows.append(row)
            show(row)
    print(load())
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file)
    worst = max(abs(off) for row in rows for off in row["off"].values())
    if worst > given.limit:
        raise SystemExit(f"predicted: {worst:.1%} off, more than {given.limit:.0%}")


if __name__ == "__main__":
    main()
