"""The engine and the wire of a run whose processes may be lost and return. Only present processes communicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import Move, Wire
from exogym.core.engine.engines import EngineOptions, Result
from exogym.core.engine.hangs import watched
from exogym.core.engine.wire import ProcessWire
from exogym.errors import WorkerError
from exogym.machines.remote.elastic.member import Generation, Member


class MemberLost(WorkerError):
    """A process that takes part in the run can no longer be reached."""


class ElasticWire(Wire):
    """A wire between the processes that currently train together, the generation's members.

    Every call raises `MemberLost` if a member can't be reached. `take_part` then connects this process with the next
    generation's members, and the process keeps its rows.

    Args:
        member: this process's connection to the membership server.
        nodes_of: each rank's node ids.
        generation: the first generation. If `generation` is None, this process is alone until it calls `take_part`.
        native: as for `ProcessWire`.
    """

    shares_memory = False

    def __init__(
        self, member: Member, nodes_of: Sequence[Sequence[int]], generation: Generation | None, native: bool = False
    ):
        super().__init__(nodes_of[member.rank], native)
        self.member, self.nodes_of, self.generation = member, [list(ids) for ids in nodes_of], generation
        self.asked_to_stop = lambda: member.lost
        self._members = Wire(nodes_of[member.rank], native)  # alone
        if generation is not None:
            self.take_part(generation)

    @property
    def total_rows(self) -> int:
        """Number of rows in the whole run, even before this process is connected to the others."""
        return sum(map(len, self.nodes_of))

    def take_part(self, generation: Generation) -> None:
        """Connect the members of `generation`, whose process group is now torch's default group."""
        self.generation = generation
        self._members = line = ProcessWire([self.nodes_of[rank] for rank in generation.members], native=self.native)
        line.around = self.or_lost
        self.placement, self.owner, self.process = line.placement, line.owner, line.process

    @property
    def is_shared(self) -> bool:
        return self.generation is not None

    @property
    def present(self) -> list[int]:
        """The ids of all present nodes: the nodes of the processes that currently take part."""
        return sorted(self.owner)

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        held = [i for i in ids if i in self.owner]
        if len(held) == len(ids):
            return self._members.rows(x, ids)
        found = x.new_full((len(ids), *x.shape[1:]), torch.nan if x.is_floating_point() else 0)
        if held:
            at = [k for k, i in enumerate(ids) if i in self.owner]
            found[at] = self._members.rows(x, held)
        return found

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        return self._members.reduce(x, ids, op, weights, everywhere)

    def agree(self, flag: bool) -> bool:
        return self._members.agree(flag)

    def all_to_all(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        return self._members.all_to_all(x, ids)

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        return self._members.carry(given, moves)

    def or_lost(self, call: Callable[[], Result]) -> Result:
        """Run `call`, which needs all members, and return its result.

        Raises:
            MemberLost: a member cannot be reached. Torch reports this by various RuntimeErrors.
        """
        if self.member.lost:
            raise MemberLost("another process of the run is lost")
        try:
            with pulse.at(pulse.WAITING):
                return call()
        except RuntimeError as error:
            raise MemberLost(f"another process of the run cannot be reached: {error}") from error


class Elastic:
    """The engine of a process in a run whose hosts may be lost. `NetworkTrainer` gives it to a `LocalTrainer`.

    Args:
        member: this process's connection to the membership server.
        size: number of processes in the complete run.
        generation: the members with which this process starts the run, or None if the run has already started and this
            process joins later.
    """

    shares_memory, runs_again, keeps_rows, is_here = False, False, True, True

    def __init__(self, member: Member, size: int, generation: Generation | None):
        self.member, self.size, self.generation = member, size, generation

    def applies(self, options: EngineOptions) -> bool:
        return True

    def processes(self, options: EngineOptions) -> int:
        return self.size

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        with watched(options.hang_s, self.member.rank):
            return body(ElasticWire(self.member, options.placement, self.generation, options.native))
