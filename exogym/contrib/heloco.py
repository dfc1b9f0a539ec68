"""HeLoCo: asynchronous DiLoCo whose server corrects each stale Delta, tensor by tensor, along the outer momentum.

Asif et al., HeLoCo: Efficient asynchronous low-communication training under data and device heterogeneity,
arXiv:2606.00271, equations 5 to 19, as in the first author's published code. theta are the outer parameters, m is the
outer momentum, eta the outer learning rate and mu the momentum's decay. Node w

    pulls theta - a eta mu m, takes H inner steps to theta_w, pushes Delta = (what it pulled) - theta_w, pulls again.

For each parameter tensor, with cos = <Delta, m> / (|Delta| |m|) and conf = |Delta| / (|Delta| + kappa |m|), the server
replaces Delta by

    Delta                                                                    if cos >= c_ok
    Delta - s cos |Delta| m/|m|,  s = min(-k_s cos conf, s_max)              if cos < 0            # shrunk against m
    |Delta| u/|u|,  u = (1 - r) Delta/|Delta| + r m/|m|,                     otherwise             # turned toward m
        r = min(k_d (1 - cos) conf, 1)

and then takes the outer step, with the weight rho of an arrival:

    g <- rho Delta;  m <- mu m + (1 - mu) g;  theta <- theta - eta (g + mu m)

A tensor whose Delta or m has a norm below 1e-8 is not corrected. Bytes: P b up and P b down per round of a node, for P
parameters of b bytes; the correction sends nothing. Without correction (c_ok = -1), HeLoCo is asynchronous DiLoCo with
momentum look-ahead.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Layout
from exogym.errors import check_number
from exogym.strategy.clocked import ClockedStrategy, ParameterServer, check_numbers, check_rounds
from exogym.strategy.strategy import InnerOptions

EPSILON = 1e-8  # norms below count as zero


class CorrectingServer(ParameterServer):
    """HeLoCo's server, which corrects each arriving Delta and takes an outer step with it.

    Args:
        theta: the initial outer parameters, (P,) per block; the server copies them.
        layouts: the layout of the parameter tensors in each block.
        strategy: the strategy, for its factors.
        rho: the weight of an arrival.

    Attributes:
        m: the momentum, (P,) per block.
    """

    kept = ("theta", "m")

    def __init__(self, theta: list[Tensor], layouts: list[Layout], strategy: HeLoCoStrategy, rho: float):
        super().__init__(theta)
        self.m = [torch.zeros_like(x) for x in theta]
        self.layouts, self.rule, self.rho = layouts, strategy, rho

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        eta, mu = self.rule.outer_lr, self.rule.outer_momentum
        for theta, m, d, layout in zip(self.theta, self.m, delta, self.layouts, strict=True):
            for slot in layout:
                self._correct(slot.of(d), slot.of(m))
            g = d.mul_(self.rho)
            m.mul_(mu).add_(g, alpha=1 - mu)
            theta.sub_(g.add(m, alpha=mu), alpha=eta)
        self.version += 1

    def _correct(self, d: Tensor, m: Tensor) -> None:
        """Correct the tensor `d` of a Delta in place by the momentum's tensor `m`."""
        rule = self.rule
        of_d, of_m = float(d.norm()), float(m.norm())
        if min(of_d, of_m) < EPSILON:
            return
        cos = float((d * m).sum()) / (of_d * of_m)
        conf = of_d / (of_d + rule.kappa * of_m + EPSILON)
        if cos >= rule.c_ok or rule.c_ok == -1:
            return
        if cos < 0:
            d.sub_(m, alpha=min(-rule.k_s * cos * conf, rule.beta_max) * cos * of_d / of_m)
            return
        r = min(rule.k_d * (1 - cos) * conf, 1.0)
        u = (d * ((1 - r) / of_d)).add_(m, alpha=r / of_m)
        d.copy_(u.mul_(of_d / float(u.norm())))

    def given(self) -> list[Tensor]:
        """Return theta - a eta mu m, (P,) per block."""
        ahead = self.rule.lookahead * self.rule.outer_lr * self.rule.outer_momentum
        return [theta.sub(m, alpha=ahead) for theta, m in zip(self.theta, self.m, strict=True)]


