"""Checkpoints: everything a run is, written whole or not at all.

A checkpoint is a folder `step_<number>` with

    rows-<first>-<last>.safetensors   per node: parameters, buffers, optimizer and strategy state, its step
    shared.safetensors                what all nodes share: outer parameters, byte counts, history
    run.json                          the description of the run, counters, and SHA-256 of the files and of itself

Rows are stored by global id, so another layout can read the ones it needs. The folder is written under
another name and renamed, so one that bears its name is whole; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from exogym.errors import ArgumentError, CheckpointError

FORMAT = 1


@dataclass
class Snapshot:
    """One checkpoint in memory: rows by global id, shared tensors, and JSON-able meta with "step"."""

    rows: dict[int, dict[str, Tensor]]
    shared: dict[str, Tensor]
    meta: dict[str, Any]


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
    return sorted(p for p in Path(folder).glob("step_*") if p.is_dir() and p.name[5:].isdigit())


def save(folder: str | Path, snapshot: Snapshot, keep: int) -> Path:
    """Write `snapshot` atomically and keep the last `keep` up to it (later ones are torn). Returns its folder.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints stand.
    """
    folder = Path(folder)
    name = f"step_{snapshot.meta['step']:010d}"
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        ids = sorted(snapshot.rows)
        rows = {f"{rank}/{key}": value for rank in ids for key, value in snapshot.rows[rank].items()}
        files = {f"rows-{ids[0]}-{ids[-1]}.safetensors": rows, "shared.safetensors": snapshot.shared}
        sums = {}
        for file, tensors in files.items():
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, temporary / file)
            sums[file] = _flush_and_sum(temporary / file)
        meta = {"format": FORMAT, "sha256": sums} | snapshot.meta
        (temporary / "run.json").write_text(json.dumps(meta | {"sha256_of_this": _sum_of(meta)}, indent=1))
        _flush_and_sum(temporary / "run.json")
        final = folder / name
        _remove(final)
        os.rename(temporary, final)
        _flush_folder(folder)
        older = [path for path in list_checkpoints(folder) if path.name <= name]
        for old in older[: -max(1, keep)]:
            _remove(old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.meta['step']} could not be written to {folder}: {error}; earlier ones "
            "stand"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load(path: str | Path) -> Snapshot:
    """Read the checkpoint folder `path`.

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
        for file, expected in meta["sha256"].items():
            if hashlib.sha256((path / file).read_bytes()).hexdigest() != expected:
                raise CheckpointError(f"{path / file} is damaged: its SHA-256 is not the one that was written")
        shared = load_file(path / "shared.safetensors")
        rows: dict[int, dict[str, Tensor]] = {}
        for file in meta["sha256"]:
            if file.startswith("rows-"):
                for key, value in load_file(path / file).items():
                    rank, name = key.split("/", 1)
                    rows.setdefault(int(rank), {})[name] = value
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error!r}") from error
    return Snapshot(rows, shared, meta)


def load_newest(folder: str | Path) -> tuple[Snapshot | None, list[str]]:
    """Return the newest good checkpoint of `folder` (None without any) and what is wrong with newer ones."""
    complaints: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load(path), complaints
        except CheckpointError as error:
            complaints.append(str(error))
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
