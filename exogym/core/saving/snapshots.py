"""A run's whole state: read it from the training loop for a checkpoint, and load it into a loop.

A run accepts a checkpoint on disk only if the run itself would save the same tensors at the checkpoint's step. Every
row and the shared state have a mark: a hash of the step and of all names, shapes and dtypes. After loading, ExoGym
saves the loop's state again, in memory, and compares names, shapes and dtypes, so no code needs a list of names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from exogym.core.communicator import ALONE, Columns
from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.state import below
from exogym.core.record.history import History
from exogym.core.saving.checkpoint_files import Snapshot, sum_of_tensor
from exogym.core.saving.export import split_history
from exogym.core.saving.parts import Parts
from exogym.errors import CheckpointError, ExoGymError
from exogym.faults import Outages

if TYPE_CHECKING:
    from exogym.core.fleet.seats import Seats

MARK, EVALUATIONS = "mark", "evaluations"
# Tensors that may be missing or new: attributes of a user's own strategy, callbacks, and the empty clients of private
# runs, which checkpoints before 0.1 lack
FREE = ("program.", "callback ", "empty clients.")


class Resumable(Protocol):
    """The interface that a training loop needs so that its run can be saved and resumed."""

    fleet: Fleet
    history: History
    step: int

    @property
    def description(self) -> dict[str, Any]: ...
    @property
    def outages(self) -> Outages | None: ...
    @property
    def seats(self) -> Seats | None: ...
    def may_be_away(self, node: int, step: int) -> bool: ...
    def counters(self) -> dict[str, Any]: ...
    def stand(self, counters: dict[str, Any]) -> None: ...
    def take_history(self, history: History) -> None: ...


def snapshot_of(loop: Resumable) -> Snapshot:
    """Return the state of the run in `loop`: this process's rows, the shared state, counters and history."""
    return _with_history(loop, _without_history(loop))


def for_disk(loop: Resumable) -> Snapshot:
    """Return the state of the run in `loop` for `checkpoint.save`, with marks (hashes of names, shapes and dtypes)."""
    found = _without_history(loop)
    found.parts = _parts_of(loop.fleet, found)
    columns = loop.fleet.comm.wire.columns
    for rank, tensors in found.rows.items():
        tensors[MARK] = mark_of(tensors, found.meta, {} if found.parts is None else found.parts.rows[rank], columns)
    found.shared[MARK] = mark_of(found.shared, found.meta, {} if found.parts is None else found.parts.shared, columns)
    return _with_history(loop, found)


def _parts_of(fleet: Fleet, snapshot: Snapshot) -> Parts | None:
    """Return this process's parts of a snapshot's tensors; None: it has them whole."""
    wire = fleet.comm.wire
    if wire.columns.parts == 1:
        return None

    def cuts(tensors: Mapping[str, Tensor]) -> dict[str, Cut]:
        found = {name: fleet.state.cut(name, x.shape) for name, x in tensors.items()}
        return {name: cut for name, cut in found.items() if cut is not None}

    rows = {rank: cuts(tensors) for rank, tensors in snapshot.rows.items()}
    parts = Parts(wire.columns.part, wire.process == 0, rows, cuts(snapshot.shared))
    _check_equal(wire.columns, snapshot, parts)
    return parts


def _check_equal(columns: Columns, snapshot: Snapshot, parts: Parts) -> None:
    """Raise CheckpointError if a tensor that nobody declared as split differs between the node's processes."""
    own = {f"node {rank}'s {name}": sum_of_tensor(x) for rank, tensors in snapshot.rows.items()
           for name, x in tensors.items() if name not in parts.rows[rank]}  # fmt: skip
    alike = {name: x for name, x in snapshot.shared.items() if not name.startswith(FREE)}  # callbacks: in main only
    own |= {f"the {name}": sum_of_tensor(x) for name, x in alike.items() if name not in parts.shared}
    for other in columns.tell(own):
        if unlike := sorted(name for name in own.keys() & other.keys() if own[name] != other[name]):
            raise CheckpointError(
                f"{unlike[0]} differs between the node's processes, and no module declares how it is split. If this "
                "tensor has a block's columns, name it by the block, such as momentum.0. Otherwise override cut() in "
                "the module that saves it"
            )


