"""The fields of a run folder's files, in one table for writing and reading.

A run folder may come from another machine or program, so every reader uses this module to check the file's size, UTF-8,
JSON and nesting depth, and the type, length and finiteness of each field that is used. If a check fails, an
`ArgumentError` names the file and the field.

>>> check_file("status.json", {"state": "running", "step": 3})
>>> check_file("status.json", {"state": "running", "started_s": "x"})
Traceback (most recent call last):
...
exogym.errors.ArgumentError: status.json: started_s='x': expected a finite number
>>> row_of(b'{"step": 3, "node": null}\\n'), row_of(b'{"step": 4, "no')
({'step': 3, 'node': None}, None)
>>> read_file("runs/none/status.json"), [*rows_in("runs/none/records.jsonl")]
({}, [])
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.core.base.files import opened_plain
from exogym.errors import ArgumentError

FILES = ("run.json", "status.json", "records.jsonl", "events.jsonl", "summary.json")  # files that the run itself writes
LINE_BYTES = 1 << 20  # longest line of records or events
MOST_DEPTH = 64  # deepest nesting of objects and lists
MOST_NODES = 1 << 24
LIMIT = 1e300
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # how ExoGym writes numbers that JSON doesn't have
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LABEL, TEXT = 1000, 20_000  # characters
MOST_LABELS, MOST_CELLS, MOST_SEEDS = 1000, 5000, 10_000
Row = dict[str, Any]
_decoded = json.JSONDecoder(parse_constant=str).decode  # made once: a record takes half the time


@dataclass(frozen=True)
class Kind:
    """A field's kind: the allowed values. None means "unknown" and is always allowed."""

    wanted: str
    fits: Callable[[Any], bool]


def is_finite(value: Any) -> bool:
    """Return whether a JSON value is a finite number within float range.

    >>> [is_finite(value) for value in (1, 2.5, float("inf"), float("nan"), 10**400, "1", True)]
    [True, True, False, False, False, False, False]
    """
    return type(value) in (int, float) and -LIMIT <= value <= LIMIT


def _is_measured(value: Any) -> bool:
    is_number = is_finite(value) or (isinstance(value, float) and math.isfinite(value))  # float64 losses grow this far
    return is_number or isinstance(value, bool) or value in NOT_FINITE


def _is_plain(value: Any) -> bool:
    return _is_measured(value) or (isinstance(value, str) and len(value) <= TEXT)


def _text(most: int) -> Kind:
    return Kind(f"a text of at most {most} characters", lambda value: isinstance(value, str) and len(value) <= most)


def _whole(most: int, least: int = 0) -> Kind:
    return Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def _list(kind: Kind, most: int) -> Kind:
    return Kind(
        f"a list of at most {most}, each {kind.wanted}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.fits, value)),
    )


def _labelled(kind: Kind, most: int) -> Kind:
    """Return the kind of an object with any labels, whose values are of `kind`."""
    return Kind(
        f"an object of at most {most} names, each of at most {LABEL} characters, with {kind.wanted}",
        lambda value: (
            isinstance(value, dict) and len(value) <= most and all(len(name) <= LABEL for name in value)
            and all(map(kind.fits, value.values()))
        ),
    )  # fmt: skip


def _fields(wanted: str, kinds: Mapping[str, Kind]) -> Kind:
    """Return the kind of an object whose known fields have their own kinds."""
    return Kind(
        wanted,
        lambda value: (
            isinstance(value, dict)
            and all(value.get(name) is None or kind.fits(value[name]) for name, kind in kinds.items())
        ),
    )  # fmt: skip


ANY = Kind("anything", lambda value: True)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
FINITE = Kind("a finite number", is_finite)
MEASURED = Kind(f"a number, or one of the texts {', '.join(NOT_FINITE)}", _is_measured)
PLAIN = Kind(f"a number, a text of at most {TEXT} characters, or null", lambda value: value is None or _is_plain(value))
STEP, COUNT, NODE = _whole(1 << 53), _whole(1 << 53), _whole(MOST_NODES - 1)
NAME, WORDS, WORD = _text(LABEL), _list(_text(1 << 20), 1 << 16), _text(TEXT)
PROCESS = _fields(
    "an object with pid, host, machine, boot and started",
    {"pid": _whole((1 << 31) - 1, 1)} | dict.fromkeys(("host", "machine", "boot", "started"), NAME),
)
SEEDS = Kind(
    f"a number or list of at most {MOST_SEEDS} seeds",
    lambda value: (
        (type(value) is int and 0 <= value <= MOST_SEEDS)
        or (isinstance(value, list | tuple) and len(value) <= MOST_SEEDS and all(type(seed) is int for seed in value))
    ),
)
AXIS = Kind("a text, or a list of texts", lambda value: isinstance(value, str) or _list(WORD, MOST_CELLS).fits(value))
AXES = _labelled(AXIS, MOST_LABELS)
ARGUMENTS = _fields("an object whose problem is a text and whose seeds are whole numbers", {
    "problem": NAME, "seeds": SEEDS, "strategy": WORD, "axes": AXES,
})  # fmt: skip

