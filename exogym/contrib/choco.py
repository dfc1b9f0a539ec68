"""CHOCO-SGD: neighbors mix copies of each other's parameters, which compressed differences keep up to date.

Koloskova, Stich, Jaggi, Decentralized stochastic optimization and gossip algorithms with compressed communication,
arXiv:1902.00340, algorithm 2. theta_i are node i's parameters, x_i is its neighbors' copy of them, C is a contraction
(`exogym.contrib.contractions`), W are Metropolis weights on the graph, and gamma is the consensus step size. After
every step divisible by H

    q_i = C(theta_i - x_i), which node i sends to its neighbors;   x_i <- x_i + q_i
    theta_i <- theta_i + gamma sum_j W_ij (x_j - x_i)

A node keeps its own x_i and s_i = sum_j W_ij x_j, which it updates by s_i <- s_i + sum_j W_ij q_j, so memory does not
grow with the number of neighbors. As in the authors' code, x_i starts as the initial parameters, which all nodes know.
(That code mixes with the copies of the round before, arXiv:1907.09356, so that messages can travel while nodes
compute.) Evaluation uses the mean of all nodes, which mixing does not change.

Payload: deg S bytes every H steps for a node with deg neighbors and messages of S bytes; tx = rx = deg S. Buffers are
mixed uncompressed, as in D-PSGD, and counted separately.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch

from exogym.contrib.contractions import Contraction
from exogym.core.compress import Compressor
from exogym.core.fleet import Block, Fleet
from exogym.errors import ArgumentError, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.gossip import GossipCommunicator
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class CompressedGossip(GossipCommunicator):
    """Mix the neighbors' copies after every step divisible by H.

    Args:
        graph, gamma, H: see `CHOCOStrategy`.
        contraction: C.

    State: x_i and s_i of each node, (rows, P) each, in fp32 or wider.
    """

    def __init__(self, graph: Any, contraction: Contraction, gamma: float, H: RoundLength):
        super().__init__(graph, H)
        if isinstance(graph, str) and graph == "matching":
            raise ArgumentError(
                "graph='matching' draws new neighbors each round, which have no copies: use another graph"
            )
        check_number("gamma", gamma, over=0, most=1, more=": the consensus step size")
        self.contraction, self.gamma = contraction, gamma

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return super().traffic(1.0, N, self.contraction.payload_bytes(P, b))

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.compressors: list[Compressor] = [self.contraction.of(block.layout) for block in fleet.blocks]
        for b, block in enumerate(fleet.blocks):
            wide = torch.promote_types(block.params.dtype, torch.float32)
            for name in ("copy", "sum"):
                self.row_state[f"{name}.{b}"] = block.params.to(wide, copy=True)

    def communicate(self, fleet: Fleet, step: int) -> None:
        W = self.mixing(fleet, step)
        for b, block in enumerate(fleet.blocks):
            self._mix(fleet, block, b, W)
        self.mix_buffers(fleet, W)

    def _mix(self, fleet: Fleet, block: Block, b: int, W: torch.Tensor) -> None:
        x, s, compressor = self.row_state[f"copy.{b}"], self.row_state[f"sum.{b}"], self.compressors[b]
        payload = compressor.encode((block.params - x).to(block.params.dtype))

        def decode(*parts: torch.Tensor) -> torch.Tensor:
            return compressor.decode(*parts).to(x.dtype)

        s.add_(fleet.comm.mix_decoded(payload, decode, W))
        x.add_(decode(*payload))
        block.params.copy_(block.params + self.gamma * (s - x))


class CHOCOStrategy(CommunicateOptimizeStrategy):
    """CHOCO-SGD: nodes send compressed differences to their neighbors, and mix the copies that these differences
    update.

    Use it when gossip's messages are too large for the links.

        q_i = C(theta_i - x_i);   x_i <- x_i + q_i;   theta_i <- theta_i + gamma sum_j W_ij (x_j - x_i)

    theta_i are node i's parameters, x_i is its neighbors' copy of them, C is a compressor, and W are Metropolis weights
    on the graph. Evaluation uses the nodes' mean. Payload: deg density P (b + 4) bytes every H steps for a node with
    deg neighbors, for P parameters of b bytes.

    Args:
        graph: a graph as for `GossipStrategy`, except "matching".
        H: steps between two exchanges, as a number or a pure function of the round (from 0).
        gamma: the consensus step size, over 0 and at most 1. Stronger compression needs a smaller gamma: the authors
            use 0.04 for 1 % of the entries and 0.34 for 4 bits per entry.
        compressor: "topk" or "sign"; see `exogym.contrib.contractions.Contraction`.
        density: the share of entries that "topk" sends. None means 0.01.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.

    >>> strategy = CHOCOStrategy("sgd", graph="ring", density=0.01, gamma=0.04, lr=0.1)
    """

    name, title, paper, payload = "choco", "CHOCO-SGD", "arXiv:1902.00340", "2 density P (b + 4) / H"
    tried = ()
    ranges = ("gamma=0.02..1.0",)
    equation = "q_i = C(theta_i - x_i); x_i <- x_i + q_i; theta_i <- theta_i + gamma sum_j W_ij (x_j - x_i)"
    needs = "neighbors (two on a ring), every H steps; few bytes"
    identities = ("gamma=1, density=1 = gossip", "N=1 = inner optimizer", "keeps the nodes' mean")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        graph: Any = "ring",
        H: RoundLength = 1,
        *,
        gamma: float = 0.04,
        compressor: str = "topk",
        density: float | None = None,
        **options: Unpack[InnerOptions],
    ):
        mixing = CompressedGossip(graph, Contraction(compressor, density), gamma, H)
        super().__init__(inner_optim, [mixing], **options)
