"""Read a run's records and events in pieces, without keeping them in memory. A read starts where the last read ended.

Records are ordered by step. So a binary search in the file finds the first record after a step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from exogym.core.base.files import opened_plain
from exogym.core.record.schema import LINE_BYTES, check_length
from exogym.errors import ArgumentError
from exogym.logger import in_json
from exogym.record import row_of

PIECE_BYTES = 1 << 19  # bytes of one read
MARK_BYTES = 64  # bytes before a position, to recognize the file
NEAR_BYTES = 1 << 16  # the binary search ends below this size
BACK_BYTES, BLOCK_BYTES = 4 << 20, 1 << 16  # bytes from the end, searched for the newest events; bytes of one read
ANSWER_BYTES = 1 << 18  # bytes of one part of an answer
OF_A_NODE = re.compile(rb'"node"\s*:\s*\d')
OF_A_CLOCK = re.compile(rb'"kind"\s*:\s*"clock"')
OF_NODES = re.compile(rb'"kind"\s*:\s*"(clock|away|back|start)"')
Row = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """How far a file has been read: the file's inode, the offset in bytes, and the last bytes before the offset."""

    inode: int = -1
    offset: int = 0
    mark: bytes = b""


def piece_after(path: Path, place: Position) -> tuple[list[bytes], Position, bool, bool]:
    """Return the complete lines after a position, the new position, whether the file is new, and whether more follow.

    The file counts as new, and is read from its start, if another file has replaced it, if it is shorter, or if the
    bytes before `place` have changed since the last read.
    """
    try:
        with opened_plain(path) as file:
            about = os.fstat(file.fileno())
            is_known = about.st_ino == place.inode and about.st_size >= place.offset
            if is_known:
                file.seek(place.offset - len(place.mark))
                is_known = file.read(len(place.mark)) == place.mark
            old, start = place.inode != -1, place if is_known else Position(about.st_ino)
            file.seek(start.offset)
            data = file.read(PIECE_BYTES)
            if b"\n" not in data:
                data += file.read(LINE_BYTES)  # one long line
    except OSError:
        return [], Position(), place.inode != -1, False
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        check_length(data, path.name)
    offset = start.offset + len(whole)
    mark = (start.mark + whole)[-MARK_BYTES:]
    is_more = bool(whole) and offset < about.st_size
    return whole.splitlines(keepends=True), Position(start.inode, offset, mark), old and not is_known, is_more


def records_after(path: Path, step: int, is_model: bool) -> Iterator[tuple[Row | None, int]]:
    """Yield (record, offset of its end in the file) for each record after a step. Leave out an incomplete last line.

    With `is_model`, yield None instead of a single node's record, without parsing this record.
    """
    try:
        with opened_plain(path) as file:
            at = _before(file, step)
            file.seek(at)
            while line := file.readline(LINE_BYTES + 1):
                check_length(line, path.name)
                if not line.endswith(b"\n"):
                    return
                at += len(line)
                if is_model and OF_A_NODE.search(line):
                    yield None, at
                elif (row := row_of(line)) is not None and row["step"] > step:
                    yield row, at
    except OSError:
        return


def _before(file: IO[bytes], step: int) -> int:
    """Return the start of a line at or shortly before the first record after a step."""
    low, high = 0, file.seek(0, os.SEEK_END)
    if step < 0:
        return 0
    while high - low > NEAR_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(LINE_BYTES + 1)  # the rest of a line
        begin = file.tell()
        row = row_of(file.readline(LINE_BYTES + 1))
        if begin >= high or row is None or row["step"] > step:
            high = middle
        else:
            low = begin
    return low


def step_reached(path: Path, after: int) -> int:
    """Return the step of the newest complete record, but at most `after`. Without a record, return `after`."""
    for line in _backwards(path):
        if (row := row_of(line)) is not None:
            return min(int(row["step"]), after)
    return after


