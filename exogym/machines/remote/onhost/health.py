"""Report this host's state and its processes' progress to the controller. Rank 0's host also sends the run's files.

Every few seconds a thread writes a mark and a line of JSON to stdout, between the lines of the ranks' output. Values
that this operating system does not report are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

STEPS = "EXOGYM_STEPS"  # folder where each process writes its progress
CHUNK_BYTES = 2000  # a file's bytes per line, few enough for a pipe to pass the line in one piece
MOST_CHUNKS = 100  # at a time
GPU_S, GPU_EVERY_S = 5.0, 10.0  # longest wait for nvidia-smi; seconds between two calls
GPU_WORDS = ["--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]


class HostReports:
    """Send this host's reports from a thread, from `start` to `close`.

    Args:
        given: a dict of settings. `mark` is the text before each report; `every_s` is the number of seconds between two
            reports. `mirror` describes the run folder to send, or is None. The description has the folder's path in the
            project's folder, the files' names, and the name of a file that shows whether the controller shares the
            folder, which is then not sent.
        project: the project's folder on this host.
        interface: network interface through which this host reaches the other hosts.
        mine: function that returns the ids of the run's processes on this host.
    """

    def __init__(self, given: dict[str, Any], project: str, interface: str, mine: Callable[[], Iterable[int]]):
        self.mark, self.every_s, self.interface, self.mine = given["mark"], given["every_s"], interface, mine
        self.mirror = given.get("mirror")
        self.source = None if self.mirror is None else os.path.join(project, self.mirror["folder"])
        self.steps = tempfile.mkdtemp(prefix="exogym-steps-")
        self.environment = {STEPS: self.steps}
        self._busy: tuple[float, float] | None = None
        self._moved: tuple[float, int, int] | None = None
        self._sent: dict[str, tuple[int, int]] = {}  # by file: its number, and the bytes sent (or its last change)
        self._seen_gpus: tuple[float, list[dict[str, Any]] | None] = (-GPU_EVERY_S, None)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # a controller that has stopped reading must not delay the end
        shutil.rmtree(self.steps, ignore_errors=True)

    def _run(self) -> None:
        last = False
        with contextlib.suppress(OSError):  # the controller has stopped reading
            while True:
                self._say({"health": self.sample()})
                if self.mirror is not None and not self._is_shared():
                    for name in self.mirror["names"]:
                        self._send(name)
                if last:
                    return
                last = self._stop.wait(self.every_s)

    def _say(self, value: dict[str, Any]) -> None:
        os.write(1, f"{self.mark}{json.dumps(value)}\n".encode())

    # The host's state

    def sample(self) -> dict[str, Any]:
        """Return this host's current load. CPU use and network rates are averages since the last call."""
        found: dict[str, Any] = {"cores": os.cpu_count(), "steps": self._steps()}
        with contextlib.suppress(OSError, ValueError, IndexError):
            found["cpu_use"] = self._cpu_use()
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.update(_memory())
            found["run_memory_bytes"] = sum(map(_resident_bytes, self.mine())) or None  # 0 at the end of a run
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.update(self._network())
        if time.monotonic() - self._seen_gpus[0] >= GPU_EVERY_S:
            self._seen_gpus = time.monotonic(), _gpus()
        found["gpus"] = self._seen_gpus[1]
        return {name: x for name, x in found.items() if x is not None}

    def _steps(self) -> dict[str, list[float]]:
        """Return by local rank: last step, restarts, seconds since the last sign of life."""
        found = {}
        for name in os.listdir(self.steps):
            path = os.path.join(self.steps, name)
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                step, restarts = map(int, file.read().split())
                found[name] = [step, restarts, round(max(time.time() - os.stat(path).st_mtime, 0.0), 1)]
        return found

    def _cpu_use(self) -> float | None:
        with open("/proc/stat") as file:
            times = [float(x) for x in file.readline().split()[1:9]]
        before, self._busy = self._busy, (sum(times), times[3] + times[4])
        if before is None or self._busy[0] <= before[0]:
            return None
        return round(1 - (self._busy[1] - before[1]) / (self._busy[0] - before[0]), 4)

    def _network(self) -> dict[str, float]:
        """Return received and sent bits per second."""
        with open("/proc/self/net/dev") as file:
            lines = dict(line.strip().partition(":")[::2] for line in file)
        counts = lines[self.interface].split()
        before, self._moved = self._moved, (time.monotonic(), int(counts[0]), int(counts[8]))
        if before is None:
            return {}
        seconds = max(self._moved[0] - before[0], 1e-6)
        received, sent = (8 * max(self._moved[k] - before[k], 0) / seconds for k in (1, 2))
        return {"rx_bps": round(received), "tx_bps": round(sent)}

    # The run's files

    def _is_shared(self) -> bool:
        """Return whether the controller shares this folder, which then contains its mark."""
        assert self.mirror is not None and self.source is not None
        with contextlib.suppress(OSError), open(os.path.join(self.source, self.mirror["token_file"])) as file:
            return file.read() == self.mirror["token"]
        return False

    def _send(self, name: str) -> None:
        """Send a file's changes: the added lines of a line-based file, otherwise the whole file."""
        assert self.source is not None
        path, grows = os.path.join(self.source, name), name.endswith(".jsonl")
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            about = os.fstat(file.fileno())
            number, at = self._sent.get(name, (-1, 0))
            if grows:
                at = at if number == about.st_ino and at <= about.st_size else 0
            elif (number, at) == (about.st_ino, about.st_mtime_ns):
                return
            else:
                at = 0
            file.seek(at)
            for _ in range(MOST_CHUNKS):
                data = file.read(CHUNK_BYTES)
                if not data:
                    break
                text, whole = data.decode("latin-1"), at + len(data) >= about.st_size
                self._say({"file": name, "at": at, "text": text, "whole": whole})
                at += len(data)
            self._sent[name] = about.st_ino, at if grows else about.st_mtime_ns


def _memory() -> dict[str, int]:
    with open("/proc/meminfo") as file:
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in file)}
    total = 1024 * kilobytes["MemTotal"]
    return {"memory_total_bytes": total, "memory_bytes": total - 1024 * kilobytes["MemAvailable"]}


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _gpus() -> list[dict[str, Any]] | None:
    """Return nvidia-smi's values for each GPU, or None if it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(
            ["nvidia-smi", *GPU_WORDS], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_S
        )
        rows = [[part.strip() for part in line.split(",")] for line in said.stdout.splitlines()]
        return [
            {"name": name, "use": float(use) / 100, "memory_bytes": float(used) * 2**20,
             "memory_total_bytes": float(total) * 2**20}
            for name, use, used, total in rows
        ]  # fmt: skip
    return None
