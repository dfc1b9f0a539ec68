"""1-bit Adam: Adam with averaged gradients at first, then one bit per entry of the momentum and a frozen variance.

Tang et al., 1-bit Adam: Communication efficient large-scale training with Adam's convergence speed, arXiv:2102.02888,
as in DeepSpeed's `OnebitAdam`. g_i is node i's gradient, gamma the learning rate, lambda the weight decay, and the
first W steps are the warm-up:

    t <= W:  g = mean_i g_i;   m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
    t >  W:  m_i = beta1 m + (1 - beta1) g_i;   m <- the compressed mean of m_i;   v stays
    theta <- theta - gamma (m / (sqrt(v) + eps) + lambda theta)

There is no bias correction. The compressed mean has two errors, which start at 0: e_i of each worker i, and s of the
node that serves the entry. C(x) = sign(x) |x|_2 / sqrt(d) for the d entries of a tensor, or of a chunk:

    q_i = C(m_i + e_i);   e_i <- m_i + e_i - q_i;   m <- C(mean_i q_i + s);   s <- mean_i q_i + s - m

Each tensor is divided into N chunks, one per node, which an all-to-all brings to their nodes. A node averages the signs
of its chunk and compresses the mean again, and an all-gather brings m to all. Because one bit cannot represent zero,
entries with v = 0 keep m = 0 (the published code has a mask for them). Errors, m and v are in fp32 or wider.

Payload: P b bytes per step in the warm-up, all-reduce, for P parameters of b bytes. Then, with S = ceil(sum_t ceil(d_t
/ N) / 8) + 4 T bytes for T tensors of d_t entries, N S bytes per step in the all-to-all and S in the all-gather; tx =
rx = 2 (N-1) S, 1/32 of DDP's bytes. A single node compresses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from exogym.contrib.quantized_reduce import through_shards
from exogym.core.compress.quantize import pack, unpack
from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Layout
from exogym.errors import check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.compressed_gradients import own_gradients
from exogym.strategy.optim import OptimSpec
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class Chunks:
    """The chunks into which n nodes divide a row, and their messages of signs and scales.

    Attributes:
        at: (n, W), the columns of each node's chunks, one tensor's chunk after the other; P means padding.
        widths: the entries of each tensor's chunk, with padding.
        counts: n lists of T numbers, the entries of each tensor's chunk without padding, at least 1.
    """

    def __init__(self, layout: Layout, n: int, device: torch.device):
        self.widths = [-(-slot.numel // n) for slot in layout]
        columns = [
            pad(torch.arange(slot.start, slot.stop), (0, n * w - slot.numel), value=layout.numel).view(n, w)
            for slot, w in zip(layout, self.widths, strict=True)
        ]
        self.at = torch.cat(columns, 1).to(device)
        self.counts = torch.stack([(part < layout.numel).sum(1).clamp(min=1) for part in columns], 1).tolist()

    def packed(self, x: Tensor, scales: Tensor) -> Tensor:
        """Return messages of bytes, (k, S), with the signs of `x`, (k, W), and the scales, (k, T)."""
        return torch.cat([pack((x >= 0).int(), 1), scales.contiguous().view(torch.uint8)], 1)

    def decoded(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values, (k, W), of messages (k, S)."""
        width = self.at.shape[1]
        bits, scales = messages.split([-(-width // 8), 4 * len(self.widths)], 1)
        scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (2 * unpack(bits, 1, width) - 1).to(dtype) * spread(scales, self.widths)


def spread(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Repeat each of the scales, (..., T), by its width: (..., sum of widths)."""
    return scales.repeat_interleave(torch.tensor(widths, device=scales.device), -1)


def scales_of(row: Tensor, widths: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return |x|_2 / sqrt(count), (T,) fp32, for each part x of `row`, where parts have `widths` with zero padding."""
    parts = zip(row.split(list(widths)), counts, strict=True)
    return torch.stack([(part.square().sum() / count).sqrt() for part, count in parts]).float()


class FrozenAdam(GradientModule):
    """Replace the gradients by m / (sqrt(v) + eps).

    State: each node's errors as a worker and as a server, (rows, P) each; m and v, (P,).
    """

    clip_first = True

    def __init__(self, warmup: float, beta1: float, beta2: float, eps: float):
        super().__init__()
        check_number("warmup", warmup, over=0, most=1, more=": the share of the steps with averaged gradients")
        check_number("beta1", beta1, least=0, under=1)
        check_number("beta2", beta2, least=0, under=1)
        check_number("eps", eps, over=0)
        self.warmup, self.beta1, self.beta2, self.eps = warmup, beta1, beta2, eps

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        late, chunk = 1 / max(1 - self.warmup, 1e-9), math.ceil(P / N) / 8
        compressed = [Traffic("all_to_all", N * chunk, late), Traffic("all_gather", chunk, late)]
        return [Traffic("all_reduce", P * b, 1 / self.warmup), *(compressed if self.warmup < 1 else [])]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.last_warm = math.ceil(self.warmup * run.total_steps)
        self.cuts = [Chunks(block.layout, fleet.num_nodes, block.params.device) for block in fleet.blocks]
        for b, block in enumerate(fleet.blocks):
            wide = torch.promote_types(block.params.dtype, torch.float32)
            for name in ("worker", "server"):
                self.row_state[f"{name}.{b}"] = torch.zeros_like(block.params, dtype=wide)
            for name in ("m", "v"):
                self.shared_state[f"{name}.{b}"] = torch.zeros_like(block.params[0], dtype=wide)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for b, block in enumerate(fleet.blocks):
            grads, m, v = own_gradients(fleet, block), self.shared_state[f"m.{b}"], self.shared_state[f"v.{b}"]
            mark_used(fleet, block)
            used = spread(block.has_grad[0], [slot.numel for slot in block.layout]).to(m.device)
            if step <= self.last_warm:
                g = fleet.comm.all_reduce(grads, "mean")[0].to(m.dtype)
                v.copy_(torch.where(used, self.beta2 * v + (1 - self.beta2) * g.square(), v))
                new = self.beta1 * m + (1 - self.beta1) * g
            else:
                new = self._mean(fleet, b, self.beta1 * m + (1 - self.beta1) * grads.to(m.dtype))
            m.copy_(torch.where(used, new * (v > 0), m))
            block.grads = (m / (v.sqrt() + self.eps)).to(grads.dtype).expand_as(grads)
        broadcast_buffers(fleet)

    def _mean(self, fleet: Fleet, b: int, x: Tensor) -> Tensor:
        """Return the compressed mean of `x` (rows, P), (P,)."""
        if fleet.num_nodes == 1:
            return x[0]
        chunks, sizes = self.cuts[b], [slot.numel for slot in fleet.blocks[b].layout]
        workers, servers = self.row_state[f"worker.{b}"], self.row_state[f"server.{b}"]
        messages = []
        for total, error in zip(x + workers, workers, strict=True):
            scales = scales_of(total, sizes, sizes)
            messages.append(chunks.packed(pad(total, (0, 1))[chunks.at], scales.expand(fleet.num_nodes, -1)))
            error.copy_(total - torch.where(total >= 0, 1, -1) * spread(scales, sizes))

        def serve(row: int, k: int, mean: Tensor) -> Tensor:
            at, real = chunks.at[k], chunks.at[k] < x.shape[1]
            total = torch.where(real, mean + pad(servers[row], (0, 1))[at], 0)
            message = chunks.packed(total[None], scales_of(total, chunks.widths, chunks.counts[k])[None])
            servers[row, at[real]] = (total - chunks.decoded(message, x.dtype)[0])[real]
            return message[0]

        answers = through_shards(fleet.comm, torch.stack(messages), lambda part: chunks.decoded(part, x.dtype), serve)
        mean = x.new_zeros(x.shape[1] + 1)
        mean[chunks.at.flatten()] = chunks.decoded(answers, x.dtype).flatten()
        return mean[:-1]


class OneBitAdamStrategy(CommunicateOptimizeStrategy):
    """1-bit Adam: Adam with averaged gradients at first, then one bit per entry of the momentum and a frozen variance.

    Use it when Adam works well and the network is too slow for DDP after the first steps.

        t <= W:  g = mean_i g_i;   m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        t >  W:  m <- the compressed mean of beta1 m + (1 - beta1) g_i
        theta <- theta - gamma (m / (sqrt(v) + eps) + lambda theta)

    theta are the parameters and g_i is the gradient of node i. The first W steps are the warm-up.
    `exogym.contrib.onebit_adam` describes the compressed mean, which has error feedback at workers and servers.

    Payload: P b bytes per node and step in the warm-up, then (1 + 1/N) P / 8 bytes, for P parameters of b bytes and N
    nodes.

    Args:
        warmup: W as a share of all steps, over 0 and at most 1 (0.15 to 0.25 in DeepSpeed's guide).
        beta1, beta2, eps: Adam's constants.
        weight_decay: lambda, the decoupled weight decay.
        lr, inner_lr: gamma, the learning rate (default 1e-3).
        max_norm: largest 2-norm of a node's own gradient; longer gradients are clipped.
        lr_scheduler, warmup_steps: see `Strategy`. The learning rate's own warm-up should end before W.

    >>> strategy = OneBitAdamStrategy(lr=1e-3, warmup=0.2)
    """

    name, title, paper = "onebit_adam", "1-bit Adam", "arXiv:2102.02888"
    tried = ()
    ranges = ("lr=3e-4..3e-2", "beta1=0.8..0.95")
    payload = "P b warmup + (N + 1) ceil(P / N) / 8 (1 - warmup)"
    equation = "t <= W: Adam as ddp; later m <- C(mean_i C(beta1 m + (1 - beta1) g_i + e_i) + s), and v stays"
    needs = "all nodes, every step; 1/32 of DDP's bytes after the warm-up"
    identities = (
        "warmup=1 = ddp with Adam without bias correction",
        "N=1 = this Adam, with v frozen after W",
        "sum_t m + mean_i e_i + s = sum_t mean_i m_i",
    )
    own_rule = True

    def __init__(
        self,
        *,
        warmup: float = 0.2,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[InnerOptions],
    ):
        check_number("weight_decay", weight_decay, least=0)
        rate = options.get("lr", options.get("inner_lr"))
        inner = OptimSpec(torch.optim.SGD, lr=1e-3 if rate is None else rate, weight_decay=weight_decay)
        super().__init__(inner, gradient_modules=[FrozenAdam(warmup, beta1, beta2, eps)], **options)
