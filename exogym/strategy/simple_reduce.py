"""DDP: data-parallel training with a gradient average at every step.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv:2006.15704.

    g = (1/N) sum_i g_i,   theta <- Opt(theta, clip(g))

Per step: payload P b bytes per node, ring all-reduce, tx = rx = 2 (N-1)/N P b.
"""

from __future__ import annotations

from typing import Any

from exogym.errors import checked
from exogym.fleet import Fleet
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.schedule import Scheduler


class GradientAverage(GradientModule):
    """Replace every node's gradient by the mean over nodes; a parameter no node has a gradient for is left alone.

    Buffers follow torch's DDP (`broadcast_buffers`): all nodes take those of the lowest id; counted apart.
    """

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for block in fleet.blocks:
            assert block.grads is not None
            block.grads = fleet.comm.all_reduce(block.grads, "mean")
            used = fleet.comm.wire.reduce(block.has_grad.float(), fleet.comm.present, "max")
            block.has_grad[:] = used > 0
        with fleet.comm.counted_as("buffers"):
            for rows in fleet.buffers.values():
                rows.copy_(fleet.comm.broadcast(rows, src=fleet.comm.present[0]).clone())


class SimpleReduceStrategy(CommunicateOptimizeStrategy):
    """DDP, equal to `torch.nn.parallel.DistributedDataParallel`.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: as `Strategy`; clipping acts on the
            averaged gradient.

    >>> strategy = SimpleReduceStrategy(inner_optim="sgd", lr=0.1)
    """

    @checked
    def __init__(
        self,
        inner_optim: Any = "adamw",
        *,
        lr: float | None = None,
        inner_lr: float | None = None,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
    ):
        super().__init__(
            inner_optim, lr=lr, inner_lr=inner_lr, max_norm=max_norm, lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps, gradient_modules=[GradientAverage()],
        )  # fmt: skip
