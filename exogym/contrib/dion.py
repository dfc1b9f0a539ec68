"""Dion: hidden matrices step along an orthonormal matrix of low rank, which nodes compute from thin factors.

Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv:2504.05295, with details from the authors' code
(microsoft/dion, `dion_reference.py`). W is a hidden m x n matrix with m >= n; if m < n, all matrices are transposed.
Node i has the gradient G_i and the momentum M_i for W. r is the rank, mu the momentum's decay, gamma_W the matrices'
learning rate and lambda the weight decay:

    M_i <- M_i + G_i
    P   <- orth(mean_i M_i Q)                       # all-reduce of m r elements
    R   <- mean_i M_i^T P                           # all-reduce of n r elements
    M_i <- M_i - (1 - mu) P R^T                     # error feedback: mu R stays, and so does all else
    Q   <- each column of R / (its 2-norm + 1e-8)
    W   <- W (1 - gamma_W lambda) - gamma_W sqrt(outputs / inputs) P Q^T

orth makes a matrix's columns orthonormal (Householder QR; the authors also have randomized Cholesky QR). Nodes draw Q,
n x r, once from the seed, and each step starts from the last step's Q. W's outputs and inputs are its first and second
dimension. If mean_i M_i Q = 0, W does not move along P Q^T, and Q stays. The M_i enter only through their mean, which
is the momentum of one node with the mean gradient, so neither the number of nodes nor the compression changes the
result.

r is ceil(rank_fraction n). A matrix is compressed if rank_fraction < 1 and (m + n) r < m n; otherwise nodes average G_i
and share one M. AdamW trains all other parameters (embeddings, head, vectors) with averaged gradients. Hidden matrices
are defined as for Muon (`exogym.strategy.muon`).

Payload per step, in two all-reduces, with b bytes per element: r (m + n) b bytes for each compressed matrix, and b
bytes for each other element. `advise` assumes square hidden matrices, as for PowerSGD.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.core.base.rng import generator
from exogym.core.fleet import Block, Fleet
from exogym.errors import check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.compressed_gradients import own_gradients
from exogym.strategy.muon import HiddenAdamW
from exogym.strategy.optim import OptimSpec
from exogym.strategy.powersgd import mean_parts, orthogonal, products, side_of
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

EPS = 1e-8  # of Dion's norms and of AdamW


class DionAdamW(HiddenAdamW):
    """SGD with the rate `matrix_lr` for the hidden matrices, AdamW with the rate `lr` for the rest.

    Args:
        params: groups of parameters, in which `use_dion` marks the hidden matrices.
        lr: the rate of all other groups.
        matrix_lr: the rate of groups with `use_dion`.
        weight_decay: the decoupled weight decay of all parameters.
    """

    flag = "use_dion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        matrix_lr: float = 0.02,
        weight_decay: float = 0.01,
    ):
        shared = {"lr": lr, "weight_decay": weight_decay, "use_dion": False, "betas": (0.9, 0.95), "eps": EPS}
        super().__init__(params, shared)
        for group in self._groups(True):
            group["lr"] = matrix_lr
        _ = self.parts  # the optimizers check their arguments

    def _of_hidden(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups)


class OrthonormalMomentum(GradientModule):
    """Replace hidden matrices' gradients by sqrt(outputs / inputs) P Q^T, and others by their mean over the nodes.

    Args:
        rank_fraction: r / n, from above 0 to 1.
        mu: the share of the momentum's sent part that stays.

    State: each node's momentum M_i, (rows, P), zero for parameters that are not compressed; Q of each hidden matrix and
    M of uncompressed ones, one copy for all nodes. Clipping acts on each node's own gradient before the momentum.
    """

    clip_first = True

    def __init__(self, rank_fraction: float, mu: float):
        super().__init__()
        check_number("rank_fraction", rank_fraction, over=0, most=1)
        check_number("mu", mu, least=0, most=1)
        self.rank_fraction, self.mu = rank_fraction, mu

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        side = max(2, round(side_of(P)))
        if not self.is_compressed(side, side):
            return [Traffic("all_reduce", P * b)]
        one = Traffic("all_reduce", self.rank(side, side) * P * b / side)
        return [one, one]

    def rank(self, m: int, n: int) -> int:
        return math.ceil(self.rank_fraction * min(m, n))

    def is_compressed(self, m: int, n: int) -> bool:
        return self.rank_fraction < 1 and (m + n) * self.rank(m, n) < m * n

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.row_state = {f"momentum.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}
        self.shared_state = {}
        hidden = [(block, slot) for block in fleet.blocks for slot in block.layout if slot.name in fleet.hidden]
        for k, (block, slot) in enumerate(hidden):
            drawn = torch.randn(min(slot.shape), self.rank(*slot.shape), generator=generator(run.seed, "dion", k))
            self.shared_state[f"Q.{slot.name}"] = drawn.to(block.params)
            if not self.is_compressed(*slot.shape):
                self.shared_state[f"M.{slot.name}"] = block.params.new_zeros(slot.shape)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for b, block in enumerate(fleet.blocks):
            G = own_gradients(fleet, block)
            mark_used(fleet, block)
            block.grads = self._directions(fleet, block, G, self.row_state[f"momentum.{b}"]).expand_as(G)
        broadcast_buffers(fleet)

    def _directions(self, fleet: Fleet, block: Block, G: Tensor, M: Tensor) -> Tensor:
        """Return the directions of the hidden matrices and the mean gradients of the rest, (1, P)."""
        hidden = [slot for slot in block.layout if slot.name in fleet.hidden]
        thin = [slot for slot in hidden if self.is_compressed(*slot.shape)]
        rest = [slot for slot in block.layout if slot not in thin]
        Qs = {slot: self.shared_state[f"Q.{slot.name}"] for slot in hidden}
        for slot in thin:
            M[:, slot.start : slot.stop] += G[:, slot.start : slot.stop]
        Ms = {slot: _tall(slot.of(M)) for slot in thin}  # (nodes, m, n); (1, m, n) if all nodes share M
        sent = [products(Ms[slot], Qs[slot]).flatten(1) for slot in thin]
        first = mean_parts(fleet, [*(G[:, slot.start : slot.stop] for slot in rest), *sent])
        found = dict(zip([*rest, *thin], first, strict=True))
        for slot in hidden:
            if slot not in Ms:
                shared = self.shared_state[f"M.{slot.name}"].add_(found[slot].view(slot.shape))
                Ms[slot] = _tall(shared[None])
                found[slot] = Ms[slot][0] @ Qs[slot]
        Ps = {slot: orthogonal(found[slot].view(-1, Q.shape[1])) for slot, Q in Qs.items()}
        second = mean_parts(fleet, [products(Ms[slot].mT, Ps[slot]).flatten(1) for slot in thin])
        Rs = {slot: R.view_as(Qs[slot]) for slot, R in zip(thin, second, strict=True)}
        directions = G.new_zeros(1, G.shape[1])
        for slot, used in zip(block.layout, block.has_grad[0].tolist(), strict=True):
            out = slot.of(directions)[0]
            if slot not in Qs:
                out.copy_(found[slot].view_as(out))
            elif used and found[slot].any():
                P, Q = Ps[slot], Qs[slot]
                R = Rs[slot] if slot in Rs else Ms[slot][0].mT @ P
                Ms[slot].sub_((1 - self.mu) * (P @ R.mT))
                wide = R if R.dtype == torch.float64 else R.float()
                Q.copy_(wide / (wide.norm(dim=0, keepdim=True) + EPS))
                _tall(out).copy_(P @ Q.mT)
                out *= math.sqrt(slot.shape[0] / slot.shape[1])
        return directions


def _tall(x: Tensor) -> Tensor:
    """Return a view of `x` or its transpose as matrices (..., m, n) with m >= n."""
    return x if x.shape[-2] >= x.shape[-1] else x.mT


class DionStrategy(CommunicateOptimizeStrategy):
    """Dion: hidden matrices step along an orthonormal matrix of rank r; nodes send their momentum's thin factors.

    Use it when the network cannot carry Muon's whole gradients and the hidden matrices are large.

        P <- orth(mean_i M_i Q);   R <- mean_i M_i^T P;   M_i <- M_i - (1 - mu) P R^T;   Q <- R / columns' norms
        W <- W (1 - gamma_W lambda) - gamma_W sqrt(outputs / inputs) P Q^T

    M_i is node i's momentum of a hidden m x n matrix W, plus the gradient G_i. orth makes columns orthonormal, and each
    step starts from the last step's Q. AdamW, with the authors' betas (0.9, 0.95), trains all other parameters with
    averaged gradients.

    Payload: r (m + n) b bytes per compressed matrix, node and step, and b bytes per element of other parameters.

    Args:
        rank_fraction: r / min(m, n). The authors' default is 1, which compresses nothing.
        mu: the momentum's decay.
        matrix_lr: gamma_W, the learning rate of hidden matrices, which also follows the schedule. Because of the factor
            sqrt(outputs / inputs), the same rate fits models of different sizes; the authors use 0.02 at 160M
            parameters.
        weight_decay: lambda, for all parameters.
        lr, inner_lr: AdamW's learning rate for all other parameters (default 1e-3). The authors use `matrix_lr`.
        max_norm: largest 2-norm of a node's own gradient; longer gradients are clipped.
        lr_scheduler, warmup_steps: see `Strategy`.

    Raises:
        ArgumentError: the model has no hidden matrix (in training).

    >>> strategy = DionStrategy(rank_fraction=0.125, matrix_lr=0.02, lr=3e-3)
    """

    name, title, paper, payload = "dion", "Dion", "arXiv:2504.05295", "2 rank_fraction P b"
    tried = ()
    equation = "P <- orth(mean_i M_i Q); R <- mean_i M_i^T P; M_i <- M_i - (1 - mu) P R^T; W <- W - gamma_W s P Q^T"
    needs = "all nodes, twice every step; r (m + n) of m n elements"
    identities = (
        "N nodes, batch B = one node, batch N B",
        "sum_t mean_i G_i = mean_i M_i + (1 - mu) sum_t P R^T",
        "rank_fraction=1, constant gradient: P Q^T -> U V^T",
    )
    own_rule = True
    ranges = ("lr=3e-4..3e-2", "matrix_lr=3e-3..0.3", "mu=0.8..0.98")

    def __init__(
        self,
        rank_fraction: float = 0.25,
        *,
        mu: float = 0.95,
        matrix_lr: float = 0.02,
        weight_decay: float = 0.01,
        **options: Unpack[InnerOptions],
    ):
        check_number("weight_decay", weight_decay, least=0)
        check_number("matrix_lr", matrix_lr, least=0)
        inner = OptimSpec(DionAdamW, matrix_lr=matrix_lr, weight_decay=weight_decay)
        super().__init__(inner, gradient_modules=[OrthonormalMomentum(rank_fraction, mu)], **options)
