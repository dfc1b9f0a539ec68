"""What ranks leave running when they end badly."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_what_is_left(folder: Path) -> None:
    """Kill the process groups of the ranks that did not end well: what they had started may still run."""
    for mark in (folder / "running").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(mark.name), signal.SIGKILL)
        mark.unlink(missing_ok=True)
