"""Save and resume a run: its checkpoint folder, and the run's newest good checkpoint in this folder."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.files import remove_folders
from exogym.core.base.torch_private import in_this_process, strided_parts
from exogym.core.combinations import check
from exogym.core.communicator import Wire, gather, say
from exogym.core.compute.worker import Worker
from exogym.core.saving.behind import Writer
from exogym.core.saving.checkpoint import differences, load_newest, remove_leftovers, save
from exogym.core.saving.checkpoint_files import Snapshot, list_checkpoints
from exogym.core.saving.keepers import Keepers, everywhere, find_keepers, holding
from exogym.core.saving.snapshots import Resumable, check_counters, for_disk, restore
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError, CheckpointError
from exogym.logger.base import check_writable
from exogym.strategy.schedule import Schedule
from exogym.strategy.strategy import Strategy

CHOSEN = ("compute", "micro_batch_size", "speeds")
OUTER_SCHEDULES = ("outer_lr_scheduler", "outer_momentum_scheduler")
FREE = ("limits", "placement", "node", "device")  # description's fields that may differ in a resumed run


class Unfit(Exception):
    """This run cannot resume from the checkpoint `name`; `why` gives the reason."""

    def __init__(self, name: str, why: str):
        super().__init__(why)
        self.name, self.why = name, why


class Kept:
    """A run's checkpoint folder: it writes the run's checkpoints, and finds the checkpoint from which the run resumes.

    Args:
        most: how many checkpoints stay in the folder.
        keepers: the processes that write into the folder, or None until the next checkpoint determines them.

    Attributes:
        snapshot: the checkpoint from which the run resumes, or None if the run starts at step 0.
        before_saving: functions to call in every process before a checkpoint is written.
        writer: writes checkpoints while nodes compute; None if nodes wait for each checkpoint.
    """

    def __init__(self, folder: Path, most: int, wire: Wire, keepers: Keepers | None = None):
        self.folder, self.most, self.wire, self.keepers = folder, most, wire, keepers
        self.snapshot: Snapshot | None = None
        self.before_saving: list[Callable[[], Any]] = []
        self.writer: Writer | None = None
        self._complaints: list[str] = []

    def find(self, description: dict[str, Any], options: FitOptions, refused: Mapping[str, str]) -> None:
        """If the run resumes, find its newest good checkpoint, whose choices replace the choices in `description`."""
        if not options.resume:
            return
        folder = self.folder
        snapshot, self._complaints = load_newest(folder, self.wire, self.keepers, refused)
        if snapshot is None:
            return
        agree(self.wire, snapshot, lambda: check_counters(snapshot))
        saved = snapshot.meta["description"]
        own = description | _rounds_as_far(saved, description)
        _refuse_another(folder, saved, own, but=(*FREE, "chosen"))  # first: another run's choices would not matter
        agree(self.wire, snapshot, lambda: _check_chosen(snapshot, options))
        description["chosen"] = dict(saved["chosen"])
        if options.weighing is not None and options.weighing.speeds is not None:
            description["chosen"]["speeds"] = options.weighing.speeds
        _refuse_another(folder, saved, own | {"chosen": description["chosen"]}, but=FREE)
        stands_at = max(snapshot.meta["step"], snapshot.meta["begun_end"] or 0)
        if stands_at > description["limits"]["total_steps"]:
            raise CheckpointError(
                f"the checkpoint in {folder} is at step {stands_at}, past the {description['limits']['total_steps']} "
                "steps of this run: raise max_steps or num_epochs"
            )
        self.snapshot = snapshot

    def begin(self, run: Resumable, tell: Callable[..., None]) -> None:
        """Save `run` from now on. `tell("checkpoint", step, path=...)` is called after each checkpoint."""
        self._run, self._tell = run, tell

    def put_back(self, run: Resumable, strategy: Strategy) -> None:
        """Load the checkpoint, if there is one, into the run. Raise Unfit if the run would save other contents."""
        snapshot = self.snapshot
        if snapshot is not None:
            agree(self.wire, snapshot, lambda: restore(run, snapshot))
            for complaint in self._complaints:
                say(self.wire, f"{complaint}; using the checkpoint before it")
            say(self.wire, f"going on from step {run.step} ({snapshot.path})")
            before, now = (of["limits"]["total_steps"] for of in (snapshot.meta["description"], run.description))
            if changed := _other_rates(strategy, run.step, before, now):
                say(self.wire, changed)
        run.fleet.state.row(0)
        run.fleet.state.shared()

    # Writing

    def save(self) -> Path:
        """Write a checkpoint now, in all processes, and return its folder."""
        snapshot = self._snapshot()
        path = self._write(snapshot, self.wire)
        self._written(snapshot.meta["step"], path)
        return path

    def save_behind(self) -> None:
        """Write a checkpoint, while nodes compute if possible, otherwise now."""
        snapshot = self._snapshot()
        if self.writer is None or not self.writer.start(snapshot):
            self._written(snapshot.meta["step"], self._write(snapshot, self.wire))

    def write_behind(self) -> None:
        """Let `save_behind` write while nodes compute."""
        self.writer = Writer(self.wire, self._write, self._written)

    def look(self) -> None:
        """Report the checkpoint under way if it is complete. Do not wait."""
        if self.writer is not None:
            self.writer.look()

    def beat(self) -> None:
        """Write a heartbeat into the folder's lock, if this process holds it."""
        if self.keepers is not None:
            self.keepers.beat()

    def release(self) -> None:
        """Let other runs use the folder."""
        if self.keepers is not None:
            self.keepers.release()

    def _snapshot(self) -> Snapshot:
        """Return the run's state for a checkpoint, after the checkpoint under way is written."""
        if self.writer is not None:
            self.writer.finish()
        for prepare in self.before_saving:
            prepare()
        return for_disk(self._run)

    def _write(self, snapshot: Snapshot, wire: Wire) -> Path:
        return save(self.folder, snapshot, self.most, wire, self.keepers)

    def _written(self, step: int, path: Path) -> None:
        self._tell("checkpoint", step, path=str(path))


