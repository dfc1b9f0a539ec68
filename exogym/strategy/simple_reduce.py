"""DDP: data-parallel training with a gradient average at every step.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv:2006.15704. g_i are the
gradients of N nodes, theta are the parameters, and Opt is the inner optimizer:

    g = (1/N) sum_i g_i,   theta <- Opt(theta, clip(g))

Per step: payload P b bytes per node, for P parameters of b bytes; ring all-reduce, tx = rx = 2 (N-1)/N P b.

With absent nodes, the mean is over the n present nodes, and only these nodes step. Each present node sends 2 (n-1)/n P
b bytes; a single present node sends nothing. A returning node takes parameters, buffers and inner optimizer state from
a node that stayed, and continues at the fleet's step. So all nodes are equal again. The broadcast takes P b bytes and
the state's bytes. A node that loses a synchronization misses this step.
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
    """Replace every node's gradient by the mean over nodes. Parameters without a gradient on any node stay unchanged.

    As in torch's DDP (`broadcast_buffers`), all nodes copy the buffers of the present node with the lowest rank. The
    traffic counts the bytes of buffers separately.

    Args:
        bucket_size_mb: MiB per bucket of gradients. A bucket may be summed while backward still runs.
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
    """Mark a parameter as having a gradient on all nodes, if it has a gradient on any present node."""
    used = fleet.comm.wire.reduce(block.has_grad.float(), fleet.comm.present, "max")
    block.has_grad[:] = used > 0


def broadcast_buffers(fleet: Fleet) -> None:
    """Copy the buffers of the present node with the lowest rank to all present nodes, as torch's DDP does.

    The traffic counts the bytes of buffers separately.
    """
    with fleet.comm.counted_as("buffers"):
        for rows in fleet.shared_buffers.values():
            rows.copy_(fleet.comm.broadcast(rows, src=fleet.comm.present[0]).clone())


class SimpleReduceStrategy(CommunicateOptimizeStrategy):
    """DDP: all nodes average their gradients at every step.

        g = mean_i g_i;   theta <- Opt(theta, clip(g))

    g_i is the gradient of node i, theta are the parameters, and Opt is the inner optimizer.

    Payload: P b bytes per node and step, for P parameters of b bytes. The strategy equals
    `torch.nn.parallel.DistributedDataParallel` up to the rounding of sums.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`; clipping acts on the averaged
            gradient.
        bucket_size_mb: MiB per bucket of gradients, as torch's `bucket_cap_mb`. If each process holds one node and
            `Placement(reduction="native")`, buckets are summed while backward still runs. Otherwise the argument has no
            effect. Parameters without a gradient need no `find_unused_parameters`. Only the last micro-batch of a step
            sends, as with torch's `no_sync`.
        averaging: an `Averaging` with a `transport`.

    >>> strategy = SimpleReduceStrategy(inner_optim="sgd", lr=0.1)
    """

    name, title, paper, payload = "ddp", "DDP", "arXiv:2006.15704", "P b"
    ranges = ()
    averages, not_taken = ("transport",), Strategy.not_taken | {"transport": FLAT["transport"]}
    equation = "g = mean_i g_i; theta <- Opt(theta, clip(g))"
    needs = "all nodes at every step, and a fast network"
    identities = ("N nodes with batch B = one node with batch N B", "= torch's DistributedDataParallel")

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
