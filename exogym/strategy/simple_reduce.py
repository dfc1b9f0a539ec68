"""DDP: data-parallel training with a gradient average at every step.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv:2006.15704. g_i are the
gradients of N nodes, theta are the parameters, and Opt is the inner optimizer:

    g = (1/N) sum_i g_i,   theta <- Opt(theta, clip(g))

Payload per step: P b bytes per node, for P parameters of b bytes; ring all-reduce, tx = rx = 2 (N-1)/N P b.

If nodes are absent, the mean is over the n present ones, and only they step. Each sends 2 (n-1)/n P b bytes; a single
present node sends nothing. A returning node receives parameters, buffers and inner optimizer state from a node that
stayed, by a broadcast of P b bytes and the state's bytes, and continues at the fleet's step, so that all nodes are
equal again. A node that loses a synchronization misses this step.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import all_present
from exogym.errors import check_number, checked
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.strategy import InnerOptions, Strategy
from exogym.strategy.traffic import Traffic


class GradientAverage(GradientModule):
    """Replace every node's gradient by the mean over nodes; parameters without a gradient on any node stay unchanged.

    As in torch's DDP (`broadcast_buffers`), all nodes copy the buffers of the present node with the lowest rank, whose
    bytes are counted separately.

    Args:
        bucket_size_mb: MiB per bucket of gradients, which may be summed during the backward pass.
    """

    weighted_means = True

    @checked
    def __init__(self, bucket_size_mb: float = 25.0):
        super().__init__()
        check_number("bucket_size_mb", bucket_size_mb, over=0, more=", in MiB")
        self.bucket_bytes = max(1, int(min(bucket_size_mb, 1e6) * 2**20))

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b)]

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for block in fleet.blocks:
            assert block.grads is not None
            out = None if all_present(fleet) else block.grads  # None: one row, expanded; otherwise absent rows stay
            block.grads = fleet.comm.all_reduce(block.grads, "mean", out=out)
            mark_used(fleet, block)
        broadcast_buffers(fleet)


def mark_used(fleet: Fleet, block: Block) -> None:
    """Mark a parameter as having a gradient on all nodes if it has one on any present node."""
    used = fleet.comm.wire.reduce(block.has_grad.float(), fleet.comm.present, "max")
    block.has_grad[:] = used > 0


def broadcast_buffers(fleet: Fleet) -> None:
    """Copy the buffers of the present node with the lowest rank to all present nodes, as torch's DDP does.

    The bytes are counted separately.
    """
    with fleet.comm.counted_as("buffers"):
        for rows in fleet.shared_buffers.values():
            rows.copy_(fleet.comm.broadcast(rows, src=fleet.comm.present[0]).clone())


class SimpleReduceStrategy(CommunicateOptimizeStrategy):
    """DDP: all nodes average their gradients at every step.

    Use it on fast networks, and as the baseline of a comparison. It equals `torch.nn.parallel.DistributedDataParallel`
    up to the rounding of sums.

        g = mean_i g_i;   theta <- Opt(theta, clip(g))

    g_i is the gradient of node i, theta are the parameters, and Opt is the inner optimizer. Payload: P b bytes per node
    and step, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on the averaged
            gradient.
        bucket_size_mb: MiB per bucket of gradients, as torch's `bucket_cap_mb`. Buckets are summed during the backward
            pass if each process holds one node and `Placement(reduction="native")`; otherwise it has no effect.
            Parameters without a gradient need no `find_unused_parameters`. Only the last micro-batch of a step sends,
            as with torch's `no_sync`.
        averaging: an `Averaging` with a `transport`.

    >>> strategy = SimpleReduceStrategy(inner_optim="sgd", lr=0.1)
    """

    name, title, paper, payload = "ddp", "DDP", "arXiv:2006.15704", "P b"
    ranges = ()
    averages, not_taken = ("transport",), Strategy.not_taken | {"transport": FLAT["transport"]}
    equation = "g = mean_i g_i; theta <- Opt(theta, clip(g))"
    needs = "all nodes, every step; a fast network"
    identities = ("N nodes, batch B = one node, batch N B", "= torch's DistributedDataParallel")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        *,
        bucket_size_mb: float = 25.0,
        averaging: Averaging | None = None,
        **options: Unpack[InnerOptions],
    ):
        super().__init__(inner_optim, gradient_modules=[GradientAverage(bucket_size_mb)], **options)
        self.average_by(averaging_of(averaging))
