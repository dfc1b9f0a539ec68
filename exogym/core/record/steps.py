"""Write this process's last step into a file, by which `exogym.machines.remote.onhost.health` watches the host."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from exogym.core.record.observers import Fields, Observer

LOCAL_RANK = "LOCAL_RANK"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
BEAT_S = 1.0


class StepFile(Observer):
    """An observer that writes its process's last step and number of restarts into a file in `folder`."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder) / os.environ.get(LOCAL_RANK, "0")
        self.restarts = os.environ.get(RESTARTS, "0")
        self._due = 0.0

    def beat(self, step: int, figures: Fields) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + BEAT_S
            self._say(step)

    def _say(self, step: int) -> None:
        with contextlib.suppress(OSError):  # nobody watches any more
            self.path.write_text(f"{step} {self.restarts}\n")
