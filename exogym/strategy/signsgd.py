"""signSGD: nodes send one bit of each gradient entry, for a majority vote or with error feedback.

Node i has the gradient g_i, and gamma is the learning rate. The majority vote of Bernstein et al., arXiv:1802.04434,
with the inner optimizer SGD(gamma), takes the step

    theta <- theta - gamma sign(sum_i sign(g_i))

A tie in the vote gives 0. Because one bit cannot represent zero, an entry of node i's gradient that is exactly zero at
step t votes up if t + i is even, otherwise down. Payload: ceil(P / 8) bytes per step for P parameters.

EF-signSGD of Karimireddy et al., arXiv:1901.09847, keeps an error e_i on node i (see `compressed_gradients`). For each
tensor of d entries:

    p_i = gamma g_i + e_i;   q_i = (|p_i|_1 / d) sign(p_i);   e_i <- p_i - q_i;   theta <- theta - mean_i q_i

with sign(0) = +. Payload: ceil(P / 8) bytes, and 4 bytes per tensor. Both methods use an all-gather, tx = rx = (N-1)
payload with N nodes. If nodes are absent, only the present ones vote; everything else is as in `compressed_gradients`.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.compress import Quantized, ScaledSign, tensors
from exogym.core.compress.quantize import pack, unpack
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import shared_row
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.compressed_gradients import CompressedMean, own_gradients
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions
from exogym.strategy.traffic import Traffic


class MajorityVote(GradientModule):
    """Replace each gradient entry by the majority of all nodes' signs: +1, -1, or 0 for a tie."""

    clip_first = True  # clipping does not change a sign

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_gather", P / 8)]

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for block in fleet.blocks:
            g = own_gradients(fleet, block)
            is_turn = torch.tensor([[(step + rank) % 2 == 0] for rank in fleet.ranks], device=g.device)
            votes = pack(((g > 0) | ((g == 0) & is_turn)).int(), 1)

            def decode(votes: Tensor, like: Tensor = g) -> Tensor:
                return (2 * unpack(votes, 1, like.shape[1]) - 1).to(like.dtype)

            size = math.ceil(block.layout.total / 8)
            total = shared_row(fleet, fleet.comm.sum_decoded([votes], decode, "sum", size=size))
            block.grads = total.sign().expand_as(g)
            mark_used(fleet, block)
        broadcast_buffers(fleet)


class SignSGDStrategy(CommunicateOptimizeStrategy):
    """signSGD: nodes send one bit per gradient entry and step along the majority of the signs.

    Use it for few nodes on slow links; received bytes grow with N.

        theta <- theta - gamma sign(sum_i sign(g_i))

    theta are the parameters, g_i is the gradient of node i, and gamma the learning rate. Payload: P / 8 bytes per node
    and step, for P parameters.

    Args:
        error_feedback: if True, nodes average scaled signs of gradient plus error (EF-signSGD) instead of voting.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. A vote moves every parameter by
            the learning rate, so start at 1e-3 or below. With error feedback, use SGD's usual rate; clipping acts on
            each node's own gradient.

    >>> strategy = SignSGDStrategy(inner_optim="sgd", lr=1e-3)
    """

    temporary_rows = 4.2
    name, title, paper, payload = "signsgd", "signSGD", "arXiv:1802.04434", "P / 8"
    ranges = ()
    equation = "theta <- theta - gamma sign(sum_i sign(g_i))"
    needs = "all nodes, every step; one bit per parameter"
    identities = ("N=1 = the sign of the gradient", "error feedback: sent + kept = gamma sum g_i")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        *,
        error_feedback: bool = False,
        **options: Unpack[InnerOptions],
    ):
        scaled = CompressedMean(
            lambda layout: Quantized(ScaledSign(), tensors(layout)), lambda P, b: P / 8, "tensors", error_feedback=True
        )
        super().__init__(inner_optim, gradient_modules=[scaled if error_feedback else MajorityVote()], **options)
