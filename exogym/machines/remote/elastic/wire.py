"""The wire of a run whose members change: rows that nobody holds are as nobody's, and a lost member ends all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import Parcel, Wire
from exogym.core.engine.wire import ProcessWire
from exogym.errors import WorkerError
from exogym.machines.remote.elastic.member import Generation, Member

Result = TypeVar("Result")


class MemberLost(WorkerError):
    """A member of the generation cannot be reached any more."""


class ElasticWire(ProcessWire):
    """A `ProcessWire` over the members of a generation; `take_part` makes it another's, with the same rows here.

    Args:
        member: this process.
        nodes_of: for each rank in the run the ids of its nodes.
        generation: the first one; None: this process is alone until it takes part.
        native: as for `ProcessWire`.

    Every call raises `MemberLost` where a member cannot be reached.
    """

    def __init__(
        self, member: Member, nodes_of: Sequence[Sequence[int]], generation: Generation | None, native: bool = False
    ):
        Wire.__init__(self, nodes_of[member.rank], native)
        self.member, self.nodes_of, self.group = member, [list(ids) for ids in nodes_of], None
        self.owner, self._device = dict.fromkeys(self.ranks, 0), torch.device("cpu")
        self.generation = generation
        if generation is not None:
            self.take_part(generation)

    @property
    def total_rows(self) -> int:
        """How many rows the run has when all are there; who joins later is alone at first."""
        return sum(map(len, self.nodes_of))

    def take_part(self, generation: Generation) -> None:
        """Go on with the members of `generation`, whose process group is the default one now."""
        self.generation = generation
        self.placement = [self.nodes_of[rank] for rank in generation.members]
        self.owner = {i: process for process, ids in enumerate(self.placement) for i in ids}
        self.process = dist.get_rank()

    @property
    def is_shared(self) -> bool:
        return self.generation is not None

    @property
    def present(self) -> list[int]:
        """The nodes of the members."""
        return sorted(self.owner)

    def asked_to_stop(self) -> bool:
        return self.member.lost

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        if self.generation is None:
            return Wire.rows(self, x, ids)
        held = [i for i in ids if i in self.owner]
        if len(held) == len(ids):
            return self.or_lost(lambda: super(ElasticWire, self).rows(x, ids))
        found = x.new_full((len(ids), *x.shape[1:]), torch.nan if x.is_floating_point() else 0)
        if held:
            at = [k for k, i in enumerate(ids) if i in self.owner]
            found[at] = self.or_lost(lambda: super(ElasticWire, self).rows(x, held))
        return found

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        if self.generation is None:
            return Wire.reduce(self, x, ids, op, weights)
        return self.or_lost(lambda: super(ElasticWire, self).reduce(x, ids, op, weights, everywhere))

    def agree(self, flag: bool) -> bool:
        if self.generation is None:
            return flag
        return self.or_lost(lambda: super(ElasticWire, self).agree(flag))

    def _carry(self, given: Mapping[int, Tensor], moves: Sequence[tuple[int, int, Parcel]]) -> dict[int, Tensor]:
        return self.or_lost(lambda: super(ElasticWire, self)._carry(given, moves))

    def or_lost(self, call: Callable[[], Result]) -> Result:
        """Do what needs all members.

        Raises:
            MemberLost: one of them is gone; torch knows many words for that, all of them a RuntimeError.
        """
        if self.member.lost:
            raise MemberLost("a member of the run is lost")
        try:
            with pulse.at(pulse.WAITING):
                return call()
        except RuntimeError as error:
            raise MemberLost(f"a member of the run cannot be reached: {error}") from error
