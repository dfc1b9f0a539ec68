"""Training that continues when hosts are lost, and readmits hosts that return.

An anchor is a step at which no message between processes is in transit. Every process keeps copies of its nodes' state
at the last two anchors. When a process is lost, the others return to the last anchor that all of them have, and from
the next step on the lost process's nodes are absent, as with `Faults`, so a simulation with the recorded outages
reproduces the run. A host that returns joins at an anchor and copies the other processes' state, as in simulation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exogym.core import combinations
from exogym.core.base.devices import CPU
from exogym.core.communicator import Wire, barrier, gather, ship, tell
from exogym.core.engine.equal_start import start_equal, sum_of
from exogym.core.fleet.state import Tensors
from exogym.core.record.run_folder import RunFolder
from exogym.core.saving.checkpoint import differences
from exogym.core.saving.checkpoint_files import Snapshot
from exogym.core.saving.keepers import everywhere, find_keepers, holding
from exogym.core.saving.snapshots import put_back, snapshot_of
from exogym.core.training.assembly import assemble
from exogym.core.training.driver import meet
from exogym.core.training.loop import TrainingLoop
from exogym.core.training.options import FitOptions, Subject
from exogym.core.training.resuming import FREE, Kept, constants
from exogym.errors import CheckpointError, ModelError, WorkerError
from exogym.faults import Outages
from exogym.logger.base import check_writable
from exogym.machines.remote.elastic.member import Generation, Member
from exogym.machines.remote.elastic.wire import ElasticWire, MemberLost
from exogym.machines.remote.world import own_wire

ANCHOR_STEPS = 10  # minimum steps between two anchors, which limits the cost of copies
KEPT_ANCHORS = 2  # no process is more than one anchor ahead of another
TRIES = 3  # generations of the same members without progress after which the failure counts as the run's own error


def check(options: FitOptions) -> None:
    """Reject options with which a run can't continue after losing a host.

    Raises:
        ArgumentError: an option or the strategy doesn't support lost hosts.
    """
    combinations.check(options.features() | {"min_hosts": "min_hosts"})


class _Planned(Exception):
    """All members are at the same step, and newcomers wait."""


class Assembly:
    """Assemble a run for `LocalTrainer` in one process, while other processes may be lost or come back.

    Attributes:
        recovery: the assembled run, which continues after losses, or None until the run is assembled.
    """

    def __init__(self, member: Member):
        self.member = member
        self.recovery: Recovery | None = None

    def __call__(
        self, subject: Subject, options: FitOptions, device: torch.device, max_stretch: int | None, wire: Wire
    ) -> TrainingLoop:
        assert isinstance(wire, ElasticWire)
        check(options)
        options = dataclasses.replace(options, faults=Outages())
        make = functools.partial(assemble, subject, device=device, max_stretch=max_stretch, wire=wire)
        if wire.generation is None:
            self.recovery = self._join(options, make, wire)
        else:
            self.recovery = self._begin(subject, lambda: make(options=options), wire)
        return self.recovery.loop

    @property
    def is_main(self) -> bool:
        """Whether this process has the lowest rank of the processes that train together."""
        return self.recovery is not None and self.recovery.wire.is_main

    def outages(self) -> dict[str, list[list[int | None]]]:
        """Return {node id: outages} for all nodes that were ever absent, as JSON values."""
        away = {} if self.recovery is None else self.recovery.outages.as_absent()
        return {str(node): [list(span) for span in spans] for node, spans in away.items()}

    def _begin(self, subject: Subject, make: Callable[[], TrainingLoop], wire: ElasticWire) -> Recovery:
        """Assemble the run together with the other initial members, and again if one of them is lost."""
        while True:
            try:
                wire.or_lost(lambda: start_equal(subject.model, own_wire()))
                recovery = Recovery(make(), wire)
                break
            except MemberLost:
                wire.take_part(self.member.ready("fresh"))
        step, present = recovery.loop.step, wire.present
        if step and not set(recovery.up(step)) & set(present):
            raise CheckpointError(
                f"the checkpoint of step {step} has no rows for nodes {present}, which were absent at that step: "
                "start the other nodes' hosts as well"
            )
        return recovery

    def _join(self, options: FitOptions, make: Callable[..., TrainingLoop], wire: ElasticWire) -> Recovery:
        """Assemble this process's part alone, and join the training members."""
        alone = dataclasses.replace(
            options, save_dir=None, checkpoint_interval=None, resume=False, run_dir=None,
            placement=dataclasses.replace(options.placement, max_restarts=0, client_state_memory=None),
            logger=options.logger if self.member.rank == 0 else None,
            progress=options.progress if self.member.rank == 0 else False,
        )  # fmt: skip
        loop = make(options=alone)
        if options.save_dir is not None:
            kept = Kept(Path(options.save_dir), options.placement.keep_checkpoints, wire)
            loop.save_into(kept, options.checkpoint_interval)
            check_writable(options.save_dir, "save_dir")
        described = loop.description
        wire.take_part(self.member.ready("alone"))
        recovery = Recovery(loop, wire)
        recovery.join()
        if options.run_dir is not None and self.member.rank == 0:
            # When this process was lost, the others returned to the last step with its nodes, up to which its reports
            # hold.
            (first, _), *_ = reversed(recovery.outages.as_absent()[wire.ranks[0]])
            loop.observe(RunFolder(options.run_dir, loop.agenda.total_steps, True), described, first - 1)
        return recovery


