"""Kill, stop, hang and cut runs whose averages are on their way, and look at what is left.

    python benchmarks/in_flight.py --json in_flight.json
    python benchmarks/in_flight.py --only launch/SIGINT

Runs train DiLoCo with a delay, eager DiLoCo and Streaming DiLoCo on hosts of `tests/hosts`: network namespaces with an
sshd each, on slow cables. In the layout "launch", `python -m exogym.launch` starts two processes on one host. In the
layout "ranks", these processes are forks (see `forked_ranks.py`), which start faster. In the layout "hosts", a
`NetworkTrainer` on the controller starts one process on each of two hosts. Needs Linux, root, and Debian's iproute2,
openssh-server and rsync.

The script of a run wraps each transfer, and notes its start and end in a file of the process. A trial waits for the
start of a random transfer in a random process, then a random part of a transfer's time, and then disturbs the run. The
trial counts if the file has no end of this transfer at that moment. Then these questions are asked:

- Did the run end, by itself, in the bits of the simulation? Or did it end with another exit code than 0 and a message?
- If it did not end in these bits: does the same command, which resumes, end in the bits of the simulation?
- Is a process left on a host or the controller? Is a port open, beside sshd's?

`--json` stores each finished trial, so you can stop the command and repeat it. `--turn 200` begins no trial after 200
seconds. The script fails if an answer is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import Cells

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hosts import Host, Hosts, Machine, shell

from exogym import LocalTrainer
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint

METHODS = (
    "diloco:H=4:delay=3", "diloco:H=4:eager=true", "streaming_diloco:H=4:num_fragments=2:fragment_sync_delay=3",
)  # fmt: skip
STEPS, STEP_S, HANG_S, LONGEST_S = 26, 0.04, 4.0, 240.0
NODES = 2  # one in each process
RATES = {"lo": "20mbit", "eth0": "10mbit"}
EVENTS = {  # number of trials
    "ranks/SIGKILL to a rank": 6, "ranks/SIGKILL to a rank, no restart": 4, "ranks/SIGTERM to a rank": 3,
    "ranks/SIGINT to a rank": 4, "ranks/SIGTERM to the launcher": 3, "ranks/SIGINT to all": 4,
    "ranks/SIGINT twice to all": 3, "ranks/SIGSTOP to a rank": 4,
    "launch/SIGKILL to a rank": 2, "launch/SIGINT to the launcher": 2, "launch/SIGINT to all": 1,
    "launch/SIGKILL to the launcher": 2, "launch/SIGSTOP to a rank": 1,
    "hosts/SIGKILL to a rank": 2, "hosts/SIGSTOP to a rank": 1, "hosts/SIGINT to the controller": 1,
    "hosts/SIGTERM to the controller": 1, "hosts/cut for seconds": 3, "hosts/cut for good": 1,
}  # fmt: skip

SAYS = ("Error", "Stopped", "stopped by", "hangs", "killed by")

MODEL = """
import time
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, sleep_s):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.sleep_s = nn.Sequential(nn.Linear(6, 250), nn.Tanh(), nn.Linear(250, 500)), sleep_s

    def forward(self, batch):
        time.sleep(self.sleep_s)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

def data():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.repeat(1, 84)[:, :500])
"""
SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from model import Model, data
from exogym import NetworkTrainer, Placement
from exogym.core.engine import behind
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint

start, count = behind.Behind.start, [0]

def marked(self, call, like, around):
    count[0] += 1
    number, file = count[0], Path({folder!r}, f"marks.{{os.environ['RANK']}}.{{os.getpid()}}")
    def carried(line):
        def mark(what):
            with file.open("a") as out:
                out.write(f"{{what}} {{number}}\\n")
        mark("start")
        found = call(line)
        mark("end")
        return found
    return start(self, carried, like, around)

behind.Behind.start = marked
trainer = NetworkTrainer({hosts!r}, Model({step_s}), data())
trainer.fit(
    parse_strategy({method!r}, lr=0.01), num_nodes={nodes}, max_steps={steps}, batch_size=4, device="cpu",
    placement=Placement(hang_s={hang_s}, max_restarts={restarts}),
    save_dir={folder!r} + "/saved", checkpoint_interval=5, resume=True,
)
if os.environ.get("RANK", "0") == "0":
    Path({folder!r}, "result").write_text(fingerprint(trainer.model))
"""


