"""Everything that a run is, taken from its loop for a checkpoint and put back into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exogym.callbacks import Callback
from exogym.checkpoint import Snapshot
from exogym.faults import Outages
from exogym.history import History

if TYPE_CHECKING:
    from exogym.loop import TrainingLoop


def snapshot_of(loop: TrainingLoop) -> Snapshot:
    """Return where `loop` stands: the rows here, what all nodes share, counters and history."""
    fleet, rows = loop.fleet, {}
    for row, rank in enumerate(fleet.ranks):
        state = {f"params.{b}": block.params[row] for b, block in enumerate(fleet.blocks)}
        state |= {f"buffer.{name}": x[row] for name, x in fleet.buffers.items()}
        state |= {f"driver.{name}": value for name, value in loop.driver.row_state(row).items()}
        if loop.begun is not None:
            state["begun"] = loop.begun[row]
        scale = [float(loop.worker.scales[row]), float(loop.worker.good_steps[row])]
        rows[rank] = state | {"scale": torch.tensor(scale, dtype=torch.float64)}
    shared = {f"driver.{name}": value for name, value in loop.driver.shared_state().items()}
    shared |= {f"ledger.{name}": value for name, value in fleet.comm.ledger.state().items()}
    for k, callback in enumerate(loop.callbacks):
        if isinstance(callback, Callback):
            shared |= {f"callback.{k}.{type(callback).__name__}.{name}": x for name, x in callback.state().items()}
    if loop.timing is not None:
        shared |= {f"clock.{name}": value for name, value in loop.timing.state().items()}
    history: dict[str, Any] = {}
    for name, value in loop.history.state().items():
        if isinstance(value, np.ndarray):
            shared[f"history.{name}"] = torch.from_numpy(np.ascontiguousarray(value))
        else:
            history[name] = value
    counters: dict[str, Any] = {
        "step": loop.step,
        "begun_end": loop.begun_end if loop.begun is not None else None,
        "logged": loop.logged,
        "evaluated": loop.evaluated_at,
        "apart": loop.apart,
        "wall_s": loop.wall_s(),
    }
    there = loop.driver.attendance
    if there is not None and isinstance(there.faults, Outages):  # planned faults are known without being told
        counters["outages"] = there.faults.state()
    return Snapshot(rows, shared, counters | {"history": history, "description": loop.plan.description})


def put_back(loop: TrainingLoop, snapshot: Snapshot) -> None:
    """Make `loop` stand where `snapshot` was taken. A node that was away then may have no row in it."""
    fleet, meta, there = loop.fleet, snapshot.meta, loop.driver.attendance
    if there is not None and isinstance(there.faults, Outages):
        there.faults.load(meta["outages"])
    for row, rank in enumerate(fleet.ranks):
        if rank not in snapshot.rows and there is not None and rank not in there.up(meta["step"]):
            continue
        state = snapshot.rows[rank]
        for b, block in enumerate(fleet.blocks):
            block.params[row] = state[f"params.{b}"]
        for name, x in fleet.buffers.items():
            x[row] = state[f"buffer.{name}"]
        loop.driver.load_row_state(row, _below("driver.", state))
        loop.worker.scales[row], loop.worker.good_steps[row] = state["scale"].tolist()
    if meta["begun_end"] is not None:
        loop.begun_end = meta["begun_end"]
        nothing = {"begun": torch.full((meta["begun_end"] - meta["step"],), torch.nan)}
        begun = [snapshot.rows.get(rank, nothing)["begun"] for rank in fleet.ranks]
        loop.begun = torch.stack(begun).to(loop.worker.device)
    loop.driver.load_shared_state(_below("driver.", snapshot.shared))
    fleet.comm.ledger.load_state(_below("ledger.", snapshot.shared))
    if loop.timing is not None:
        loop.timing.load_state(_below("clock.", snapshot.shared))
    for k, callback in enumerate(loop.callbacks):
        if isinstance(callback, Callback):
            callback.load_state(_below(f"callback.{k}.{type(callback).__name__}.", snapshot.shared))
    arrays = {name: value.numpy() for name, value in _below("history.", snapshot.shared).items()}
    loop.history = History.from_state(meta["history"] | arrays)
    loop.step, loop.logged, loop.evaluated_at = (meta[name] for name in ("step", "logged", "evaluated"))
    loop.wall_before, loop.apart = meta["wall_s"], meta.get("apart")
    if there is not None:
        fleet.comm.present = there.up(loop.step)


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
