"""The interface of loggers, and one logger for several."""

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
# numbers that JSON lacks, and the texts that replace them
NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Logger:
    """Base of loggers. Only `log` is required.

    >>> class Best(Logger):
    ...     loss = float("inf")
    ...     def log(self, record):
    ...         self.loss = min(self.loss, record["val_loss"] or self.loss)
    """

    is_silent = False  # True: the run need not make records

    def start(self, run: Mapping[str, Any]) -> None:
        """Prepare before training. `run` describes the run; a resumed run also has its step, `run["resumed_step"]`.

        Raises:
            ArgumentError: the logger cannot write to its target.
        """

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        """Keep exactly these records, because the run continues after them. The default does nothing.

        A resumed run calls it after `start`, with the checkpoint's records up to `run["resumed_step"]`. A run that goes
        back because a host was lost calls it, too.
        """

    def log(self, record: Record) -> None:
        """Receive one record."""
        raise NotImplementedError(f"{type(self).__name__} needs a method log(record)")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish after training, even if it failed or was interrupted. `summary` is the last averaged record."""


class _Function(Logger):
    """Wraps a callable, or an object with `log` that is not a Logger."""

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
        with contextlib.ExitStack() as stack:  # finishes all loggers even if some raise
            for logger in reversed(self.loggers):
                stack.callback(logger.finish, summary)


def combine(loggers: Any) -> Logger:
    """Return one logger for None, a logger, a function of a record, or a list of these.

    Raises:
        ArgumentError: `loggers` is anything else.

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
        pass  # a builtin without a signature
    return _Function(loggers)


def in_json(value: Any) -> Any:
    """Return a value in strict JSON. Numbers that JSON lacks become the texts "NaN", "Infinity" and "-Infinity".

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
    """Check that `folder` is writable: make it, write a file into it and remove the file.

    Raises:
        ArgumentError: the folder is not writable. New folders are removed again. The message names the argument `name`.
    """
    try:
        make_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}={str(folder)!r} cannot be written ({error}): choose another folder") from error
