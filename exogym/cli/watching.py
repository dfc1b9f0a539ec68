"""A run on hosts, seen while it goes on: where it stands, as its folder on the master says."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from exogym.errors import ExoGymError
from exogym.network import readable_seconds
from exogym.remote import HostsConfig
from exogym.remote.session import Session, Unanswered
from exogym.remote.world import RUNS

PAUSE_S = 1.0
ANSWER_S = 20.0
BAR = 30
NUMBERS = ("step", "total_steps", "heartbeat_s", "started_s")  # of the status
LOSS = re.compile(r"step \d+.*?(?:loss|val) ")


class Watching:
    """While it is entered, shows on stderr how far a run is, asked of the master once a second.

    Args:
        hosts, folder: of the run; its files lie below the project's folder on the master.
        estimated_s: of its training.
    """

    def __init__(self, hosts: HostsConfig, folder: Path, estimated_s: float):
        self.hosts, self.folder, self.estimated_s = hosts, folder, estimated_s
        self._over = threading.Event()
        self._status: dict[str, Any] = {}
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._live = Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True)

    def __enter__(self) -> Watching:
        self._live.start()
        self._live.update(self.table(), refresh=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._live.stop()

    def table(self) -> Text:
        """Return what is shown now."""
        step, total = self._status.get("step", 0), self._status.get("total_steps", 0)
        if not total:
            return Text(f"starting on {len(self.hosts.hosts)} computers, since {time.monotonic() - self._begun:.0f} s")
        done = min(step / total, 1.0)
        gone_s = max(0.0, self._status.get("heartbeat_s", 0.0) - self._status.get("started_s", 0.0))
        left = f", about {gone_s / done - gone_s:.0f} s left" if 0 < done < 1 else ""
        bar = "#" * round(done * BAR) + "-" * (BAR - round(done * BAR))
        lines = [f"{bar} step {step} of {total}", f"training since {gone_s:.0f} s{left}"]
        lines[1] += f"; estimated {readable_seconds(self.estimated_s)}"
        return Text("\n".join([*lines, *self._said()]), no_wrap=True, overflow="ellipsis")

    def _watch(self) -> None:
        """Ask, and draw; a master that does not answer is asked again, by a new connection."""
        while not self._over.is_set():
            with contextlib.suppress(Unanswered, ExoGymError, OSError):
                session = Session(self.hosts.master, ANSWER_S)
                try:
                    while not self._over.wait(PAUSE_S):
                        self._take(session)
                        self._live.update(self.table(), refresh=True)
                finally:
                    session.end()
            self._over.wait(PAUSE_S)

    def _take(self, session: Session) -> None:
        place = f"{RUNS}/{self.folder.name}/status.json"
        project = self.hosts.master.path or str(Path.cwd())
        found = session.ask("file", path=place, folder=project, text=None)
        with contextlib.suppress(ValueError, TypeError):
            status = json.loads(found["text"])
            if all(isinstance(status.get(name), int | float) for name in NUMBERS):
                self._status = status

    def _said(self) -> list[str]:
        """Return the newest line of progress of rank 0, if there is one."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "training_rank_0.log").read_text("utf-8", "replace").splitlines()
            found = next((line for line in reversed(lines) if LOSS.search(line)), "")
            return ["".join(c if c.isprintable() else "?" for c in found)] if found else []
        return []
