"""Read a speech folder's manifest: each clip's file, text, speaker, and whether it is for training or validation."""

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
AUDIO = (
    *("audio", "path", "file", "file_name", "filename", "file_path", "filepath", "audio_filepath", "audio_path"),
    *("audio_file", "audio_filename", "wav", "wav_path", "wav_file", "clip", "recording", "sound"),
)
TEXT = (
    *("text", "sentence", "transcription", "transcript", "normalized_text", "words", "word", "utterance", "label"),
    *("digit", "number"),
)
SPLIT = ("split", "set", "subset")
SPEAKER = ("speaker", "speaker_id", "speaker_name", "client_id", "spk_id", "person", "reader", "voice")
PLACES = ("clips", "audio", "wavs", "recordings")  # folders beside a manifest that may hold its files
HUGGING_FACE = {"dataset_dict.json", "dataset_info.json", "state.json"}  # files that save_to_disk writes
MOST_CLIPS, LONGEST_LINE = 1_000_000, 1_000_000  # a file with more is not a speech manifest
TRAIN = {"train", "training"}
VALIDATION = {"val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation", "held_out"}


@dataclass(frozen=True)
class ClipEntry:
    """A clip: its file or samples, its text, its speaker, and whether it is for validation (None if unknown)."""

    audio: Any
    text: str
    speaker: str = ""
    held_out: bool | None = None
    name: str = ""


def find_manifest(data: str | os.PathLike[str]) -> Path | None:
    """Return the path of the manifest: `data` itself, or the manifest in the folder `data`.

    Return None if the folder has no manifest. A folder's manifest has a usual name, or is the only file
    with a usual ending.

    Raises:
        DataError: the file or folder does not exist.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(
            f"data={os.fspath(data)!r} does not exist: pass a folder with a manifest, or the manifest itself"
        )
    for name in NAMES:
        for ending in ENDINGS:
            if (path / (name + ending)).is_file():
                return path / (name + ending)
    others = [other for other in path.iterdir() if other.suffix in ENDINGS and other.is_file()]
    odd = [other for other in others if other.name not in HUGGING_FACE]
    return odd[0] if len(odd) == len(others) == 1 else None


def read_manifest(path: Path) -> list[ClipEntry]:
    """Return a manifest's clips.

    A manifest is a CSV file with a header (commas, semicolons, tabs or bars), or a file of JSON lines.

    A clip has a file, relative to the manifest's folder, and a text. It may have a speaker and a split: "train", or for
    validation clips "validation", "test" or a similar word. If the manifest is named train (such as train.csv), a file
    validation, valid, val, dev or test beside it is read, too. This file must have the same ending. If there are
    several, the first in this order is read. Clips must be inside the folder.

    Raises:
        DataError: a line cannot be read or names a file outside the folder, or the manifest has no clips.
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


def _entries(path: Path, held_out: bool | None) -> list[ClipEntry]:
    found: list[ClipEntry] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = _bounded(path, file)
            rows = (
                _json_rows(path, lines) if path.suffix.lower().startswith((".json", ".nd")) else _csv_rows(path, lines)
            )
            for number, row in rows:
                found.append(_entry(path, number, row, held_out))
                if len(found) > MOST_CLIPS:
                    raise DataError(f"{path} lists more than {MOST_CLIPS:,} clips: split it into several")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a manifest: {error}") from error
    if not found:
        raise DataError(f"{path} lists no clips: write a header, and a line with the file and the text of each clip")
    return found


def _bounded(path: Path, file: Any) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE or "\0" in line:
            raise DataError(
                f"{path}, line {number}: not a line of a manifest (over {LONGEST_LINE:,} characters, or binary)"
            )
        yield line


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    header = next(lines, "")
    mark = max(",;\t|", key=header.count)
    names = [_plain(name) for name in next(csv.reader([header], delimiter=mark), [])]
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
            raise DataError(
                f"{path}, line {number} is not a JSON object ({error}): write one object per line"
            ) from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} contains a {type(row).__name__}: write one JSON object per line")
        yield number, {_plain(str(name)): value for name, value in row.items()}


def _plain(column: str) -> str:
    """Return "file_name" for "File Name", "file-name" and similar names."""
    return "_".join(column.lower().replace("-", " ").split())


def _entry(path: Path, number: int, row: Mapping[str, Any], held_out: bool | None) -> ClipEntry:
    where = f"{path}, line {number}"
    audio, text = (column(row, names, where) for names in (AUDIO, TEXT))
    split = _plain(str(next((row[name] for name in SPLIT if row.get(name)), "")))
    speaker = str(next((row[name] for name in SPEAKER if row.get(name)), ""))
    if split:
        if split not in TRAIN | VALIDATION:
            raise DataError(f"{where}: the split {split!r} is unknown: use train, validation or test")
        held_out = split in VALIDATION
    return ClipEntry(_inside(path, str(audio), where), "" if text is None else str(text), speaker, held_out, str(audio))


def column(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    """Return the value of the first column in `names` that a row has.

    Raises:
        DataError: the row has none of these columns.
    """
    for name in names:
        if name in row:
            return row[name]
    has, others = (", ".join(words) for words in (map(repr, map(str, row)), names[1:]))
    raise DataError(f"{where} has {has}, but no column {names[0]!r}: {nearest(names[0], row)}; also possible: {others}")


def _inside(path: Path, name: str, where: str) -> Path:
    """Return a clip's file. Links inside the folder may lead anywhere.

    A path may contain a folder with the name of the manifest's folder, because people copy folders. Then only the
    part after that folder counts.
    """
    given, foreign, folder = PurePosixPath(name), PureWindowsPath(name), path.parent
    whole = given.is_absolute() or bool(foreign.drive)
    own = folder.absolute().name in given.parts[:-1]
    if ".." in (*given.parts, *foreign.parts) or (whole and not own):
        raise DataError(f"{where}: {name!r} is outside the manifest's folder; name files inside it")
    if not name or "\0" in name:
        raise DataError(f"{where} names no file")
    places = [] if whole else [folder / name, *(folder / place / name for place in PLACES)]
    if own:
        behind = given.parts[::-1].index(folder.absolute().name)
        places.append(folder.joinpath(*given.parts[-behind:]))
    return next((place for place in places if os.path.isfile(place)), places[0])
