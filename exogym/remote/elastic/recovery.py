"""Training that goes on when hosts are lost, and takes back those that return.

Every process keeps copies of where its nodes stood at the last two moments of rest. When a member of the epoch is lost,
those who remain go back to the last of these moments that all of them know, and from the next step on the nodes of the
lost one are away, as `Faults` would have it; so the same run can be had in simulation, from the outages that were
written down. Who comes back is let in at a moment of rest and takes the others' state, as in simulation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load as unpacked
from safetensors.torch import save as packed
from torch import Tensor

from exogym.communicator import Wire
from exogym.engine.hangs import watched
from exogym.errors import ArgumentError, CheckpointError, ModelError, WorkerError
from exogym.faults import Outages
from exogym.remote.elastic.member import Epoch, Member
from exogym.remote.elastic.wire import ElasticWire, Lost
from exogym.remote.world import same_start
from exogym.saving.checkpoint import Snapshot, differences
from exogym.saving.keepers import check_folder, everywhere, find_keepers, holding
from exogym.saving.snapshots import put_back, snapshot_of
from exogym.trainer import LocalTrainer
from exogym.training.assembly import assemble, constants
from exogym.training.loop import TrainingLoop
from exogym.training.options import FitOptions
from exogym.training.resuming import FREE

if TYPE_CHECKING:
    from exogym.training.assembly import Subject

ANCHOR_STEPS = 10  # between two moments of rest at least, so that copies cost little beside the steps
KEPT_ANCHORS = 2  # nobody is more than one such moment ahead of another
TRIES = 3  # epochs without a step forward, with the same members, before that counts as an error of its own


def check(options: FitOptions) -> None:
    """Refuse what cannot go on with fewer hosts.

    Raises:
        ArgumentError: an option or a strategy.
    """
    strategy = options.strategy
    if strategy.driven_by != "rounds":
        raise ArgumentError(
            f"min_hosts with {type(strategy).__name__}: going on without lost nodes needs a strategy of communication "
            "modules (DiLoCo, FedAvg, SPARTA, DDP, ...); leave min_hosts out, or take one of these"
        )
    for name in ("faults", "network", "balance", "max_memory_usage"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"min_hosts and {name} do not go together: leave one out")
    if options.compute == "auto":
        raise ArgumentError("min_hosts needs compute='loop' or 'vmap': a host that joins later must not choose anew")


class _Planned(Exception):
    """All members stand at the same step, and newcomers wait."""


class ElasticTrainer(LocalTrainer):
    """A `LocalTrainer` in a process that has a seat at a roll call; `processes` come and go.

    Args:
        subject: model, data and loss.
        member: the seat.
        nodes_of: seat to the ids of its nodes.
        epoch: the one that was joined before anything was trained; None: others are training already.
    """

    def __init__(self, subject: Subject, member: Member, nodes_of: Sequence[Sequence[int]], epoch: Epoch | None):
        super().__init__(
            subject.model, subject.train_dataset, subject.val_dataset, loss_fn=subject.loss_fn, metrics=subject.metrics
        )
        self.member, self.nodes_of, self.epoch = member, nodes_of, epoch
        self.is_main = False  # of those who came to the end together

    def _carry_out(self, options: FitOptions, device: torch.device) -> None:
        check(options)
        with watched(options.hang_s, self.member.seat):
            self._train_with_others(dataclasses.replace(options, faults=Outages()), device)

    def _train_with_others(self, options: FitOptions, device: torch.device) -> None:
        native = options.reduction == "native"
        recovery = self._join(options, device, native) if self.epoch is None else self._begin(options, device, native)
        loop = recovery.loop
        self.history, self.description = loop.history, loop.description
        try:
            loop.run()
        finally:
            self.history, self.traffic = loop.history, loop.fleet.comm.ledger.traffic
            self.is_main = loop.wire.is_main
            away = recovery.outages.as_absent()
            self.description["outages"] = {str(node): [list(span) for span in spans] for node, spans in away.items()}
            loop.end()

    def _begin(self, options: FitOptions, device: torch.device, native: bool) -> Recovery:
        """Put the run together with the others who begin it; where one of them is lost, all do so again."""
        assert self.epoch is not None
        wire = ElasticWire(self.member, self.nodes_of, self.epoch, native)
        while True:
            try:
                wire.or_lost(lambda: same_start(self.model))
                recovery = Recovery(assemble(self.subject, options, device, self.max_stretch, wire), wire)
                break
            except Lost:
                wire.take_part(self.member.ready("fresh"))
        step, there = recovery.loop.step, wire.present
        if step and not set(recovery.up(step)) & set(there):
            raise CheckpointError(
                f"the checkpoint of step {step} holds no rows of the nodes {there}, which were away then, and the "
                "hosts of the others are not there: start them too"
            )
        return recovery

    def _join(self, options: FitOptions, device: torch.device, native: bool) -> Recovery:
        """Put this process's part together alone, and join those who are training."""
        own = self.nodes_of[self.member.seat]
        alone = dataclasses.replace(
            options, save_dir=None, checkpoint_interval=None, resume=False, max_restarts=0, run_dir=None,
            logger=options.logger if self.member.seat == 0 else None,
            progress=options.progress if self.member.seat == 0 else False,
        )  # fmt: skip
        loop = assemble(self.subject, alone, device, self.max_stretch, Wire(own))
        if options.save_dir is not None:
            loop.save_into(Path(options.save_dir), options.checkpoint_interval)
            check_folder(Path(options.save_dir))
        wire = ElasticWire(self.member, self.nodes_of, self.member.ready("alone"), native)
        loop.join(wire)
        recovery = Recovery(loop, wire)
        recovery.join()
        return recovery


