"""Which process it is: a number alone is used again, after the process or after the machine has gone."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return host, boot, pid and start of a process of this machine, by default this one, as JSON.

    `boot` names the time since this machine was started, and `started` counts clock ticks in it; both are None where
    the system has no /proc.
    """
    pid = os.getpid() if pid is None else pid
    boot = BOOT.read_text().strip() if BOOT.exists() else None
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "started": _started(pid)}


def is_alive(known: dict[str, Any]) -> bool | None:
    """Return whether the process that `identity` described is there; None: that cannot be known from here.

    >>> is_alive(identity()), is_alive(identity() | {"started": 1}), is_alive(identity() | {"host": "elsewhere"})
    (True, False, None)
    """
    here = identity()
    if known.get("host") != here["host"] or here["boot"] is None:
        return None
    if known.get("boot") != here["boot"]:
        return False
    started = _started(int(known["pid"]))
    return started is not None and started == known.get("started")


def _started(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None: it is not there, or is a zombie."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])
