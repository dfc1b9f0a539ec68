"""EF21: nodes send compressed differences between their gradients and the estimates that these differences build.

Richtarik, Sokolov, Fatkhullin, EF21: A new, simpler, theoretically better, and practically faster error feedback,
arXiv:2106.05203, algorithm 2. Node i has the gradient G_i and its estimate g_i, which starts at 0; C is a contraction
(`exogym.contrib.contractions`), and Opt the inner optimizer:

    c_i = C(G_i - g_i), which node i sends;   g_i <- g_i + c_i
    g <- g + mean_i c_i = mean_i g_i;   theta <- Opt(theta, clip(g))

Error feedback (`compressed_gradients`) adds unsent entries to the next gradient. EF21 instead repeats sent entries in
each later step until a difference replaces them, so its messages do not depend on the learning rate. If the gradients
are constant, g converges to their mean. Estimates and g are in fp32 or wider.

Payload: as with error feedback, k (b + 4) bytes per step for k sent entries of b bytes, or one bit per entry;
all-gather, tx = rx = (N-1) payload with N nodes.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.contrib.contractions import Contraction
from exogym.core.fleet import Block, Fleet
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.compressed_gradients import mark_sent, own_gradients
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class EstimatedMean(GradientModule):
    """Replace every node's gradient by the mean of the nodes' estimates. State: each node's g_i, (rows, P); g, (P,)."""

    def __init__(self, contraction: Contraction):
        super().__init__()
        self.contraction = contraction

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_gather", self.contraction.payload_bytes(P, b))]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.compressors = [self.contraction.of(block.layout) for block in fleet.blocks]
        for b, block in enumerate(fleet.blocks):
            wide = torch.promote_types(block.params.dtype, torch.float32)
            self.row_state[f"estimate.{b}"] = torch.zeros_like(block.params, dtype=wide)
            self.shared_state[f"mean.{b}"] = torch.zeros_like(block.params[0], dtype=wide)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for b, block in enumerate(fleet.blocks):
            g = self._estimate(fleet, block, b)
            mark_used(fleet, block)
            mark_sent(block, g)
            assert block.grads is not None
            block.grads = g.to(block.grads.dtype, copy=True).expand_as(block.grads)  # clipping changes it
        broadcast_buffers(fleet)

    def _estimate(self, fleet: Fleet, block: Block, b: int) -> Tensor:
        """Update g_i and g, and return g, (P,)."""
        own, g, C = self.row_state[f"estimate.{b}"], self.shared_state[f"mean.{b}"], self.compressors[b]
        grads = own_gradients(fleet, block)
        payload = C.encode((grads - own).to(grads.dtype))

        def decode(*parts: Tensor) -> Tensor:
            return C.decode(*parts).to(own.dtype)

        own.add_(decode(*payload))
        return g.add_(fleet.comm.sum_decoded(payload, decode, "mean")[0])


class EF21Strategy(CommunicateOptimizeStrategy):
    """EF21: nodes send compressed differences to estimates of their gradients, and step along the estimates' mean.

    Use it when gradients change slowly, as with large batches or a small learning rate.

        c_i = C(G_i - g_i);   g_i <- g_i + c_i;   g = mean_i g_i;   theta <- Opt(theta, clip(g))

    G_i is the gradient of node i, g_i its estimate, C a compressor, and Opt the inner optimizer. With density 1, the
    strategy is DDP. Payload: density P (b + 4) bytes per node and step, for P parameters of b bytes.

    Args:
        compressor: "topk" or "sign"; see `exogym.contrib.contractions.Contraction`.
        density: the share of entries that "topk" sends. None means 0.01.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on g.

    >>> strategy = EF21Strategy(inner_optim="sgd", density=0.01, lr=0.1)
    """

    name, title, paper, payload = "ef21", "EF21", "arXiv:2106.05203", "density P (b + 4)"
    tried = ()
    ranges = ()
    equation = "c_i = C(G_i - g_i); g_i <- g_i + c_i; g = mean_i g_i; theta <- Opt(theta, clip(g))"
    needs = "all nodes, every step"
    identities = ("density=1 = ddp", "constant gradients: g goes to their mean", "g = mean_i g_i")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        *,
        compressor: str = "topk",
        density: float | None = None,
        **options: Unpack[InnerOptions],
    ):
        estimated = EstimatedMean(Contraction(compressor, density))
        super().__init__(inner_optim, gradient_modules=[estimated], **options)