class HeLoCoStrategy(ClockedStrategy):
    """HeLoCo: asynchronous DiLoCo with momentum look-ahead, and a server that corrects stale Deltas tensor by tensor.

    Use it when asynchronous nodes differ in speed and data, so that stale Deltas conflict with the outer momentum.

        g <- rho correct(Delta, m);   m <- mu m + (1 - mu) g;   theta <- theta - eta (g + mu m)

    Delta is the parameters that a node pulled, theta - a eta mu m, minus its parameters after its round. theta are the
    outer parameters, which evaluation uses, and m is the outer momentum. `exogym.contrib.heloco` describes `correct`.

    Bytes: P b up and P b down per round of a node, for P parameters of b bytes; payload P b / H per step of the node.
    Memory: one more row per node, for the parameters that it pulled.

    Args:
        inner_optim: inner optimizer. Each node keeps its optimizer state between rounds.
        H: inner steps of a node's round; with `dylu`, of the fastest node's round.
        outer_lr, outer_momentum: eta and mu of the outer step.
        lookahead: a, how far ahead of theta the pulled parameters lie: 1 in the paper, 0 means theta. The idea is the
            momentum look-ahead of Ajanthan et al. (OpenReview 4O8nzTkHPI).
        arrival_weight: rho. None means 1 / sqrt(N) for N nodes, as the paper recommends.
        c_ok: the cosine from which a tensor of Delta is not corrected, from -1 (no correction) to 1.
        k_s, beta_max: strength and limit (s_max) of shrinking the part of Delta against m.
        k_d: strength of turning Delta toward m.
        kappa: weight of the momentum's norm in `conf`.
        dylu: see `AsyncDiLoCoStrategy`.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The learning-rate schedule follows the
            fleet's step.

    >>> strategy = HeLoCoStrategy(inner_optim="adamw", H=50, lr=3e-4)
    """

    name, title, paper, payload = "heloco", "HeLoCo", "arXiv:2606.00271", "P b / H"
    tried = ()
    ranges = ("outer_lr=0.1..1.0", "outer_momentum=0.0..0.95")
    equation = "g <- rho correct(Delta, m); m <- mu m + (1 - mu) g; theta <- theta - eta (g + mu m)"
    needs = "a server; no node waits"
    identities = ("c_ok=-1, mu=0 = async_diloco:rule=nesterov with K=1, eta rho, beta=0",)
    grace_s = 0.0

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: int = 50,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        lookahead: float = 1.0,
        arrival_weight: float | None = None,
        c_ok: float = 0.2,
        k_s: float = 0.5,
        k_d: float = 1.0,
        kappa: float = 3.0,
        beta_max: float = 0.5,
        dylu: bool = False,
        **options: Unpack[InnerOptions],
    ):
        check_rounds(H, type(self).__name__)
        check_number("c_ok", c_ok, least=-1, most=1)
        check_numbers(
            ("outer_lr", outer_lr, math.inf), ("outer_momentum", outer_momentum, 1), ("lookahead", lookahead, math.inf),
            ("arrival_weight", 0 if arrival_weight is None else arrival_weight, math.inf), ("k_s", k_s, math.inf),
            ("k_d", k_d, math.inf), ("kappa", kappa, math.inf), ("beta_max", beta_max, math.inf),
        )  # fmt: skip
        super().__init__(inner_optim, **options)
        self.H, self.dylu = H, dylu
        self.outer_lr, self.outer_momentum, self.lookahead = outer_lr, outer_momentum, lookahead
        self.arrival_weight, self.c_ok, self.k_s, self.k_d = arrival_weight, c_ok, k_s, k_d
        self.kappa, self.beta_max = kappa, beta_max

    def server(self, fleet: Fleet) -> CorrectingServer:
        """Return a new server whose theta is the fleet's initial parameters."""
        rho = fleet.num_nodes**-0.5 if self.arrival_weight is None else self.arrival_weight
        blocks = fleet.blocks
        return CorrectingServer([block.params[0] for block in blocks], [block.layout for block in blocks], self, rho)
