"""Read the runs folder for the page. The folder is read again after a while, and less often if reading is slow.

No file is read under a lock, so a request for one run never waits for a request for another run.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from exogym.logger import in_json
from exogym.record import row_of
from exogym.strategy.names import titles
from exogym.study import runs
from exogym.ui.lines import OF_A_NODE, OF_NODES, PIECE_BYTES, Position, piece_after
from exogym.ui.views import NodesPicture

SHARE = 5  # a list that took 1 s to read is kept for 5 s
CACHE_BYTES = 64 << 20  # bytes of kept pictures
Row = dict[str, Any]


class RunShelf:
    """Gives the page the runs in the folder `top`."""

    def __init__(self, top: Path):
        self.top = top
        self._lock = threading.Lock()
        self._listed: list[Row] = []
        self._due, self._age, self._asked = 0.0, -1, 0  # time of the next read; the list's version; the wanted version
        self._looking: int | None = None  # the version that a thread reads now
        self._found = threading.Condition(self._lock)
        self._pictures: OrderedDict[str, _Followed] = OrderedDict()
        self._writing, self._written = threading.Lock(), (self._listed, "[]")

    def all(self) -> list[Row]:
        """Return all runs as JSON values. While a thread reads the folder, other threads may get the previous list."""
        with self._found:
            while self._looking == self._asked or time.monotonic() < self._due:
                if self._age == self._asked:
                    return self._listed
                if self._looking != self._asked:
                    break
                self._found.wait()
            age = self._looking = self._asked
        found: list[Row] | None = None
        begun = time.monotonic()
        try:
            found = [_row(run) for run in (runs.list(self.top) if self.top.is_dir() else [])]
        finally:
            with self._found:
                took = time.monotonic() - begun
                if found is not None and age >= self._age:
                    self._listed, self._age = found, age
                    self._due = time.monotonic() + min(max(SHARE * took, 0.5), 60.0)
                if self._looking == age:
                    self._looking = None
                self._found.notify_all()
        return found

    def text(self) -> str:
        """Return all runs as JSON text. It is made once for each list, however many pages ask."""
        rows = self.all()
        with self._writing:
            if self._written[0] is not rows:
                self._written = rows, json.dumps(rows)
            return self._written[1]

    def forget(self) -> None:
        """Let the next call of `all` read the folder again, because the page has changed something."""
        with self._lock:
            self._asked += 1

    def folder(self, name: str) -> Path | None:
        """Return a run's folder. Return None if `top` has no such folder, or if the name leads out of `top`.

        >>> RunShelf(Path("runs")).folder("../etc") is None
        True
        """
        parts = name.split("/")
        if len(parts) > 2 or any(not part or part[0] == "." or set(part) & set("\\\0") for part in parts):
            return None
        path = self.top.joinpath(*parts)
        inside = os.path.realpath(path) == os.path.join(os.path.realpath(self.top), *parts)  # no links either
        return path if inside and os.path.isdir(path) else None  # `Path.is_dir` fails for a name that is too long

    def nodes(self, path: Path, most_bytes: int | None = None) -> Row:
        """Return the data for the picture of a run's nodes (see `nodes_of`), and `more`: whether unread lines are left.

        Each call reads about `most_bytes` of the lines that earlier calls have not read; None reads everything.
        """
        with self._lock:
            followed = self._pictures.setdefault(os.fspath(path), _Followed(path))
            self._pictures.move_to_end(os.fspath(path))
        spent, is_more = 0, True
        while is_more and (most_bytes is None or spent < most_bytes):
            is_more, spent = followed.advance(), spent + PIECE_BYTES
        with self._lock:
            size_bytes = sum(other.size_bytes for other in self._pictures.values())
            while size_bytes > CACHE_BYTES and len(self._pictures) > 1:
                size_bytes -= self._pictures.popitem(last=False)[1].size_bytes
        return followed.found() | {"more": is_more}


class _Followed:
    """The picture of a run's nodes. Each call reads only new lines of the run's files."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._picture = NodesPicture()
        self._places = {"records.jsonl": Position(), "events.jsonl": Position()}

    def advance(self) -> bool:
        """Read the next piece of each file. Return whether a file has more unread lines."""
        return any([self._read("records.jsonl"), self._read("events.jsonl")])

    def _read(self, name: str) -> bool:
        is_record = name == "records.jsonl"
        wanted = OF_A_NODE if is_record else OF_NODES
        place = self._places[name]
        lines, reached, is_anew, is_more = piece_after(self.path / name, place)
        rows = [row for line in lines if wanted.search(line) and (row := row_of(line, name)) is not None]
        with self._lock:
            if self._places[name] is not place:  # another thread has read it
                return True
            if is_anew:
                self._begin()
            self._places[name] = reached
            for row in rows:
                (self._picture.take_record if is_record else self._picture.take_event)(row)
        return is_more or is_anew

    @property
    def size_bytes(self) -> int:
        return self._picture.size_bytes

    def found(self) -> Row:
        with self._lock:
            return self._picture.found()


def _row(run: runs.Listed) -> Row:
    row = in_json(run.to_json())
    del row["path"]
    row["strategies"] = _titles(row["strategy"])
    row["summary"] = {name: row[name] for name in ("loss", "accuracy", "tx_bytes", "wall_s", "time_s")}
    return row


def _titles(strategies: str | None) -> list[str]:
    """Return the titles of strategies in a comparison's table.

    >>> _titles("ddp,diloco:H=10:lr=0.01,mine")
    ['DDP', 'DiLoCo (H=10, lr=0.01)', 'mine']
    """
    named = [text.partition(":") for text in (strategies or "").split(",") if text]
    return [titles().get(name, name) + (f" ({rest.replace(':', ', ')})" if rest else "") for name, _, rest in named]
