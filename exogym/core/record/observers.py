"""Who looks on while a run goes on: one stream of records and events, and any number of observers.

The history is where records come from, so it is no observer itself: it holds them by column, for all steps and nodes.
Callbacks are none either, since they may stop a run and ask all processes for something.
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
    """What an observer may do; a subclass overrides what it looks at. All of it happens in the main process.

    Attributes:
        reads_records: whether records need to be made for it.
    """

    reads_records = False

    def start(self, run: Fields) -> None:
        """The run is about to train; `run` describes it, and `run["resumed_step"]`, if there, is where it goes on."""

    def restore(self, rows: Callable[[], Iterable[Fields]]) -> None:
        """After `start` of a run that goes on: `rows()` yields the records up to `resumed_step`, told once already."""

    def record(self, row: Fields) -> None:
        """Take a record, a row of the history, in the order of steps."""

    def event(self, event: Fields) -> None:
        """Something happened: `event["kind"]` says what, `event["step"]` after which step."""

    def beat(self, step: int, figures: Fields) -> None:
        """The run goes on: `step` steps are done; `figures`: the newest of loss, val_loss, tx_bytes; often none."""

    def finish(self, summary: Fields) -> None:
        """It is over, whatever its end, of which an event told; `summary` is the last record of the averaged model."""


class Observers(Observer):
    """Several observers as one. Where one cannot start, those that did are finished."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self.all = list(observers)

    @property
    def reads_records(self) -> bool:  # type: ignore[override]
        return any(observer.reads_records for observer in self.all)

    def add(self, observer: Observer) -> None:
        """Tell one more, which was started."""
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
        with contextlib.ExitStack() as stack:  # each is called, whatever the others raise
            for observer in reversed(self.all):
                stack.callback(observer.finish, summary)


class Logging(Observer):
    """Gives records to a `Logger`."""

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
    """Moves a progress bar, which is entered and left apart from it."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def beat(self, step: int, figures: Fields) -> None:
        self.progress.update(step, **figures)
