"""Checkpoints: everything a run is, written whole or not at all.

A checkpoint is a folder `step_<number>` with

    rows-<first>-<last>.safetensors   per node: parameters, buffers, optimizer and strategy state, its step
    shared.safetensors                what all nodes share: outer parameters, byte counts, history
    run.json                          the description of the run, counters, and SHA-256 of the files and of itself

Rows are stored by global id, each process writing its own, so another layout can read the ones it needs. The folder
is written under another name and renamed, so one that bears its name is whole; one is never replaced: a second of
the same step is `step_<number>_<count>`. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from exogym.communicator import Wire
from exogym.errors import ArgumentError, CheckpointError

FORMAT = 1


@dataclass
class Snapshot:
    """One checkpoint in memory: rows by global id, shared tensors, and JSON-able meta with "step"."""

    rows: dict[int, dict[str, Tensor]]
    shared: dict[str, Tensor]
    meta: dict[str, Any]


def name_of(path: Path) -> tuple[int, int] | None:
    """Return (step, count) of a checkpoint folder's name, or None for another name."""
    parts = path.name.split("_")
    if parts[0] != "step" or len(parts) not in (2, 3) or not all(part.isdigit() for part in parts[1:]):
        return None
    return int(parts[1]), int(parts[2]) if len(parts) == 3 else 0


def check_folder(path: str | Path) -> list[Path]:
    """Make the folder and write to it once; return the folders that were made, the deepest first.

    Raises:
        ArgumentError: it cannot be written.
    """
    folder = Path(path)
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".writable-{os.getpid()}"
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        remove_folders(made)
        raise ArgumentError(
            f"save_dir={str(path)!r} cannot be written: {error.strerror or error}; choose another folder"
        ) from error
    return made


