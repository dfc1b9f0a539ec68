"""Base class of federated modules that act at the end of an `AveragingCommunicator`'s rounds.

The `AveragingCommunicator` decides when rounds end, which clients take part, how many steps each takes, and the
weights. A module before it in the strategy's list sees the clients' results, and a module after it sees the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import shared_row
from exogym.strategy.capabilities import ChoosesClients
from exogym.strategy.communicate_optimize import CommunicationModule
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.traffic import Traffic


class RoundModule(CommunicationModule, ChoosesClients):
    """Base class of modules that act at the end of every round of `average`, a module of the same strategy."""

    weighted_means = True

    def __init__(self, average: AveragingCommunicator):
        super().__init__()
        self.average = average

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []

    def couples_every(self, N: int) -> float:
        return math.inf

    def next_event(self, step: int) -> int:
        return self.average.next_event(step)

    def seats(self, num_nodes: int) -> int | None:
        return self.average.seats(num_nodes)

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        return self.average.seated(step)

    def members(self, fleet: Fleet, step: int) -> list[int]:
        """Return the present clients of the round that ends after `step`."""
        return [i for i in self.average.clients(self.average.round_of(step)) if i in fleet.comm.present]

    def all_reduce(self, fleet: Fleet, x: Tensor, op: str, members: list[int], weights: Tensor | None = None) -> Tensor:
        """Reduce `x`, (rows, ...), over the nodes `members`, and return the result, (1, ...), in every process.

        Sampled clients send to the server; otherwise nodes use a ring.
        """
        comm, way = fleet.comm, "server" if self.average.samples else "ring"
        if members == comm.present:  # every process has the result
            return shared_row(fleet, comm.all_reduce(x, op, weights=weights, algorithm=way))
        result = comm.all_reduce(x, op, groups=[members], weights=weights, algorithm=way)
        return comm.wire.rows(result, members[:1])


def with_gradient(grads: Sequence[Tensor | None], *others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradients in `grads` that are not None, and the matching entries of each list in `others`."""
    known = [(k, g) for k, g in enumerate(grads) if g is not None]
    return [[g for _, g in known], *([x[k] for k, _ in known] for x in others)]
