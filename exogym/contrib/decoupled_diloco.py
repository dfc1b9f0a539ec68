"""Decoupled DiLoCo: a server that needs only a quorum of nodes, waits a grace window, and weights nodes by tokens.

Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, arXiv:2604.21428. Node w pulls theta, takes H
inner steps to theta_w on its own clock, pushes Delta_w = theta_pulled - theta_w and waits. Once Q nodes have arrived,
the server waits another `grace_s` seconds for more nodes. Then it merges the Deltas of the set M of arrived nodes, with
the outer learning rate eta and the outer momentum beta:

    c_w = tokens of w's round;  s_w = steps of w's round;  weight_w = c_w c_w / s_w
    g = sum_M weight_w Delta_w / sum_M weight_w
    m <- beta m + g;  theta <- theta - eta (g + beta m)

Then the nodes of M pull theta. The other nodes' Deltas arrive later, as differences from the older theta that these
nodes pulled.

In the paper, fragments are synchronized one after the other while nodes continue, and the grace window adapts to the
remaining time. Here nodes send the whole model at once and wait for theta, and the window is constant. The paper's
second way of merging (by radius and direction) is not implemented.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count
from exogym.strategy.clocked import ClockedStrategy, ParameterServer, check_numbers, check_rounds
from exogym.strategy.strategy import InnerOptions


class QuorumServer(ParameterServer):
    """Decoupled DiLoCo's server, which holds the outer parameters theta and the Deltas for theta's next update.

    Attributes:
        m: the momentum, (P,) per block.
        total: the weighted sum of the waiting Deltas, (P,) per block.
        weight: the sum of the waiting Deltas' weights.

    >>> server = QuorumServer([torch.zeros(1)], eta=1.0, beta=0.0)
    >>> server.apply([torch.ones(1)], staleness=0, steps=10, batch_size=8)
    >>> server.apply([torch.full((1,), 4.0)], staleness=0, steps=5, batch_size=8)
    >>> server.release()
    >>> server.theta  # weights 10 : 5
    [tensor([-2.])]
    """

    kept, counted = ("theta", "m", "total"), ("weight", "version")

    def __init__(self, theta: list[Tensor], eta: float, beta: float):
        super().__init__(theta)
        self.m, self.total = ([torch.zeros_like(x) for x in theta] for _ in range(2))
        self.eta, self.beta, self.weight = eta, beta, 0.0

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        tokens = steps * batch_size  # up to a factor that all nodes share
        weight = tokens * tokens / steps
        for total, x in zip(self.total, delta, strict=True):
            total.add_(x, alpha=weight)
        self.weight += weight

    def release(self) -> None:
        if not self.weight:
            return
        for theta, m, total in zip(self.theta, self.m, self.total, strict=True):
            g = total.div_(self.weight)
            m.mul_(self.beta).add_(g)
            theta.sub_(g.add(m, alpha=self.beta), alpha=self.eta)
            total.zero_()
        self.weight, self.version = 0.0, self.version + 1


class DecoupledDiLoCoStrategy(ClockedStrategy):
    """Decoupled DiLoCo: a server takes the outer step as soon as Q nodes have arrived, without the slower nodes.

    Use it when some nodes are much slower than others or may stall.

        g = sum_M weight_w Delta_w / sum_M weight_w;   m <- beta m + g;   theta <- theta - eta (g + beta m)

    M is the set of arrived nodes. Delta_w is the theta that node w pulled minus its parameters after its round,
    weight_w is the squared number of the round's tokens divided by the round's steps, and m is the momentum. Evaluation
    uses theta.

    Bytes: P b up and P b down per round of a node, for P parameters of b bytes; payload P b / H per step of the node.
    Memory: one more row per node, for the theta that it pulled.

    Args:
        inner_optim: inner optimizer. Each node keeps its optimizer state between rounds.
        H: inner steps of a round.
        quorum: Q, the number of nodes that must have arrived. None means more than half of the nodes.
        grace_s: virtual seconds for which the server waits for more nodes after the Q-th arrival. 0 includes another
            node only if it arrives at the same moment as the Q-th node and Q is over 1; math.inf waits for all nodes.
        outer_lr, outer_momentum: eta and beta of the outer step.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The learning-rate schedule follows the
            fleet's step.

    A step of the fleet is N local steps, whichever nodes take them. The server uses every node's Delta, even a late
    one. At the end of training, nodes push their unfinished rounds, and the server merges these Deltas (`final_sync`).
    With Q = N the strategy is DiLoCo up to the order of a sum; with Q = 1 and `grace_s` = 0 it is asynchronous DiLoCo
    with rule="nesterov" and period 1. Planned faults (`fit(faults=...)`) and compute="vmap" are refused.

    Raises:
        ArgumentError: the quorum is larger than the number of nodes.

    >>> strategy = DecoupledDiLoCoStrategy(inner_optim='adamw', H=50, quorum=3, grace_s=0.5, lr=3e-4)
    """

    name, title, paper, payload = "decoupled_diloco", "Decoupled DiLoCo", "arXiv:2604.21428", "P b / H"
    tried = ()
    ranges = ("outer_lr=0.1..1.0", "outer_momentum=0.0..0.95")
    equation = "g = mean of Q or more Deltas, weighted by tokens^2/steps; m <- beta m + g; a step along m"
    needs = "a server and Q nodes at a time"
    identities = ("Q=N = diloco", "Q=1, grace 0 = async_diloco:rule=nesterov, K=1")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: int = 50,
        *,
        quorum: int | None = None,
        grace_s: float = 0.0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Unpack[InnerOptions],
    ):
        check_rounds(H, type(self).__name__)
        if quorum is not None:
            check_count("quorum", quorum)
        check_numbers(
            ("grace_s", grace_s, math.inf), ("outer_lr", outer_lr, math.inf), ("outer_momentum", outer_momentum, 1)
        )
        super().__init__(inner_optim, **options)
        self.H, self.quorum, self.grace_s = H, quorum, grace_s
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def quorum_of(self, num_nodes: int) -> int:
        if self.quorum is None:
            return num_nodes // 2 + 1
        if self.quorum > num_nodes:
            raise ArgumentError(f"quorum={self.quorum} is more than the {num_nodes} nodes of this run: lower it")
        return self.quorum

    def server(self, fleet: Fleet) -> QuorumServer:
        return QuorumServer([block.params[0] for block in fleet.blocks], self.outer_lr, self.outer_momentum)