def newest_events(path: Path, most: int) -> list[Row]:
    """Return the newest events in the file's last 4 MB, at most `most`, oldest first. Leave out predicted times."""
    found: list[Row] = []
    for line in _backwards(path):
        if not OF_A_CLOCK.search(line) and (row := row_of(line, "events.jsonl")) is not None:
            found.append(row)
            if len(found) == most:
                break
    return found[::-1]


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the whole lines in a file's last `BACK_BYTES` bytes, the last line first."""
    try:
        with opened_plain(path) as file:
            end = size = file.seek(0, os.SEEK_END)
            rest: bytes | None = None  # end of a line that begins earlier; None: skip the incomplete last line
            while end > max(size - BACK_BYTES, 0):
                begin = max(end - BLOCK_BYTES, size - BACK_BYTES, 0)
                file.seek(begin)
                parts = (file.read(end - begin) + (rest or b"")).split(b"\n")
                if rest is None:
                    parts[-1] = b""
                rest, end = parts[0], begin
                yield from (line + b"\n" for line in reversed(parts[1:]) if line)
            if rest and end == 0:
                yield rest + b"\n"
    except OSError:
        return


def as_text(path: Path, after: int, is_model: bool) -> Iterator[str]:
    """Yield all records after a step as one JSON text, in parts, so that few records are in memory at a time.

    If a record is invalid, the text ends before this record, and its field `error` has the reason.
    """
    last, parts, size, told = None, ['{"records": ['], 0, dict[str, Any]()
    try:
        for row, _ in records_after(path, after, is_model):
            if row is None:
                continue
            parts.append(f"{'' if last is None else ', '}{json.dumps(row)}")
            last, size = row["step"], size + len(parts[-1])
            if size > ANSWER_BYTES:
                yield "".join(parts)
                parts, size = [], 0
        told = {"last": step_reached(path, after) if last is None else last}
    except ArgumentError as error:
        told = {"last": after if last is None else last, "error": in_json(str(error))}
    yield "".join(parts) + "], " + json.dumps(told)[1:]


def some_of(path: Path, after: int, is_model: bool, most: int, most_bytes: int | None) -> Row:
    """Return about `most` of the `records` after a step. Up to half are evaluations; the rest are evenly spread.

    About `most_bytes` are read, but at least one step; None reads the whole file. Also return the `last` step that was
    read, whether the file has `more`, and an identifier of the `file`: a run that resumes earlier starts a new file.
    """
    thinner, begun, last = Thinner(most), None, None
    try:
        which = f"{os.lstat(path).st_ino:x}"
    except OSError:
        which = ""
    for row, at in records_after(path, after, is_model):
        begun = at if begun is None else begun
        if row is None:
            continue
        if most_bytes is not None and at - begun > most_bytes and last is not None and row["step"] > last:
            return {"records": thinner.rows(), "last": last, "more": True, "file": which}
        last = row["step"]
        thinner.take(row)
    last = step_reached(path, after) if last is None else last
    return {"records": thinner.rows(), "last": last, "more": False, "file": which}


class Thinner:
    """Receives many records one by one and keeps about `most`. Its memory does not grow with their number.

    >>> thinner = Thinner(100)
    >>> for k in range(5000):
    ...     thinner.take({"step": k})
    >>> rows = thinner.rows()
    >>> len(rows), rows[0]["step"], rows[-1]["step"]
    (100, 0, 4999)
    """

    def __init__(self, most: int):
        self.most, self._count = most, 0
        self._held: list[dict[int, Row]] = [{}, {}]  # other records, evaluations; number of the row -> row
        self._seen, self._every = [0, 0], [1, 1]  # rows of each kind so far; every n-th row is held
        self._last: dict[int, Row] = {}

    def take(self, row: Row) -> None:
        kind = row.get("val_loss") is not None
        self._last = {self._count: row}
        if self._seen[kind] % self._every[kind] == 0:
            self._held[kind] |= self._last
            if len(self._held[kind]) > 4 * self.most:
                self._held[kind] = dict([*self._held[kind].items()][::2])
                self._every[kind] *= 2
        self._seen[kind] += 1
        self._count += 1

    def rows(self) -> list[Row]:
        found = self._held[0] | self._held[1] | self._last
        return thinned([found[k] for k in sorted(found)], self.most)


def thinned(rows: list[Row], most: int) -> list[Row]:
    """Return about `most` of the given records. Up to half are evaluations; the rest are evenly spread."""
    if len(rows) <= most:
        return rows
    evaluated = [k for k, row in enumerate(rows) if row.get("val_loss") is not None]
    kept = set(_evenly(evaluated, most // 2)) | {len(rows) - 1}
    kept |= set(_evenly([k for k in range(len(rows)) if k not in kept], most - len(kept)))
    return [rows[k] for k in sorted(kept)]


def _evenly(items: list[int], most: int) -> list[int]:
    return items if len(items) <= most else [items[k * len(items) // most] for k in range(most)]