def kept_in(
    folder: Path, options: FitOptions, worker: Worker, description: dict[str, Any], refused: Mapping[str, str],
    undo: contextlib.ExitStack,
) -> Kept:  # fmt: skip
    """Prepare a run's checkpoint folder, and return it with the checkpoint to resume from."""
    wire = worker.fleet.comm.wire
    kept = Kept(folder, options.placement.keep_checkpoints, wire, open_folder(folder, options.resume, wire, undo))
    description["shared"] = sum_of_shared(worker.model, worker.fleet.buffers)
    kept.find(description, options, refused)
    return kept


def _other_rates(strategy: Strategy, step: int, before: int, now: int) -> str:
    """Return what a run of `now` steps instead of `before` does to the schedules after `step`; "" if nothing."""
    if not 0 < step < now:
        return ""
    inner, given, last = strategy.inner, vars(strategy).get("given_arguments", {}), step - 1
    pairs = {"lr_scheduler": (inner.lr_scheduler, inner.schedule(before), inner.schedule(now))}
    for name in OUTER_SCHEDULES:
        scheduler = given.get(name)
        pairs[name] = (scheduler, Schedule(scheduler, 0, before, 1.0), Schedule(scheduler, 0, now, 1.0))
    pairs = {name: pair for name, pair in pairs.items() if not math.isclose(pair[1].lr(last), pair[2].lr(last))}
    if not pairs:
        return ""
    names = " and ".join(f"{name}={getattr(pair[0], '__name__', repr(pair[0]))}" for name, pair in pairs.items())
    rates = ""
    if "lr_scheduler" in pairs:
        _, old, new = pairs["lr_scheduler"]
        rates = f": after step {step} the learning rate goes from {old.lr(last):.3g} to {new.lr(step):.3g}"
    return (
        f"{names} now ends at step {now}, not at step {before}{rates}. To avoid a jump, start with the whole run's "
        "max_steps, and stop and resume it; or choose a schedule that does not depend on max_steps: 'constant', or a "
        "function of the step"
    )