def this_tree(folder: Path) -> str:
    """Return a Python for hosts that imports the package of this tree, as the controller does."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={Path(__file__).parent.parent} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


@functools.cache
def simulated(method: str, nodes: int) -> str:
    """Return the fingerprint of the undisturbed run, simulated in this process."""
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    trainer = LocalTrainer(scope["Model"](0.0), scope["data"]())
    trainer.fit(
        parse_strategy(method, lr=0.01), num_nodes=nodes, max_steps=STEPS, batch_size=4, device="cpu", progress=False
    )
    return fingerprint(trainer.model)


class Forks:
    """A process on a host that forks ranks (see `forked_ranks.py`)."""

    def __init__(self, machine: Machine):
        words = [sys.executable, str(Path(__file__).with_name("forked_ranks.py"))]
        self.process = machine.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = 20000

    def ask(self, **order: Any) -> Any:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, folder: Path, ranks: int, restarts: int) -> Forked:
        self.port += 10
        script = str(folder / "script.py")
        return Forked(self, self.ask(start=script, folder=str(folder), ranks=ranks, restarts=restarts, port=self.port))


class Forked:
    """The agent of forked ranks, like a `subprocess.Popen`."""

    def __init__(self, forks: Forks, pid: int):
        self.forks, self.pid, self.returncode = forks, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forks.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float = LONGEST_S) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked ranks", timeout)
            time.sleep(0.02)
        return code


Running = subprocess.Popen[Any] | Forked


class Trial:
    """One run, one disturbance, and what came of it."""

    def __init__(self, hosts: Hosts, forks: Forks, folder: Path, event: str, number: int):
        self.hosts, self.forks, self.folder = hosts, forks, folder
        self.layout, _, self.what = event.partition("/")
        self.draw = random.Random(f"{event} {number}")
        self.method = METHODS[number % len(METHODS)]
        self.machine: Machine = hosts.controller if self.layout == "hosts" else hosts[0]
        folder.mkdir()
        (folder / "model.py").write_text(MODEL)
        config: Any = (
            hosts.config(count=2, python_env=this_tree(folder)) if self.layout == "hosts" else {"master": "localhost"}
        )
        self.restarts = int("no restart" not in self.what)
        script = SCRIPT.format(
            folder=str(folder), hosts=config, step_s=STEP_S, method=self.method, nodes=NODES, steps=STEPS,
            hang_s=HANG_S, restarts=self.restarts if self.layout == "hosts" else 0,
        )  # fmt: skip
        (folder / "script.py").write_text(script)

    def start(self) -> Running:
        if self.layout == "ranks":
            return self.forks.start(self.folder, NODES, self.restarts)
        words = [sys.executable, "script.py"]
        if self.layout == "launch":
            restarts = ["--max_restarts", str(self.restarts)]
            words[1:1] = ["-m", "exogym.launch", "--nproc_per_node", str(NODES), *restarts]
        with (self.folder / "log").open("a") as log:
            return self.machine.start(words, cwd=self.folder, stdout=log, stderr=log)

    def run(self) -> dict[str, Any]:
        """Return the trial's answers."""
        begin = time.monotonic()
        run = self.start()
        rank = self.draw.randrange(NODES)
        pid, number, is_seen = self.wait_for_transfer(run, rank)
        in_flight = False
        if is_seen:
            undo = self.disturb(run, pid)
            in_flight = self.state(rank)[1:] == (number, "start")
            undo()
        code, said = self.end(run), self.said()
        found = self.result()
        row = {"method": self.method, "code": code, "in_flight": in_flight}
        row |= {"first": found is not None, "left": self.left(), "said": said[-1500:]}
        if found is None:
            row["again"] = self.end(self.start())
            row["left"] += self.left()
        row["bits"] = self.result() == simulated(self.method, NODES)
        return row | {"wall_s": time.monotonic() - begin}

    def wait_for_transfer(self, run: Running, rank: int) -> tuple[int, int, bool]:
        """Wait until a random transfer of a process has started, and for a random part of its time."""
        wanted, seen, begun, takes_s = self.draw.randint(2, 5), 0, 0.0, 0.2
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until and run.poll() is None:
            pid, number, state = self.state(rank)
            if number == wanted and state == "start":
                time.sleep(self.draw.uniform(0.0, 0.7) * takes_s)
                return pid, number, True
            if state == "end" and seen and number == seen:
                takes_s, seen = time.monotonic() - begun, 0
            if state == "start" and number != seen:
                begun, seen = time.monotonic(), number
            time.sleep(0.002)
        return 0, 0, False

    def state(self, rank: int) -> tuple[int, int, str]:
        """Return a process's number, and its last transfer and what was noted of it."""
        files = sorted(self.folder.glob(f"marks.{rank}.*"), key=lambda file: file.stat().st_mtime)
        lines = files[-1].read_text().splitlines() if files else []
        if not lines:
            return 0, 0, ""
        what, _, number = lines[-1].partition(" ")
        return int(files[-1].suffix[1:]), int(number), what

    def disturb(self, run: Running, pid: int) -> Callable[[], None]:
        """Disturb the run. Return a function that ends the disturbance."""
        name, host = self.what.split(" ")[0], self.hosts[1]
        if name == "cut":
            self.hosts.cut(host)
            if self.what == "cut for seconds":
                time.sleep(self.draw.uniform(1.0, 8.0))
                return lambda: self.hosts.restore(host)

            def later() -> None:
                self.end(run)
                self.hosts.restore(host)

            return later
        number = signal.Signals[name]
        if self.what.endswith("twice to all"):
            self.to_all(run, number)
            time.sleep(self.draw.uniform(0.0, 0.3))
        if "rank" in self.what:
            os.kill(pid, number)
        elif self.what.endswith("to all"):
            self.to_all(run, number)
        else:
            os.kill(run.pid, number)
        return lambda: None

    def to_all(self, run: Running, number: int) -> None:
        """Send a signal as a terminal would: to the launcher and all ranks."""
        ranks = {self.state(rank)[0] for rank in range(NODES)}
        for pid in [run.pid, *ranks]:
            _send(pid, number)

    def end(self, run: Running) -> int:
        """Wait for a run. End a run that hangs."""
        try:
            return run.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            for machine in (*self.hosts.machines, self.hosts.controller):
                for pid in machine.processes().keys() - {self.forks.process.pid}:
                    _send(pid, signal.SIGKILL)
            run.wait()
            return 999

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def result(self) -> str | None:
        file = self.folder / "result"
        return file.read_text() if file.exists() else None

    def left(self) -> list[str]:
        """Return processes and open ports that are left after up to 75 s."""
        until = time.monotonic() + 75
        while (found := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        found = []
        for machine in (*self.hosts.machines, self.hosts.controller):
            others = [(pid, line) for pid, line in machine.processes().items() if pid != self.forks.process.pid]
            found += [f"{machine.name}: process {pid} {line}" for pid, line in others]
            ports = shell(*machine.words(["ss", "-Htln"])).splitlines()
            found += [f"{machine.name}: port {line}" for line in ports if not line.split()[3].endswith(":22")]
        return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wrong(row: dict[str, Any]) -> str:
    """Return what is wrong with a trial, in words."""
    found = []
    if row["code"] == 999 or row.get("again") == 999:
        found.append("it hung")
    by_signal = {sign * number + base for number in (2, 9, 15) for sign, base in ((1, 128), (-1, 0))}
    if row["code"] not in {0, *by_signal} and not any(word in row["said"] for word in SAYS):
        found.append(f"exit code {row['code']} without a message")
    if row["code"] == 0 and not row["first"]:
        found.append("exit code 0 without a result")
    if row.get("again", 0) != 0:
        found.append(f"it could not be resumed: exit code {row['again']}")
    if not row["bits"]:
        found.append("other bits")
    return "; ".join([*found, *row["left"]])


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'layout/disturbance':<40}{'in flight':>10}{'went on':>9}{'resumed':>9}{'too late':>9}{'wrong':>7}"]
    total: Counter[str] = Counter()
    for event in EVENTS:
        mine = [row for key, row in rows.items() if key.rpartition(" #")[0] == event]
        counted = [row for row in mine if row["in_flight"]]
        seen = {
            "in flight": len(counted), "went on": sum(row["first"] for row in counted),
            "resumed": sum(not row["first"] for row in counted), "too late": len(mine) - len(counted),
            "wrong": sum(bool(wrong(row)) for row in mine),
        }  # fmt: skip
        total.update(seen)
        lines.append(
            f"{event:<40}" + "".join(f"{n:>{w}}" for n, w in zip(seen.values(), (10, 9, 9, 9, 7), strict=True))
        )
    return "\n".join(
        [*lines, f"{'all':<40}" + "".join(f"{total[n]:>{w}}" for n, w in zip(seen, (10, 9, 9, 9, 7), strict=True))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for finished trials")
    parser.add_argument("--only", default="", help="trials whose name begins with this")
    parser.add_argument("--turn", type=float, help="seconds after which no trial begins")
    parser.add_argument("--times", type=int, default=1, help="multiply the number of trials")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would runs
    cells = Cells(given.json, turn_s=given.turn)
    base = Path(tempfile.mkdtemp(prefix="in-flight-"))
    with Hosts(2, base / "hosts") as hosts:
        for host in hosts.machines:
            slow(host)
        forks = Forks(hosts[0])
        for event, count in EVENTS.items():
            for number in range(count * given.times if event.startswith(given.only) else 0):
                key = f"{event} #{number}"
                if cells.wants(key):
                    folder = base / key.replace("/", "_").replace(" ", "_")
                    row = Trial(hosts, forks, folder, event, number).run()
                    cells.put(key, row | {"is_disturbed": False})
                    state = wrong(row) or ("went on" if row["first"] else "resumed")
                    late = "" if row["in_flight"] else " (too late)"
                    print(f"{key}: exit code {row['code']}, {state}{late}, {row['wall_s']:.0f} s", flush=True)
                    if not wrong(row):
                        shutil.rmtree(folder)
    print(table(cells.rows))
    if cells.left:
        print(f"{cells.left} trials left: repeat the command")
    if bad := [f"{key}: {wrong(row)}" for key, row in cells.rows.items() if wrong(row)]:
        raise SystemExit("\n".join(bad))
    shutil.rmtree(base)


def slow(host: Host) -> None:
    """Limit a host's cable, and the loopback through which its processes send to each other."""
    for device, rate in RATES.items():
        words = ["tc", "-n", host.namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate]
        shell(*words, "burst", "200kb", "latency", "2s")


if __name__ == "__main__":
    main()
