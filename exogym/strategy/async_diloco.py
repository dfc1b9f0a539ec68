"""Asynchronous DiLoCo with dynamic local updates, and four rules by which its server applies the nodes' updates.

Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv:2401.09135. No node waits for another. Node w

    pulls theta, takes H_w inner steps to theta_w, pushes Delta = theta_pulled - theta_w, pulls again.

A server applies each Delta on arrival by one of the rules below, where eta is the outer learning rate, beta the outer
momentum, K the period (by default the number of nodes N), and t the number of arrivals so far. The momentum m and the
buffer A start at 0.

    delayed_nesterov   A <- A + Delta
                       if (t+1) mod K = 0:  m <- beta m + A/K;  theta <- theta - eta (beta m + Delta/K);  A <- 0
                       else:                                    theta <- theta - eta Delta/K
    nesterov           g = Delta/K;             m <- beta m + g;  theta <- theta - eta (g + beta m)
    discount           as nesterov, with g = (1+s)^(-1/2) Delta/K               s: updates of theta since w pulled theta
    fedbuff            A <- A + Delta;  at every K-th arrival: as nesterov, with g = A/K; A <- 0      (arXiv:2106.06639)

Every rule divides by K, so that K arrivals weigh as much as one outer step of DiLoCo and eta means the same in every
rule. `nesterov` with K = 1 takes DiLoCo's outer step at every arrival. If K = N and all nodes pulled the same theta,
`delayed_nesterov` and `fedbuff` equal DiLoCo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_choice, check_count
from exogym.strategy.clocked import ClockedStrategy, ParameterServer, check_numbers, check_rounds
from exogym.strategy.strategy import InnerOptions


class RuleServer(ParameterServer):
    """The server of asynchronous DiLoCo, which applies each node's Delta to the outer parameters theta on arrival.

    Delta is the theta that the node pulled minus the node's parameters after its round.

    Args:
        theta: the initial outer parameters, (P,) per block; the server copies them.
        rule, K: the rule's name and the period; see `exogym.strategy.async_diloco`.
        eta, beta: outer learning rate and outer momentum.

    Attributes:
        theta, m, A: outer parameters, momentum, and the sum of the Deltas since the last period, (P,) per block.
        t: number of arrivals so far.
        version: number of updates of theta.

    >>> server = RuleServer([torch.zeros(1)], "delayed_nesterov", K=2, eta=1.0, beta=0.5)
    >>> for _ in range(2):
    ...     server.apply([torch.ones(1)])
    >>> server.theta  # -1/2, then -1/2 - beta m with m = (1 + 1)/2
    [tensor([-1.5000])]
    """

    kept: tuple[str, ...] = ("theta", "m", "A")
    counted: tuple[str, ...] = ("t", "version")

    def __init__(self, theta: list[Tensor], rule: str, K: int, eta: float, beta: float):
        super().__init__(theta)
        self.m = [torch.zeros_like(x) for x in theta]
        self.A = [torch.zeros_like(x) if rule in BUFFERED else x.new_empty(0) for x in theta]
        self.rule, self.K, self.eta, self.beta = RULES[rule], K, eta, beta
        self.t = 0

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        """Apply one node's `delta` by the server's rule, and count the arrival."""
        changes = [self.rule(self, b, x, staleness) for b, x in enumerate(delta)]
        self.t += 1
        self.version += any(changes)

    def flush(self) -> None:
        """Update theta with the Deltas that "fedbuff" has not applied yet, each with the weight 1 / period."""
        waiting = self.t % self.K if self.rule is _fedbuff else 0
        for b, A in enumerate(self.A if waiting else []):
            self.outer_step(b, A.div_(self.K))
            A.zero_()
        self.version += waiting > 0

    @property
    def completes_period(self) -> bool:
        """Whether the current Delta completes a period of K arrivals."""
        return (self.t + 1) % self.K == 0

    def outer_step(self, b: int, g: Tensor) -> None:
        """Update theta and the momentum in block `b` by Nesterov's rule, with `g` as the gradient."""
        theta, m = self.theta[b], self.m[b]
        m.mul_(self.beta).add_(g)
        theta.sub_(g.add(m, alpha=self.beta), alpha=self.eta)


def _delayed_nesterov(server: RuleServer, b: int, delta: Tensor, s: int) -> bool:
    theta, m, A = server.theta[b], server.m[b], server.A[b]
    A.add_(delta)
    g = delta.div_(server.K)
    if server.completes_period:
        m.mul_(server.beta).add_(A.div_(server.K))
        A.zero_()
        g.add_(m, alpha=server.beta)
    theta.sub_(g, alpha=server.eta)
    return True


def _nesterov(server: RuleServer, b: int, delta: Tensor, s: int) -> bool:
    server.outer_step(b, delta.div_(server.K))
    return True


def _discount(server: RuleServer, b: int, delta: Tensor, s: int) -> bool:
    server.outer_step(b, delta.div_(server.K * math.sqrt(1 + s)))
    return True