def open_folder(folder: Path, resume: bool, wire: Wire, undo: contextlib.ExitStack) -> Keepers:
    """Prepare the checkpoint folder. Return its keepers: the processes that write files, one per separate folder."""
    made: list[Path] = []
    undo.callback(remove_folders, made)
    everywhere(wire, lambda: made.extend([] if wire.is_hidden else check_writable(folder, "save_dir")))
    found = find_keepers(folder, wire)
    if len(wire.world.placement) > len(wire.placement) and not found.are_one:
        places = f"save_dir={str(folder)!r}, a folder of each host ({', '.join(dict.fromkeys(found.places))})"
        check({"node in several processes": "node= in several processes", "save_dir of each host": places})
    keepers = holding(folder, wire, found)
    undo.callback(keepers.release)
    if not resume:
        everywhere(wire, lambda: _check_empty(folder, keepers))
    remove_leftovers(folder, wire, keepers)
    return keepers


def _check_empty(folder: Path, keepers: Keepers) -> None:
    if keepers.is_keeper and list_checkpoints(folder):
        where = "" if keepers.are_one else f" ({keepers.places[keepers.here]})"
        raise ArgumentError(
            f"save_dir={str(folder)!r}{where} already contains checkpoints: pass resume=True to resume from them, or "
            "choose another folder"
        )


def _refuse_another(folder: Path, saved: dict[str, Any], own: dict[str, Any], but: Collection[str]) -> None:
    """Raise CheckpointError if two descriptions differ in fields other than `but`."""
    theirs, ours = ({key: value for key, value in of.items() if key not in but} for of in (saved, own))
    unlike, remedy = differences(theirs, ours), ""
    if saved.get("num_nodes") != own["num_nodes"]:
        unlike = [line for line in unlike if not line.startswith("data.shards")]  # they differ as a consequence
        remedy = f"\nGive num_nodes={saved.get('num_nodes')}: the number of processes or hosts may differ"
    if unlike:
        lines = "\n  ".join(unlike) + remedy
        raise CheckpointError(
            f"the checkpoint in {folder} is from another run; only max_steps and num_epochs may differ:\n  {lines}"
        )


def _rounds_as_far(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return the saved round lengths if the current ones are equal as far as both runs go."""
    theirs, ours = saved.get("rounds"), current.get("rounds")
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return {}
    found = dict(ours)
    for module, lengths in ours.items():
        if isinstance(before := theirs.get(module), list):
            common = min(len(before), len(lengths))
            found[module] = before if before[:common] == lengths[:common] else lengths
    return {"rounds": found}


def _check_chosen(snapshot: Snapshot, options: FitOptions) -> None:
    """Raise CheckpointError if this run could not make the checkpoint's recorded choices."""
    chosen = snapshot.meta["description"].get("chosen")
    compute, micro, speeds = (chosen.get(name) if isinstance(chosen, dict) else 0 for name in CHOSEN)
    right = {
        "compute": compute == options.compute,
        "micro_batch_size": (type(micro) is int and micro > 0)
        if options.max_memory_usage is not None and options.minibatch_size is None
        else micro == options.micro_batch_size,
        "speeds": speeds is None or (isinstance(speeds, list) and len(speeds) == options.num_nodes
        and all(type(x) in (int, float) and 0 < x < np.inf for x in speeds)),
    }  # fmt: skip
    right["speeds"] = right["speeds"] and (speeds is not None) == (options.weighing is not None)
    for name, is_right in right.items():
        if not is_right:
            raise CheckpointError(
                f"{snapshot.path}/run.json records chosen={chosen!r}, but this run's options do not allow this "
                f"{name}: resume with the first run's options"
            )


def agree(wire: Wire, snapshot: Snapshot, check: Callable[[], None]) -> None:
    """Call `check` in every process, or raise Unfit if `check` raised CheckpointError in at least one process."""
    why = None
    try:
        check()
    except CheckpointError as error:
        why = str(error)
    troubles = [trouble for trouble in gather(wire, why) if trouble is not None]
    if troubles:
        assert snapshot.path is not None
        raise Unfit(snapshot.path.name, troubles[0])


def constants(model: nn.Module, changing: Collection[str]) -> dict[str, Tensor]:
    """Return the frozen parameters and constant buffers, which all nodes share, by name. Rows have the others."""
    frozen = {name: in_this_process(p.detach()) for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | {name: x for name, x in model.named_buffers() if name not in changing}


def sum_of_shared(model: nn.Module, changing: Collection[str]) -> str:
    """Return a checksum of frozen parameters and constant buffers, which checkpoints do not hold."""
    digest = hashlib.sha256()
    for name, x in constants(model, changing).items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        for part in () if x.is_meta else strided_parts(x):
            digest.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]
