"""Hosts for benchmarks: processes in network namespaces on limited links, their measurements, and the clock's times.

    enter()
    with hosts(2, train) as group:
        group.meet()
        group.limit("100mbit")
        seen = measured(group.train({"strategy": "ddp", "hosts": 2}))
        group.part()
        alone = group.train({"strategy": "ddp", "hosts": 1})  # each for itself, all at once

A host has one process, or `slots` of them, and one cable to a bridge, which lies in a namespace of its own. `tc tbf`
limits every cable in both directions; what processes of one host say to each other goes over its loopback. The
namespaces have no names and live as long as their processes, so nothing is left behind however a run ends. Needs Linux,
root, and Debian's iproute2.

The script defines a job: `train(job, mark, **options)` trains it, calls `mark(loop)` after each segment, passes
`options` to `fit`, and returns the `LocalTrainer`. All hosts are forks of the script, so any function will do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym import LocalTrainer
from exogym.core.engine.behind import Carried
from exogym.core.engine.wire import ProcessWire
from exogym.machines.distributed.probing import measure, step_seconds
from exogym.network import Network, parse_bandwidth
from exogym.network.overheads import HEADER_BYTES
from exogym.testing import fingerprint

Train = Callable[..., LocalTrainer]  # train(job, mark, **options of fit)
BURST_S = 0.002  # of the rate, that may pass at once after a pause
QUEUE_S = 2.0  # of the rate, that may wait: nothing is dropped
CONTROL = "cubic"  # of TCP: Linux's own default, whatever this machine's is
SMALL_BYTES = 65536  # what is under this is the loop's own: which gradients there are, losses
GIVE_UP_S = 120.0
SUBNET = "10.78.0"
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1  # linux/sched.h, linux/prctl.h
SCRIPT = Path(sys.argv[0]).stem  # that measures, for its messages


def enter() -> None:
    """Put this process into its own namespace, with one thread. End it if that is impossible."""
    missing = [name for name in ("nsenter", "ip", "tc") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise SystemExit(
            f"{SCRIPT}: needs {', '.join(missing) or 'root'}: apt-get install iproute2 util-linux; run as root"
        )
    linux("unshare", CLONE_NEWNET)
    torch.set_num_threads(1)


# A host's process


class Stopwatch:
    """Notes when this process enters and leaves the wire's collectives: (start, end, bytes handed over) in `spans`.

    `behind` has the same for collectives that run while the process computes, with their processor seconds.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, int]] = []
        self.behind: list[tuple[float, float, int, float]] = []
        self._inside = False
        for name in ("rows", "reduce", "agree", "carry"):
            setattr(ProcessWire, name, self._timed(getattr(ProcessWire, name)))
        Carried.wait = self._timed(Carried.wait)  # type: ignore[method-assign]
        begin = ProcessWire.begin

        def begun(wire: ProcessWire, x: Tensor) -> Callable[[], None]:
            start, wait = time.perf_counter(), begin(wire, x)

            def waited() -> None:  # the sum lasts until somebody has waited for it
                wait()
                self.spans.append((start, time.perf_counter(), nbytes(x)))

            return waited

        ProcessWire.begin = begun  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(wire: Any, *given: Any, **options: Any) -> Any:
            x = given[0] if given else None
            if threading.current_thread() is not threading.main_thread():
                start, cpu_s = time.perf_counter(), time.thread_time()
                try:
                    return call(wire, *given, **options)
                finally:
                    self.behind.append((start, time.perf_counter(), nbytes(x), time.thread_time() - cpu_s))
            if self._inside:
                return call(wire, *given, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return call(wire, *given, **options)
            finally:
                self._inside = False
                self.spans.append((start, time.perf_counter(), nbytes(x)))

        return timed


def nbytes(x: Any) -> int:
    """Return the bytes of a tensor, or of the tensors by node that `carry` gets; 0 for anything else."""
    parts = x.values() if isinstance(x, dict) else [x]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def host(pipe: Connection, train: Train, urgent: bool, beside: int | None) -> None:
    """Be a host, or another process of the one that `beside` is: say when there is a namespace, then do as told until
    killed.

    The first answer is False where real-time priority was asked for and not had. Orders are ("meet", environment of
    the world), ("part", None), ("latency", None), ("step", task), ("probe", None), ("train", job), ("call", (function,
    arguments)); each is answered.
    """
    linux("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if beside is None:
        linux("unshare", CLONE_NEWNET)
    else:
        with open(f"/proc/{beside}/ns/net") as space:
            linux("setns", space.fileno(), CLONE_NEWNET)
    try:
        if urgent:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        pipe.send(True)
    except PermissionError:
        pipe.send(False)
    watch = Stopwatch()
    while True:
        order, given = pipe.recv()
        if order == "meet":
            os.environ.update(given)
            dist.init_process_group("gloo", timeout=timedelta(seconds=GIVE_UP_S))
            pipe.send(None)
        elif order == "part":
            dist.destroy_process_group()
            for name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]
            pipe.send(None)
        elif order == "latency":
            pipe.send(message_s())
        elif order == "probe":
            pipe.send(measure()[1])
        elif order == "step":
            with contextlib.chdir(Path(__file__).parent):  # where the script is a module
                pipe.send(step_seconds(given))
        elif order == "call":
            pipe.send(given[0](*given[1:]))
        else:
            watch.spans, watch.behind, marks, sent = [], [], [], []

            def mark(
                loop: Any,
                marks: list[tuple[float, int]] = marks,
                sent: list[tuple[float, float]] = sent,
            ) -> None:
                marks.append((time.perf_counter(), len(watch.spans)))
                sent.append((sent_bytes(), float(loop.fleet.comm.ledger.tx_bytes.mean())))

            trainer = train(given, mark)
            is_here = not any(p.is_meta for p in trainer.model.parameters())  # of a model that is split: in one process
            found = fingerprint(trainer.model) if is_here else None
            answer = {"spans": watch.spans, "behind": watch.behind, "marks": marks, "sent": sent, "fingerprint": found}
            pipe.send(answer)


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


def sent_bytes(device: str = "eth0") -> int:
    """Return the bytes that this host has sent over its cable, less the headers of packets."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(f"{device}:")]
    fields = line.split(":")[1].split()
    return int(fields[8]) - HEADER_BYTES * int(fields[9])


# Hosts


def linux(call: str, *arguments: int) -> None:
    """Make a call of the C library that Python has no name for."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*arguments):
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def shell(*words: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{SCRIPT}: {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


class Hosts:
    """`count` network namespaces with `slots` processes each, on one bridge in the namespace of this process.

    Args:
        train: what a job is.
        urgent: ask for real-time priority, so that what other programs do is not measured. Not for jobs that compute
            all the time: they would keep the system from carrying their packets.
        slots: processes of a host; those of the first host come first.
    """

    def __init__(self, count: int, train: Train, urgent: bool, slots: int = 1):
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.meetings, self.slots = 0, slots
        fork = multiprocessing.get_context("fork")
        for rank in range(count * slots):
            here, there = fork.Pipe()
            self.pipes.append(here)
            beside = self.processes[rank - rank % slots].pid if rank % slots else None
            self.processes.append(fork.Process(target=host, args=(there, train, urgent, beside), daemon=True))
            self.processes[-1].start()
            there.close()  # else its end would not be seen
            if not self._answer(rank) and rank == 0:
                print("hosts without real-time priority: what other programs do is measured too")

    def connect(self) -> None:
        """Plug the cables in."""
        shell("ip", "link", "add", "name", "bridge0", "type", "bridge")
        shell("ip", "link", "set", "bridge0", "up")
        for rank, process in enumerate(self._firsts):
            inside, port = self._inside(process), f"port{rank}"
            ends = ["name", "eth0", "netns", str(process.pid), "type", "veth", "peer", "name", port]
            shell("ip", "link", "add", *ends)
            shell("ip", "link", "set", port, "master", "bridge0", "up")
            shell(*inside, "ip", "link", "set", "lo", "up")
            shell(*inside, "ip", "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
            shell(*inside, "ip", "link", "set", "eth0", "up")
            shell(*inside, "ip", "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", CONTROL)

    def meet(self, apart: bool = False) -> None:
        """Connect the processes into one world (`apart`: one world per host). From now on they train together."""
        self.meetings += 1  # each at a port of its own: the last one may still be closing
        size = self.slots if apart else len(self.pipes)
        worlds = [
            {
                "MASTER_ADDR": f"{SUBNET}.{rank // size * size // self.slots + 1}",
                "MASTER_PORT": str(29500 + self.meetings),
                "WORLD_SIZE": str(size),
                "RANK": str(rank % size),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            for rank in self._ranks
        ]
        self._order("meet", worlds)

    def limit(self, rate: str | None, hosts: Sequence[int] | None = None) -> None:
        """Let the cables of all `hosts`, or of some, carry `rate`, such as "100mbit", each way; None: no limit."""
        for rank, process in enumerate(self._firsts):
            if hosts is not None and rank not in hosts:
                continue
            for inside, device in ((self._inside(process), "eth0"), ([], f"port{rank}")):
                words = [*inside, "tc", "qdisc"]
                if rate is None:  # none is there at first
                    subprocess.run([*words, "del", "dev", device, "root"], capture_output=True, check=False)
                    continue
                bytes_per_s = bits_per_s(rate) / 8
                shape = ["rate", rate, "burst", str(max(3028, int(bytes_per_s * BURST_S)))]
                shape += ["limit", str(int(bytes_per_s * QUEUE_S))]
                shell(*words, "replace", "dev", device, "root", "tbf", *shape)

    def part(self) -> None:
        """End the world. From now on each process trains for itself."""
        self._order("part", [None for _ in self._ranks])

    def latency_s(self) -> float:
        """Return the seconds of a small message between the first two, which have met."""
        return self._order("latency", [None for _ in self._ranks])[0]

    def probes(self) -> dict[str, Any]:
        """Return what `exogym doctor --measure` writes of these hosts, which have met."""
        return self._order("probe", [None for _ in self._ranks])[0]

    def steps_s(self, task: str) -> list[float]:
        """Return the seconds of a step of a task on each host, all at once, as `exogym doctor --measure` has them."""
        return self._order("step", [task for _ in self._ranks])

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of the script in all processes. Return the results."""
        return self._order("call", [(function, *arguments) for _ in self._ranks])

    def train(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Train in all processes. Return for each its "spans" on the wire, "behind", "marks", and "fingerprint"."""
        return self._order("train", [job for _ in self._ranks])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        # The kernel removes the cables of a namespace that has ended a moment later. New cables have the same names.
        for device in ("bridge0", *(f"port{rank}" for rank in range(len(self._firsts)))):
            subprocess.run(["ip", "link", "del", device], capture_output=True, check=False)

    @property
    def pids(self) -> list[int]:
        """The hosts' processes."""
        return [process.pid for process in self.processes]

    @property
    def _firsts(self) -> list[Any]:
        """The first process of each host."""
        return self.processes[:: self.slots]

    @property
    def _ranks(self) -> range:
        return range(len(self.pipes))

    def _order(self, order: str, given: Sequence[Any]) -> list[Any]:
        for pipe, own in zip(self.pipes, given, strict=True):
            pipe.send((order, own))
        return self._answers()

    def _inside(self, process: Any) -> list[str]:
        return ["nsenter", "--net", "--target", str(process.pid)]

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in self._ranks]

    def _answer(self, rank: int) -> Any:
        try:
            return self.pipes[rank].recv()
        except EOFError:
            raise SystemExit(f"{SCRIPT}: a host's process ended; its error is above") from None


@contextlib.contextmanager
def hosts(count: int, train: Train, urgent: bool = False, slots: int = 1) -> Iterator[Hosts]:
    """Hosts while entered."""
    made = Hosts(count, train, urgent, slots)
    try:
        made.connect()
        yield made
    finally:
        made.close()


# What they measured, and what the clock says


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


def memory_bytes_per_s(size: int = 4_000_000, times: int = 20) -> float:
    """Return the most bytes per second that a host's process read and wrote as it copied `size` bytes."""
    x, y, seconds = torch.zeros(size // 4), torch.zeros(size // 4), []
    for _ in range(times):
        start = time.perf_counter()
        y.copy_(x)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


def links(rate: str, latency_s: float, memory_bytes_per_s: float = 0.0) -> dict[str, Any]:
    """Return the network of cables that carry `rate`; with the rate of memory, copies and sums take time."""
    memory = 8 * memory_bytes_per_s or None
    return Network(bits_per_s(rate), latency_s, tcp=True, memory=memory).describe()


def predict(train: Train, job: dict[str, Any], network: dict[str, Any], step_s: Any) -> dict[str, Any]:
    """Return the seconds of a segment, "comm_s" and "run_s", as the clock has it, and the weights' "fingerprint".

    The job is trained here, in one process, on a network as `Network.describe` gives it; `step_s` is of a node's step.
    """
    seen: list[tuple[float, float]] = []

    def mark(loop: Any) -> None:
        seen.append((loop.timing.time_s, float(loop.timing.clock.seconds("sending")[0])))

    trainer = train(job, mark, network=Network.of(network), step_seconds=step_s)
    run_s, comm_s = ((seen[-1][part] - seen[0][part]) / (len(seen) - 1) for part in (0, 1))
    return {"run_s": run_s, "comm_s": comm_s, "fingerprint": fingerprint(trainer.model)}


def bits_per_s(rate: str) -> float:
    """Return a rate as `tc` writes it, "100mbit", in bits per second."""
    return parse_bandwidth(f"{rate}/s", "--rates")


def load() -> str:
    return "load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
