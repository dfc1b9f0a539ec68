"""What a federated method adds to rounds of averaging: a module that goes with an `AveragingCommunicator`.

The averaging decides when rounds end, who takes part, how much each client works, and what weighs how much. Modules
before it in a strategy see what the clients have come to, those after it the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.presence import shared_row
from exogym.strategy.capabilities import ChoosesClients
from exogym.strategy.communicate_optimize import CommunicationModule
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.traffic import Traffic


class RoundModule(CommunicationModule, ChoosesClients):
    """Acts at the end of every round of `average`, which is a module of the same strategy. Abstract."""

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
        """Return the clients of the round that ends after `step` that are there."""
        return [i for i in self.average.clients(self.average.round_of(step)) if i in fleet.comm.present]

    def all_reduce(self, fleet: Fleet, x: Tensor, op: str, members: list[int], weights: Tensor | None = None) -> Tensor:
        """Reduce `x` (rows, ...) among `members`, the way the averaging goes; return (1, ...) in every process."""
        comm, way = fleet.comm, "server" if self.average.samples else "ring"
        if members == comm.present:  # then everyone has the result
            return shared_row(fleet, comm.all_reduce(x, op, weights=weights, algorithm=way))
        result = comm.all_reduce(x, op, groups=[members], weights=weights, algorithm=way)
        return comm.wire.rows(result, members[:1])


def with_gradient(grads: Sequence[Tensor | None], *others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradients that there are, and what lies beside them in each of `others`."""
    there = [(k, g) for k, g in enumerate(grads) if g is not None]
    return [[g for _, g in there], *([x[k] for k, _ in there] for x in others)]
