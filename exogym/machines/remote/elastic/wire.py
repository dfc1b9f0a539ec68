"""The wire of a run with changing members. Absent members' rows take no part; a lost member ends every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import Move, Wire
from exogym.core.engine.wire import ProcessWire
from exogym.errors import WorkerError
from exogym.machines.remote.elastic.member import Generation, Member

Result = TypeVar("Result")


class MemberLost(WorkerError):
    """A member of the generation can no longer be reached."""


class ElasticWire(Wire):
    """A wire over a generation's members. `take_part` changes the generation and keeps the rows here.

    Args:
        member: this process.
        nodes_of: each rank's node ids.
        generation: the first generation; None: this process is alone until `take_part`.
        native: as for `ProcessWire`.

    Every call raises `MemberLost` if a member cannot be reached.
    """

    shares_memory = False

    def __init__(
        self, member: Member, nodes_of: Sequence[Sequence[int]], generation: Generation | None, native: bool = False
    ):
        super().__init__(nodes_of[member.rank], native)
        self.member, self.nodes_of, self.generation = member, [list(ids) for ids in nodes_of], generation
        self.asked_to_stop = lambda: member.lost
        self._members: ProcessWire | None = None
        if generation is not None:
            self.take_part(generation)

    @property
    def total_rows(self) -> int:
        """Number of rows in the whole run. A process that joins later is alone at first."""
        return sum(map(len, self.nodes_of))

    def take_part(self, generation: Generation) -> None:
        """Continue as a member of `generation`. Its process group becomes torch's default group."""
        self.generation = generation
        self._members = line = ProcessWire([self.nodes_of[rank] for rank in generation.members], native=self.native)
        line.around = self.or_lost
        self.placement, self.owner, self.process = line.placement, line.owner, line.process

    @property
    def is_shared(self) -> bool:
        return self.generation is not None

    @property
    def present(self) -> list[int]:
        """The members' nodes."""
        return sorted(self.owner)

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        if self._members is None:
            return super().rows(x, ids)
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
        return (
            super().reduce(x, ids, op, weights, everywhere)
            if self._members is None
            else self._members.reduce(x, ids, op, weights, everywhere)
        )

    def agree(self, flag: bool) -> bool:
        return super().agree(flag) if self._members is None else self._members.agree(flag)

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        return super().carry(given, moves) if self._members is None else self._members.carry(given, moves)

    def or_lost(self, call: Callable[[], Result], *about: Any) -> Result:
        """Make a call that needs all members.

        Raises:
            MemberLost: a member is gone. Torch reports this by various RuntimeErrors.
        """
        if self.member.lost:
            raise MemberLost("a member of the run is lost")
        try:
            with pulse.at(pulse.WAITING):
                return call()
        except RuntimeError as error:
            raise MemberLost(f"a member of the run cannot be reached: {error}") from error
