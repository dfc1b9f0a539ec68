"""PowerSGD: nodes average each matrix's gradient as a product of two thin matrices, by a step of power iteration.

Vogels, Karimireddy, Jaggi, arXiv:1905.13727. A tensor of several dimensions is treated as an n x m matrix, where n is
its first dimension. For each matrix, node i has the gradient G_i and the error E_i that its earlier messages left out.
r is the rank. The rule equals torch's `powerSGD_hook`:

    M_i = G_i + E_i;   Q <- orth(Q);   P <- orth(mean_i M_i Q);   Q <- mean_i M_i^T P
    G = P Q^T;   E_i = M_i - G;   theta <- Opt(theta, clip(G)) for all i

orth makes a matrix's columns orthonormal, and Opt is the inner optimizer. Q, m x r, is the same on all nodes: they draw
it once from the seed, and each step starts from the last step's Q (warm start). The error is the difference from the
common approximation G (epfml/powersgd keeps M_i - P Q_i^T; the sums over i are the same), so sum_t G + mean_i E_i =
sum_t mean_i G_i if E_i = 0 at first. A matrix is compressed if (n + m) r min_rate < n m. Vectors and all other matrices
are sent uncompressed in the first of a step's two all-reduces.

Payload per step, in two all-reduces, with b bytes per element: r (n + m) b bytes for each compressed matrix, and b
bytes for each other element. In the first `start_step` steps, nodes send all gradients uncompressed (b bytes per
parameter). Unless `advise` knows the model, it assumes that all P parameters are in d x d matrices with d = (32 P /
3)^(1/3) (see `side_of`), which takes 2 r b / d bytes per parameter.

If nodes are absent, means are over the present ones, and an absent node's error does not change until the node returns
and its error becomes zero. A returning node receives parameters, buffers, inner optimizer state and Q from a node that
stayed, by a broadcast, and continues at the fleet's step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.base.rng import generator
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import rows_of, shared_row
from exogym.core.fleet.returning import give_shared
from exogym.errors import check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.compressed_gradients import mark_sent, own_gradients
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic, shapes_of


def side_of(P: float) -> float:
    """Return d for P parameters in d x d matrices, as in a transformer of GPT-3's shape.

    Such a model has L layers of 12 d^2 parameters each (Kaplan et al., arXiv:2001.08361), and d is 128 L (Brown et al.,
    arXiv:2005.14165: 96 layers of width 12,288).

    >>> [round(side_of(P)) for P in (124e6, 1.3e9, 175e9)]
    [1098, 2402, 12313]
    """
    return (P * 128 / 12) ** (1 / 3)


class LowRankMean(GradientModule):
    """Replace the gradients by a low-rank approximation of their mean over the nodes, with error feedback.

    Args:
        rank: r, the rank of the approximations; an n x m matrix has rank min(r, n, m).
        start_step: number of initial steps in which nodes average uncompressed gradients.
        min_rate: a matrix is compressed if compression makes it smaller by more than this factor.

    State: each node's error, (rows, P), and the matrices Q of the power iteration, one copy for all nodes.
    """

    acts_on = "tensors"
    weighted_means = right_in_mean = True

    def __init__(self, rank: int, start_step: int, min_rate: float):
        super().__init__()
        check_count("rank", rank)
        check_count("start_step", start_step, least=0)
        check_number("min_rate", min_rate, least=0)
        self.rank, self.start_step, self.min_rate = rank, start_step, min_rate

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        shapes = shapes_of(P)
        if shapes is None:
            one = Traffic("all_reduce", self.rank * P * b / side_of(P))
            return [one, one]
        matrices = [self.matrix(shape) for shape in shapes]
        rest = sum(math.prod(shape) for shape, matrix in zip(shapes, matrices, strict=True) if matrix is None)
        first = rest + sum(n * r for n, _, r in filter(None, matrices))
        second = sum(m * r for _, m, r in filter(None, matrices))
        return [Traffic("all_reduce", first * b), *([Traffic("all_reduce", second * b)] if second else [])]

    def matrix(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Return n, m and the rank of a parameter as an n x m matrix, or None if it is not compressed."""
        if not shape:
            return None
        n, m = shape[0], math.prod(shape[1:])
        r = min(self.rank, n, m)
        return (n, m, r) if (n + m) * r * self.min_rate < n * m else None

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.row_state = {f"error.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}
        self.shared_state = {}
        count = 0  # numbers the matrices of all processes of a node
        for block in fleet.blocks:
            here = {slot.name for slot in block.layout}
            for slot in block.layout.whole or block.layout:
                if (shape := self.matrix(slot.shape)) is not None:
                    if slot.name in here:
                        drawn = torch.randn(shape[1:], generator=generator(run.seed, "powersgd", count))
                        self.shared_state[f"Q.{slot.name}"] = drawn.to(block.params)
                    count += 1

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        for error in self.row_state.values():
            error[rows_of(fleet, nodes)] = 0
        give_shared(fleet, self.shared_state.values(), nodes)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for b, block in enumerate(fleet.blocks):
            G = own_gradients(fleet, block)
            if step <= self.start_step:
                mean = shared_row(fleet, fleet.comm.all_reduce(G, "mean"))
            else:
                mean = self._approximate(fleet, block, G, self.row_state[f"error.{b}"])
            block.grads = mean.expand_as(G)
            mark_used(fleet, block)
            if step > self.start_step:
                mark_sent(block, mean[0])
        broadcast_buffers(fleet)

    def _approximate(self, fleet: Fleet, block: Block, G: Tensor, E: Tensor) -> Tensor:
        """Return the approximate mean, (1, P), and keep the rest in `E`."""
        M = G + E
        shapes = {slot: shape for slot in block.layout if (shape := self.matrix(slot.shape)) is not None}
        rest = [slot for slot in block.layout if slot not in shapes]
        views = {slot: M[:, slot.start : slot.stop].unflatten(1, shape[:2]) for slot, shape in shapes.items()}
        Qs = {slot: orthogonal(self.shared_state[f"Q.{slot.name}"]) for slot in shapes}
        sent = [products(views[slot], Q).flatten(1) for slot, Q in Qs.items()]
        first = mean_parts(fleet, [*(M[:, slot.start : slot.stop] for slot in rest), *sent])
        Ps = {
            slot: orthogonal(part.view(n, r))
            for (slot, (n, _, r)), part in zip(shapes.items(), first[len(rest) :], strict=True)
        }
        second = mean_parts(fleet, [products(views[slot].mT, P).flatten(1) for slot, P in Ps.items()])
        mean = M.new_empty(1, M.shape[1])
        for slot, part in zip(rest, first, strict=False):
            mean[0, slot.start : slot.stop] = part
        for (slot, (_, m, r)), part in zip(shapes.items(), second, strict=True):
            Q = self.shared_state[f"Q.{slot.name}"].copy_(part.view(m, r))
            mean[0, slot.start : slot.stop] = (Ps[slot] @ Q.T).flatten()
        here = rows_of(fleet, fleet.comm.present)
        for slot in shapes:
            E[here, slot.start : slot.stop] = (M[:, slot.start : slot.stop] - mean[:, slot.start : slot.stop])[here]
        return mean


def mean_parts(fleet: Fleet, parts: Sequence[Tensor]) -> list[Tensor]:
    """All-reduce (rows, ...) parts together, and return their means, (...) each."""
    if not parts:
        return []
    mean = shared_row(fleet, fleet.comm.all_reduce(torch.cat(list(parts), 1), "mean"))[0]
    return list(mean.split([part.shape[1] for part in parts]))


def orthogonal(x: Tensor) -> Tensor:
    """Return an (n, r) matrix with orthonormal columns that span the columns of `x`, (n, r).

    The computation is in fp32, or in fp64 if `x` is in fp64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.linalg.qr(wide).Q.to(x)


def products(views: Tensor, thin: Tensor) -> Tensor:
    """Multiply (rows, n, m) by (m, r), node by node because a batched product may round differently."""
    return torch.stack([node.clone() @ thin for node in views])


class PowerSGDStrategy(CommunicateOptimizeStrategy):
    """PowerSGD: nodes average rank-r approximations of their gradients, with error feedback.

    Use it for large matrices and many nodes, because it needs only all-reduces.

        P <- orth(mean_i (G_i + E_i) Q);   Q <- mean_i (G_i + E_i)^T P;   G = P Q^T;   E_i <- G_i + E_i - G

    For an n x m matrix of parameters, node i has the gradient G_i and the error E_i that its earlier messages left out,
    and all nodes step along G. orth makes columns orthonormal, and each step starts from the last step's Q.

    Payload: r (n + m) b bytes per matrix, node and step, and b bytes per element of other parameters.

    Args:
        rank: r, the rank of the approximations. The paper uses 1 to 4 for images, 4 to 32 for language.
        start_step: number of initial steps in which nodes average uncompressed gradients (1000 in torch's hook).
        min_rate: a matrix is compressed if (n + m) r min_rate < n m, as in torch's hook.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The inner optimizer (and its
            momentum) and clipping act on the approximation G.

    >>> strategy = PowerSGDStrategy(inner_optim="sgd", rank=2, lr=0.1)
    """

    temporary_rows = 2.9
    name, title, paper, payload = "powersgd", "PowerSGD", "arXiv:1905.13727", "2 rank P b / (32 P / 3)^(1/3)"
    ranges = ()
    equation = "P <- orth(mean_i (G_i + E_i) Q); Q <- mean_i (G_i + E_i)^T P; G = P Q^T; E_i <- G_i + E_i - G"
    needs = "all nodes, twice every step; r (m + n) of m n elements"
    identities = ("full rank = ddp", "= torch's powerSGD_hook", "sum_t G + mean_i E_i = sum_t mean_i G_i")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        rank: int = 2,
        start_step: int = 0,
        *,
        min_rate: float = 2.0,
        **options: Unpack[InnerOptions],
    ):
        super().__init__(inner_optim, gradient_modules=[LowRankMean(rank, start_step, min_rate)], **options)
