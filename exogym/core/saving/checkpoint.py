"""Checkpoints: a run's whole state, written atomically.

A checkpoint is a folder `step_<number>` with

    rows-<first>-<last>.safetensors   for each node: parameters, buffers, optimizer and strategy state, step
    shared.safetensors                shared state: outer parameters, byte counts, the history
    run.json                          the run's description, counters, and SHA-256 of all files, run.json included

Each process writes its own rows by node id, so a run with other processes can read just the rows that it needs. The
folder is written under a temporary name and then renamed, so a folder with the final name is complete. A run never
replaces a checkpoint: the second checkpoint of a step is `step_<number>_<count>`. ExoGym never unpickles anything.

Hosts may share one folder, or each host has its own (see `keepers`), with its processes' rows, the shared state, and a
run.json that names the files of all hosts. Together, the hosts' folders of one step have the same contents as a shared
folder. A host renames its folder only after all hosts have written theirs, and removes older checkpoints only after all
have renamed. If a run is killed between two renames, the next run completes the renaming.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from exogym.core.base.locks import LOCK, is_old
from exogym.core.base.retired import is_default, is_same
from exogym.core.communicator import Wire, barrier, gather, ship, tell
from exogym.core.progress import warn
from exogym.core.saving.checkpoint_files import (
    FORMAT,
    SHARED,
    RowsElsewhere,
    Snapshot,
    list_checkpoints,
    load,
    name_of,
    plain,
    rows_file,
    sum_of,
    sum_of_tensor,
)
from exogym.core.saving.keepers import MARK, Keepers, one_keeper
from exogym.core.saving.parts import as_file, part_file
from exogym.errors import CheckpointError

_writings = itertools.count()


def save(
    folder: str | Path, snapshot: Snapshot, keep: int, wire: Wire | None = None, keepers: Keepers | None = None
) -> Path:
    """Write `snapshot` atomically as a checkpoint, return its folder, and keep only the newest `keep` checkpoints.

    Checkpoints of later steps are not counted, because the run could not resume from them. Each process calls this
    function with its own rows, and each folder's keeper writes the main process's shared state there. Raise
    CheckpointError if a disk is full, or the folder cannot be written; earlier checkpoints remain.
    """
    folder, wire = Path(folder), wire or Wire(sorted(snapshot.rows))
    keepers = keepers or one_keeper(folder, wire)
    step = snapshot.meta["step"]
    taken = max(gather(wire, _last_count(folder, step) if keepers.is_keeper else -1))
    name = f"step_{step:010d}" + (f"_{taken + 1}" if taken >= 0 else "")
    writing = f"{os.getpid()}-{next(_writings)}"  # a thread of an earlier run in this process may still write
    temporary = folder / f".{name}.{tell(wire, writing)}.tmp"
    final = folder / name
    own: dict[str, str] = {}
    try:
        with _together(wire, folder, step):
            if keepers.is_keeper:
                keepers.check()
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        if not keepers.are_one:
            snapshot = _as_the_main_one(snapshot, wire, keepers)
        with _together(wire, folder, step):
            for file, (tensors, told) in ({} if wire.is_copy else _files(snapshot)).items():
                own[file] = _write(tensors, temporary / file, told, snapshot.is_copy)
        sums = {file: digest for told in gather(wire, own) for file, digest in told.items()}
        with _together(wire, folder, step):
            if keepers.is_keeper:
                sums[SHARED] = _write(snapshot.shared, temporary / SHARED, None, snapshot.is_copy)
                meta = {"format": FORMAT, "sha256": sums} | snapshot.meta
                (temporary / "run.json").write_text(json.dumps(meta | {"sha256_of_this": sum_of(meta)}, indent=1))
                _flush_and_sum(temporary / "run.json")
                _flush_folder(temporary)
        with _together(wire, folder, step):
            if keepers.is_keeper:
                keepers.check()
                os.rename(temporary, final)
                _flush_folder(folder)
    except BaseException as error:
        # A host that lost the others cannot know whether one has renamed: the next start finds out.
        unknown = not keepers.are_one and not isinstance(error, CheckpointError) and (temporary / "run.json").exists()
        if keepers.is_keeper and not unknown:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    _remove_older(folder, name, keep, wire, keepers)
    return final


def _as_the_main_one(snapshot: Snapshot, wire: Wire, keepers: Keepers) -> Snapshot:
    """Return `snapshot` with the main process's meta and shared tensors. Equal tensors are not sent.

    Only the main process has its callbacks' records, and each process has its own wall time.
    """
    meta = tell(wire, snapshot.meta)
    sums = {name: sum_of_tensor(x) for name, x in snapshot.shared.items()}
    wanted = tell(wire, sums)
    unlike = [name for name in wanted if keepers.is_keeper and sums.get(name) != wanted[name]]
    sent = sorted({name for names in gather(wire, unlike) for name in names})
    here = snapshot.shared if wire.is_main else {}
    theirs = ship(wire, {name: plain(here[name]) for name in sent if name in here}, wire.placement[0][0])
    shared = {name: theirs[name] if name in theirs else snapshot.shared[name] for name in wanted if keepers.is_keeper}
    return replace(snapshot, shared=shared, meta=meta)


@contextlib.contextmanager
def _together(wire: Wire, folder: Path, step: int) -> Iterator[None]:
    """Do a part of writing a checkpoint. If one process fails, all stop."""
    cause: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = error
    if wire.agree(cause is not None):
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder} "
            f"({cause or 'another process failed'}). Earlier checkpoints remain"
        ) from cause


def _remove_older(folder: Path, name: str, keep: int, wire: Wire, keepers: Keepers) -> None:
    """Remove all but the last `keep` checkpoints up to `name`. Warn if one cannot be removed."""
    common = set.intersection(*_held(folder, wire, keepers).values())
    kept = sorted(order for order in map(_order, common) if order <= _order(name))[-max(1, keep) :]
    left: list[str] = []
    for old in list_checkpoints(folder) if keepers.is_keeper else []:
        try:
            if _order(old.name) < kept[0]:
                _remove(old)
        except OSError as error:
            left.append(f"{old} could not be removed ({error}). It only takes up space: remove it yourself")
    barrier(wire)
    for text in left:
        warn(text)


def _last_count(folder: Path, step: int) -> int:
    """Return the largest count among the checkpoints of `step`; -1 if there are none."""
    return max((count for path in folder.glob("step_*") for at, count in [_order(path.name)] if at == step), default=-1)


def _order(name: str) -> tuple[int, int]:
    return name_of(Path(name)) or (-1, 0)


def _files(snapshot: Snapshot) -> dict[str, tuple[dict[str, Tensor], dict[str, str] | None]]:
    """Return tensors and metadata, by name, of the files of rows and pieces that this process writes."""
    ids, parts = sorted(snapshot.rows), snapshot.parts
    rows = {f"{rank}/{key}": value for rank in ids for key, value in snapshot.rows[rank].items()}
    if parts is None:
        return {rows_file(ids): (rows, None)}
    cuts = {f"{rank}/{key}": cut for rank in ids for key, cut in parts.rows[rank].items()}
    found: dict[str, tuple[dict[str, Tensor], dict[str, str] | None]] = {}
    found[part_file(rows_file(ids), parts.part)] = as_file({name: (rows[name], cut) for name, cut in cuts.items()})
    if parts.is_first:
        pieces = {name: (snapshot.shared.pop(name), cut) for name, cut in parts.shared.items()}
        found[part_file(SHARED, parts.part)] = as_file(pieces)
    if parts.part == 0:
        found[rows_file(ids)] = {name: x for name, x in rows.items() if name not in cuts}, None
    return found


def _write(tensors: dict[str, Tensor], file: Path, told: dict[str, str] | None, is_copy: bool) -> str:
    save_file(tensors if is_copy else {k: plain(v) for k, v in tensors.items()}, file, told)
    return _flush_and_sum(file)


def load_newest(
    folder: str | Path, wire: Wire | None = None, keepers: Keepers | None = None,
    refused: Mapping[str, str] | None = None,
) -> tuple[Snapshot | None, list[str]]:  # fmt: skip
    """Return the newest good checkpoint in `folder`, and the errors of newer checkpoints.

    Return None if `folder` has no checkpoint. `refused` holds the names of checkpoints to skip, with their errors. With
    several processes, each process gets its own rows, from a checkpoint that all processes can read in their folders.
    Raise CheckpointError if the folder has checkpoints, but none can be read. If rows are on other hosts, the message
    says what to do.
    """
    folder, wire = Path(folder), wire or Wire([])
    keepers = keepers or one_keeper(folder, wire)
    complaints: list[str] = []
    apart = ""  # the newest checkpoint whose files are in several places
    held = _held(folder, wire, keepers)
    for name in sorted(set().union(*held.values()), key=_order, reverse=True):
        if refused and name in refused:
            complaints.append(refused[name])
        elif without := [keepers.places[k] for k, names in held.items() if name not in names]:
            complaints.append(f"there is no {name} in {' and '.join(without)}")
            apart = apart or name
        else:
            found, complaint, lacks_rows = _load_in_all(folder / name, wire, keepers)
            if found is not None:
                return found, complaints
            complaints.append(complaint)
            apart = apart or name * lacks_rows
    if complaints:
        advice = apart and (
            "\nWithout a shared file system, each host has only its own nodes' rows. Resume with the same hosts in "
            "the same order, or copy the checkpoint's files together on each host, for example with "
            f"rsync -a OTHER_HOST:FOLDER/{apart}/ FOLDER/{apart}/"
        )
        raise CheckpointError(
            f"no checkpoint in {folder} can be read (a new save_dir starts at step 0): {'; '.join(complaints)}{advice}"
        )
    return None, []


def _held(folder: Path, wire: Wire, keepers: Keepers) -> dict[int, set[str]]:
    """Return, by keeper, the names of the checkpoints in its folder."""
    mine = [path.name for path in list_checkpoints(folder)] if keepers.is_keeper else []
    return {k: set(names) for k, names in enumerate(gather(wire, mine)) if keepers.of[k] == k}


def _load_in_all(path: Path, wire: Wire, keepers: Keepers) -> tuple[Snapshot | None, str, bool]:
    """Load a checkpoint if all processes can; otherwise return why not, and whether a process lacks rows."""
    found, trouble, lacking, mark = None, None, [], ""
    try:
        found = load(path, wire.ranks, _others(wire)) if wire.is_shared else load(path)
        mark = sum_of({file: total for file, total in found.meta["sha256"].items() if file.startswith("rows-")})
    except CheckpointError as error:
        trouble, lacking = str(error), error.files if isinstance(error, RowsElsewhere) else []
    there = [file.name for file in path.glob("rows-*")] if keepers.is_keeper else []
    said = gather(wire, [trouble, lacking, there, mark])
    troubles = list(dict.fromkeys(trouble for trouble, *_ in said if trouble is not None))
    if not troubles and len({mark for *_, mark in said}) > 1:
        places = " and ".join(keepers.places[k] for k in sorted(set(keepers.of)))
        troubles = [f"{path.name} belongs to different runs in {places}: remove the copies of other runs"]
    elsewhere = dict.fromkeys(file for _, files, _, _ in said for file in files)
    for file in elsewhere:
        holders = [keepers.places[k] for k, (_, _, there, _) in enumerate(said) if file in there]
        troubles.append(f"{file} is in {' and '.join(holders)}" if holders else f"no host of this run has {file}")
    return (None if troubles else found), "; ".join(troubles), bool(elsewhere)


def _others(wire: Wire) -> range:
    """Return this process's share of the ids without a row in this run.

    With fewer rows than nodes, a run in another number of processes may have saved more rows.
    """
    return range(sum(map(len, wire.placement)) + wire.process, 1 << 62, len(wire.placement))


def differences(saved: dict[str, Any], current: dict[str, Any], path: str = "") -> list[str]:
    """Return a line for each value that differs between two run descriptions, without equal defaults and units."""
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        a, b = saved.get(key), current.get(key)
        if is_same(key, a, b):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{path}{key}.")
        elif not (key not in current and is_default(key, a)):
            lines.append(f"{path}{key}: saved {a!r}, now {b!r}")
    return lines


def _remove(path: Path) -> None:
    """Rename a checkpoint and remove it, so that a folder with its name is complete even if this is cut off."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        gone = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
        os.rename(path, gone)
        shutil.rmtree(gone)


def remove_leftovers(folder: Path, wire: Wire, keepers: Keepers) -> None:
    """Remove files that a killed run left in `folder` while it wrote or removed a checkpoint.

    If one host has already renamed a checkpoint, all hosts have written it. In this case the other hosts rename it now.
    """
    named = set().union(*_held(folder, wire, keepers).values())
    for path in folder.glob(".clients-*") if keepers.is_keeper else []:  # saved state of clients without a row
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step_*.tmp") if keepers.is_keeper else []:
        name, *rest = path.name.split(".")[1:]
        with contextlib.suppress(OSError):
            if len(rest) == 2 and name in named and (path / "run.json").exists():  # not half removed
                os.rename(path, folder / name)
        shutil.rmtree(path, ignore_errors=True)
    for mark in [*folder.glob(f"{MARK}*"), *folder.glob(f"{LOCK}-*")] if keepers.is_keeper else []:
        with contextlib.suppress(OSError):
            if keepers.lock is None or is_old(mark, keepers.lock.path):  # not from a run that is just starting
                mark.unlink()
    barrier(wire)


def _flush_and_sum(file: Path) -> str:
    with open(file, "rb+") as f:
        os.fsync(f.fileno())
        return hashlib.file_digest(f, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
