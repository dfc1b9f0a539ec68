"""Stochastic gradient push: gossip along a directed graph, with weights that undo its bias.

Assran et al., Stochastic gradient push for distributed deep learning, arXiv:1811.10792. Node i has x_i and a weight
w_i, 1 at first; it trains z_i = x_i / w_i. The columns of P sum to 1. After every step that H divides,

    x_i <- sum_j P_ij x_j,   w_i <- sum_j P_ij w_j,   z_i <- x_i / w_i

Before that, x_i takes the inner optimizer's change of z_i: a step -gamma g_i(z_i) of z_i is the same step of x_i. Each
node splits its x_i and w_i evenly between itself and its takers. So the sums over the nodes of x_i and of w_i are kept
(the second is N). Without w_i the mean would be biased. The model is the mean of the z_i.

With H > 1 a node's local steps between two exchanges are its inner optimizer's steps on z_i, at the full rate. At the
exchange x_i takes their sum. If w_i is not 1, z_i continues from x_i / w_i, not from the end of its local steps. This
happens if a node gives more or less than it receives, or nodes are absent. The paper has H = 1, where no gradient is
computed in between. Stepping x_i at every local step, so z_i at 1 / w_i of the rate, would be a different algorithm. On
quadratic clients and an uneven graph it ended further from the optimum and diverged at lower rates.

Payload P b + 8 bytes per node and taker every H steps (w_i in 8); tx the same, rx for each giver. By default a node has
one taker, i + 2^(t mod ceil(log2 N)): after ceil(log2 N) turns without training all N = 2^k nodes hold the exact mean.
A node waits for its givers only. The paper's overlap of several steps is not built.

With absent nodes: absent nodes keep x_i and w_i, and nobody gives to them. A returning node takes z from a node that
stayed, and keeps its weight. A node that starts anew (`forget`) takes the weight, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch

from exogym.core.fleet import Fleet
from exogym.core.fleet.presence import rows_of
from exogym.errors import check_choice
from exogym.strategy.averaging import AveragingOptions
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.graphs import DIRECTED, pushing, takers_of
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class PushSum(PeriodicModule):
    """Push-sum after every step divisible by H. State: x_i and w_i of each node; the fleet's rows are z_i."""

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
        self.w = torch.ones(len(fleet), 1, dtype=torch.float64, device=self.x[0].device)
        self.row_state = {f"x.{b}": x for b, x in enumerate(self.x)} | {"w": self.w}

    def communicate(self, fleet: Fleet, step: int) -> None:
        takers = takers_of(self.graph, fleet.num_nodes, self.round_of(step)) if self.takers is None else self.takers
        P = pushing(takers, fleet.comm.present)
        for block, x in zip(fleet.blocks, self.x, strict=True):
            x.add_(block.params - x / self.w.to(x))  # add the change of z since the last exchange
        *mixed, w = fleet.comm.mix_all([*self.x, self.w[:, 0]], P)
        self.w.copy_(w[:, None])
        for block, x, new in zip(fleet.blocks, self.x, mixed, strict=True):
            x.copy_(new)
            block.params.copy_(x / self.w.to(x))

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        rows = rows_of(fleet, nodes)
        for block, x in zip(fleet.blocks, self.x, strict=True):
            x[rows] = self.w[rows].to(x) * block.params[rows]


class GradientPushStrategy(CommunicateOptimizeStrategy):
    """Stochastic gradient push: nodes train while they push weighted shares to takers on a directed graph.

        x_i <- sum_j P_ij x_j;   w_i <- sum_j P_ij w_j;   z_i <- x_i / w_i, which node i trains

    Payload: P b + 8 bytes per node and taker every H steps.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.
        graph: "exponential" (one taker at a time, which changes), "ring" (i to i + 1), "complete", or a networkx graph
            of the nodes 0, 1, ..., along whose edges nodes give.
        H: steps from one exchange to the next. In between, z_i takes local steps at the full rate for every w_i.

    >>> strategy = GradientPushStrategy("sgd", lr=0.1)
    """

    name, title, paper, payload = "sgp", "Stochastic gradient push", "arXiv:1811.10792", "(P b + 8) / H"
    equation = "x_i <- sum_j P_ij x_j; w_i <- sum_j P_ij w_j; z_i <- x_i / w_i, which is trained"
    needs = "each node sends to one node and waits for one, every H steps"
    identities = (
        "complete graph, SGD = ddp",
        "N=2^k, exponential graph: the exact mean after k turns",
        "the sums of x and w are kept",
        "N=1 = the inner optimizer",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        graph: Any = "exponential",
        H: RoundLength = 1,
        **options: Unpack[AveragingOptions],
    ):
        super().__init__(inner_optim, [PushSum(graph, H)], **options)
