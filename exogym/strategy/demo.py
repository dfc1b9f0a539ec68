"""DeMo: decoupled momentum optimization.

Peng, Quesnelle, Kingma, DeMo, arXiv:2411.19870 (the 2024 rule, alpha = 1). Node i has the gradient g_i; gamma is the
learning rate, lambda the weight decay and beta the momentum's decay. I_i are indices, V_i values, and DCT is the
discrete cosine transform:

    theta <- theta (1 - gamma lambda)                        # decoupled weight decay
    e_i   <- beta e_i + gamma g_i                            # residual momentum
    (I_i, V_i) <- the k largest of each chunk of DCT(e_i)
    e_i   <- e_i - IDCT(scatter(I_i, V_i))                   # remove the sent part
    q     <- each coefficient's mean over the nodes that sent it
    theta <- theta - gamma sign(IDCT(q))

Payload per node and step: (number of chunks) * k * (4-byte value + index) bytes, all-gather, tx = rx = (N-1) payload.
An index takes 1 byte if a chunk has up to 256 coefficients, 2 bytes up to 32768, otherwise 4, so a coefficient takes 6
bytes by default. The paper counts 12 bytes per coefficient, because its code sends 8-byte indices.

FlexDeMo (From et al., arXiv:2502.06728) is DeMo between nodes of several devices that share the model:
`fit(DeMoStrategy(), node=NodeMesh(shard=4))`.

If nodes are absent, only the n present ones send and step, with tx = rx = (n-1) payload, and an absent node's momentum
e_i does not change. A returning node starts with e_i = 0, because its momentum belongs to old parameters, receives
parameters and buffers (P b bytes) from a node that stayed, by a broadcast, and continues at the fleet's step. A node
that loses a synchronization misses this step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from exogym.core.compress import BlockDCT
from exogym.core.compress.dct import Blocks
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import rows_of, shared_row
from exogym.errors import check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.optim import OptimSpec
from exogym.strategy.simple_reduce import mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic, shapes_of


class DCTMomentum(GradientModule):
    """Replace the gradients by the sign of the decoded mean of all nodes' largest momentum coefficients.

    Args:
        decay: beta, the share of the momentum that a step keeps.
        topk: k, the number of coefficients that a node sends per chunk (all, if the chunk has fewer than k).
        chunk: largest side of a chunk. A chunk is a block of at most `chunk` x `chunk` values.

    State: each node's residual momentum e, (rows, P). Clipping acts on each node's own gradient before it enters the
    momentum.
    """

    acts_on = "tensors"
    clip_first = right_in_mean = True

    def __init__(self, decay: float, topk: int, chunk: int):
        super().__init__()
        check_number("compression_decay", decay, least=0, most=1)
        check_count("compression_topk", topk)
        check_count("compression_chunk", chunk)
        self.decay, self.topk, self.chunk = decay, topk, chunk

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        size, shapes = self.chunk**2, shapes_of(P)
        cuts = [(math.ceil(P / size), size)]  # (blocks, values of a block) of each tensor
        if shapes is not None:
            cuts = [(cut.blocks, cut.size) for cut in (Blocks(torch.Size(shape), self.chunk) for shape in shapes)]
        kept = (n * min(self.topk, size) * (b + _index_dtype(size).itemsize) for n, size in cuts)
        return [Traffic("all_gather", sum(kept))]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.row_state = {f"residual.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}
        self.transforms = [
            [BlockDCT(slot.shape, self.chunk, block.layout.dtype, block.params.device) for slot in block.layout]
            for block in fleet.blocks
        ]

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        for residual in self.row_state.values():
            residual[rows_of(fleet, nodes)] = 0

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        away = [row for row, rank in enumerate(fleet.ranks) if rank not in fleet.comm.present]
        for b, block in enumerate(fleet.blocks):
            e = self.row_state[f"residual.{b}"]
            resting = e[away]
            if away and block.grads is not None:
                block.grads[away] = 0  # absent nodes computed no gradient
            self._transform_block(fleet, block, e, self.transforms[b], lr)
            e[away] = resting

    def _transform_block(self, fleet: Fleet, block: Block, e: Tensor, transforms: list[BlockDCT], lr: float) -> None:
        assert block.grads is not None
        mark_used(fleet, block)
        e.mul_(self.decay).add_(block.grads, alpha=lr)
        payload: list[Tensor] = []
        for used, (_, residual), t in zip(block.has_grad[0].tolist(), block.views(e), transforms, strict=True):
            coefficients = t.encode(residual)
            indices = coefficients.abs().topk(min(self.topk, t.size), dim=-1).indices
            values = coefficients.gather(-1, indices)
            if not used:  # the parameter does not move, so its momentum must not be taken out
                values.zero_()
            sent = torch.zeros_like(coefficients).scatter_(-1, indices, values)
            residual -= t.decode(sent)
            payload += [indices.to(_index_dtype(t.size)), values]

        def decode(*parts: Tensor) -> Tensor:
            """Return (rows, 2, P): each node's coefficients, and 1 where the node sent one, otherwise 0."""
            dense = [_scatter(i.long(), v, t.size) for i, v, t in zip(parts[::2], parts[1::2], transforms, strict=True)]
            return torch.cat(dense, dim=-1)

        total = shared_row(fleet, fleet.comm.sum_decoded(payload, decode, "sum"))[0]
        mean = total[0] / total[1].clamp(min=1)
        update = torch.empty(1, block.layout.numel, dtype=e.dtype, device=e.device)
        for (slot, view), t in zip(block.views(update), transforms, strict=True):
            view.copy_(t.decode(mean[slot.start : slot.stop].view(1, t.blocks, t.size)).sign_().view(view.shape))
        block.grads = update.expand_as(e)


