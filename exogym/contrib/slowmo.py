"""SlowMo: local steps, an average, and a slow momentum over the averages.

Wang et al., SlowMo: improving communication-efficient distributed SGD with slow momentum, arXiv:1910.00643. theta are
the outer parameters, theta_i node i's parameters, and u is the slow momentum. After every H inner steps, with the inner
learning rate gamma of the last of these steps:

    xbar    = (1/N) sum_i theta_i                   # all-reduce of P elements
    u       <- beta u + (theta - xbar) / gamma
    theta   <- theta - alpha gamma u,   theta_i <- theta

Payload: P b bytes per node every H steps, for P parameters of b bytes; ring all-reduce, tx = rx = 2 (N-1)/N P b. Inner
optimizers keep their states (the paper's "maintain"). With beta = 0 and alpha = 1, SlowMo is local SGD. With a constant
gamma, it is DiLoCo with heavy-ball SGD as the outer optimizer, with the rate eta = alpha and the momentum mu = beta;
with a changing gamma it is not, because u has the unit of a gradient.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from exogym.core.fleet import Fleet
from exogym.errors import StrategyError, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.optim import OptimSpec
from exogym.strategy.outer import OuterRule
from exogym.strategy.outer_parameters import OuterModule, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Inner, InnerOptions, Run
from exogym.strategy.traffic import Traffic


class SlowMomentum(Optimizer):
    """The outer optimizer of SlowMo: u <- beta u + g / gamma; p <- p - alpha gamma u.

    p is a parameter, g its gradient and u its momentum. `lr` is gamma, `slow_lr` is alpha, and `momentum` is beta.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> p.grad = torch.ones(1)
    >>> SlowMomentum([p], lr=0.5, slow_lr=2.0).step()
    >>> p.item()
    -2.0
    """

    def __init__(self, params: Any, lr: float = 1.0, slow_lr: float = 1.0, momentum: float = 0.5):
        super().__init__(params, {"lr": lr, "slow_lr": slow_lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            gamma = group["lr"]
            if not gamma > 0:
                raise StrategyError(
                    f"SlowMo divides by the inner learning rate, which is {gamma} at the end of this round: "
                    "use a schedule that stays above 0"
                )
            for p in group["params"]:
                state = self.state[p]
                u = state.setdefault("u", torch.zeros_like(p))
                u.mul_(group["momentum"]).add_(p.grad, alpha=1 / gamma)
                p.sub_(u, alpha=group["slow_lr"] * gamma)
        return loss


class SlowMoCommunicator(OuterModule):
    """Take SlowMo's outer step at the end of each round of H steps.

    Args:
        inner: the strategy's inner optimizer, whose learning rate the outer step uses.
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        slow_lr, slow_momentum: alpha and beta, the learning rate and the momentum of the outer step.
    """

    def __init__(self, inner: Inner, H: RoundLength, slow_lr: float, slow_momentum: float):
        super().__init__()
        self.take_rounds(H)
        check_number("slow_lr", slow_lr, over=0)
        check_number("slow_momentum", slow_momentum, least=0, under=1)
        self.inner, self.slow_lr, self.slow_momentum = inner, slow_lr, slow_momentum

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        gamma, T = self.inner.schedule(run.total_steps), run.total_steps

        def at_the_end(round_: int) -> float:
            return gamma.lr(min(self.end_of(round_), T) - 1)

        slow = OptimSpec(SlowMomentum, lr=1.0, slow_lr=self.slow_lr, momentum=self.slow_momentum)
        rule = OuterRule(slow, outer_lr_scheduler=at_the_end)
        self.outer = OuterParameters(fleet, rule, self.round_of(T) + 1)


class SlowMoStrategy(CommunicateOptimizeStrategy):
    """SlowMo: local steps with any inner optimizer, then a step of slow momentum along the nodes' mean change.

    Use it when local SGD loses quality. Unlike in DiLoCo, the momentum follows the inner learning rate's changes.

        u <- beta u + (theta - mean_i theta_i) / gamma;   theta <- theta - alpha gamma u;   theta_i <- theta

    theta are the outer parameters, which evaluation uses, theta_i node i's parameters, u is the slow momentum and gamma
    the inner learning rate. Payload: P b bytes per node every H steps, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. gamma is the optimizer's own
            rate, not a parameter group's.
        H, slow_lr, slow_momentum: see `SlowMoCommunicator`. slow_lr is alpha (1 in the paper), and slow_momentum is
            beta (0.4 to 0.8 in the paper).

    >>> strategy = SlowMoStrategy("sgd", H=12, lr=0.1, slow_momentum=0.6)
    """

    name, title, paper, payload = "slowmo", "SlowMo", "arXiv:1910.00643", "P b / H"
    tried = ()
    ranges = ("slow_lr=0.5..1.5", "slow_momentum=0.0..0.95")
    equation = "u <- beta u + (theta - mean_i theta_i) / gamma; theta <- theta - alpha gamma u; theta_i <- theta"
    needs = "all nodes, every H steps"
    identities = ("beta=0, alpha=1 = fedavg", "constant gamma = diloco with heavy ball, eta=alpha, mu=beta")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 12,
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        **options: Unpack[InnerOptions],
    ):
        inner = Inner.of(inner_optim, options)
        super().__init__(inner_optim, [SlowMoCommunicator(inner, H, slow_lr, slow_momentum)], **options)
