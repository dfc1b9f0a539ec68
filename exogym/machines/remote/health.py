"""Save and read the states of a run's hosts, in a file in the run's folder on the controller.

    hosts.json   each host's state, device, use of CPU, GPU, memory and network, last steps, restarts; the run's events

Hosts send their reports over the run's ssh connections. The controller doesn't trust them: it uses only known names
whose values are finite numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import write_json
from exogym.core.base.processes import described, is_alive
from exogym.core.progress import notice, readable_bytes
from exogym.core.record.run_folder import read_object
from exogym.core.record.schema import FILES, is_finite
from exogym.machines.remote.budget import TOLD_BYTES
from exogym.machines.remote.orders import HostOrder

NAME, TOKEN = "hosts.json", ".controller"
EVERY_S = 2.0  # seconds between a host's reports
SILENT_S = 15.0  # a host that has not reported for this long is silent
WRITE_S = 0.5
MOST_EVENTS = 200
FIGURES = ("cores", "cpu_use", "memory_bytes", "memory_total_bytes", "run_memory_bytes", "rx_bps", "tx_bps")
GPU_FIGURES = ("use", "memory_bytes", "memory_total_bytes")
Row = dict[str, Any]


class Board:
    """Collect the states of a run's hosts from their reports, and save them in `hosts.json`.

    Args:
        folder: the folder of the run's logs on the controller.
        mirror: the controller's copy of the run folder, inside `folder`, to which rank 0's host sends the files during
            training. None: the run folder is not copied.
        host_mirror: path of the run folder on rank 0's host, relative to the project's folder.

    Attributes:
        mark: text at the start of each output line that is a report.
    """

    def __init__(self, folder: Path, mirror: Path | None = None, host_mirror: str | None = None):
        self.folder, self.mirror, self.host_mirror = folder, mirror, host_mirror
        self._is_full = False
        self.mark = f"exogym-{secrets.token_hex(8)}: "
        self._hosts: dict[int, Row] = {}  # first rank -> host
        self._events: list[Row] = []
        self._lock = threading.Lock()
        self._written, self._trouble = 0.0, False
        if mirror is not None:
            mirror.mkdir(parents=True, exist_ok=True)
            (mirror / TOKEN).write_text(self.mark)

    def asked_of(self, order: HostOrder) -> Row | None:
        """Return the settings for reports from the host of the command `order`, or None if it sends no reports."""
        if not order.ranks:
            return None
        sends = self.mirror is not None and order.ranks[0] == 0
        mirror = {"folder": self.host_mirror, "names": list(FILES), "token_file": TOKEN, "token": self.mark}
        return {"mark": self.mark, "every_s": EVERY_S, "mirror": mirror if sends else None}

    def started(self, order: HostOrder) -> None:
        """Record that the host of the command `order` starts its processes, for the first time or again."""
        if not order.ranks:
            return
        address = order.host.address
        with self._lock:
            before = self._hosts.get(order.ranks[0])
            restarts = 0 if before is None else before["restarts"] + 1
            self._hosts[order.ranks[0]] = {
                "address": address, "device": order.host.device, "ranks": list(order.ranks), "state": "starting",
                "restarts": restarts, "heard_s": None,
            }  # fmt: skip
            self._event("started" if before is None else "started again", address)

    def take(self, order: HostOrder, text: str) -> None:
        """Read a report from the host of the command `order`. `text` is the report's line without its mark."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(said, dict) or not order.ranks:
            return
        if isinstance(said.get("health"), dict):
            with self._lock:
                self._heard(order, said["health"])
        elif self.mirror is not None and order.ranks[0] == 0:
            self._keep(said)

    def ended(self, order: HostOrder, state: str, why: str | None = None) -> None:
        """Record that the command `order` has ended on its host, with the state "done", "failed" or "lost"."""
        host = self._hosts.get(order.ranks[0]) if order.ranks else None
        if host is None:
            return
        with self._lock:
            host["state"] = state
            self._event(state, order.host.address, **({} if why is None else {"why": why}))

    def close(self) -> None:
        """Record that the run is over on all hosts, and save the states."""
        with self._lock:
            for host in self._hosts.values():
                if host["state"] in ("starting", "running"):
                    host["state"] = "stopped"
            self._write(ended=True)
        if self.mirror is not None:
            with contextlib.suppress(OSError):
                (self.mirror / TOKEN).unlink()

    def _heard(self, order: HostOrder, said: Row) -> None:
        host = self._hosts.get(order.ranks[0])
        if host is None:
            return
        host |= figures(said, FIGURES) | {"heard_s": time.time()}
        gpus = said.get("gpus")
        if isinstance(gpus, list):
            host["gpus"] = [_gpu(gpu) for gpu in gpus[:64] if isinstance(gpu, dict)]
        steps = said.get("steps")
        if isinstance(steps, dict):
            host["processes"] = _processes(order.ranks, steps)
        if host["state"] == "starting":
            host["state"] = "running"
            self._event("running", order.host.address)
        elif time.monotonic() >= self._written + WRITE_S:
            self._write()

    def _event(self, kind: str, address: str, **told: Any) -> None:
        self._events = [*self._events, {"at_s": round(time.time(), 3), "kind": kind, "host": address, **told}]
        self._events = self._events[-MOST_EVENTS:]
        self._write()

    def _write(self, ended: bool = False) -> None:
        self._written = time.monotonic()
        value = {
            "process": described(), "written_s": time.time(), "ended": ended, "hosts": list(self._hosts.values()),
            "events": self._events,
        }  # fmt: skip
        try:
            write_json(self.folder / NAME, value)
        except OSError as error:  # a full disk here must not stop the training there
            if not self._trouble:
                notice(f"{self.folder / NAME} cannot be written: {error}")
            self._trouble = True

    def _keep(self, said: Mapping[str, Any]) -> None:
        """Write a received part of a run's file. Parts beyond the limit are copied at the end of the run."""
        name, at, text = said.get("file"), said.get("at"), said.get("text")
        if name not in FILES or type(at) is not int or not isinstance(text, str) or self.mirror is None:
            return
        path = self.mirror / str(name)
        beside = path if path.suffix == ".jsonl" else path.with_name(f".{name}.coming")
        with contextlib.suppress(OSError, ValueError):
            size = beside.stat().st_size if beside.exists() else 0
            if at and at != size:
                return
            if not at:
                beside.unlink(missing_ok=True)
            if not self._has_room(len(text)):
                return
            with open(beside, "ab") as file:
                file.write(text.encode("latin-1"))
            if beside is not path and said.get("whole") is True:
                os.replace(beside, path)

    def _has_room(self, count: int) -> bool:
        assert self.mirror is not None
        names = [*FILES, *(f".{name}.coming" for name in FILES)]
        size = sum(path.stat().st_size for path in map(self.mirror.joinpath, names) if path.exists())
        if size + count <= TOLD_BYTES:
            return True
        if not self._is_full:
            notice(f"{self.mirror} has {readable_bytes(size)}: later records are copied at the end of the run")
        self._is_full = True
        return False


def read_hosts(folder: str | os.PathLike[str]) -> Row:
    """Return a run's hosts, each with its state, and the run's events. Return {} if the run has no hosts.

    A host's state is "unknown" if the run's controller is lost, and "silent" if the host has not reported for 15
    seconds.
    """
    found = read_object(Path(folder) / NAME)
    hosts: list[Row] | None = found.get("hosts")
    if hosts is None:
        return {}
    process = found.get("process") or {}
    here = not found.get("ended") and "pid" in process and is_alive(process)
    now = time.time()
    for host in hosts:
        heard_s = host.get("heard_s")
        host["quiet_s"] = None if heard_s is None else max(now - heard_s, 0.0)
        if host.get("state") in ("starting", "running") and here is False:
            host["state"] = "unknown"
        elif host.get("state") == "running" and (host["quiet_s"] or 0.0) > SILENT_S:
            host["state"] = "silent"
    return {"hosts": hosts, "events": found.get("events") or []}


def figures(said: Mapping[str, Any], names: Iterable[str]) -> Row:
    """Return {name: value} for each of `names` whose value in the report `said` is a finite number.

    >>> figures({"cores": 2, "cpu_use": "<b>", "rx_bps": float("nan"), "more": 1}, ("cores", "cpu_use", "rx_bps"))
    {'cores': 2}
    """
    return {
        name: said[name] for name in names
        if is_finite(said.get(name))
    }  # fmt: skip


def _gpu(said: Row) -> Row:
    return figures(said, GPU_FIGURES) | {"name": "".join(x for x in str(said.get("name"))[:80] if x.isprintable())}


def _processes(ranks: Sequence[int], said: Row) -> list[Row]:
    """Return each rank's last step, restarts, and seconds since its last sign of life."""
    found = []
    for local, rank in enumerate(ranks):
        row = said.get(str(local))
        if isinstance(row, list) and len(row) == 3 and all(map(is_finite, row)):
            found.append({"rank": rank, "step": row[0], "restarts": row[1], "quiet_s": row[2]})
    return found
