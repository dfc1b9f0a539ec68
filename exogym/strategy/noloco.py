"""NoLoCo: outer steps in small groups that change every round, without an all-reduce over all nodes.

Kolehmainen et al., NoLoCo: no-all-reduce low communication training, arXiv:2506.10911. Node i has the parameters
theta_i, slow weights phi_i and a momentum delta_i; alpha, beta and gamma are factors. After every H inner steps, nodes
are divided into random groups G of n, and with D_i = theta_i - phi_i

    delta_i <- alpha delta_i + beta mean_G(D) + gamma (mean_G(phi) - phi_i)
    phi_i   <- phi_i + delta_i,   theta_i <- phi_i

where mean_G is the mean over the node's group. The paper prints beta with the opposite sign for this difference, which
would move phi_i away from the trained parameters; its published code adds, as here. The paper calls the momentum
Nesterov's, but it is a heavy ball. According to the paper's appendix, the method is stable for sqrt(n / (2 (n-1)))
alpha < gamma and beta > alpha, which holds for gamma = beta = 0.7 and alpha = 0.5.

Payload: 2 P b bytes per node every H steps, for D and phi of P parameters of b bytes. Pairs exchange D and phi, tx = rx
= 2 P b; larger groups use a ring all-reduce, tx = rx = 4 (n-1)/n P b. Nodes derive the groups from (seed, round)
without communication. The nodes' parameters are never equal, so evaluation uses their mean. Let the inner learning rate
decay, because the distance between nodes follows it.

If nodes are absent, groups are drawn among the present ones. A leftover node is its own group, sends nothing, and takes
its outer step with its own D. A node that was down receives the parameters of a node that stayed as its phi_i, and its
momentum starts at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from exogym.core.base.rng import numpy_generator
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.errors import check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class NoLoCoCommunicator(PeriodicModule):
    """Take NoLoCo's outer step after every step divisible by H.

    Args:
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        group_size: n, the number of nodes in a group.
        alpha: the share of the momentum that an outer step keeps.
        beta: the factor of the group's mean change in the round.
        gamma: the factor of the pull toward the group's mean slow weights. None means beta, as in the published code.

    State: the slow weights phi_i and the momentum delta_i of each node.
    """

    def __init__(self, H: RoundLength, group_size: int, alpha: float, beta: float, gamma: float | None):
        super().__init__()
        self.take_rounds(H)
        check_count("group_size", group_size)
        check_number("alpha", alpha, least=0, under=1)
        check_number("beta", beta, least=0)
        check_number("gamma", beta if gamma is None else gamma, least=0)
        self.group_size, self.alpha, self.beta = group_size, alpha, beta
        self.gamma = beta if gamma is None else gamma

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        n = min(self.group_size, N)
        kind = "exchange" if n == 2 else "all_reduce"
        return [Traffic(kind, P * b, self.interval_steps, n)] * 2 if n > 1 else []

    def couples_every(self, N: int) -> float:
        return self.interval_steps * math.ceil(math.log(max(N, 2), max(self.group_size, 2)))

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.phi = [block.zeros().copy_(block.params) for block in fleet.blocks]
        self.delta = [block.zeros() for block in fleet.blocks]
        self.row_state = {f"phi.{b}": x for b, x in enumerate(self.phi)}
        self.row_state |= {f"delta.{b}": x for b, x in enumerate(self.delta)}

    def groups(self, round_: int, present: Sequence[int]) -> list[list[int]]:
        """Divide the nodes `present` into the random groups of round `round_`, one group per node."""
        order = numpy_generator(self.run.seed, "noloco", round_).permutation(len(present)).tolist()
        size = self.group_size
        return [sorted(present[k] for k in order[at : at + size]) for at in range(0, len(order), size)]

    def communicate(self, fleet: Fleet, step: int) -> None:
        groups = self.groups(self.round_of(step), fleet.comm.present)
        rows = rows_of(fleet, fleet.comm.present)
        for block, phi, delta in zip(fleet.blocks, self.phi, self.delta, strict=True):
            D = _group_mean(fleet, block.params - phi, groups)
            pull = _group_mean(fleet, phi, groups).sub_(phi)
            delta[rows] = (self.alpha * delta).add_(D, alpha=self.beta).add_(pull, alpha=self.gamma)[rows]
            phi[rows] += delta[rows]
            block.params[rows] = phi[rows]
        fleet.synchronise_buffers(groups)

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        rows = rows_of(fleet, nodes)
        for block, phi, delta in zip(fleet.blocks, self.phi, self.delta, strict=True):
            phi[rows], delta[rows] = block.params[rows], 0.0


def _group_mean(fleet: Fleet, x: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean of `x` over each node's group, (rows, ...): by swaps in pairs, all-reduces in larger groups."""
    if max(map(len, groups)) > 2:
        return fleet.comm.all_reduce(x, "mean", groups=groups, out=x.clone())
    partner = list(range(fleet.num_nodes))
    for group in groups:
        partner[group[0]], partner[group[-1]] = group[-1], group[0]
    return fleet.comm.exchange(x, partner).add_(x).mul_(0.5)


class NoLoCoStrategy(CommunicateOptimizeStrategy):
    """NoLoCo: H local steps, then an outer step in small random groups, whose members move toward each other.

    Use it when an all-reduce over all nodes is too slow, as with many nodes or some slow links.

        delta_i <- alpha delta_i + beta mean_G(theta - phi) + gamma (mean_G(phi) - phi_i);   phi_i <- phi_i + delta_i

    phi_i are node i's slow weights, delta_i is its momentum, theta its parameters after the local steps, and mean_G the
    mean over the group. Evaluation uses the nodes' mean. Payload: 2 P b bytes per node every H steps, for P parameters
    of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The paper uses Adam with
            gradients clipped to norm 1.
        H, group_size, alpha, beta, gamma: see `NoLoCoCommunicator`.

    >>> strategy = NoLoCoStrategy(H=50, lr=6e-4, max_norm=1.0, lr_scheduler="cosine")
    """

    temporary_rows = 4.0
    name, title, paper, payload = "noloco", "NoLoCo", "arXiv:2506.10911", "2 P b / H"
    ranges = ("alpha=0.0..0.9", "beta=0.2..1.0")
    equation = "delta_i <- alpha delta_i + beta mean_G D + gamma (mean_G phi - phi_i); phi_i <- phi_i + delta_i"
    needs = "pairs, every H steps; no all-reduce"
    identities = (
        "n=N = diloco with heavy ball, eta=beta, mu=alpha",
        "alpha=0, beta=gamma=1 = averages of pairs",
        "equal data = one node",
    )

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: RoundLength = 50,
        *,
        group_size: int = 2,
        alpha: float = 0.5,
        beta: float = 0.7,
        gamma: float | None = None,
        **options: Unpack[InnerOptions],
    ):
        noloco = NoLoCoCommunicator(H, group_size, alpha, beta, gamma)
        super().__init__(inner_optim, [noloco], **options)
