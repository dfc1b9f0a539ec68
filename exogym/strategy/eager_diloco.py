"""DiLoCo with eager updates: averages arrive a whole round late, but each node uses its own share at once.

Kale et al., Eager Updates for Overlapped Communication and Computation in DiLoCo, arXiv:2502.12996. Each node has its
own outer parameters theta_i. After the H steps of round r, Delta_i = theta_i - (node i's trained parameters):

    E_i     = (1/N) Delta_i^(r) + (1/N) sum_{j != i} Delta_j^(r-1)     # the other nodes' share is one round old
    theta_i <- OuterOpt_i(theta_i, E_i)                                # and training continues from theta_i
    nodes send the mean of Delta_i^(r), and need it after round r + 1

In the first round the other nodes' share is 0. Payload: P b bytes per node every H steps, for P parameters of b bytes;
ring all-reduce, tx = rx = 2 (N-1)/N P b. The nodes' parameters are never equal, so evaluation uses their mean. Averages
that are pending at the end of training are not used.

If nodes are absent, the mean is over the n present ones, and 1/N becomes 1/n. A node that misses a synchronization
continues with its trained parameters and its unused average. A node that was down receives the parameters of a node
that stayed as its theta_i; it has no unused average, and its outer optimizer starts afresh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.state import Tensors, below
from exogym.strategy.outer import OuterOptimizer, OuterSteps
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class EagerCommunicator(OuterSteps):
    """Take DiLoCo's eager outer step after every step divisible by H. `OuterSteps` describes the arguments."""

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps, overlap_steps=self.interval_steps)]

    def couples_every(self, N: int) -> float:
        return 2 * self.interval_steps if N > 1 else self.interval_steps

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.theta = [block.zeros().copy_(block.params) for block in fleet.blocks]
        self.others = [block.zeros() for block in fleet.blocks]  # the other nodes' part of the mean in flight
        self.row_state = {f"theta.{b}": x for b, x in enumerate(self.theta)}
        self.row_state |= {f"others.{b}": x for b, x in enumerate(self.others)}
        self.comm, self.flight = fleet.comm, fleet.comm.new_flight()
        self.sent: list[tuple[Tensor, Tensor]] = []  # each block's mean on its way, and the nodes' own parts of it
        self.hidden, self.blocks = fleet.hidden, fleet.blocks
        self.optimizers = [self._optimizer(row) for row in range(len(fleet))]

    def _optimizer(self, row: int) -> OuterOptimizer:
        named = {
            slot.name: view[row]
            for block, theta in zip(self.blocks, self.theta, strict=True)
            for slot, view in block.views(theta)
        }
        return OuterOptimizer(self.rule, named, self.hidden, self.outer_rounds)

    def communicate(self, fleet: Fleet, step: int) -> None:
        fleet.comm.arrive(self.flight)  # the last round's average
        self._take()
        rows, share = rows_of(fleet, fleet.comm.present), self._shares(fleet)
        eager = []
        for block, theta, others in zip(fleet.blocks, self.theta, self.others, strict=True):
            delta = theta - block.params
            with fleet.comm.on_its_way(self.flight):
                mean = fleet.comm.all_reduce(delta, "mean", weights=self.weights)
            is_carried = fleet.comm.are_under_way(self.flight)  # then delta is still being read
            own = delta * share.to(delta) if is_carried else delta.mul_(share.to(delta))
            eager.append(others + own)
            if is_carried:
                self.sent.append((mean, own))
            else:
                others[rows] = (mean - own)[rows]
        for row in rows:
            parts = zip(fleet.blocks, eager, strict=True)
            gradients = [view[row] for block, x in parts for _, view in block.views(x)]
            self.optimizers[row].step(gradients, self.round_of(step))
            for block, theta in zip(fleet.blocks, self.theta, strict=True):
                block.params[row] = theta[row]
        fleet.synchronise_buffers()

    def _settle(self) -> None:
        self.comm.settle(self.flight)
        self._take()

    def _take(self) -> None:
        """Store the other nodes' share of the averages that this process sent last, which have arrived."""
        for others, (mean, own) in zip(self.others, self.sent, strict=bool(self.sent)):
            torch.sub(mean, own, out=others)
        self.sent = []

    def _shares(self, fleet: Fleet) -> Tensor:
        """Return each local row's averaging weight, (rows, 1)."""
        weights = fleet.comm.weights if self.weights is None else self.weights
        weights = torch.ones(fleet.num_nodes, dtype=torch.float64) if weights is None else weights.double()
        return (weights[fleet.ranks] / weights[fleet.comm.present].sum())[:, None]

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self._settle()
        for row in rows_of(fleet, nodes):
            for block, theta, others in zip(fleet.blocks, self.theta, self.others, strict=True):
                theta[row] = block.params[row]
                others[row] = 0
            self.optimizers[row] = self._optimizer(row)

    def row(self, row: int) -> Tensors:
        self._settle()
        return super().row(row) | {f"outer.{name}": x for name, x in self.optimizers[row].state().items()}

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        if not name.startswith("outer."):
            return super().cut(name, shape)
        slots = [(block.layout, slot) for block in self.blocks for slot in block.layout]
        return self.optimizers[0].cut(name.removeprefix("outer."), shape, slots)

    def load_row(self, row: int, tensors: Tensors) -> None:
        super().load_row(row, tensors)
        self.optimizers[row].load_state(below("outer.", tensors))
