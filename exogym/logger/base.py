"""The interface of loggers, and a function that combines several loggers into one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exogym.core.base.files import make_folder
from exogym.core.record.observers import Observer, Observers
from exogym.core.record.rows import plain
from exogym.errors import ArgumentError

Record = Mapping[str, Any]
# numbers that JSON lacks, and the texts that replace them
NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Logger(Observer):
    """Base class of loggers. Subclasses must define only `log`.

    >>> class Best(Logger):
    ...     loss = float("inf")
    ...     def log(self, record):
    ...         self.loss = min(self.loss, record["val_loss"] or self.loss)
    """

    is_silent = False  # True: the run need not produce records
    ended = "done"  # how the run ended: "done", "stopped" or "error"; known when `finish` is called
    start, restore, finish = Observer.start, Observer.restore, Observer.finish  # for the reference

    @property
    def reads_records(self) -> bool:  # type: ignore[override]
        return not self.is_silent

    def log(self, record: Record) -> None:
        """Receive one record, a row of the run's history."""
        raise NotImplementedError(f"{type(self).__name__} does not define log(record): every logger needs this method")

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in ("done", "stopped", "error"):
            self.ended = event["kind"]


class _Function(Logger):
    """Wraps a callable, or an object with `log` that is not a Logger."""

    def __init__(self, target: Any) -> None:
        self.log = getattr(target, "log", target)  # type: ignore[method-assign]
        self.start = getattr(target, "start", self.start)  # type: ignore[method-assign]
        self.finish = getattr(target, "finish", self.finish)  # type: ignore[method-assign]


class _Several(Observers, Logger):
    @property
    def is_silent(self) -> bool:  # type: ignore[override]
        return not self.reads_records


def combine(loggers: Any) -> Logger:
    """Combine a logger, a function that takes a record, None (no logger), or a list of these into one logger.

    Raises:
        ArgumentError: `loggers` is something else.

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
        raise ArgumentError(f"logger={loggers.__name__} is a class: pass an instance, {loggers.__name__}(...)")
    try:
        inspect.signature(getattr(loggers, "log", loggers)).bind({})
    except TypeError:
        wanted = "a logger of exogym.logger, an object with log(record), a function of a record, or a list of these"
        raise ArgumentError(f"logger={loggers!r} is not a logger: pass {wanted}") from None
    except ValueError:
        pass  # a builtin without a signature
    return _Function(loggers)


def in_json(value: Any) -> Any:
    """Return `value` as strict JSON allows it: NaN and infinities become "NaN", "Infinity" and "-Infinity".

    >>> in_json({"loss": float("nan"), "at": [1, float("-inf")], "script": os.fsdecode(b"run\\xe9.py")})
    {'loss': 'NaN', 'at': [1, '-Infinity'], 'script': 'run\\\\udce9.py'}
    """
    if isinstance(value, Mapping):
        return {plain(str(key)): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    value = plain(value)
    return NOT_IN_JSON.get(repr(value), value) if isinstance(value, float) else value


def check_writable(folder: str | os.PathLike[str], name: str = "path") -> list[Path]:
    """Check that `folder` is writable by creating it and writing and removing a file.

    Return the folders that the check has created, deepest first.

    Raises:
        ArgumentError: the folder is not writable. The message begins with `name`, the caller's argument, and the
            created folders are removed.
    """
    try:
        return make_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}={str(folder)!r} cannot be written ({error}): choose another folder") from error
