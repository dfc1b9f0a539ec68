"""What a logger may do, and how several are one."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from exogym.core.base.files import make_folder
from exogym.core.record.history import plain
from exogym.errors import ArgumentError

Record = Mapping[str, Any]
# numbers that JSON has no word for, and what stands for them
NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Logger:
    """What a logger may do; only `log` is needed.

    >>> class Best(Logger):
    ...     loss = float("inf")
    ...     def log(self, record):
    ...         self.loss = min(self.loss, record["val_loss"] or self.loss)
    """

    is_silent = False  # whether records need not be made at all

    def start(self, run: Mapping[str, Any]) -> None:
        """Prepare, before training; `run` describes the run, and `run["resumed_step"]`, if there, is where it goes on.

        Raises:
            ArgumentError: what this logger writes to cannot be written.
        """

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        """Hold these records and no later ones: the run goes on after them. The default does nothing.

        Called after `start` of a resumed run, up to `run["resumed_step"]` as the checkpoint has them, and where hosts
        that lost one go back.
        """

    def log(self, record: Record) -> None:
        """Take one record."""
        raise NotImplementedError(f"{type(self).__name__} needs a method log(record)")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish, after training, also one that failed or was interrupted; `summary` is the last averaged record."""


class _Function(Logger):
    """A callable, or an object with `log` that is no Logger."""

    def __init__(self, target: Any) -> None:
        self.log = getattr(target, "log", target)  # type: ignore[method-assign]
        self.start = getattr(target, "start", self.start)  # type: ignore[method-assign]
        self.finish = getattr(target, "finish", self.finish)  # type: ignore[method-assign]


class _Several(Logger):
    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = list(loggers)
        self.is_silent = all(logger.is_silent for logger in loggers)

    def start(self, run: Mapping[str, Any]) -> None:
        started: list[Logger] = []
        try:
            for logger in self.loggers:
                logger.start(run)
                started.append(logger)
        except BaseException:
            for logger in started:
                logger.finish({})
            raise

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        for logger in self.loggers:
            logger.restore(records)

    def log(self, record: Record) -> None:
        for logger in self.loggers:
            logger.log(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as stack:  # each is called, whatever the others raise
            for logger in reversed(self.loggers):
                stack.callback(logger.finish, summary)


def combine(loggers: Any) -> Logger:
    """Return one logger for None, a logger, a function of a record, or several of these.

    Raises:
        ArgumentError: anything else.

    >>> combine(None).is_silent, combine([print, None]).is_silent
    (True, False)
    """
    if isinstance(loggers, Logger):
        return loggers
    if loggers is None:
        return _Several([])
    if isinstance(loggers, list | tuple):
        return _Several([combine(logger) for logger in loggers if logger is not None])
    if isinstance(loggers, type):
        raise ArgumentError(f"logger={loggers.__name__} is a class: give an instance, {loggers.__name__}(...)")
    try:
        inspect.signature(getattr(loggers, "log", loggers)).bind({})
    except TypeError:
        wanted = "one of exogym.logger, an object with log(record), a function of a record, or a list of these"
        raise ArgumentError(f"logger={loggers!r} is not a logger: give {wanted}") from None
    except ValueError:
        pass  # a builtin that does not tell its arguments
    return _Function(loggers)


def in_json(value: Any) -> Any:
    """Return a value as strict JSON has it: numbers that it lacks are the texts "NaN", "Infinity", "-Infinity".

    >>> in_json({"loss": float("nan"), "at": [1, float("-inf")], "script": os.fsdecode(b"run\\xe9.py")})
    {'loss': 'NaN', 'at': [1, '-Infinity'], 'script': 'run\\\\udce9.py'}
    """
    if isinstance(value, Mapping):
        return {plain(str(key)): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    value = plain(value)
    return NOT_IN_JSON.get(repr(value), value) if isinstance(value, float) else value


def check_writable(folder: str | os.PathLike[str], name: str = "path") -> None:
    """Make `folder` and write a file into it, to see that it can be done; the file is removed again.

    Raises:
        ArgumentError: it cannot; folders made on the way are removed, and `name` is the argument in the message.
    """
    try:
        make_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}={str(folder)!r} cannot be written ({error}): choose another folder") from error