def _cut_down(fleet: Fleet, snapshot: Snapshot) -> Snapshot:
    """Return this process's part of a whole snapshot."""
    if fleet.comm.wire.columns.parts == 1:
        return snapshot

    def here(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, x in tensors.items():
            if name == MARK or name.startswith("history."):
                found[name] = x
                continue
            with contextlib.suppress(KeyError):  # this process has no part of it
                cut = fleet.state.cut(name, x.shape)
                found[name] = x if cut is None else cut.of(x).clone()
        return found

    rows = {rank: here(tensors) for rank, tensors in snapshot.rows.items()}
    return replace(snapshot, rows=rows, shared=here(snapshot.shared))


def mark_of(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], cuts: Mapping[str, Cut] | None = None,
    columns: Columns = ALONE,
) -> Tensor:  # fmt: skip
    """Return the mark: (32,) bytes, a hash of the run's step and of the names, shapes and dtypes beside it.

    It covers all the node's processes, with the whole shape of split tensors. So it does not depend on the split.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    shapes |= {name: cut.whole_shape(tensors[name]) for name, cut in (cuts or {}).items()}
    marked = [name for name in tensors if name != MARK and not name.startswith("history.")]
    own = [f"{name} {tensors[name].dtype} {shapes[name]}" for name in marked]
    lines = sorted({line for told in columns.tell(own) for line in told})
    text = json.dumps([meta["step"], meta["begun_end"], lines])
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def _without_history(loop: Resumable) -> Snapshot:
    loop.fleet.comm.settle()
    state = loop.fleet.state
    seats, shared = loop.seats, state.shared()
    rows = {rank: state.row(row) for row, rank in enumerate(loop.fleet.ranks)} if seats is None else seats.rows()
    counters = loop.counters()
    if loop.outages is not None:  # planned faults are known from the options
        counters["outages"] = loop.outages.state()
    return Snapshot(rows, shared, counters | {"description": loop.description})


def _with_history(loop: Resumable, found: Snapshot) -> Snapshot:
    """Add the history: its columns as tensors, and its evaluations as bytes of JSON."""
    tensors, small = split_history(loop.history)
    evaluations = json.dumps(small.pop(EVALUATIONS)).encode()
    tensors[EVALUATIONS] = torch.frombuffer(bytearray(evaluations), dtype=torch.uint8)
    found.shared |= {f"history.{name}": x for name, x in tensors.items()}
    found.meta["history"] = small
    return found


def put_back(loop: Resumable, snapshot: Snapshot) -> None:
    """Load `snapshot` into `loop`. The snapshot may lack rows of nodes that were absent when it was saved."""
    fleet, meta = loop.fleet, snapshot.meta
    if loop.outages is not None:
        loop.outages.load(meta["outages"])
    loop.stand(meta)
    if loop.seats is not None:
        with _blamed_on(snapshot, min(snapshot.rows, default=None)):
            loop.seats.load(snapshot.rows)
    for row, rank in enumerate(fleet.ranks if loop.seats is None else ()):
        if rank in snapshot.rows or not loop.may_be_away(rank, meta["step"]):
            with _blamed_on(snapshot, rank):
                fleet.state.load_row(row, snapshot.rows[rank])
    with _blamed_on(snapshot, None):
        fleet.state.load_shared(snapshot.shared)
        arrays = {name: value.numpy() for name, value in below("history.", snapshot.shared).items()}
        evaluations = json.loads(arrays.pop(EVALUATIONS).tobytes())
        loop.take_history(History.from_state(meta["history"] | arrays | {EVALUATIONS: evaluations}))


@contextlib.contextmanager
def _blamed_on(snapshot: Snapshot, rank: int | None) -> Iterator[None]:
    """Turn errors from a checkpoint's contents into a CheckpointError that names the file."""
    try:
        yield
    except Exception as error:
        if snapshot.path is None or isinstance(error, MemoryError):
            raise
        why = error if isinstance(error, ExoGymError) else repr(error)
        raise CheckpointError(f"{snapshot.file_of(rank)} does not fit this run: {why}") from error