class Recovery:
    """Takes `loop` through its run over `wire`, whoever is lost or comes back."""

    def __init__(self, loop: TrainingLoop, wire: ElasticWire):
        self.loop, self.wire, self.member = loop, wire, wire.member
        assert loop.outages is not None
        self.outages = loop.outages
        self.anchors: dict[int, Snapshot] = {}
        self.joined = False
        self._stood: list[Any] = []  # step and members of the last epochs in which nobody came forward
        loop.take_over(self.carry, self.at_rest)

    def carry(self, run: Callable[[], bool]) -> bool:
        """Train to the end, or to where a signal stops all; say whether it is the end."""
        if not self.joined:
            self._anchor()
            self._note_who_is_there()
            self.member.training()
        while True:
            try:
                if not self.joined:
                    self.joined = True
                    self.wire.barrier()  # nobody trains before all can be told to stop
                finished = run()
                if finished:
                    self.loop.keep_outcome()
                self.wire.barrier()  # nobody leaves before all have come so far, and need nobody any more
                return finished
            except Lost as lost:
                self._regroup(lost)
            except _Planned:
                self._regroup(None)

    def at_rest(self) -> None:
        """All stand at the same step, and nothing is in flight."""
        loop = self.loop
        if not loop.driver.losses.under_way and set(self.up(loop.step + 1)) != set(self.wire.present):
            self._note_who_is_there()  # back since a stretch that was taken up in the middle
        if loop.step - max(self.anchors) >= ANCHOR_STEPS:
            self._anchor()
            if not loop.driver.losses.under_way and self.wire.agree(self.member.waiting):
                raise _Planned

    def join(self) -> None:
        """Take the state of the others, in the epoch that the wire is in; then the next ones."""
        rows = {rank: _copy(state) for rank, state in snapshot_of(self.loop).rows.items()}
        while True:
            try:
                self._receive(rows)
                break
            except Lost:
                epoch = self.member.ready("alone")
                self.wire.take_part(epoch)
        self.joined = True

    # Inside

    def _anchor(self) -> None:
        found = snapshot_of(self.loop)
        rows = {rank: _copy(state) for rank, state in found.rows.items()}
        meta = json.loads(json.dumps(found.meta))
        self.anchors[self.loop.step] = Snapshot(rows, _copy(found.shared), meta)
        for step in sorted(self.anchors)[:-KEPT_ANCHORS]:
            del self.anchors[step]

    def _regroup(self, lost: Lost | None) -> None:
        """Go on in the next epoch, where nothing that this process knows is unknown to another.

        Raises:
            WorkerError: the same members have failed together again and again.
        """
        while True:
            epoch = self.member.ready("member", sorted(self.anchors), planned=lost is None)
            assert epoch.step is not None
            standing = [epoch.step, epoch.members]
            self._stood = [*self._stood, standing] if standing in self._stood[-1:] else [standing]
            if len(self._stood) > TRIES:
                raise WorkerError(
                    f"the same ranks failed {TRIES} times after step {epoch.step}; what they printed says why: {lost}"
                ) from lost
            self.wire.take_part(epoch)
            try:
                self._settle(epoch)
                return
            except Lost as again:
                lost = again

    def _settle(self, epoch: Epoch) -> None:
        """Stand where the epoch begins, and tell the newcomers."""
        assert epoch.step is not None
        anchor = self.anchors[epoch.step]
        self._stand(anchor)
        if epoch.newcomers and epoch.source == self.member.seat:
            for seat in epoch.newcomers:
                process = epoch.members.index(seat)
                self.wire.or_lost(
                    functools.partial(_send, process, anchor, constants(self.loop.worker.model, self.loop.fleet))
                )
        self._begin()

    def _receive(self, rows: dict[int, dict[str, Tensor]]) -> None:
        """Take what the source of the epoch sends, and stand there with rows that are still to be brought back."""
        epoch, own = self.wire.epoch, self.loop.description
        process = epoch.members.index(epoch.source)
        shared, meta, constant = self.wire.or_lost(lambda: _take(process))
        free = (*FREE, "device", "chosen", "shared")  # hosts may differ in device
        theirs, mine = ({k: x for k, x in y.items() if k not in free} for y in (meta["description"], own))
        unlike = differences(theirs, mine)
        if unlike:
            lines = "\n  ".join(unlike)
            raise ModelError(f"the script here is not the one that the others train (saved: theirs):\n  {lines}")
        self._stand(Snapshot(rows, shared, meta))
        with torch.no_grad():
            for name, x in constants(self.loop.worker.model, self.loop.fleet).items():
                x.copy_(constant[name])
        self.loop.take_description(meta["description"])
        self._begin()

    def _begin(self) -> None:
        """All members stand at the same step: note who is there, and who keeps which folder of checkpoints."""
        agenda = self.loop.agenda
        self.wire.barrier()
        self._note_who_is_there()
        if agenda.save_dir is not None:
            folder = Path(agenda.save_dir)
            everywhere(self.wire, lambda: check_folder(folder))
            keepers = holding(folder, self.wire, find_keepers(folder, self.wire), agenda.keepers)
            self.loop.save_into(folder, agenda.checkpoint_interval, keepers)

    def _stand(self, anchor: Snapshot) -> None:
        loop = self.loop
        logged, began = loop.reports.logged, bool(self.anchors)
        wall_s = loop.wall_s() if began else anchor.meta["wall_s"]
        copy = Snapshot({rank: _copy(x) for rank, x in anchor.rows.items()}, _copy(anchor.shared), anchor.meta)
        put_back(loop, copy)
        loop.carry_on(logged, wall_s)
        self.anchors = {anchor.meta["step"]: anchor}

    def _note_who_is_there(self) -> None:
        """From the next step on the nodes of the members are there; in a stretch that has begun nobody comes back."""
        step, there = self.loop.step, self.wire.present
        stayed = [node for node in self.up(step) if node in there]
        self.outages.note(step, there if not self.loop.driver.losses.under_way else stayed)
        self.loop.driver.meet(stayed)

    def up(self, step: int) -> list[int]:
        """Return the nodes that were there for `step`."""
        assert self.loop.driver.attendance is not None
        return self.loop.driver.attendance.up(step)


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}


# Sending a state: JSON, then safetensors. Nothing is pickled.


def _send(process: int, anchor: Snapshot, constant: dict[str, Tensor]) -> None:
    tensors = {f"shared.{name}": x for name, x in anchor.shared.items()} | {
        f"constant.{n}": x for n, x in constant.items()
    }
    parts = [json.dumps(anchor.meta).encode(), packed({name: x.detach().cpu().clone() for name, x in tensors.items()})]
    dist.send(torch.tensor([len(part) for part in parts]), process)
    for part in parts:
        dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), process)


def _take(process: int) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Return shared state, meta and constants that `process` sends."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.recv(lengths, process)
    parts = [torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()]
    for part in parts:
        dist.recv(part, process)
    meta, tensors = json.loads(parts[0].numpy().tobytes()), unpacked(parts[1].numpy().tobytes())
    found: dict[str, dict[str, Tensor]] = {"shared": {}, "constant": {}}
    for name, x in tensors.items():
        kind, _, own = name.partition(".")
        found[kind][own] = x
    return found["shared"], meta, found["constant"]