def remove_folders(made: list[Path]) -> None:
    """Remove the folders that `check_folder` made, unless there is something in them."""
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints of `folder`, oldest first."""
    found = [(name_of(path), path) for path in Path(folder).glob("step_*") if path.is_dir()]
    return [path for _, path in sorted((name, path) for name, path in found if name is not None)]


def save(folder: str | Path, snapshot: Snapshot, keep: int, wire: Wire | None = None) -> Path:
    """Write `snapshot` atomically and keep the last `keep` up to it (later ones are torn). Returns its folder.

    With several processes each one calls this with its own rows; the main one writes what is shared.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints stand.
    """
    folder, wire = Path(folder), wire or Wire(sorted(snapshot.rows))
    step = snapshot.meta["step"]
    name = wire.tell(_free_name(folder, step) if wire.is_main else None)
    temporary = folder / f".{name}.{wire.tell(os.getpid())}.tmp"
    final = folder / name
    digest = b""
    try:
        with _together(wire, folder, step):
            if wire.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with _together(wire, folder, step):
            ids = sorted(snapshot.rows)
            rows = {f"{rank}/{key}": value for rank in ids for key, value in snapshot.rows[rank].items()}
            digest = _write(rows, temporary / _rows_file(ids))
        sums = _sums(wire, digest)
        with _together(wire, folder, step):
            if wire.is_main:
                sums["shared.safetensors"] = _write(snapshot.shared, temporary / "shared.safetensors").hex()
                meta = {"format": FORMAT, "sha256": sums} | snapshot.meta
                (temporary / "run.json").write_text(json.dumps(meta | {"sha256_of_this": _sum_of(meta)}, indent=1))
                _flush_and_sum(temporary / "run.json")
                os.rename(temporary, final)
                _flush_folder(folder)
                older = [path for path in list_checkpoints(folder) if _order(path) <= _order(final)]
                for old in older[: -max(1, keep)]:
                    _remove(old)
    finally:
        if wire.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


@contextlib.contextmanager
def _together(wire: Wire, folder: Path, step: int) -> Iterator[None]:
    """Do a part of writing a checkpoint; where one process cannot, none goes on."""
    cause: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = error
    if wire.agree(cause is not None):
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: "
            f"{cause or 'another process failed to'}; earlier ones stand"
        ) from cause


def _free_name(folder: Path, step: int) -> str:
    taken = [count for path in folder.glob("step_*") for at, count in [name_of(path) or (-1, 0)] if at == step]
    return f"step_{step:010d}" + (f"_{max(taken) + 1}" if taken else "")


def _order(path: Path) -> tuple[int, int]:
    return name_of(path) or (-1, 0)


def _rows_file(ids: Sequence[int]) -> str:
    return f"rows-{ids[0]}-{ids[-1]}.safetensors"


def _write(tensors: dict[str, Tensor], file: Path) -> bytes:
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, file)
    return bytes.fromhex(_flush_and_sum(file))


def _sums(wire: Wire, digest: bytes) -> dict[str, str]:
    """Return file name to SHA-256 of the rows that each process wrote."""
    mine = torch.tensor(list(digest), dtype=torch.uint8).expand(len(wire.ranks), -1)
    digests = wire.rows(mine, [ids[0] for ids in wire.placement])
    return {_rows_file(ids): bytes(d.tolist()).hex() for ids, d in zip(wire.placement, digests, strict=True)}


def load(path: str | Path, ids: Collection[int] | None = None) -> Snapshot:
    """Read the checkpoint folder `path`: all rows, or those of `ids` (files without any of them are not opened).

    Raises:
        CheckpointError: a file is missing, torn or altered.
    """
    path = Path(path)
    try:
        meta = json.loads((path / "run.json").read_text())
        if meta.pop("sha256_of_this") != _sum_of(meta):
            raise CheckpointError(f"{path / 'run.json'} is damaged: its SHA-256 is not the one that was written")
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {meta['format']}, this version reads {FORMAT}")
        files = [file for file in meta["sha256"] if _holds(file, ids)]
        for file in files:
            expected = meta["sha256"][file]
            if hashlib.sha256((path / file).read_bytes()).hexdigest() != expected:
                raise CheckpointError(f"{path / file} is damaged: its SHA-256 is not the one that was written")
        shared = load_file(path / "shared.safetensors")
        rows: dict[int, dict[str, Tensor]] = {}
        for file in files:
            if file.startswith("rows-"):
                for key, value in load_file(path / file).items():
                    rank, name = key.split("/", 1)
                    if ids is None or int(rank) in ids:
                        rows.setdefault(int(rank), {})[name] = value
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error!r}") from error
    return Snapshot(rows, shared, meta)


def _holds(file: str, ids: Collection[int] | None) -> bool:
    if ids is None or not file.startswith("rows-"):
        return True
    first, last = (int(part) for part in file.removesuffix(".safetensors").split("-")[1:])
    return any(first <= i <= last for i in ids)


def load_newest(folder: str | Path, wire: Wire | None = None) -> tuple[Snapshot | None, list[str]]:
    """Return the newest good checkpoint of `folder` (None without any) and what is wrong with newer ones.

    With several processes each gets its own rows of a checkpoint that all of them can read.
    """
    complaints: list[str] = []
    wire = wire or Wire([])
    for path in wire.tell([str(path) for path in reversed(list_checkpoints(folder))] if wire.is_main else None):
        found, complaint = None, "another process cannot read it"
        try:
            found = load(path, wire.ranks if wire.is_shared else None)
        except CheckpointError as error:
            complaint = str(error)
        if not wire.agree(found is None):
            return found, complaints
        complaints.append(complaint)
    if complaints:
        raise CheckpointError(f"no checkpoint of {folder} can be read: {'; '.join(complaints)}")
    return None, []


def differences(saved: dict[str, Any], current: dict[str, Any], path: str = "") -> list[str]:
    """Return a line for each value in which two run descriptions differ."""
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        a, b = saved.get(key), current.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{path}{key}.")
        elif a != b:
            lines.append(f"{path}{key}: saved {a!r}, now {b!r}")
    return lines


def _remove(path: Path) -> None:
    """Remove a checkpoint, under another name, so that one that bears its name is whole also if this is cut off."""
    if path.exists():
        gone = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
        os.rename(path, gone)
        shutil.rmtree(gone)


def remove_leftovers(folder: str | Path) -> None:
    """Remove what a run that was killed while it wrote or removed a checkpoint has left in `folder`."""
    for path in Path(folder).glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _sum_of(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _flush_and_sum(file: Path) -> str:
    with open(file, "rb+") as f:
        os.fsync(f.fileno())
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
