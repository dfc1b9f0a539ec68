"""SNOO: DDP whose parameters take a step of Nesterov momentum along their own change every H steps.

Kallusky et al., SNOO: Step-K Nesterov Outer Optimizer, arXiv:2510.15830. w are the slow weights and theta the fast
weights, which are the nodes' parameters; all nodes are equal. b is the outer momentum, eta the outer learning rate and
mu the momentum's decay. Each step is a step of DDP. After every H steps (the paper's K):

    s <- w - theta
    b <- mu b + s
    w <- w - eta (mu b + s),   theta <- w

Payload: P b bytes per node and step, for P parameters of b bytes, as in DDP (the outer step sends nothing); ring
all-reduce, tx = rx = 2 (N-1)/N P b. On one node, SNOO is DiLoCo. With mu = 0, SNOO is Lookahead. Evaluation uses the
fast weights, which equal the slow weights right after an outer step. Steps after the last whole round take no outer
step.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.fleet import Fleet
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.options import split
from exogym.strategy.outer import OuterRule, OuterRuleOptions
from exogym.strategy.outer_parameters import Flight, OuterModule, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class OuterStepOfEqualNodes(OuterModule):
    """Let all nodes, whose parameters must be equal, take the same outer step after every step divisible by H.

    Args:
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        rule: the outer optimizer and its schedules.
    """

    def __init__(self, H: RoundLength, rule: OuterRule):
        super().__init__()
        self.take_rounds(H)
        self.rule = rule

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.outer = OuterParameters(fleet, self.rule, self.round_of(run.total_steps) + 1)

    def communicate(self, fleet: Fleet, step: int) -> None:
        s = [w - x for w, x in zip(self.outer.theta, self.outer.equal_parameters(fleet), strict=True)]
        present = list(fleet.comm.present)
        self.outer.arrive(fleet, Flight(s, present, self.round_of(step), step), present)

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Do nothing: the nodes are equal."""

    def consensus(self, fleet: Fleet) -> None:  # type: ignore[override]
        """Return None: evaluation uses the fast weights."""


class SNOOOptions(OuterRuleOptions, InnerOptions, total=False):
    """Options that `SNOOStrategy` shares with other strategies."""


class SNOOStrategy(CommunicateOptimizeStrategy):
    """SNOO: DDP, and every H steps a step of Nesterov momentum along the change of the parameters.

    Use it when the network carries DDP and the inner optimizer alone learns too slowly, even on one node.

        g = mean_i g_i;   theta <- Opt(theta, clip(g));   every H steps
        s <- w - theta;   b <- mu b + s;   w <- w - eta (mu b + s);   theta <- w

    theta are the fast weights, w the slow weights, b is the outer momentum, and Opt the inner optimizer. Payload: P b
    bytes per node and step, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The paper uses AdamW and Muon.
        outer_optim: the outer optimizer. 'sgd' is Nesterov SGD with rate 0.7 and momentum 0.9, as in DiLoCo.
        H: steps between two outer steps, as a number or a pure function of the round (from 0).
        outer_lr: eta, the outer learning rate.
        outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler: see `OuterRule`.

    >>> strategy = SNOOStrategy("adamw", H=20, lr=1e-3, outer_lr=0.7)
    """

    name, title, paper, payload = "snoo", "SNOO", "arXiv:2510.15830", "P b"
    tried = ()
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95")
    equation = "as ddp; every H steps s <- w - theta; b <- mu b + s; w <- w - eta (mu b + s); theta <- w"
    needs = "all nodes, every step; a fast network"
    identities = ("outer SGD(lr=1) = ddp", "N=1 = diloco")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 20,
        **options: Unpack[SNOOOptions],
    ):
        rule, others = split(options, OuterRule)
        outer = OuterStepOfEqualNodes(H, OuterRule(outer_optim, **rule))
        super().__init__(inner_optim, [outer], gradient_modules=[GradientAverage()], **others)
