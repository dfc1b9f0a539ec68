r"""Test the page (`exogym ui`) with a crowd of slow connections, and with a long run that still grows.

    python benchmarks/page.py                                      both, in under three minutes
    python benchmarks/page.py --connections 200 --steps 2000 --seconds 10

*Crowd*: `--connections` connections begin a request and send a byte of it now and then, for `--crowd-seconds`. Where
the page closes one, it comes again after a second. Meanwhile the owner asks for the list of runs, each time by a new
connection.

*Long run*: a program writes the records of `--steps` steps of `--nodes` nodes in `--seconds`, as a run does: a record
of each node and of the averaged model for each step, and events. The owner's page looks once a second. A poll is what
it asks for then: the run, its records since the last look, and each third time what the nodes did, the timeline and the
hosts. Afterwards a second page is opened on the whole run, and all records are downloaded.

All is on the loopback of this machine, in a folder that is removed, and ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from exogym.core.base.processes import described

PART_BYTES, MOST_POINTS = 2**20, 2000  # as static/base.js and static/run.js have them
PATIENCE_S = 30.0
TARGET_MB, TARGET_MS = 400, 300


@dataclass
class Page:
    """A page over `folder`; its messages are in `log`."""

    port: int
    token: str
    pid: int
    log: Path
    took_s: dict[str, float] = field(default_factory=dict)  # the longest, by what was asked for

    def ask(self, path: str) -> Any:
        """Return an answer, and record the time if it is the longest."""
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} was answered {answer.status}: {body[:200]!r}")
        what = path.partition("?")[0].rpartition("/")[2]
        self.took_s[what] = max(self.took_s.get(what, 0.0), time.perf_counter() - begun)
        return json.loads(body)

    def cpu_s(self) -> float:
        """Return the processor time that the page has taken, other programs or not."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, of: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(of))


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(folder), "--port", "0", "--no-open", "--read-only"]
    log = folder.parent / "log"
    with (
        open(log, "wb") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            if address.port is None:
                raise SystemExit(f"the page did not start: {log.read_text()}")
            found = Page(address.port, parse_qs(address.query)["token"][0], process.pid, log)
            found.ask("/api/runs")
            yield found
        finally:
            process.terminate()


def crowd(port: int, count: int, seconds: float) -> None:
    """Open `count` connections that begin a request and never end it. A closed one returns after a second."""
    begun, deadline, fed_s, again = 0, time.monotonic() + seconds, 0.0, list[float]()
    with selectors.DefaultSelector() as selector:
        while (now := time.monotonic()) < deadline:
            again = [at for at in again if at > now]
            for _ in range(min(50, count - len(selector.get_map()) - len(again))):  # not all in one moment
                connection = socket.socket()
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(("127.0.0.1", port))
                selector.register(connection, selectors.EVENT_READ)
                begun += 1
            for key, _ in selector.select(0.02):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                again.append(now + 1.0)
            if now > fed_s + 0.5:
                fed_s = now
                for key in list(selector.get_map().values()):
                    with contextlib.suppress(OSError):  # it is not connected yet, or closed
                        text = b"GET /api/runs HTTP/1.1\r\nX-Slow: " if key.data is None else b"x"
                        key.fileobj.send(text)  # type: ignore[union-attr]
                        selector.modify(key.fileobj, selectors.EVENT_READ, "begun")
    print(begun)


def under_a_crowd(top: Path, count: int, seconds: float) -> dict[str, Any]:
    """Return how long the owner waits for the list of runs, in milliseconds, quietly and in the crowd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 100:
        raise SystemExit(f"--connections {count} takes as many open files, and {hard} are allowed here: give fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
    top.mkdir()
    begin_run(top / "one", 10)

    def polled(until: float) -> list[float]:
        took: list[float] = []
        while time.monotonic() < until:
            begun = time.perf_counter()
            shown.ask("/api/runs")
            took.append(1000 * (time.perf_counter() - begun))
            time.sleep(0.1)
        return took

    with page(top) as shown:
        quiet = polled(time.monotonic() + 2)
        words = [sys.executable, __file__, f"--crowd={shown.port}", f"--connections={count}"]
        words.append(f"--crowd-seconds={seconds}")
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as strangers:
            assert strangers.stdout is not None
            took = polled(time.monotonic() + seconds)
            begun = int(strangers.stdout.readline())
        return {
            "connections": count, "begun": begun, "quiet ms": statistics.median(quiet), "polls": len(took),
            "median ms": statistics.median(took), "longest ms": max(took), "log bytes": shown.log.stat().st_size,
            "memory MB": shown.memory_mb("VmHWM"),
        }  # fmt: skip


def begin_run(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True)
    about = {"description": {"strategy": {"name": "DiLoCoStrategy", "H": 10}}, "started_s": time.time()}
    (folder / "run.json").write_text(json.dumps(about))
    stand(folder, 0, steps, "running")


def stand(folder: Path, step: int, steps: int, state: str) -> None:
    status = {"state": state, "step": step, "total_steps": steps, "process": described(), "started_s": time.time(),
              "heartbeat_s": time.time()}  # fmt: skip
    (folder / ".status").write_text(json.dumps(status))
    (folder / ".status").replace(folder / "status.json")


def lines_of(step: int, nodes: int) -> str:
    """Return the records of a step, with all columns that a history has."""
    about = {"epoch": step // 100, "payload_bytes": 8e3 * step, "tx_bytes": 1.5e4 * step, "rx_bytes": 1.5e4 * step,
             "lr": 1e-3, "wall_s": 0.0123456 * step, "time_s": 0.0234567 * step}  # fmt: skip
    loss, rows = 2.345678 * math.exp(-step / 10_000), []
    for node in (None, *range(nodes)):
        is_evaluated = node is None and step % 100 == 0
        rows.append({"step": step, "node": node, "train_loss": loss + 0.01 * (node or 0), **about,
                     "val_loss": loss if is_evaluated else None, "val_accuracy": 0.5 if is_evaluated else None,
                     "consensus_distance": 0.1234567 if is_evaluated else None})  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(folder: Path, steps: int, nodes: int, seconds: float) -> None:
    """Write a run that goes on for so many seconds, and ends."""
    begin_run(folder, steps)
    begun = time.monotonic()
    with open(folder / "records.jsonl", "a") as records, open(folder / "events.jsonl", "a") as events:
        for step in range(1, steps + 1):
            records.write(lines_of(step, nodes))
            if step % 10 == 0:
                told = {"at_s": time.time(), "kind": "communication", "step": step, "calls": 1, "tx_bytes": 1.5e4}
                events.write(json.dumps(told) + "\n")
            if step % 100 == 0:
                spent = [0.01 * step] * nodes
                clock = {"at_s": time.time(), "kind": "clock", "step": step, "computing": spent, "sending": spent,
                         "waiting": spent, "down": [0.0] * nodes}  # fmt: skip
                events.write(json.dumps(clock) + "\n")
                records.flush()
                events.flush()
                stand(folder, step, steps, "running")
                time.sleep(max(0.0, begun + seconds * step / steps - time.monotonic()))
    stand(folder, steps, steps, "done")


class Viewer:
    """Asks for what the page of one run asks for."""

    def __init__(self, shown: Page, name: str):
        self.shown, self.api, self.last, self.looks, self.rows = shown, f"/api/runs/{name}", -1, 0, 0
        self.behind, self.polls_ms, self.memory_mb = True, list[float](), list[float]()

    def poll(self) -> str:
        """Poll once, as often as it takes to be up to date; return the run's state."""
        while True:
            begun = time.perf_counter()
            state = self.shown.ask(self.api)["state"]
            asked = f"{self.api}/records?node=none&after={self.last}&most={MOST_POINTS}&most_bytes={PART_BYTES}"
            found = self.shown.ask(asked)
            self.last, self.rows = found["last"], self.rows + len(found["records"])
            if self.behind or self.looks % 3 == 0:
                self.behind = self.shown.ask(f"{self.api}/nodes?most_bytes={PART_BYTES}").get("more", False)
                self.shown.ask(f"{self.api}/timeline")
                self.shown.ask(f"{self.api}/hosts")
            self.looks += 1
            self.polls_ms.append(1000 * (time.perf_counter() - begun))
            self.memory_mb.append(self.shown.memory_mb())
            if not (found.get("more") or self.behind):
                return str(state)


def over_a_long_run(top: Path, steps: int, nodes: int, seconds: float) -> dict[str, Any]:
    """Return milliseconds of polls, and the page's memory, while a run is written and afterwards."""
    top.mkdir()
    words = [sys.executable, __file__, "--write", str(top / "long"), f"--steps={steps}", f"--nodes={nodes}",
             f"--seconds={seconds}"]  # fmt: skip
    with page(top) as shown, subprocess.Popen(words) as writer:
        try:
            while not (top / "long" / "status.json").exists() and writer.poll() is None:
                time.sleep(0.05)
            first, deadline = Viewer(shown, "long"), time.monotonic() + 2 * seconds + 30
            cpu_s = shown.cpu_s()
            while first.poll() == "running" and time.monotonic() < deadline:
                time.sleep(1.0)
            polls, longest = len(first.polls_ms), dict(shown.took_s)
            cpu_ms = 1000 * (shown.cpu_s() - cpu_s) / polls
        finally:
            writer.terminate()
        second = Viewer(shown, "long")
        begun = time.perf_counter()
        second.poll()
        opened_s, begun = time.perf_counter() - begun, time.perf_counter()
        count = len(shown.ask("/api/runs/long/records")["records"])
        return {
            "steps": first.last, "records": count, "file MB": (top / "long" / "records.jsonl").stat().st_size / 1e6,
            "polls": polls, "CPU ms": cpu_ms,
            "median ms": statistics.median(first.polls_ms), "longest ms": max(first.polls_ms),
            "slowest answer ms": {what: round(1000 * s) for what, s in sorted(longest.items())},
            "memory MB at first": first.memory_mb[0], "memory MB at last": first.memory_mb[-1],
            "second page, longest ms": max(second.polls_ms), "second page, whole s": opened_s,
            "download s": time.perf_counter() - begun, "memory MB, most": shown.memory_mb("VmHWM"),
        }  # fmt: skip


def show(what: str, found: dict[str, Any]) -> None:
    print(f"{what}:")
    for name, value in found.items():
        print(f"  {name:<24} {f'{value:,.1f}' if isinstance(value, float) else value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1150, help="slow connections; 0: no crowd")
    parser.add_argument("--crowd-seconds", type=float, default=20.0, help="duration of the crowd")
    parser.add_argument("--steps", type=int, default=32_000, help="steps of the long run; 0: no long run")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=100.0, help="time for writing the long run")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.crowd is not None:
        return crowd(given.crowd, given.connections, given.crowd_seconds)
    if given.write is not None:
        return write_run(given.write, given.steps, given.nodes, given.seconds)
    found: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="exogym-page-") as folder:
        if given.connections:
            found["crowd"] = under_a_crowd(Path(folder, "crowd"), given.connections, given.crowd_seconds)
            show("slow connections", found["crowd"])
        if given.steps:
            run = found["run"] = over_a_long_run(Path(folder, "run"), given.steps, given.nodes, given.seconds)
            show("long run", run)
            is_held = run["memory MB, most"] < TARGET_MB and run["longest ms"] < TARGET_MS
            print(f"{TARGET_MB} MB and {TARGET_MS} ms a poll: {'held' if is_held else 'missed'}")
    print(f"load average {found['load'][0]:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
