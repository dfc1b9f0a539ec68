"""Read one checkpoint's folder. ExoGym checks the folder's contents before it trusts them.

All files must be plain files with known names; this module never opens a link, a pipe or a device. Each file's checksum
must equal the one in run.json, and run.json contains its own checksum. Every error is a CheckpointError that names the
file. The module `snapshots` checks afterward whether the contents fit the run.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exogym.core.base.files import opened_plain
from exogym.core.saving.parts import Parts, joined_pieces
from exogym.errors import CheckpointError

# 1: evaluations in run.json; 2: state by driver and number, not by name; 3: no counts of unfinished losses; 4: the
# history in separate files
FORMAT = 5
SHARED = "shared.safetensors"
PART = r"(\.part-(0|[1-9]\d{0,5}))?\.safetensors"
NAME = re.compile(rf"shared{PART}|rows-(0|[1-9]\d{{0,17}})-(0|[1-9]\d{{0,17}}){PART}")
DESCRIPTION_BYTES = 1 << 30  # largest run.json
WRONG = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError),
    *(SafetensorError, RuntimeError),
)  # errors that wrong files can raise


@dataclass
class Snapshot:
    """A checkpoint in memory: rows by node id, shared tensors, and `meta`, a JSON object with the key "step".

    If a node has several processes, `parts` says which slices of the rows' tensors and of the shared tensors this
    process has. The history is stored in `shared` under the names `history.*`, and in `meta["history"]`. `is_copy`
    says whether the tensors are copies that nobody else changes.
    """

    rows: dict[int, dict[str, Tensor]]
    shared: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path | None = None
    parts: Parts | None = None
    is_copy: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for tensors in (self.shared, *self.rows.values()) for x in tensors.values())

    def copied(self) -> Snapshot:
        """Return a copy in CPU memory, which does not change when the run continues. `self` loses its tensors."""
        rows = {rank: {name: plain(tensors.pop(name)) for name in list(tensors)} for rank, tensors in self.rows.items()}
        shared = {name: plain(self.shared.pop(name)) for name in list(self.shared)}
        return replace(self, rows=rows, shared=shared, meta=copy.deepcopy(self.meta), is_copy=True)

    def file_of(self, rank: int | None) -> str:
        """Return the path of the file with node `rank`'s row, or with the shared state (None), for error messages."""
        if rank is None:
            return f"{self.path}/{SHARED}"
        for name in self.meta.get("sha256", ()):
            if name.startswith("rows-") and ".part-" not in name and rank in span_of(name):
                return f"{self.path}/{name}"
        return str(self.path)


class RowsElsewhere(CheckpointError):
    """A process's checkpoint folder doesn't have the files with rows that the process needs."""

    def __init__(self, path: Path, files: list[str]):
        super().__init__(f"{path} lacks {', '.join(files)}, with rows of this process's nodes")
        self.files = files


def name_of(path: Path) -> tuple[int, int] | None:
    """Return (step, count) from a checkpoint folder's name, or None if no checkpoint has such a name."""
    found = re.fullmatch(r"step_(\d{1,18})(?:_(\d{1,18}))?", path.name, re.ASCII)
    return (int(found[1]), int(found[2] or 0)) if found else None


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    found = [(name_of(path), path) for path in Path(folder).glob("step_*") if path.is_dir()]
    return [path for _, path in sorted((name, path) for name, path in found if name is not None)]


def rows_file(ids: Collection[int]) -> str:
    return f"rows-{min(ids)}-{max(ids)}.safetensors"


def span_of(file: str) -> range:
    """Return the nodes whose rows a file holds, from the file's name.

    >>> span_of("rows-2-3.safetensors")
    range(2, 4)
    """
    first, last = file.partition(".")[0].split("-")[1:]
    return range(int(first), int(last) + 1)


