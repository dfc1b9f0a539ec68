"""Top-k: every node sends its gradient's k largest entries and keeps the rest for later.

Stich, Cordonnier, Jaggi, Sparsified SGD with memory, arXiv:1809.07599; Lin et al., Deep Gradient Compression,
arXiv:1712.01887, without that paper's momentum tricks. Node i has the gradient g_i and the error e_i, gamma is the
learning rate, and Opt the inner optimizer. With error feedback (`compressed_gradients`):

    p_i = gamma g_i + e_i;   send the k largest of |p_i|, with indices;   e_i <- p_i - sent_i
    g = (1 / gamma) mean_i sent_i,   theta <- Opt(theta, g)

k = max(1, round(density P)), chosen among all P parameters (of one dtype) together. The mean is over all N nodes,
including nodes that did not send the entry. Payload: k (b + 4) bytes per step for values of b bytes; all-gather, tx =
rx = (N-1) payload, so received bytes grow with N.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.compress import TopK
from exogym.errors import check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.compressed_gradients import CompressedMean
from exogym.strategy.strategy import InnerOptions


class TopKStrategy(CommunicateOptimizeStrategy):
    """Top-k: nodes average their gradients' largest entries and keep the rest as error feedback.

    Use it for few nodes on slow links; received bytes grow with N.

        p_i = gamma g_i + e_i;   e_i <- p_i - top_k(p_i);   theta <- theta - mean_i top_k(p_i)

    g_i is the gradient of node i, e_i its error, gamma the learning rate; top_k picks the k entries of largest
    magnitude. With density 1, the strategy is DDP. Payload: density P (b + 4) bytes per node and step, for P parameters
    of b bytes.

    Args:
        density: k / P, the share of the entries that a node sends, over 0 and at most 1.
        error_feedback: whether a node keeps the unsent entries for later. If False, most of the gradient is lost.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. With error feedback, clipping
            acts on each node's own gradient.

    >>> strategy = TopKStrategy(inner_optim="sgd", density=0.01, lr=0.1)
    """

    temporary_rows = 2.0
    name, title, paper, payload = "topk", "Top-k", "arXiv:1809.07599", "density P (b + 4)"
    ranges = ()
    equation = "p_i = gamma g_i + e_i; e_i <- p_i - top_k(p_i); theta <- theta - mean_i top_k(p_i)"
    needs = "all nodes, every step"
    identities = ("density=1 = ddp", "sent + kept = gamma sum g_i", "N=1, density=1 = inner optimizer")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        density: float = 0.01,
        *,
        error_feedback: bool = True,
        **options: Unpack[InnerOptions],
    ):
        check_number("density", density, over=0, most=1, more=": the share of entries to send")
        mean = CompressedMean(
            lambda layout: TopK(layout.numel, max(1, round(density * layout.numel))),
            lambda P, b: max(1, round(density * P)) * (b + 4),
            "row",
            error_feedback,
        )
        super().__init__(inner_optim, gradient_modules=[mean], **options)