def restore(loop: Resumable, snapshot: Snapshot) -> None:
    """Load a checkpoint into `loop`. Raise CheckpointError if this run would save other names, shapes or dtypes."""
    path, meta = snapshot.path, snapshot.meta
    seats, comes_and_goes = loop.seats, loop.outages is not None
    wanted = list(loop.fleet.ranks) if seats is None else sorted(snapshot.rows)
    if ("outages" in meta) != comes_and_goes:
        how = "without" if comes_and_goes else "with"
        raise CheckpointError(f"{path}/run.json is from a run {how} min_hosts: resume it {how} min_hosts")
    if comes_and_goes:
        wanted = [rank for rank in wanted if rank in snapshot.rows]  # nodes that were away may have no row
    if lacking := [rank for rank in wanted if rank not in snapshot.rows]:
        raise CheckpointError(f"{path} has no row of node {lacking[0]}")
    _check_marks(snapshot, wanted)
    try:
        snapshot = _cut_down(loop.fleet, snapshot)
        put_back(loop, snapshot)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this run: {error!r}") from error
    _check_same(snapshot, snapshot_of(loop), wanted, seats is not None)


def _check_marks(snapshot: Snapshot, ranks: Sequence[int]) -> None:
    for rank in (*ranks, None):
        tensors = snapshot.shared if rank is None else snapshot.rows[rank]
        mark = tensors.get(MARK)
        if mark is None or mark.dtype != torch.uint8 or not torch.equal(mark, mark_of(tensors, snapshot.meta)):
            raise CheckpointError(
                f"{snapshot.file_of(rank)} was changed after it was saved at step {snapshot.meta['step']}: "
                f"{_whose(rank)} names, shapes or dtypes differ"
            )


def _check_same(saved: Snapshot, now: Snapshot, ranks: Sequence[int], is_seated: bool) -> None:
    """Raise CheckpointError unless the run would save again what was saved, by names, shapes and dtypes."""
    pairs = [({rank: saved.rows[rank] for rank in ranks}, now.rows)]
    if is_seated:  # a client may have another row now
        from exogym.core.fleet.seats import by_node

        pairs = list(zip(by_node(saved.rows), by_node(now.rows), strict=True))
    for before, after in pairs:
        for rank in sorted(before.keys() & after.keys()):
            if unlike := _unlike(before[rank], after[rank]):
                file = saved.path if is_seated else saved.file_of(rank)
                raise CheckpointError(f"{file} does not fit this run: {_whose(rank)} {unlike}")
    if unlike := _unlike(saved.shared, now.shared):
        raise CheckpointError(f"{saved.file_of(None)} does not fit this run: {_whose(None)} {unlike}")


def _whose(rank: int | None) -> str:
    return "the" if rank is None else f"node {rank}'s"


def _unlike(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Return the first difference in names, shapes and dtypes; "" without any."""
    for name in sorted(saved.keys() | wanted.keys()):
        if name == MARK or name.startswith(FREE):
            continue
        if name not in saved:
            return f"{name!r} is missing"
        if name not in wanted:
            return f"{name!r} is unknown to it"
        one, other = saved[name], wanted[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{name!r} is {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}"
    return ""


def check_counters(snapshot: Snapshot) -> None:
    """Raise CheckpointError if a counter in run.json has a value that no run can have."""
    meta, step = snapshot.meta, snapshot.meta["step"]
    end: Any = meta.get("begun_end")
    wall_s: Any = meta.get("wall_s")
    apart: Any = meta.get("apart")
    history = meta.get("history")
    right = {
        "begun_end": "begun_end" in meta and (end is None or (type(end) is int and step < end < 1 << 62)),
        "logged": type(meta.get("logged")) is int and -1 <= meta["logged"] <= step,
        "evaluated": type(meta.get("evaluated")) is int and -1 <= meta["evaluated"] <= step,
        "apart": apart is None or (isinstance(apart, dict) and all(type(x) is float for x in apart.values())),
        "wall_s": type(wall_s) in (int, float) and 0 <= wall_s < math.inf,
        "history": isinstance(history, dict) and history.get("last_step") == step,
        "description": isinstance(meta.get("description"), dict),
    }
    for name, is_right in right.items():
        if not is_right:
            given = f"{name}={meta.get(name)!r}"[:200]
            raise CheckpointError(f"{snapshot.path}/run.json: {given} is impossible at step {step}")