def _index_dtype(size: int) -> torch.dtype:
    return torch.uint8 if size <= 256 else torch.int16 if size <= 32768 else torch.int32


def _scatter(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Spread (rows, blocks, k) to (rows, 2, blocks * size): values and ones at their places, zeros elsewhere."""
    rows, blocks, _ = indices.shape
    dense = values.new_zeros(2, rows, blocks, size)
    dense[0].scatter_(-1, indices, values)
    dense[1].scatter_(-1, indices, torch.ones_like(values))
    return dense.transpose(0, 1).flatten(2)


class DeMoStrategy(CommunicateOptimizeStrategy):
    """DeMo: nodes send their largest momentum coefficients and step along the sign of the decoded mean.

    Use it for few nodes on a slow link, because received bytes grow with N.

        e_i <- beta e_i + gamma g_i - (the top k of DCT(e_i), which are sent);   theta <- theta - gamma sign(IDCT(mean))

    e_i is node i's residual momentum, g_i its gradient, and mean the mean of the sent coefficients over the nodes that
    sent them. The rule equals the published one, and all nodes' parameters stay identical.

    Payload: (number of chunks) * k * (value + index) bytes per node and step.

    Args:
        compression_decay: beta, the share of the residual momentum that a step keeps.
        compression_topk: k, the number of coefficients that a node sends per chunk.
        compression_chunk: largest side of a chunk, which has up to `compression_chunk`² coefficients.
        weight_decay: lambda, the decoupled weight decay.
        lr, inner_lr: gamma, the learning rate (default 1e-3).
        max_norm: largest 2-norm of a node's own gradient; longer gradients are clipped.
        lr_scheduler, warmup_steps: see `Strategy`.

    >>> strategy = DeMoStrategy(compression_decay=0.999, compression_topk=32, compression_chunk=64, weight_decay=1e-4)
    """

    name, title, paper = "demo", "DeMo", "arXiv:2411.19870"
    ranges = ("lr=3e-4..3e-2", "compression_decay=0.9..0.999")
    temporary_rows = 4.0
    payload = "ceil(P / compression_chunk^2) compression_topk (b + 2)"
    equation = "e_i <- beta e_i + gamma g_i minus the top k of DCT(e_i); theta <- theta - gamma sign(IDCT(mean sent))"
    needs = "all nodes, every step"
    identities = ("all sent = the sign of the mean gradient", "beta=1: sent + kept = all gradients")
    own_rule = True

    def __init__(
        self,
        *,
        compression_decay: float = 0.999,
        compression_topk: int = 32,
        compression_chunk: int = 64,
        weight_decay: float = 0.0,
        **options: Unpack[InnerOptions],
    ):
        check_number("weight_decay", weight_decay, least=0)
        rate = options.get("lr", options.get("inner_lr"))
        inner = OptimSpec(torch.optim.SGD, lr=1e-3 if rate is None else rate, weight_decay=weight_decay)
        momentum = DCTMomentum(compression_decay, compression_topk, compression_chunk)
        super().__init__(inner, gradient_modules=[momentum], **options)
