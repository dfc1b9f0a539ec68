"""Loggers that write a file: CSV or JSON lines."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from exogym.core.base.files import cut_torn_line, replacing
from exogym.core.progress import notice
from exogym.core.record.rows import plain
from exogym.errors import ArgumentError, checked
from exogym.logger.base import Logger, Record, check_writable, in_json

_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode  # created once, which halves a record's time


class OnDisk(Logger):
    """A logger that writes files. If a write fails, it prints one message and stops, and training continues.

    Attributes:
        trouble: why the logger has stopped, if it has.
    """

    trouble: str | None = None

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """A context in which the logger writes into `path`."""
        try:
            yield
        except OSError as error:
            if self.trouble is None:
                notice(f"{path} is no longer written: {error}; training continues")
                self.trouble = str(error)
            self._abandon()

    def _abandon(self) -> None:
        """Close open files without writing."""


class FileLogger(OnDisk):
    """Write records to a text file.

    A new run replaces the file, which the first record opens, and a resumed run rewrites its earlier records. When
    `log` returns, the file has the complete record.
    """

    suffix = ""

    def __init__(self, path: str | os.PathLike[str] | None, experiment_name: str | None) -> None:
        name = (experiment_name or "metrics") + self.suffix
        self.path = Path(path if path is not None else name)
        if os.path.isdir(self.path) or str(path).endswith(("/", os.sep)):
            self.path = self.path / name
        self._file: IO[str] | None = None
        self._begun = False  # whether the file's contents belong to this run
        self._columns: list[str] = []

    def start(self, run: Mapping[str, Any]) -> None:
        """Check that the file is writable."""
        self.finish({})
        self._columns, self._begun, self.trouble = [], False, None
        check_writable(self.path.parent)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(self.path)
                open(self.path, "a").close()
        except (OSError, ValueError) as error:  # ValueError: not a valid name
            raise ArgumentError(f"path={str(self.path)!r} cannot be written ({error}): name another file") from error

    def _opened(self) -> IO[str]:
        if self._file is None:
            mode = "a" if self._begun else "w"
            self._file = open(self.path, mode, buffering=1, encoding="utf-8", newline="")  # noqa: SIM115
            self._begun = True
        return self._file

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        """Replace the file's records by `records()`.

        After a power failure, `records()` may return records that the file lacks.
        """
        with self.writing(self.path):
            self._close()  # it is open if the run went back
            if self.trouble is None:
                self._replace(records)
                self._begun = True

    _replace: Any  # function: write exactly the records of `records()`

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        with self.writing(self.path):
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            cut_torn_line(self.path)

    def log(self, record: Record) -> None:
        """Write one record to the file."""
        with self.writing(self.path):
            if self.trouble is None:
                self._add(record)

    _add: Any  # (record) -> None


class CSVLogger(FileLogger):
    """Write records to a CSV file with a header, with empty cells for missing values.

    A new metric adds a column, for which the file is rewritten with a complete header. A new run replaces an existing
    file, and a resumed run rewrites its earlier records.

    Args:
        path: the file, or a folder for the file `<experiment_name>.csv`. Default: the current folder.
        experiment_name: the file's name if `path` does not name a file. Default: "metrics".

    >>> logger = CSVLogger(path="runs/diloco.csv")
    >>> CSVLogger(experiment_name="sparta").path.name
    'sparta.csv'
    """

    suffix = ".csv"

    @checked
    def __init__(self, path: str | os.PathLike[str] | None = None, experiment_name: str | None = None) -> None:
        super().__init__(path, experiment_name)

    def _add(self, record: Record) -> None:
        if new := [name for name in record if name not in self._columns]:
            self._columns += new
            if self._begun:
                self.finish({})
                self._replace(self._rows)
            else:
                csv.writer(self._opened(), lineterminator="\n").writerow(self._columns)
        row = [plain(record.get(name)) for name in self._columns]
        csv.writer(self._opened(), lineterminator="\n").writerow(row)

    def _rows(self) -> Iterator[dict[str, Any]]:
        with open(self.path, encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        for record in itertools.islice(records(), 1):
            self._columns += [name for name in record if name not in self._columns]
        super().restore(records)

    def _replace(self, records: Callable[[], Iterable[Record]]) -> None:
        with replacing(self.path) as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(records())


class JSONLinesLogger(FileLogger):
    """Write each record as a line of JSON; NaN and infinities become the texts "NaN", "Infinity" and "-Infinity".

    A new run replaces an existing file, and a resumed run rewrites its earlier records.

    >>> logger = JSONLinesLogger("runs/diloco.jsonl")
    """

    suffix = ".jsonl"

    @checked
    def __init__(self, path: str | os.PathLike[str] | None = None, experiment_name: str | None = None) -> None:
        super().__init__(path, experiment_name)

    def _add(self, record: Record) -> None:
        self._opened().write(_line(record))

    def _replace(self, records: Callable[[], Iterable[Record]]) -> None:
        with replacing(self.path) as file:
            file.writelines(map(_line, records()))


def _line(record: Record) -> str:
    try:
        return _encode(dict(record)) + "\n"
    except (TypeError, ValueError):  # a tensor, or a number that JSON lacks
        return json.dumps(in_json(record), allow_nan=False) + "\n"
