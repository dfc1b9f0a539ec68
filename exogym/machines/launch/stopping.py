"""End a launch: handle signals, and kill the child processes that failed ranks have left running."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

RUNNING = "running"  # subfolder of a launch's folder, where each rank has a mark while it runs


class Interrupted(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@dataclass
class Stop:
    """The state of an `ended_by` block, which signals can end.

    Attributes:
        number: the signal that has ended the block, or 0 if no signal has ended it.
        again: called when a second signal arrives. If `again` is None, the second signal also raises `Interrupted`.
        before: the signals' handlers from before the block, to be restored after the block.
    """

    number: int = 0
    again: Callable[[], object] | None = None
    before: dict[signal.Signals, Any] = field(default_factory=dict)

    def hold(self) -> None:
        """Ignore the block's signals from now on, so that they don't interrupt the cleanup."""
        for number in self.before:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int, frame: FrameType | None) -> None:
        if self.number and self.again is not None:
            self.again()
            return
        self.number = number
        raise Interrupted(number)


@contextlib.contextmanager
def ended_by(signals: Sequence[signal.Signals]) -> Iterator[Stop]:
    """Let each of `signals` end the block by raising `Interrupted`. After the block the signal has its usual effect."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread gets signals
        return
    for number in signals:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # ignored, or not set from Python
            stop.before[number] = signal.signal(number, stop.take)
    try:
        yield stop
    except Interrupted as interrupted:
        stop.number = interrupted.number
    finally:
        for number, handler in stop.before.items():
            signal.signal(number, handler)
    if stop.number:
        sys.stdout.flush()
        os.kill(os.getpid(), stop.number)


def kill_what_is_left(folder: Path) -> None:
    """Kill the process groups of ranks that have not ended normally. These ranks' child processes may still run."""
    for mark in (folder / RUNNING).iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(mark.name), signal.SIGKILL)
        mark.unlink(missing_ok=True)
