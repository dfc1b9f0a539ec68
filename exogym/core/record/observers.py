"""Observers of a run: objects, such as loggers, that receive the run's records and events.

The history is not an observer, because it produces the records, and callbacks are not observers, because they may stop
the run and need all processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]
LOCAL_RANK, RESTARTS = "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"  # environment variables of torch's launcher
STEP_S = 1.0  # between two writes of a step


class Observer:
    """Base class of observers. Override the methods that you need. They are called only in the main process.

    If `reads_records` is False, `log` is not called.
    """

    reads_records = False

    def start(self, run: Fields) -> None:
        """Prepare before training. Raise ArgumentError if the observer cannot write its file or folder.

        `run` is a description of the run. If the run is resumed, run["resumed_step"] is the checkpoint's step.
        """

    def restore(self, records: Callable[[], Iterable[Fields]]) -> None:
        """Replace all earlier records of this run with `records()`, after which the run continues.

        A resumed run calls this method after `start`, with the checkpoint's records up to `run["resumed_step"]`, and so
        does a run that lost a host and returns to a checkpoint. The base class does nothing.
        """

    def log(self, record: Fields) -> None:
        """Receive one record, a row of the run's history, in step order."""

    def event(self, event: Fields) -> None:
        """Receive an event. The event's kind is in `event["kind"]`, and its step in `event["step"]`."""

    def beat(self, step: int, figures: Fields) -> None:
        """Called regularly while the run makes progress, after `step` steps.

        `figures` has the latest loss, val_loss and tx_bytes, and is often empty.
        """

    def finish(self, summary: Fields) -> None:
        """Finish after training, even if it failed or was interrupted, and after the event that says how it ended.

        `summary` is the averaged model's last record.
        """


class Observers(Observer):
    """Pass each call to several observers. If one fails to start, those that have started are finished."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self.all = list(observers)

    @property
    def reads_records(self) -> bool:  # type: ignore[override]
        return any(observer.reads_records for observer in self.all)

    def start(self, run: Fields) -> None:
        with contextlib.ExitStack() as undo:
            for observer in self.all:
                observer.start(run)
                undo.callback(observer.finish, {})
            undo.pop_all()

    def restore(self, records: Callable[[], Iterable[Fields]]) -> None:
        for observer in self.all:
            observer.restore(records)

    def log(self, record: Fields) -> None:
        for observer in self.all:
            observer.log(record)

    def event(self, event: Fields) -> None:
        for observer in self.all:
            observer.event(event)

    def beat(self, step: int, figures: Fields) -> None:
        for observer in self.all:
            observer.beat(step, figures)

    def finish(self, summary: Fields) -> None:
        with contextlib.ExitStack() as stack:  # calls each, even if others raise
            for observer in reversed(self.all):
                stack.callback(observer.finish, summary)


class StepFile(Observer):
    """Writes its process's last step and number of restarts into `folder`, for the host's watcher (`health`)."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder) / os.environ.get(LOCAL_RANK, "0")
        self.restarts = os.environ.get(RESTARTS, "0")
        self._due = 0.0

    def beat(self, step: int, figures: Fields) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + STEP_S
            with contextlib.suppress(OSError):  # nobody watches any more
                self.path.write_text(f"{step} {self.restarts}\n")
