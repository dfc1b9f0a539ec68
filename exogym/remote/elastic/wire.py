"""The wire of a run whose members change: rows that nobody holds are as nobody's, and a lost member ends the epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.base import pulse
from exogym.communicator import Parcel
from exogym.engine.wire import ProcessWire
from exogym.errors import WorkerError
from exogym.remote.elastic.member import Epoch, Member

Result = TypeVar("Result")


class Lost(WorkerError):
    """A member of the epoch cannot be reached any more."""


class ElasticWire(ProcessWire):
    """A `ProcessWire` over the members of an epoch; `take_part` makes it another epoch's, with the same rows here.

    Args:
        member: this process's seat.
        nodes_of: seat to the ids of its nodes, for all seats.
        epoch: the first one; native: as for `ProcessWire`.

    Every call raises `Lost` where a member cannot be reached.
    """

    def __init__(self, member: Member, nodes_of: Sequence[Sequence[int]], epoch: Epoch, native: bool = False):
        self.member, self.nodes_of = member, [list(ids) for ids in nodes_of]
        super().__init__([self.nodes_of[seat] for seat in epoch.members], native=native)
        self.take_part(epoch)

    def take_part(self, epoch: Epoch) -> None:
        """Go on with the members of `epoch`, whose process group is the default one now."""
        self.epoch = epoch
        self.placement = [self.nodes_of[seat] for seat in epoch.members]
        self.owner = {i: process for process, ids in enumerate(self.placement) for i in ids}
        self.process = dist.get_rank()
        self.overlaps = False

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def present(self) -> list[int]:
        """The nodes of the members."""
        return sorted(self.owner)

    def asked_to_stop(self) -> bool:
        return self.member.lost

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
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
        return self.or_lost(lambda: super(ElasticWire, self).reduce(x, ids, op, weights, everywhere))

    def agree(self, flag: bool) -> bool:
        return self.or_lost(lambda: super(ElasticWire, self).agree(flag))

    def _carry(self, given: Mapping[int, Tensor], moves: Sequence[tuple[int, int, Parcel]]) -> dict[int, Tensor]:
        return self.or_lost(lambda: super(ElasticWire, self)._carry(given, moves))

    def or_lost(self, call: Callable[[], Result]) -> Result:
        """Do what needs all members.

        Raises:
            Lost: one of them is gone; torch knows many words for that, all of them a RuntimeError.
        """
        if self.member.lost:
            raise Lost("a member of the run is lost")
        try:
            with pulse.at(pulse.WAITING):
                return call()
        except RuntimeError as error:
            raise Lost(f"a member of the run cannot be reached: {error}") from error