class Recovery:
    """Run the training loop `loop`, and continue it when hosts are lost or come back."""

    def __init__(self, loop: TrainingLoop, wire: ElasticWire):
        self.loop, self.wire, self.member = loop, wire, wire.member
        assert loop.standing.outages is not None
        self.outages = loop.standing.outages
        self.anchors: dict[int, Snapshot] = {}
        self.joined = False
        self._stood: list[Any] = []  # (step, members) of the last generations without progress
        loop.take_over(self.train, self.at_rest)

    def train(self, run: Callable[[], bool]) -> bool:
        """Train to the end, or until a signal stops all processes. Return whether the run has finished."""
        if not self.joined:
            self._anchor()
            self._note_present()
            self.member.tell("training")
        while True:
            try:
                if not self.joined:
                    self.joined = True
                    barrier(self.wire)  # no process trains before all can receive a stop
                finished = run()
                if finished:
                    self.loop.keep_outcome()
                barrier(self.wire)  # no process leaves while another still needs it
                return finished
            except MemberLost as lost:
                self._regroup(lost)
            except _Planned:
                self._regroup(None)

    def at_rest(self) -> None:
        """Save the state if the last anchor is many steps ago. Interrupt training if processes are waiting to join.

        Training calls this method when all members are at the same step and no message is in transit.
        """
        loop = self.loop
        if not loop.driver.losses.under_way and set(self.up(loop.step + 1)) != set(self.wire.present):
            self._note_present()  # members that came back in the middle of a stretch
        if loop.step - max(self.anchors) >= ANCHOR_STEPS:
            self._anchor()
            if not loop.driver.losses.under_way and self.wire.agree(self.member.waiting):
                raise _Planned

    def join(self) -> None:
        """Copy the run's state from the other members to this process, and retry if a member is lost meanwhile."""
        rows = {rank: _copy(state) for rank, state in snapshot_of(self.loop.standing).rows.items()}
        while True:
            try:
                self._receive(rows)
                break
            except MemberLost:
                generation = self.member.ready("alone")
                self.wire.take_part(generation)
        self.joined = True

    # Inside

    def _anchor(self) -> None:
        found = snapshot_of(self.loop.standing)
        rows = {rank: _copy(state) for rank, state in found.rows.items()}
        meta = json.loads(json.dumps(found.meta))
        self.anchors[self.loop.step] = Snapshot(rows, _copy(found.shared), meta)
        for step in sorted(self.anchors)[:-KEPT_ANCHORS]:
            del self.anchors[step]

    def _regroup(self, lost: MemberLost | None) -> None:
        """Continue in the next generation, from a step that all members know.

        Raises:
            WorkerError: the same members failed together repeatedly.
        """
        while True:
            generation = self.member.ready("member", sorted(self.anchors), planned=lost is None)
            assert generation.step is not None
            standing = [generation.step, generation.members]
            self._stood = [*self._stood, standing] if standing in self._stood[-1:] else [standing]
            if len(self._stood) > TRIES:
                raise WorkerError(
                    f"the same ranks failed {TRIES} times after step {generation.step}; see their output: {lost}"
                ) from lost
            self.wire.take_part(generation)
            try:
                self._settle(generation)
                return
            except MemberLost as again:
                lost = again

    def _settle(self, generation: Generation) -> None:
        """Go to the generation's first step, and send the state to the newcomers."""
        assert generation.step is not None
        anchor = self.anchors[generation.step]
        self._stand(anchor)
        if generation.newcomers:
            self._share(generation, anchor)
        self._begin()

    def _share(self, generation: Generation, anchor: Snapshot | None) -> Snapshot:
        """Return the source's `anchor`, without rows, on the newcomers.

        It includes shared values that differ on a newcomer; pretrained weights that the newcomer has read are not sent.
        """
        at = generation.members.index(generation.source)
        meta = tell(self.wire, None if anchor is None else anchor.meta, at)
        constants = self._constants()
        sums = gather(self.wire, {name: sum_of(x) for name, x in constants.items()})
        far = [name for name, own in sums[at].items() if any(there.get(name) != own for there in sums)]
        shared = {} if anchor is None else anchor.shared | {name: constants[name] for name in far}
        source, *takers = (self.wire.nodes_of[rank][0] for rank in (generation.source, *generation.newcomers))
        return Snapshot({}, ship(self.wire, shared, source, takers), meta)

    def _constants(self) -> Tensors:
        """Return the tensors that all nodes share outside rows, under names that the shared state doesn't use."""
        found = constants(self.loop.worker.model, self.loop.fleet.buffers)
        return {f"constant {name}": x for name, x in found.items()}

    def _receive(self, rows: dict[int, dict[str, Tensor]]) -> None:
        """Adopt the source's state and step. The rows are restored later."""
        assert self.wire.generation is not None
        own, told = self.loop.description, self._share(self.wire.generation, None)
        meta = told.meta
        free = (*FREE, "chosen", "shared")
        theirs, mine = ({k: x for k, x in y.items() if k not in free} for y in (meta["description"], own))
        unlike = differences(theirs, mine)
        if unlike:
            lines = "\n  ".join(unlike)
            raise ModelError(
                "this process's values (now) differ from the other processes' values (saved): run the same script on "
                f"every host\n  {lines}"
            )
        with torch.no_grad():
            for name, x in self._constants().items():
                if name in told.shared:
                    x.copy_(told.shared.pop(name))
        self._stand(Snapshot(rows, told.shared, meta))
        self.loop.standing.take_description(meta["description"])
        self._begin()

    def _begin(self) -> None:
        """At a step that all members share, record the present members and each folder's keeper."""
        barrier(self.wire)
        self._note_present()
        if (kept := self.loop.standing.kept) is not None:
            everywhere(self.wire, lambda: check_writable(kept.folder, "save_dir"))
            kept.keepers = holding(kept.folder, self.wire, find_keepers(kept.folder, self.wire), kept.keepers)

    def _stand(self, anchor: Snapshot) -> None:
        loop, began = self.loop, bool(self.anchors)
        wall_s = loop.standing.wall_s() if began else anchor.meta["wall_s"]
        copy = Snapshot({rank: _copy(x) for rank, x in anchor.rows.items()}, _copy(anchor.shared), anchor.meta)
        put_back(loop.standing, copy)
        loop.standing.carry_on(wall_s)
        if began:
            loop.reports.restore(loop.history)  # reports of steps that are repeated are invalid
        self.anchors = {anchor.meta["step"]: anchor}

    def _note_present(self) -> None:
        """Mark the members' nodes as present from the next step on. No node comes back within a stretch."""
        step, present = self.loop.step, self.wire.present
        stayed = [node for node in self.up(step) if node in present]
        self.outages.note(step, present if not self.loop.driver.losses.under_way else stayed)
        meet(self.loop.fleet, stayed)

    def up(self, step: int) -> list[int]:
        """Return the nodes that are present in `step`."""
        assert self.loop.driver.attendance is not None
        return self.loop.driver.attendance.up(step)


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to(CPU, copy=True) for name, x in tensors.items()}