COLUMNS = dict.fromkeys(
    ("epoch", "train_loss", "val_loss", "val_accuracy", "payload_bytes", "tx_bytes", "rx_bytes", "consensus_distance",
     "lr", "wall_s", "time_s"),
    MEASURED,
)  # fmt: skip
RECORD: dict[str, Kind] = {"step": STEP, "node": NODE} | COLUMNS
EVENT: dict[str, Kind] = {"kind": NAME, "step": STEP, "at_s": FINITE}
_OF_A_RUN: dict[str, Kind] = {
    "description": OBJECT, "command": WORDS, "folder": WORD, "save_dir": WORD, "versions": OBJECT, "process": PROCESS,
    "started_s": FINITE,
}  # fmt: skip
_OF_SEVERAL: dict[str, Kind] = {
    "task": NAME, "description": WORD, "state": NAME, "process": PROCESS, "arguments": ARGUMENTS, "runs_wanted": COUNT,
    "versions": OBJECT, "summary": _list(_labelled(PLAIN, MOST_LABELS), MOST_CELLS), "finding": WORD,
    "target_loss": FINITE, "target": WORD, "undecided": _labelled(_list(WORD, MOST_CELLS), MOST_LABELS),
}  # fmt: skip
_SETTING = _fields("an object whose seeds are whole numbers", {"seeds": SEEDS})
_TIMING = _fields(
    "an object whose times and losses are finite", dict.fromkeys(("measured_step_s", "wanted_loss"), FINITE)
)
COMPARISON = _OF_SEVERAL | {
    "setting": _SETTING, "timing": _TIMING, "wanted_loss": FINITE, "all_arguments": OBJECT,
    "strategies": _labelled(ANY, MOST_LABELS), "titles": _labelled(WORD, MOST_LABELS),
}  # fmt: skip
_SHOWN = dict.fromkeys(("address", "device", "state"), WORD) | dict.fromkeys(
    ("restarts", "heard_s", "cores", "cpu_use", "memory_bytes", "memory_total_bytes", "run_memory_bytes", "rx_bps",
     "tx_bps"), FINITE,
)  # fmt: skip
_GPU = _fields("an object with numbers and a name", dict.fromkeys(("use", "memory_bytes", "memory_total_bytes"), FINITE)
               | {"name": NAME})  # fmt: skip
_RANK = _fields("an object of numbers", dict.fromkeys(("rank", "step", "restarts", "quiet_s"), FINITE))
_HOST = _fields("an object with a host's state", _SHOWN | {
    "ranks": _list(COUNT, 1 << 16), "gpus": _list(_GPU, 64), "processes": _list(_RANK, 1 << 16),
})  # fmt: skip
_SAID = _fields("what happened", {"at_s": FINITE, "kind": WORD, "host": WORD, "why": WORD})
_SHORT, _LONG = 1 << 20, 1 << 24  # bytes

# By file: its size limit in bytes, and its fields.
OBJECTS: dict[str, tuple[int, dict[str, Kind]]] = {
    "run.json": (_LONG, _OF_A_RUN),
    "status.json": (_SHORT, {
        "state": NAME, "step": STEP, "total_steps": STEP, "process": PROCESS, "started_s": FINITE,
        "heartbeat_s": FINITE, "trouble": WORD,
    }),
    "summary.json": (_SHORT, {"state": NAME, "step": STEP} | COLUMNS),
    "sweep.json": (_LONG, _OF_SEVERAL | {
        "axes": AXES, "given": OBJECT, "best": WORD, "measured_step_s": FINITE,
        "cells": _labelled(_labelled(WORD, MOST_LABELS), MOST_CELLS),
    }),
    "notes.json": (_SHORT, {"tags": LIST, "note": WORD}),
    "hosts.json": (_LONG, {
        "process": PROCESS, "written_s": FINITE, "hosts": _list(_HOST, 1 << 14), "events": _list(_SAID, 1 << 14),
    }),
    "outcome.json": (_SHORT, {"state": NAME, "error": _text(_SHORT), "wall_s": FINITE, "description": OBJECT}),
    "timeline.json": (_LONG, {"spans": LIST, "shares": OBJECT}),
}  # fmt: skip


