"""D-PSGD: each node averages with its neighbors on a graph, without a server or an all-reduce.

Lian et al., Can decentralized algorithms outperform centralized algorithms?, arXiv:1705.09056. W are Metropolis weights
on the graph: symmetric, with rows that sum to 1 (`exogym.strategy.graphs`). After every step divisible by H

    theta_i <- sum_j W_ij theta_j                       # adapt, then combine: after the inner step

theta_i are node i's parameters. (The paper mixes between the gradient and the inner step.) Optimizer moments stay
local. Evaluation uses the mean of all nodes, which mixing with W does not change.

Payload: deg P b bytes every H steps for a node with deg neighbors, for P parameters of b bytes; tx = rx = deg P b,
because the node sends a message to each neighbor. A node waits only for its neighbors.

If nodes are absent, W is computed on the graph of the present nodes. A node without present neighbors trains alone.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_choice
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.graphs import GRAPHS, diameter, edges_of, metropolis
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class GossipCommunicator(PeriodicModule):
    """Mix each node's parameters and buffers with its neighbors' after every step divisible by H."""

    def __init__(self, graph: Any, H: RoundLength):
        super().__init__()
        self.take_rounds(H)
        if isinstance(graph, str):
            check_choice("graph", graph, GRAPHS)
        self.graph = graph

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        degree = 2 * len(edges_of(self.graph, N)) / N
        return [Traffic("mix", degree * P * b, self.interval_steps, fan=degree)] if degree else []

    def couples_every(self, N: int) -> float:
        """Return the number of steps until every node's parameters have reached all nodes."""
        if self.graph == "matching":
            return self.interval_steps * math.ceil(math.log2(max(N, 2)))
        return self.interval_steps * max(1, diameter(self.graph, N))

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.edges = None if self.graph == "matching" else edges_of(self.graph, fleet.num_nodes, run.seed)

    def communicate(self, fleet: Fleet, step: int) -> None:
        W = self.mixing(fleet, step)
        mixed = fleet.comm.mix_all([block.params for block in fleet.blocks], W)
        for block, rows in zip(fleet.blocks, mixed, strict=True):
            block.params.copy_(rows)
        self.mix_buffers(fleet, W)

    def mixing(self, fleet: Fleet, step: int) -> Tensor:
        """Return W, (N, N), for the present nodes after `step`."""
        edges = self.edges
        if edges is None:
            edges = edges_of(self.graph, fleet.num_nodes, self.run.seed, self.round_of(step))
        return metropolis(edges, tuple(fleet.comm.present), fleet.num_nodes)

    def mix_buffers(self, fleet: Fleet, W: Tensor) -> None:
        """Mix the floating-point buffers of the present nodes by `W`."""
        floating = [rows for rows in fleet.shared_buffers.values() if rows.is_floating_point()]
        with fleet.comm.counted_as("buffers"):
            for rows, new in zip(floating, fleet.comm.mix_all(floating, W) if floating else (), strict=True):
                rows.copy_(new)


class GossipStrategy(CommunicateOptimizeStrategy):
    """D-PSGD: nodes average with their neighbors on a graph.

    Use it when there is no server, or an all-reduce over all nodes is slow.

        theta_i <- sum_j W_ij theta_j          W: Metropolis weights on the graph

    theta_i are the parameters of node i; evaluation uses the nodes' mean. Payload: deg P b bytes every H steps for a
    node with deg neighbors, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.
        graph: "ring", "torus", "exponential", "random", "complete", "matching" (new random pairs each time), or a
            networkx graph of the nodes 0, 1, ...; see `exogym.strategy.graphs.edges_of`.
        H: steps between two averages.

    >>> strategy = GossipStrategy("sgd", graph="torus", lr=0.1)
    """

    temporary_rows = 1.8
    name, title, paper, payload = "gossip", "D-PSGD", "arXiv:1705.09056", "2 P b / H"
    ranges = ()
    equation = "theta_i <- sum_j W_ij theta_j every H steps; W: Metropolis weights"
    needs = "neighbors (two on a ring), every H steps"
    identities = ("complete graph, SGD = ddp", "N=1 = inner optimizer", "keeps the nodes' mean")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        graph: Any = "ring",
        H: RoundLength = 1,
        **options: Unpack[InnerOptions],
    ):
        super().__init__(inner_optim, [GossipCommunicator(graph, H)], **options)