def sum_of(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def plain(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().clone()


def sum_of_tensor(x: Tensor) -> str:
    data = plain(x).view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode() + data).hexdigest()


def load(path: str | Path, ids: Collection[int] | None = None, others: range = range(0)) -> Snapshot:
    """Read the checkpoint folder `path`: only the rows of the nodes in `ids` and in `others`, or all rows if `ids` is
    None.

    Raises:
        CheckpointError: a file is missing, incomplete, changed, not a plain file, or no file of a checkpoint.
    """
    path = Path(path)

    def wants(rank: int) -> bool:
        return ids is None or rank in ids or rank in others

    try:
        meta = _description(path / "run.json")
        named = list(meta["sha256"])
        files = [file for file in named if not file.startswith("rows-") or _holds(file, ids, others)]
        if lacking := [file for file in files if file.startswith("rows-") and not os.path.lexists(path / file)]:
            raise RowsElsewhere(path, lacking)
        for file in files:
            if file_sum(path / file) != meta["sha256"][file]:
                raise CheckpointError(f"{path / file} is damaged: its SHA-256 differs from run.json's")
        shared = _tensors(path / SHARED)
        rows: dict[int, dict[str, Tensor]] = {}
        for file in files:
            if file.startswith("rows-") and ".part-" not in file:
                rows |= _rows(path / file, wants)
        in_parts = [path / file for file in files if ".part-" in file]
        for (rank, name), x in joined_pieces(in_parts, wants).items():
            held = shared if rank is None else rows.setdefault(rank, {})
            if name in held:
                raise CheckpointError(f"{path}: {name!r} is saved both whole and in pieces")
            held[name] = x
    except CheckpointError:
        raise
    except WRONG as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error!r}") from error
    return Snapshot(rows, shared, meta, path)


def _description(file: Path) -> dict[str, Any]:
    """Return a run.json's contents, after checking that it is as it was written."""
    with opened_plain(file) as opened:
        text = opened.read(DESCRIPTION_BYTES + 1)
    if len(text) > DESCRIPTION_BYTES:
        raise CheckpointError(f"{file} has more than {DESCRIPTION_BYTES} bytes, so ExoGym did not write it")
    try:
        meta = json.loads(text)
        right = isinstance(meta, dict) and meta.pop("sha256_of_this") == sum_of(meta)
    except WRONG as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
    if not right:
        raise CheckpointError(f"{file} is damaged: it does not match its SHA-256")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{file.parent} has format {meta.get('format')!r}, and this version reads format {FORMAT}: resume with the "
            "version that wrote it, or start anew in another folder"
        )
    _check_names(file, meta.get("sha256"))
    if type(meta.get("step")) is not int or not 0 <= meta["step"] < 1 << 62:
        raise CheckpointError(f"{file}: step={meta.get('step')!r} is not the step of a checkpoint")
    return meta


def _check_names(file: Path, sums: Any) -> None:
    """Raise CheckpointError unless `sums` names a checkpoint's files, with each node's rows in exactly one file."""
    if not isinstance(sums, dict) or not all(isinstance(x, str) for x in sums.values()):
        raise CheckpointError(f"{file} lists no files with checksums")
    for name in sums:
        if not NAME.fullmatch(name):
            raise CheckpointError(f"{file} names {name!r}, which is not a checkpoint's file name")
    if SHARED not in sums:
        raise CheckpointError(f"{file} does not name {SHARED}")
    spans = sorted(
        (name.partition(".")[2], span.start, span.stop, name)
        for name in sums if name.startswith("rows-") for span in [span_of(name)]
    )  # fmt: skip
    for (kind, _, end, one), (alike, start, _, other) in itertools.pairwise(spans):
        if kind == alike and start < end:
            raise CheckpointError(f"{file}: the rows of node {start} are in both {one} and {other}")
    if empty := [name for _, start, stop, name in spans if start >= stop]:
        raise CheckpointError(f"{file} lists {empty[0]}, which contains no rows")


def file_sum(file: Path) -> str:
    """Return the SHA-256 of a plain file, or raise OSError if the file is not a plain file, or cannot be read."""
    with opened_plain(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except WRONG as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error!r}") from error


def _rows(file: Path, wants: Callable[[int], bool]) -> dict[int, dict[str, Tensor]]:
    """Return a file's rows of the nodes that `wants` accepts. The file must hold exactly the nodes in its name."""
    span, seen = span_of(file.name), set()
    found: dict[int, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - not a dict
            number, slash, name = key.partition("/")
            if not slash or not (number.isascii() and number.isdigit()) or str(int(number)) != number:
                raise CheckpointError(f"{file} contains {key!r}, which belongs to no node")
            rank = int(number)
            if rank not in span:
                raise CheckpointError(f"{file} contains {key!r}, of a node that is not in {file.name}")
            seen.add(rank)
            if wants(rank):
                found.setdefault(rank, {})[name] = opened.get_tensor(key)
    if len(seen) < len(span):
        raise CheckpointError(f"{file} lacks the row of node {next(rank for rank in span if rank not in seen)}")
    return found


def _holds(file: str, ids: Collection[int] | None, others: range) -> bool:
    span = span_of(file)
    return ids is None or any(i in span for i in ids) or any(i in others for i in span[-others.step :])
