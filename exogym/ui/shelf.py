"""What the page knows of the runs folder; read again when it may have changed, and seldom where that takes long."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from exogym import runs
from exogym.base.files import opened_plain
from exogym.logger import in_json

SHARE = 5  # a list that took a second is kept for so many
KEPT = 8  # runs whose records are kept
Row = dict[str, Any]


class Shelf:
    """The runs below `top`."""

    def __init__(self, top: Path):
        self.top = top
        self._lock = threading.Lock()
        self._listed: list[Row] = []
        self._due = 0.0
        self._records: OrderedDict[str, _Records] = OrderedDict()

    def all(self) -> list[Row]:
        """Return all runs as JSON has them."""
        with self._lock:
            if time.monotonic() >= self._due:
                begun = time.monotonic()
                found = runs.list(self.top) if self.top.is_dir() else []
                self._listed = [_row(run) for run in found]
                took = time.monotonic() - begun
                self._due = begun + took + min(max(SHARE * took, 0.5), 60.0)
            return self._listed

    def forget(self) -> None:
        """Look anew the next time: something has just been changed from here."""
        with self._lock:
            self._due = 0.0

    def folder(self, name: str) -> Path | None:
        """Return the folder of a run; None where the name is none of a folder in `top`, or leads out of it.

        >>> Shelf(Path("runs")).folder("../etc") is None
        True
        """
        parts = name.split("/")
        if len(parts) > 2 or any(not part or part[0] == "." or set(part) & set("\\\0") for part in parts):
            return None
        path = self.top.joinpath(*parts)
        inside = os.path.realpath(path) == os.path.join(os.path.realpath(self.top), *parts)  # no links either
        return path if inside and path.is_dir() else None

    def records(self, path: Path) -> list[Row]:
        """Return all records of a run."""
        with self._lock:
            kept = self._records.setdefault(os.fspath(path), _Records(path / "records.jsonl"))
            self._records.move_to_end(os.fspath(path))
            while len(self._records) > KEPT:
                self._records.popitem(last=False)
            return kept.all()


class _Records:
    """The records of one run: what is added to the file is read, and no more."""

    def __init__(self, path: Path):
        self.path = path
        self._rows: list[Row] = []
        self._place = (-1, 0)  # of the file, and up to where it is read

    def all(self) -> list[Row]:
        try:
            with opened_plain(self.path) as file:
                inode, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
                if inode != self._place[0] or size < self._place[1]:  # begun anew, or gone on with from before
                    self._rows, self._place = [], (inode, 0)
                file.seek(self._place[1])
                text = file.read(size - self._place[1])
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                self._rows.append(row)
        self._place = (inode, self._place[1] + len(whole))
        return self._rows


def thinned(rows: list[Row], most: int) -> list[Row]:
    """Return at most about `most` rows: all evaluations of the averaged model, as far as they fit, and others evenly.

    >>> len(thinned([{"step": k} for k in range(1000)], 100)), thinned([{"step": 1}], 5)
    (100, [{'step': 1}])
    """
    if len(rows) <= most:
        return rows
    evaluated = [k for k, row in enumerate(rows) if row.get("val_loss") is not None]
    kept = set(_evenly(evaluated, most // 2)) | {len(rows) - 1}
    kept |= set(_evenly([k for k in range(len(rows)) if k not in kept], most - len(kept)))
    return [rows[k] for k in sorted(kept)]


def _evenly(items: list[int], most: int) -> list[int]:
    return items if len(items) <= most else [items[k * len(items) // most] for k in range(most)]


def _row(run: runs.Listed) -> Row:
    row = in_json(run.to_json())
    del row["path"]
    row["summary"] = {name: row[name] for name in ("loss", "accuracy", "tx_bytes", "wall_s", "time_s")}
    return row
