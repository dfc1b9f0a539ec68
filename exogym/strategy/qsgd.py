"""QSGD: nodes round their gradients to a few levels at random, so that their expected value stays exact.

Alistarh et al., arXiv:1610.02132. A node's gradient g is divided into buckets of d numbers, in which each entry g_j
becomes Q(g_j), one of s levels or 0. All nodes then step with the mean over the N nodes, where Opt is the inner
optimizer:

    a_j = |g_j| s / |g|_2;   level_j = floor(a_j), or one more with probability a_j - floor(a_j)
    Q(g_j) = |g|_2 sign(g_j) level_j / s;   g = mean_i Q(g_i),   theta <- Opt(theta, clip(g))

With the expected value E, each bucket has E Q(g) = g and E|Q(g) - g|^2 <= min(d / s^2, sqrt(d) / s) |g|^2. Each node
draws its own random numbers from (seed, step, node), so the nodes' errors are independent and the mean's variance falls
as 1/N.

Payload: ceil(P (1 + ceil(log2(s + 1))) / 8) + 4 ceil(P / d) bytes per step for P parameters; all-gather, tx = rx =
(N-1) payload. All codes have the same length (the paper's Elias coding is shorter). Absent nodes are handled as in DDP:
the mean is over the present nodes.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from exogym.core.compress import Quantized, Stochastic, buckets
from exogym.errors import check_count
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.compressed_gradients import CompressedMean
from exogym.strategy.strategy import InnerOptions


class QSGDStrategy(CommunicateOptimizeStrategy):
    """QSGD: nodes average stochastically quantized gradients.

    Use it for few nodes on slow links when the mean gradient must stay unbiased; received bytes grow with N.

        g = mean_i Q(g_i), with E Q(g_i) = g_i;   theta <- Opt(theta, clip(g))

    Q rounds the gradient g_i of node i at random, E is the expected value, and Opt the inner optimizer. Payload: ceil(P
    (1 + ceil(log2(s + 1))) / 8) + 4 ceil(P / d) bytes per node and step, for P parameters.

    Args:
        levels: s, the number of levels besides zero. A code takes 1 + ceil(log2(s + 1)) bits: 4 bits for 7 levels, 8
            bits for 127.
        bucket: d, the number of entries that share a norm.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on the mean.

    >>> strategy = QSGDStrategy(inner_optim="sgd", levels=7, lr=0.1)
    """

    name, title, paper = "qsgd", "QSGD", "arXiv:1610.02132"
    ranges = ()
    temporary_rows = 10.4
    payload = "ceil(P (1 + ceil(log2(levels + 1))) / 8) + 4 ceil(P / bucket)"
    equation = "g = mean_i Q(g_i), E Q(g_i) = g_i; theta <- Opt(theta, clip(g))"
    needs = "all nodes, every step"
    identities = ("levels=2^20 = ddp within 1e-5", "the mean over draws = the gradient")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        levels: int = 7,
        *,
        bucket: int = 512,
        **options: Unpack[InnerOptions],
    ):
        check_count("bucket", bucket)
        code = Stochastic(levels)
        mean = CompressedMean(
            lambda layout: Quantized(code, buckets(layout.numel, bucket)),
            lambda P, b: math.ceil(P * code.bits / 8) + 4 * math.ceil(P / bucket),
            "row",
        )
        super().__init__(inner_optim, gradient_modules=[mean], **options)
