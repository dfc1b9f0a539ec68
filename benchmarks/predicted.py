"""Times that the clock predicts against times of the same training among real processes on links of limited rate.

    python benchmarks/predicted.py --hosts 2,4 --rates 50mbit,100mbit,200mbit --strategies ddp,diloco:H=10
    python benchmarks/predicted.py --hosts 2 --rates 100mbit --strategies ddp --reduction native

Hosts are network namespaces, each with one process and one cable to a bridge, which lies in a namespace of its own. `tc
tbf` limits every cable in both directions. The namespaces have no names and live as long as their processes, so nothing
is left behind however a run ends. Needs Linux, root, and Debian's iproute2. The processes ask for real-time priority;
where they do not get it, what other programs do is measured too.

**Measured.** gloo trains a linear model of 1,001,000 parameters (4 MB). Its forward pass sleeps for `--step`, so that
hosts compute at the same time although they share the machine's cores. Rank 0 marks the time every few steps; the first
of these segments warms up, medians over the others are shown. A wrapper around the wire notes when each process enters
and leaves a collective; all processes of a machine read the same clock. *comm* is the time from the entry of the last
process to rank 0's exit, small messages included; until then rank 0 waits, which is part of *run* only.

**Predicted.** The same `fit` in one process with `network=` and `step_seconds=`; the fingerprint of the weights shows
that it is the same training. Of the links it knows the rate, the share of it that is payload, and the time of a small
message; that and the time of a step (a segment less *comm*) are measured beforehand without limits. Nothing is fitted.
The share: 1,448 bytes of a packet of 1,514 (Ethernet 14, IP 20, TCP with timestamps 32), and 66 bytes back to
acknowledge every second packet (RFC 5681, section 4.2), which share the line with the data that goes that way. A ring,
which the clock reckons with, and the exact reduction cost the same here.

The script fails where they differ by more than `--limit`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.engine.wire import ProcessWire
from exogym.network import Network, parse_bandwidth, parse_seconds
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint

PAYLOAD_SHARE = 1448 / (1514 + 66 / 2)
BURST_S = 0.002  # of the rate, that may pass at once after a pause
QUEUE_S = 2.0  # of the rate, that may wait: nothing is dropped
CONTROL = "cubic"  # of TCP: Linux's own default, whatever this machine's is
SMALL_BYTES = 65536  # what is under this is the loop's own: which gradients there are, losses
STEPS = 4  # of a segment, or H where that is more
GIVE_UP_S = 120.0
SUBNET = "10.78.0"
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1  # linux/sched.h, linux/prctl.h


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


def train(job: dict[str, Any], mark: Callable[[Any], Any], step_s: float, **options: Any) -> LocalTrainer:
    """Train as `job` says, calling `mark(loop)` after each segment."""
    strategy = parse_strategy(job["strategy"], inner_optim="sgd", lr=0.01)
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    trainer = LocalTrainer(Wide(step_s), torch.utils.data.TensorDataset(x, x.roll(1, 0)))
    trainer.fit(
        strategy, num_nodes=job["hosts"], max_steps=job["steps"] * (job["segments"] + 1), batch_size=1, device="cpu",
        reduction=job["reduction"], final_sync=False, progress=False, callbacks=[Every(job["steps"], mark)], **options,
    )  # fmt: skip
    return trainer


def predict(job: dict[str, Any], rate_bps: float, latency_s: float, step_s: float) -> dict[str, Any]:
    """Return the seconds of a segment, "comm_s" and "run_s", as the clock has it, and the weights' "fingerprint"."""
    seen: list[tuple[float, float]] = []

    def mark(loop: Any) -> None:
        seen.append((loop.timing.time_s, float(loop.timing.clock.seconds("sending")[0])))

    network = Network(rate_bps * PAYLOAD_SHARE, latency_s)
    trainer = train(job, mark, 0.0, network=network, step_seconds=step_s)
    run_s, comm_s = ((seen[-1][part] - seen[0][part]) / (len(seen) - 1) for part in (0, 1))
    return {"run_s": run_s, "comm_s": comm_s, "fingerprint": fingerprint(trainer.model)}


# A host's process