def _fedbuff(server: RuleServer, b: int, delta: Tensor, s: int) -> bool:
    A = server.A[b].add_(delta)
    if server.completes_period:
        server.outer_step(b, A.div_(server.K))
        A.zero_()
    return server.completes_period


RULES: dict[str, Callable[[RuleServer, int, Tensor, int], bool]] = {
    "delayed_nesterov": _delayed_nesterov,
    "nesterov": _nesterov,
    "discount": _discount,
    "fedbuff": _fedbuff,
}
BUFFERED = ("delayed_nesterov", "fedbuff")


class AsyncDiLoCoStrategy(ClockedStrategy):
    """Asynchronous DiLoCo: each node trains at its own pace, and a server applies each node's Delta on arrival.

    Use it when nodes differ in speed and none may wait for another.

        A <- A + Delta;   every K-th arrival: m <- beta m + A/K and a step of theta along m;   A <- 0

    Delta is the outer parameters theta that a node pulled minus its parameters after its round, A the sum of the Deltas
    since the last period, m the momentum, beta its decay and K the period. Evaluation uses theta.

    Bytes: P b up and P b down per round of a node, for P parameters of b bytes; in T_w local steps, node w takes T_w /
    H_w rounds. Memory: one more row per node, for the theta that it pulled.

    Args:
        inner_optim: inner optimizer. Each node keeps its optimizer state between rounds.
        H: inner steps of a node's round; with `dylu`, of the fastest node's round.
        outer_lr, outer_momentum: eta and beta of the outer step.
        rule: "delayed_nesterov", "nesterov" (naive), "discount" or "fedbuff"; see `exogym.strategy.async_diloco`.
        dylu: dynamic local updates. A round of node w has H_w = max(1, floor(v_w / max v * H)) steps, where v_w is the
            node's mean number of steps per second, so that all nodes return at about the same time.
        grace_s: virtual seconds for which the server waits for more nodes after an arrival, before it applies all
            arrived Deltas in turn and these nodes pull the same theta. 0 means no wait, math.inf a wait for all nodes.
        period: K, the number of arrivals that weigh as much as one outer step of DiLoCo. None means N.
        max_staleness: the server drops a Delta if theta was updated more often than this between the node's pull and
            its push. None means that the server drops none.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The learning-rate schedule follows the
            fleet's step, so it ends at the same time for fast and slow nodes.

    A step of the fleet is N local steps, whichever nodes take them. Every node draws examples from its own share of the
    data, so a fast node finishes its share sooner.

    At the end of training each node pushes the steps since its last push and pulls once more (`final_sync`), so as many
    bytes go up as down. With rule="fedbuff", the server then takes a step along A/K, even if fewer than K Deltas have
    arrived. These last rounds are shorter than H steps, but a round that completes a period still causes a whole step
    along the momentum, so the loss may jump. Nodes also send buffers that training changes: if n of N nodes pull
    together, the server's buffers move n/N of the way toward the mean of these nodes' buffers. Planned faults
    (`fit(faults=...)`) and compute="vmap" are refused.

    >>> strategy = AsyncDiLoCoStrategy(inner_optim='adamw', H=50, lr=3e-4, dylu=True)
    >>> naive = AsyncDiLoCoStrategy(inner_optim='adamw', H=50, lr=3e-4, rule='nesterov', outer_lr=0.1)
    """

    name, title, paper, payload = "async_diloco", "Async DiLoCo", "arXiv:2401.09135", "P b / H"
    ranges = ("outer_lr=0.1..1.0", "outer_momentum=0.0..0.95")
    equation = "A <- A + Delta_i on arrival; every K-th: m <- beta m + A/K and a step along m"
    needs = "a server; no node waits"
    identities = ("equal speeds, K=N, infinite grace = diloco", "N=1 = diloco", "beta=0: theta - eta/K Delta")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: int = 50,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        rule: str = "delayed_nesterov",
        dylu: bool = False,
        grace_s: float = 0.0,
        period: int | None = None,
        max_staleness: int | None = None,
        **options: Unpack[InnerOptions],
    ):
        check_rounds(H, type(self).__name__)
        check_choice("rule", rule, RULES)
        for name, given in (("period", period), ("max_staleness", max_staleness)):
            if given is not None:
                check_count(name, given, least=1 if name == "period" else 0)
        check_numbers(
            ("outer_lr", outer_lr, math.inf), ("outer_momentum", outer_momentum, 1), ("grace_s", grace_s, math.inf),
        )  # fmt: skip
        super().__init__(inner_optim, **options)
        self.H, self.dylu, self.grace_s, self.max_staleness = H, dylu, grace_s, max_staleness
        self.rule, self.outer_lr, self.outer_momentum, self.period = rule, outer_lr, outer_momentum, period

    def server(self, fleet: Fleet) -> RuleServer:
        """Return a new server whose theta is the fleet's initial parameters."""
        K = fleet.num_nodes if self.period is None else self.period
        theta = [block.params[0] for block in fleet.blocks]
        return RuleServer(theta, self.rule, K, self.outer_lr, self.outer_momentum)
