"""Stop a run by signal: SIGINT and SIGTERM take effect at the next step at which the run can write a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from exogym.core.communicator import Wire, gather, say
from exogym.core.compute.spans import Losses
from exogym.core.progress import GOING_ON
from exogym.core.training.agenda import Agenda
from exogym.errors import Stopped

ONCE = "EXOGYM_SIGTERM_ONCE"  # set if both a scheduler and a launcher send each process the same SIGTERM
TRACE_CHARACTERS = 4000


class Interrupt:
    """A context manager that only records the first signal among `signals`. A second signal takes effect at once.

    If the variable EXOGYM_SIGTERM_ONCE is set, a second SIGTERM is ignored, because each process gets the signal twice.

    Calling the object returns whether this process must stop. Processes that share memory all stop together.

    >>> with Interrupt(Wire([0])) as interrupt:
    ...     interrupt()
    False
    """

    def __init__(self, wire: Wire, signals: Sequence[signal.Signals] = ()):
        self.wire, self.signals = wire, signals
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self.received is not None or self.wire.asked_to_stop()

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers. Keep a handler that is neither Python's nor the default.
        if not self.wire.is_hidden and threading.current_thread() is threading.main_thread():
            for number in self.signals:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.wire.ask_to_stop()
        self._restore(but=signal.SIGTERM if number == signal.SIGTERM and ONCE in os.environ else None)

    def _restore(self, but: signal.Signals | None = None) -> None:
        for number in [number for number in self._before if number != but]:
            signal.signal(number, self._before.pop(number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()


def waiting_signals(wire: Wire, agenda: Agenda) -> list[signal.Signals]:
    """Return the signals that take effect only between two steps.

    SIGTERM is always one of these signals. SIGINT (Ctrl-C) is one of them only if the run saves checkpoints or has
    several processes. Otherwise SIGINT raises KeyboardInterrupt at once.
    """
    waits = agenda.save_dir is not None or wire.is_shared
    return [signal.SIGTERM, *([signal.SIGINT] if waits else [])]


def say_stopped(wire: Wire, received: signal.Signals | None, step: int, losses: Losses, path: Path | None) -> None:
    """Print at which step the nodes stopped, and how to resume the run from the checkpoint at `path`, if one exists."""
    here = losses.counts.sum(1).tolist() if losses.under_way else [0]
    taken = [count for counts in gather(wire, here) for count in counts]
    within = f", {min(taken)} to {max(taken)} local steps into the next stretch" if max(taken) else ""
    stopped = f"stopped by {Stopped(received, step)}{within}"
    if path is not None:
        again = f"To resume, call the same fit with save_dir={str(path.parent)!r}, resume=True"
        say(wire, f"{stopped}; saved in {path}. {again}", GOING_ON)
    elif received is signal.SIGTERM:
        say(wire, f"{stopped}; nothing is saved: the run has no save_dir", GOING_ON)


def leave(received: signal.Signals | None, step: int) -> None:
    """Raise the exception that belongs to a received signal, even if the signal came too late to stop the run."""
    stopped = Stopped(received, step)
    if received is signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM) from stopped
    raise stopped


def last_lines(error: BaseException) -> str:
    """Return the last lines of an error's traceback, at most 4000 characters.

    >>> last_lines(ValueError("why"))
    'ValueError: why'
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= TRACE_CHARACTERS else text[-TRACE_CHARACTERS:].partition("\n")[2]
