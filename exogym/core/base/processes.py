"""Identify a process. Its number is not enough, because the system reuses numbers, also after a restart.

`lines_from_parent` binds a process to the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


@functools.cache
def identity() -> tuple[str, str, str]:
    """Return three texts: the scope in which process numbers are unique, the installed system, and the machine's start.

    The system and the start are "" if unknown.
    """
    boot, space, system = _read("/proc/sys/kernel/random/boot_id"), "", _read("/etc/machine-id")
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # a container has its own process numbers
    return (f"{boot} {space}" if boot else f"host {socket.gethostname()}"), system, boot


def started(pid: int) -> str | None:
    """Return a text that identifies the start of process `pid`, or None if the process has ended.

    A later process with the same number has another text.
    """
    if os.path.exists("/proc/self/stat"):
        state, *others = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"]
        return None if state in "ZX" else others[18]
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def described(pid: int | None = None) -> dict[str, Any]:
    """Return a process of this machine (default: this process) as a JSON object: host, machine, boot, pid, started."""
    pid = os.getpid() if pid is None else pid
    machine, _, boot = identity()
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "pid": pid, "started": started(pid)}


def is_alive(known: dict[str, Any]) -> bool | None:
    """Return whether the process that `described` returned is alive, or None if this machine can't know.

    >>> is_alive(described()), is_alive(described() | {"started": "1"}), is_alive(described() | {"machine": "other"})
    (True, False, None)
    """
    machine, _, boot = identity()
    if known.get("machine") == machine:
        now = started(int(known["pid"]))
        return now is not None and now == known.get("started")
    return False if known.get("host") == socket.gethostname() and known.get("boot") != boot else None


def lines_from_parent() -> queue.SimpleQueue[str]:
    """Return the lines that the parent writes to this process's standard input, as they arrive.

    When the input closes, this process ends immediately. If only the parent has the other end of the pipe, this process
    ends with its parent, even if the parent is killed.
    """
    lines = queue.SimpleQueue[str]()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines
