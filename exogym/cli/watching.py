"""A live view of a run on hosts: its progress and its hosts, read from the run's folder on the controller."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from exogym.files import end_of
from exogym.machines.remote.health import figures, read_hosts
from exogym.network import readable_seconds
from exogym.progress import STDERR, printable, readable_bytes
from exogym.record import read_object

PAUSE_S = 0.5
BAR = 30
TAIL_BYTES = 1 << 16  # end of a log, searched for the newest progress
NUMBERS = ("step", "total_steps", "heartbeat_s", "started_s")  # required keys of status.json
LOSS = re.compile(r"step \d+.*?(?:loss|val) ")


class LiveView:
    """Shows a run's progress and hosts on stderr, while the context is open.

    Args:
        folder: the run's folder on this machine. `exogym.machines.remote.health` keeps it up to date.
        estimated_s: predicted seconds of training.
    """

    def __init__(self, folder: Path, estimated_s: float):
        self.folder, self.estimated_s = folder, estimated_s
        self._over = threading.Event()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._live = Live(console=Console(file=STDERR), auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._live.stop()

    def _watch(self) -> None:
        while not self._over.wait(PAUSE_S):
            self._live.update(self.shown(), refresh=True)

    def shown(self) -> Text:
        """Return the view's current text: progress, the newest loss, and a line for each host."""
        lines = [*self._steps(), *self._said(), *map(_host, read_hosts(self.folder).get("hosts", []))]
        return Text("\n".join(map(printable, lines)), no_wrap=True, overflow="ellipsis")

    def _steps(self) -> Iterator[str]:
        status = figures(read_object(self.folder / "status.json"), NUMBERS)
        if len(status) < len(NUMBERS) or not status["total_steps"]:
            yield f"starting for {time.monotonic() - self._begun:.0f} s"
            return
        done = min(status["step"] / status["total_steps"], 1.0)
        gone_s = max(0.0, status["heartbeat_s"] - status["started_s"])
        left = f", about {gone_s / done - gone_s:.0f} s left" if 0 < done < 1 else ""
        bar = "#" * round(done * BAR) + "-" * (BAR - round(done * BAR))
        yield f"{bar} step {status['step']} of {status['total_steps']}"
        yield f"training for {gone_s:.0f} s{left}; estimated {readable_seconds(self.estimated_s)}"

    def _said(self) -> Iterator[str]:
        """Yield rank 0's newest progress line, if any."""
        lines = end_of(self.folder / "training_rank_0.log", TAIL_BYTES).decode("utf-8", "replace").splitlines()
        yield from [line for line in lines if LOSS.search(line)][-1:]


def _host(host: dict[str, Any]) -> str:
    """Describe a host in one line.

    >>> _host({"address": "10.0.0.2", "state": "running", "cpu_use": 0.5, "tx_bps": 8e6})
    '10.0.0.2 running, CPU 50 %, sends 1 MB/s'
    """
    parts = [f"{host.get('address')} {host.get('state')}"]
    parts += [f"CPU {100 * host['cpu_use']:.0f} %"] if "cpu_use" in host else []
    parts += [f"GPU {100 * gpu['use']:.0f} %" for gpu in host.get("gpus", []) if "use" in gpu]
    parts += [f"memory {readable_bytes(host['run_memory_bytes'])}"] if "run_memory_bytes" in host else []
    parts += [f"sends {readable_bytes(host['tx_bps'] / 8)}/s"] if "tx_bps" in host else []
    return ", ".join(parts)
