"""Stochastic gradient push: gossip along a directed graph, with weights that undo its bias.

Assran et al., Stochastic gradient push for distributed deep learning, arXiv:1811.10792. Node i has a vector x_i and a
weight w_i, initially 1, and trains z_i = x_i / w_i. The matrix (P_ij) has columns that sum to 1. After every step that
H divides,

    x_i <- sum_j P_ij x_j,   w_i <- sum_j P_ij w_j,   z_i <- x_i / w_i

Before this exchange, x_i takes the inner optimizer's change of z_i: if z_i took the step -gamma g_i(z_i), so does x_i.
Each node splits its x_i and w_i evenly between itself and its takers, the nodes to which it sends, so the sums of all
x_i and of all w_i (which is N) do not change. Without w_i, the mean would be biased. Evaluation uses the mean of the
z_i.

If H > 1, a node takes local steps on z_i between two exchanges at the full learning rate, and at the exchange x_i takes
their sum. If w_i is not 1, because the node sends more or less than it receives, z_i continues from x_i / w_i, not from
the end of its local steps. The paper has H = 1, where no gradient is computed between the change of x_i and the
exchange. An alternative would add every local step to x_i at once, so that z_i moves at 1 / w_i of the learning rate;
with quadratic losses and an uneven graph, it ended further from the optimum and diverged at lower learning rates.

Payload: P b + 8 bytes per node and taker every H steps, for P parameters and the 8 bytes of w_i. tx is the payload, and
rx the same for each giver, a node that sends to this node. By default, node i has one taker at exchange t = 0, 1, ...,
the node i + 2^(t mod ceil(log2 N)), and after ceil(log2 N) exchanges without training all N = 2^k nodes hold the exact
mean. A node waits only for its givers. The paper's overlap of several steps is not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_choice
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.graphs import check_graph, hops_of
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

DIRECTED = ("exponential", "ring", "complete")


def takers_of(graph: Any, num_nodes: int, turn: int = 0) -> list[list[int]]:
    """Return each node's takers at exchange number `turn`, the nodes to which it sends on a directed graph.

    Args:
        graph: "exponential" (node i sends to i + 2^(turn mod ceil(log2 N))), "ring" (to i + 1), "complete" (to all
            others), or a networkx graph of the nodes 0, 1, ...

    >>> takers_of("exponential", 5, turn=1)
    [[2], [3], [4], [0], [1]]
    """
    n = num_nodes
    if graph == "complete":
        return [[j for j in range(n) if j != i] for i in range(n)]
    if isinstance(graph, str):
        check_choice("graph", graph, DIRECTED)
        hops = hops_of(n) if graph == "exponential" else [1]
        return [[(i + hops[turn % len(hops)]) % n] if n > 1 else [] for i in range(n)]
    check_graph(graph, n, directed=True)
    near = graph.successors if graph.is_directed() else graph.neighbors
    return [sorted(j for j in near(i) if j != i) for i in range(n)]


def pushing(takers: Sequence[Sequence[int]]) -> Tensor:
    """Return the shares P, (N, N): `P[i, j]` is the share of node j's values that node i receives.

    Each node splits its values evenly between itself and its takers, so columns sum to 1.
    """
    P = torch.zeros(len(takers), len(takers), dtype=torch.float64)
    for i, others in enumerate(takers):
        P[[i, *others], i] = 1 / (1 + len(others))
    return P


class PushSum(PeriodicModule):
    """Exchange weighted parameters along a directed graph after every step divisible by H (push-sum).

    State: the vector x_i and the weight w_i of each node. The fleet's rows are z_i = x_i / w_i.
    """

    def __init__(self, graph: Any, H: RoundLength):
        super().__init__()
        if isinstance(graph, str):
            check_choice("graph", graph, DIRECTED)
        self.take_rounds(H)
        self.graph = graph

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        takers = sum(map(len, takers_of(self.graph, N))) / N
        return [Traffic("mix", takers * (P * b + 8), self.interval_steps, fan=takers)] if takers else []

    def couples_every(self, N: int) -> float:
        turns = {"complete": 1, "ring": N - 1}.get(self.graph) if isinstance(self.graph, str) else None
        return self.interval_steps * max(1, math.ceil(math.log2(max(N, 2))) if turns is None else turns)

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.takers = None if isinstance(self.graph, str) else takers_of(self.graph, fleet.num_nodes)
        self.x = [block.zeros().copy_(block.params) for block in fleet.blocks]
        self.w = torch.ones(len(fleet), 1, dtype=torch.float64)
        self.row_state = {f"x.{b}": x for b, x in enumerate(self.x)} | {"w": self.w}

    def communicate(self, fleet: Fleet, step: int) -> None:
        takers = takers_of(self.graph, fleet.num_nodes, self.round_of(step)) if self.takers is None else self.takers
        P = pushing(takers)
        for block, x in zip(fleet.blocks, self.x, strict=True):
            x.add_(block.params - x / self.w.to(x))  # add the change of z since the last exchange
        *mixed, w = fleet.comm.mix_all([*self.x, self.w[:, 0]], P)
        self.w.copy_(w[:, None])
        for block, x, new in zip(fleet.blocks, self.x, mixed, strict=True):
            x.copy_(new)
            block.params.copy_(x / self.w.to(x))


class GradientPushStrategy(CommunicateOptimizeStrategy):
    """Stochastic gradient push: nodes train, and send shares of their parameters along a directed graph.

    Use it on one-way or uneven links.

        x_i <- sum_j P_ij x_j;   w_i <- sum_j P_ij w_j;   z_i <- x_i / w_i

    Node i holds the vector x_i and the weight w_i and trains z_i; P_ij is the share of node j's values that node i
    receives. Payload: P b + 8 bytes per node and taker every H steps, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.
        graph: "exponential" (one taker at a time, another at each exchange), "ring" (i to i + 1), "complete", or a
            networkx graph of the nodes 0, 1, ..., whose edges point from a giver to its taker.
        H: steps between two exchanges, in which z_i takes local steps at the full learning rate for any w_i.

    >>> strategy = GradientPushStrategy("sgd", lr=0.1)
    """

    name, title, paper, payload = "sgp", "Stochastic gradient push", "arXiv:1811.10792", "(P b + 8) / H"
    tried = ()
    ranges = ()
    equation = "x_i <- sum_j P_ij x_j; w_i <- sum_j P_ij w_j; z_i <- x_i / w_i, which is trained"
    needs = "one receiver and one sender per node, every H steps"
    identities = (
        "complete graph, SGD = ddp",
        "N=2^k, exponential graph: the exact mean after k turns",
        "keeps the sums of x and w",
        "N=1 = inner optimizer",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        graph: Any = "exponential",
        H: RoundLength = 1,
        **options: Unpack[InnerOptions],
    ):
        super().__init__(inner_optim, [PushSum(graph, H)], **options)
