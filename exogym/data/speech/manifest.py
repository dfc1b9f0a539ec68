"""What a folder of speech holds, as its manifest says: which clip says what, who speaks, and what it is for."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from exogym.errors import DataError, nearest

NAMES = ("manifest", "metadata", "train", "validated", "transcripts")
ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".ndjson")
AUDIO = ("audio", "path", "file", "file_name", "filename", "audio_filepath", "audio_path", "audio_file", "wav", "clip")
TEXT = ("text", "sentence", "transcription", "transcript", "normalized_text", "words", "label")
SPLIT, SPEAKER = ("split", "set", "subset"), ("speaker", "speaker_id", "client_id")
MOST_CLIPS, LONGEST_LINE = 1_000_000, 1_000_000  # a manifest with more was not made for this
VALIDATION = {"val", "valid", "validation", "dev", "test", "eval"}


@dataclass(frozen=True)
class Entry:
    """One clip: its file or its samples, what is said, who says it, and whether it is held out (None: not said)."""

    audio: Any
    text: str
    speaker: str = ""
    held_out: bool | None = None
    name: str = ""


def find_manifest(data: str | os.PathLike[str]) -> Path | None:
    """Return the manifest `data`, or that of the folder `data`; None where the folder has none.

    Raises:
        DataError: there is no such file or folder.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"data={os.fspath(data)!r} does not exist: give a folder with a manifest, or the manifest")
    for name in NAMES:
        for ending in ENDINGS:
            if (path / (name + ending)).is_file():
                return path / (name + ending)
    return None


def read_manifest(path: Path) -> list[Entry]:
    """Return what a manifest lists: a CSV with a header (commas, semicolons, tabs or bars), or a JSON object a line.

    A clip has its file, from the manifest's folder on, and its text; it may have a speaker, and a split: "train", or
    "validation", "test" and the like, which are held out. Beside train.csv a file validation.csv or test.csv, of the
    same ending, is read too. No file outside the folder is named.

    Raises:
        DataError: a line that cannot be read, or that names a file elsewhere; no clip at all.
    """
    entries = _entries(path, None if path.stem != "train" else False)
    if path.stem == "train":
        others = (path.with_stem(name) for name in ("validation", "valid", "val", "dev", "test"))
        found = next((other for other in others if other.is_file()), None)
        if found is None:
            entries = _entries(path, None)
        else:
            entries += _entries(found, True)
    return entries


def _entries(path: Path, held_out: bool | None) -> list[Entry]:
    found: list[Entry] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = _bounded(path, file)
            rows = (
                _json_rows(path, lines) if path.suffix.lower().startswith((".json", ".nd")) else _csv_rows(path, lines)
            )
            for number, row in rows:
                found.append(_entry(path, number, row, held_out))
                if len(found) > MOST_CLIPS:
                    raise DataError(f"{path} lists more than {MOST_CLIPS:,} clips: split it")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a manifest: {error}") from error
    if not found:
        raise DataError(f"{path} lists no clip: wanted a header, then a line for each clip with its file and text")
    return found


def _bounded(path: Path, file: Any) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE or "\0" in line:
            raise DataError(
                f"{path}, line {number}: no line of a manifest (over {LONGEST_LINE:,} characters, or binary)"
            )
        yield line


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    header = next(lines, "")
    mark = max(",;\t|", key=header.count)
    names = [name.strip().lower() for name in next(csv.reader([header], delimiter=mark), [])]
    reader = csv.reader(lines, delimiter=mark)
    for values in reader:
        if len(values) > len(names):
            raise DataError(
                f"{path}, line {reader.line_num + 1}: {len(values)} values for {len(names)} columns; put texts that "
                f"hold {mark!r} into quotes"
            )
        if values:
            yield reader.line_num + 1, dict(zip(names, values, strict=False))


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is no JSON object ({error}): wanted one a line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} holds a {type(row).__name__}: wanted a JSON object a line")
        yield number, {str(name).lower(): value for name, value in row.items()}


def _entry(path: Path, number: int, row: Mapping[str, Any], held_out: bool | None) -> Entry:
    where = f"{path}, line {number}"
    audio, text = (column(row, names, where) for names in (AUDIO, TEXT))
    split = str(next((row[name] for name in SPLIT if row.get(name)), "")).strip().lower()
    speaker = str(next((row[name] for name in SPEAKER if row.get(name)), ""))
    if split:
        held_out = split in VALIDATION
    return Entry(_inside(path, str(audio), where), str(text or ""), speaker, held_out, str(audio))


def column(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    """Return the first of the columns `names` that a row has.

    Raises:
        DataError: it has none.
    """
    for name in names:
        if name in row:
            return row[name]
    raise DataError(f"{where} has {', '.join(map(str, row))}, but no column {names[0]!r}: {nearest(names[0], row)}")


def _inside(path: Path, name: str, where: str) -> Path:
    """Return the file of a clip; what links in the folder lead to is the user's."""
    given = PurePosixPath(name)
    foreign = PureWindowsPath(name)
    own = given.is_relative_to(PurePosixPath(path.parent.absolute().as_posix())) and given.is_absolute()
    if ".." in (*given.parts, *foreign.parts) or ((given.is_absolute() or foreign.drive) and not own):
        raise DataError(f"{where}: {name!r} is outside the folder of the manifest; name files in it")
    if not name or "\0" in name:
        raise DataError(f"{where} names no file")
    return path.parent / name
