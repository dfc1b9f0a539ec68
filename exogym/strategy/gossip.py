"""D-PSGD: each node averages with its neighbors on a graph, without a server or an all-reduce.

Lian et al., Can decentralized algorithms outperform centralized algorithms?, arXiv:1705.09056. W holds symmetric
weights whose rows sum to 1, by Metropolis's rule on the graph (`exogym.strategy.graphs`). After every step divisible
by H

    theta_i <- sum_j W_ij theta_j                       # adapt, then combine: after the inner step

theta_i are node i's parameters. The paper's order is theta_i <- sum_j W_ij theta_j - gamma g_i(theta_i), where gamma is
the learning rate and g_i the gradient at theta_i before the mix. Optimizer moments stay local. The evaluation model is
the mean of all nodes; mixing with W does not change this mean.

Payload deg P b bytes every H steps for a node with deg neighbors, for P parameters of b bytes: tx = rx = deg P b,
because the node sends a message to each neighbor. A node waits only for its neighbors.

With absent nodes, W is computed on the graph between the present nodes. A node without present neighbors trains alone.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_choice
from exogym.strategy.communicate_optimize import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    GradientModule,
    PeriodicModule,
)
from exogym.strategy.graphs import GRAPHS, Edges, diameter, edges_of, metropolis
from exogym.strategy.rounds import RoundLength, check_one_length
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

ORDERS = ("adapt_then_combine", "combine_then_adapt")


class Neighbors:
    """A graph over the nodes, along which neighbors mix parameters and buffers."""

    def __init__(self, graph: Any):
        if isinstance(graph, str):
            check_choice("graph", graph, GRAPHS)
        self.graph = graph
        self.edges: Edges | None = None

    def start(self, fleet: Fleet, seed: int) -> None:
        self.seed = seed
        self.edges = None if self.graph == "matching" else edges_of(self.graph, fleet.num_nodes, seed)

    def traffic(self, P: float, N: int, b: float, H: int) -> list[Traffic]:
        degree = 2 * len(edges_of(self.graph, N)) / N
        return [Traffic("mix", degree * P * b, H, fan=degree)] if degree else []

    def couples_every(self, N: int, H: int) -> float:
        """Return the steps until every node's parameters have reached all nodes.

        These are H times the largest number of hops between two nodes. With graph="matching" the result is H ceil(log2
        N).
        """
        if self.graph == "matching":
            return H * math.ceil(math.log2(max(N, 2)))
        return H * max(1, diameter(self.graph, N))

    def mix(self, fleet: Fleet, turn: int) -> None:
        """Mix the rows of the present nodes. `turn` counts the mixes from 0."""
        W = self.weights(fleet, turn)
        mixed = fleet.comm.mix_all([block.params for block in fleet.blocks], W)
        for block, rows in zip(fleet.blocks, mixed, strict=True):
            block.params.copy_(rows)
        self.mix_buffers(fleet, W)

    def weights(self, fleet: Fleet, turn: int) -> Tensor:
        """Return W, (N, N), for the present nodes. `turn` counts the mixes from 0."""
        edges = edges_of(self.graph, fleet.num_nodes, self.seed, turn) if self.edges is None else self.edges
        return metropolis(edges, tuple(fleet.comm.present), fleet.num_nodes)

    def mix_buffers(self, fleet: Fleet, W: Tensor) -> None:
        """Mix the floating-point buffers of the present nodes by `W`."""
        floating = [rows for rows in fleet.buffers.values() if rows.is_floating_point()]
        with fleet.comm.counted_as("buffers"):
            for rows, new in zip(floating, fleet.comm.mix_all(floating, W) if floating else (), strict=True):
                rows.copy_(new)


class GossipCommunicator(PeriodicModule):
    """Mix each node's parameters with its neighbors' parameters after every step divisible by H."""

    def __init__(self, graph: Any, H: RoundLength):
        super().__init__()
        self.take_rounds(H)
        self.neighbors = Neighbors(graph)

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return self.neighbors.traffic(P, N, b, self.interval_steps)

    def couples_every(self, N: int) -> float:
        return self.neighbors.couples_every(N, self.interval_steps)

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.neighbors.start(fleet, run.seed)

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.neighbors.mix(fleet, self.round_of(step))


class GossipBeforeStep(GradientModule):
    """Mix neighbors' parameters at every step divisible by H, after the gradient and before the inner step.

    The paper mixes in this order.
    """

    def __init__(self, graph: Any, H: int):
        super().__init__()
        check_one_length(H, type(self).__name__)
        self.H, self.neighbors = H, Neighbors(graph)

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return self.neighbors.traffic(P, N, b, self.H)

    def couples_every(self, N: int) -> float:
        return self.neighbors.couples_every(N, self.H)

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.neighbors.start(fleet, run.seed)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        if step % self.H == 0:
            self.neighbors.mix(fleet, step // self.H - 1)


class GossipStrategy(CommunicateOptimizeStrategy):
    """D-PSGD: nodes average with their neighbors on a graph.

        theta_i <- sum_j W_ij theta_j          W: Metropolis's weights on the graph

    theta_i are the parameters of node i. Payload: deg P b bytes every H steps for a node with deg neighbors, for P
    parameters of b bytes. The evaluation model is the nodes' mean.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.
        graph: "ring", "torus", "exponential", "random", "complete", "matching" (pairs drawn anew each time), or a
            networkx graph of the nodes 0, 1, ...; see `exogym.strategy.graphs.edges_of`.
        H: steps from one average to the next.
        order: "adapt_then_combine" (mix after the inner step), or "combine_then_adapt", the paper's order. The two
            orders give different results.

    >>> strategy = GossipStrategy("sgd", graph="torus", lr=0.1)
    """

    name, title, paper, payload = "gossip", "D-PSGD", "arXiv:1705.09056", "2 P b / H"
    ranges = ()
    equation = "theta_i <- sum_j W_ij theta_j every H steps, W Metropolis's on the graph"
    needs = "each node its neighbors (two on a ring) every H steps"
    identities = ("complete graph, SGD = ddp", "N=1 = the inner optimizer", "the mean over the nodes is kept")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        graph: Any = "ring",
        H: RoundLength = 1,
        *,
        order: str = "adapt_then_combine",
        **options: Unpack[InnerOptions],
    ):
        check_choice("order", order, ORDERS)
        late = order == "adapt_then_combine"
        after: list[CommunicationModule] = [GossipCommunicator(graph, H)] if late else []
        before = [] if late else [GossipBeforeStep(graph, H)]  # type: ignore[arg-type]
        super().__init__(inner_optim, after, gradient_modules=before, **options)