class Stopwatch:
    """Notes when this process enters and leaves the wire's collectives: (start, end, bytes handed over) in `spans`."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, int]] = []
        self._inside = False
        for name in ("rows", "reduce", "agree", "tell"):
            setattr(ProcessWire, name, self._timed(getattr(ProcessWire, name)))
        begin = ProcessWire.begin
        ProcessWire.begin = lambda wire, x: _Begun(self, begin(wire, x), x)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(wire: ProcessWire, x: Any, *args: Any, **options: Any) -> Any:
            if self._inside:
                return call(wire, x, *args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return call(wire, x, *args, **options)
            finally:
                self._inside = False
                self.add(start, x)

        return timed

    def add(self, start: float, x: Any) -> None:
        self.spans.append((start, time.perf_counter(), x.nbytes if isinstance(x, Tensor) else 0))


class _Begun:
    """A sum that was begun; it lasts until somebody has waited for it."""

    def __init__(self, watch: Stopwatch, work: Any, x: Tensor):
        self.watch, self.work, self.x, self.start = watch, work, x, time.perf_counter()

    def wait(self) -> None:
        self.work.wait()
        self.watch.add(self.start, self.x)


def host(pipe: Connection) -> None:
    """Be a host: say when there is a namespace, meet the others as told, and answer jobs until killed."""
    linux("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    linux("unshare", CLONE_NEWNET)
    urgent = True
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        urgent = False
    pipe.send(urgent)
    os.environ.update(pipe.recv())
    dist.init_process_group("gloo", timeout=timedelta(seconds=GIVE_UP_S))
    watch = Stopwatch()
    while True:
        job = pipe.recv()
        if job == "latency":
            pipe.send(message_s())
            continue
        watch.spans, marks = [], []

        def mark(loop: Any, marks: list[tuple[float, int]] = marks) -> None:
            marks.append((time.perf_counter(), len(watch.spans)))

        trainer = train(job, mark, job["step_s"])
        pipe.send({"spans": watch.spans, "marks": marks, "fingerprint": fingerprint(trainer.model)})


def message_s(times: int = 100) -> float:
    """Return the least seconds that a small message between ranks 0 and 1 took, one way."""
    rank, x, seconds = dist.get_rank(), torch.zeros(1), []
    for _ in range(times if rank < 2 else 0):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(x, 1 - sender)
            else:
                dist.recv(x, sender)
        seconds.append((time.perf_counter() - start) / 2)
    dist.barrier()
    return min(seconds, default=0.0)


# Hosts


def linux(call: str, *arguments: int) -> None:
    """Make a call of the C library that Python has no name for."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*arguments):
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def shell(*words: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"predicted: {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


class Hosts:
    """`count` processes, each in a network namespace, on one bridge in the namespace of this process."""

    def __init__(self, count: int):
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            here, there = fork.Pipe()
            self.pipes.append(here)
            self.processes.append(fork.Process(target=host, args=(there,), daemon=True))
            self.processes[-1].start()
            there.close()  # else its end would not be seen

    def connect(self) -> None:
        """Plug the cables in, and let the processes meet."""
        shell("ip", "link", "add", "name", "bridge0", "type", "bridge")
        shell("ip", "link", "set", "bridge0", "up")
        if not all(self._answers()):
            print(f"{len(self.pipes)} hosts without real-time priority: what other programs do is measured too")
        world = {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29500", "WORLD_SIZE": str(len(self.pipes))}
        for rank, process in enumerate(self.processes):
            inside, port = self._inside(process), f"port{rank}"
            ends = ["name", "eth0", "netns", str(process.pid), "type", "veth", "peer", "name", port]
            shell("ip", "link", "add", *ends)
            shell("ip", "link", "set", port, "master", "bridge0", "up")
            shell(*inside, "ip", "link", "set", "lo", "up")
            shell(*inside, "ip", "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
            shell(*inside, "ip", "link", "set", "eth0", "up")
            shell(*inside, "ip", "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", CONTROL)
        for rank, pipe in enumerate(self.pipes):
            pipe.send(world | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"})

    def limit(self, rate: str | None) -> None:
        """Let every cable carry `rate`, such as "100mbit", each way; None: no limit."""
        for rank, process in enumerate(self.processes):
            for inside, device in ((self._inside(process), "eth0"), ([], f"port{rank}")):
                words = [*inside, "tc", "qdisc"]
                if rate is None:  # none is there at first
                    subprocess.run([*words, "del", "dev", device, "root"], capture_output=True, check=False)
                    continue
                bytes_per_s = bits_per_s(rate) / 8
                shape = ["rate", rate, "burst", str(max(3028, int(bytes_per_s * BURST_S)))]
                shape += ["limit", str(int(bytes_per_s * QUEUE_S))]
                shell(*words, "replace", "dev", device, "root", "tbf", *shape)

    def do(self, job: Any) -> list[Any]:
        """Give all processes a job; return their answers."""
        for pipe in self.pipes:
            pipe.send(job)
        return self._answers()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        subprocess.run(["ip", "link", "del", "bridge0"], capture_output=True, check=False)

    def _inside(self, process: Any) -> list[str]:
        return ["nsenter", "--net", "--target", str(process.pid)]

    def _answers(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise SystemExit("predicted: a host's process ended; its error is above") from None


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Hosts while entered."""
    made = Hosts(count)
    try:
        made.connect()
        yield made
    finally:
        made.close()


# Comparing


def measured(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of a segment: "run_s", of that "comm_s", "waiting_s", "small_s" (in comm_s); medians."""
    spans, marks = [answer["spans"] for answer in answers], answers[0]["marks"]
    segments = []
    for (start, first), (end, last) in itertools.pairwise(marks):
        found = dict.fromkeys(("comm_s", "waiting_s", "small_s"), 0.0) | {"run_s": end - start}
        for calls in zip(*(of[first:last] for of in spans), strict=True):
            (entered, left, size), all_there = calls[0], max(call[0] for call in calls)
            took = max(0.0, left - all_there)
            found["comm_s"] += took
            found["small_s"] += took if size < SMALL_BYTES else 0.0
            found["waiting_s"] += min(left, all_there) - entered
        segments.append(found)
    return {name: statistics.median(segment[name] for segment in segments) for name in segments[0]}


def compare(count: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each reduction, strategy and rate among `count` hosts."""
    with hosts(count) as group:
        for reduction, text in itertools.product(given.reduction.split(","), given.strategies.split(",")):
            job = {"strategy": text, "reduction": reduction, "hosts": count, "segments": given.repeat}
            job["step_s"] = parse_seconds(given.step, "--step")
            job["steps"] = max(STEPS, parse_strategy(text).given_arguments.get("H", 1))
            group.limit(None)
            latency_s, free = group.do("latency")[0], measured(group.do(job))
            own_step_s = (free["run_s"] - free["comm_s"]) / job["steps"]
            for rate in given.rates.split(","):
                known = {"rate_bps": bits_per_s(rate), "latency_s": latency_s, "step_s": own_step_s}
                clock = predict(job, **known)
                group.limit(rate)
                answers = group.do(job)
                if reduction == "tree" and clock["fingerprint"] != answers[0]["fingerprint"]:
                    raise SystemExit(f"predicted: {text} ended in other weights than predicted")
                seen = measured(answers)
                off = {part: clock[f"{part}_s"] / seen[f"{part}_s"] - 1 for part in ("comm", "run")}
                yield {
                    "job": job, "rate": rate, "known": known, "clock": clock, "measured": seen, "free": free, "off": off
                }  # fmt: skip


def bits_per_s(rate: str) -> float:
    """Return a rate as `tc` writes it, "100mbit", in bits per second."""
    return parse_bandwidth(f"{rate}/s", "--rates")


def show(row: dict[str, Any]) -> None:
    job, seen, clock, known = row["job"], row["measured"], row["clock"], row["known"]
    cells = [f"{job['hosts']:5d} {row['rate']:>8s} {job['strategy']:12s} {job['reduction']:9s}"]
    cells += [
        f"{seen[f'{part}_s']:8.3f} {clock[f'{part}_s']:9.3f} {row['off'][part]:+6.1%}" for part in ("comm", "run")
    ]
    cells += [f"{seen['waiting_s']:8.3f} {seen['small_s']:7.3f}"]
    cells += [f"{1e3 * known['latency_s']:10.2f} {1e3 * known['step_s']:7.1f}"]
    print(*cells, flush=True)


def load() -> str:
    return "load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="how many, by commas")
    parser.add_argument("--rates", default="50mbit,100mbit,200mbit", help="of every cable, as tc writes them")
    parser.add_argument("--strategies", default="ddp,diloco:H=10", help="as exogym compare reads them")
    parser.add_argument("--reduction", default="tree,native", help="tree, native or both")
    parser.add_argument("--repeat", type=int, default=5, help="segments measured, after one that is not")
    parser.add_argument("--step", default="30ms", help="how long the forward pass sleeps")
    parser.add_argument("--limit", type=float, default=0.10, help="share by which a prediction may be off")
    parser.add_argument("--json", help="file for the rows with all that was measured")
    given = parser.parse_args()
    missing = [name for name in ("nsenter", "ip", "tc") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise SystemExit(
            f"predicted: needs {', '.join(missing) or 'root'}: apt-get install iproute2 util-linux; run as root"
        )
    linux("unshare", CLONE_NEWNET)
    torch.set_num_threads(1)
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