def check_file(name: str, found: Mapping[str, Any]) -> None:
    """Check the fields of the file `name`.

    Raises:
        ArgumentError: a field has a wrong value.
    """
    kinds = COMPARISON if name == "run.json" and isinstance(found.get("strategies"), dict) else OBJECTS[name][1]
    _check(name, kinds, found)


def read_file(path: str | os.PathLike[str]) -> Row:
    """Return the JSON object in one of the files `OBJECTS`; {} if the file is missing or not a plain file.

    Raises:
        ArgumentError: the file cannot be read, or a field has a wrong value. The message names the field and its kind.
    """
    path = Path(path)
    most = OBJECTS[path.name][0]
    try:
        with opened_plain(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        if error.errno is None or isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        raise ArgumentError(f"{path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:  # a path with NUL
        raise ArgumentError(f"{path.name} cannot be read ({error})") from None
    if len(data) > most:
        raise ArgumentError(f"{path.name} has more than {most} bytes")
    try:
        found = parsed(data)
    except ValueError as error:
        raise ArgumentError(f"{path.name} is not complete JSON in UTF-8 ({error})") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"{path.name} must contain a JSON object, not {reprlib.repr(found)}")
    check_file(path.name, found)
    return found


def parsed(data: bytes) -> Any:
    """Return the value of a JSON text. The numbers NaN, Infinity and -Infinity become the texts in `NOT_FINITE`.

    Raise ValueError if the text is not complete JSON in UTF-8, is nested too deep, or has a lone surrogate (half a
    character).
    """
    try:
        found = _decoded(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} deep") from None
    if SURROGATE.search(data):
        _check_texts(found)
    if data.count(b"{") + data.count(b"[") <= MOST_DEPTH:
        return found
    level = [found]
    for _ in range(MOST_DEPTH):
        level = [x for part in level if type(part) in (dict, list) for x in _parts(part) if type(x) in (dict, list)]
        if not level:
            return found
    raise ValueError(f"nested more than {MOST_DEPTH} deep")


def row_of(line: bytes, name: str = "records.jsonl") -> Row | None:
    """Return the JSON object in a line of the file `name`, "records.jsonl" or "events.jsonl". NaN and infinities are
    texts.

    Return None if the line is incomplete, because its writer was killed.

    Raises:
        ArgumentError: a field has a wrong value.
    """
    try:
        row = parsed(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    if name == "events.jsonl":
        _check(name, EVENT, row)
    elif row.get("step") is None:
        raise ArgumentError("records.jsonl: a record has no step")
    elif not _is_of_numbers(row):
        _check("records.jsonl", RECORD, row, PLAIN)
    return row


def rows_in(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the objects in the lines of records.jsonl or events.jsonl (see `row_of`), without incomplete lines.

    Yield nothing if there is no such plain file.

    Raises:
        ArgumentError: a line has a field with a wrong value. The message names the line.
    """
    name = Path(path).name
    try:
        with opened_plain(path) as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                if not line.endswith(b"\n"):
                    check_length(line, name)
                    return  # the last line, incomplete
                try:
                    row = row_of(line, name)
                except ArgumentError as error:
                    raise ArgumentError(f"{error} (line {number})") from None
                if row is not None:
                    yield row
    except OSError:
        return


def check_length(line: bytes, name: str) -> None:
    """Raise ArgumentError for a line that is longer than any line that a run writes."""
    if len(line) > LINE_BYTES:
        raise ArgumentError(f"{name} has a line of more than {LINE_BYTES} bytes")


def _check(where: str, kinds: Mapping[str, Kind], found: Mapping[str, Any], other: Kind | None = None) -> None:
    for name in kinds if other is None else found:
        kind, value = kinds.get(name) or other, found.get(name)
        if value is not None and kind is not None and not kind.fits(value):
            raise ArgumentError(f"{where}: {name[:LABEL]}={reprlib.repr(value)}: expected {kind.wanted}")


def _is_of_numbers(row: Row) -> bool:
    """Return True for a record that has only numbers, as most do. If False, each field must be checked."""
    values = [value for value in row.values() if value is not None]
    if not set(map(type, values)) <= {int, float} or not (min(values) >= -LIMIT and max(values) <= LIMIT):
        return False
    return STEP.fits(row["step"]) and (row.get("node") is None or NODE.fits(row["node"]))


def _check_texts(found: Any) -> None:
    """Raise ValueError for a lone surrogate: no file can hold it, and no browser can receive it."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character in a text: {error}"[:100]) from None
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value
