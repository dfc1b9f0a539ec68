"""Observers of a run: any number of them receive one stream of records and events.

The history is not an observer: it is the source of the records. Callbacks are not observers either: they may stop a run
and need all processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exogym.core.progress import Progress

if TYPE_CHECKING:
    from exogym.logger import Logger

Fields = Mapping[str, Any]


class Observer:
    """Base of observers. A subclass overrides the methods that it needs. All are called in the main process.

    Attributes:
        reads_records: whether it needs records.
    """

    reads_records = False

    def start(self, run: Fields) -> None:
        """Called before training. `run` describes the run; a resumed run has its step in `run["resumed_step"]`."""

    def restore(self, rows: Callable[[], Iterable[Fields]]) -> None:
        """Called after `start` in a resumed run. `rows()` yields the earlier records, up to `resumed_step`."""

    def record(self, row: Fields) -> None:
        """Take a record: a row of the history. Records come in the order of steps."""

    def event(self, event: Fields) -> None:
        """Take an event, with its kind in `event["kind"]` and its step in `event["step"]`."""

    def beat(self, step: int, figures: Fields) -> None:
        """Called while the run makes progress: `step` steps are done.

        Args:
            figures: newest loss, val_loss and tx_bytes; often empty.
        """

    def finish(self, summary: Fields) -> None:
        """Called at the end of every run, after an event that says how it ended.

        Args:
            summary: the averaged model's last record.
        """


class Observers(Observer):
    """Several observers as one. If one cannot start, the started ones are finished."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self.all = list(observers)

    @property
    def reads_records(self) -> bool:  # type: ignore[override]
        return any(observer.reads_records for observer in self.all)

    def add(self, observer: Observer) -> None:
        """Add an observer that has started already."""
        self.all.append(observer)

    def start(self, run: Fields) -> None:
        with contextlib.ExitStack() as undo:
            for observer in self.all:
                observer.start(run)
                undo.callback(observer.finish, {})
            undo.pop_all()

    def restore(self, rows: Callable[[], Iterable[Fields]]) -> None:
        for observer in self.all:
            observer.restore(rows)

    def record(self, row: Fields) -> None:
        for observer in self.all:
            observer.record(row)

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


class Logging(Observer):
    """Pass records to a `Logger`."""

    def __init__(self, logger: Logger):
        self.logger, self.reads_records = logger, not logger.is_silent

    def start(self, run: Fields) -> None:
        self.logger.start(run)

    def restore(self, rows: Callable[[], Iterable[Fields]]) -> None:
        self.logger.restore(rows)

    def record(self, row: Fields) -> None:
        self.logger.log(row)

    def finish(self, summary: Fields) -> None:
        self.logger.finish(summary)


class Showing(Observer):
    """Update a progress bar, which the caller enters and leaves."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def beat(self, step: int, figures: Fields) -> None:
        self.progress.update(step, **figures)
