"""Pier: DDP while the outer momentum warms up, then DiLoCo with a changing momentum and outer rate.

Fan and Zhang, Pier: Efficient Large Language Model pretraining with Relaxed Global Communication, arXiv:2511.17849,
with details from the authors' published training loop. theta are the outer parameters, theta_i node i's parameters, v
is the outer momentum, and T the run's number of steps. The first W steps are DDP. After every H steps:

    t <= W:  v <- mu v + (theta - theta_i),   theta <- theta_i         # all theta_i are equal; nodes send nothing
    t >  W:  Delta = (1/N) sum_i (theta - theta_i)                     # all-reduce of P elements
             v <- mu_t v + Delta,   theta <- theta - eta_t (Delta + mu_t v),   theta_i <- theta

W is the end of the first round that ends at or after the share `warmup` of the run. The momentum decays: 1 - mu_t is
0.1 (1 - mu) until 15 % of the run, 0.5 (1 - mu) until 20 %, and 1 - mu later, which for mu = 0.9 gives the paper's
0.99, 0.95 and 0.9. The rate eta_t rises linearly from 0 to eta during 10 % of the run after W, and falls to 9/11 eta at
80 % of the run (1.1 and 0.9 in the paper). The newest revision of the published loop replaces these steps of mu_t and
eta_t by cosines, which ExoGym does not have.

Payload: P b bytes per node and step up to W, then P b every H steps, for P parameters of b bytes; ring all-reduce, tx =
rx = 2 (N-1)/N P b. Without warm-up and decay, Pier is DiLoCo.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule
from exogym.strategy.outer import OuterRule
from exogym.strategy.outer_parameters import OuterModule, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class PierCommunicator(OuterModule):
    """Follow DDP with the outer momentum up to step W, and take Pier's outer steps every H steps after it.

    Args:
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        outer_lr, outer_momentum: eta and mu.
        warmup: the share of the run's steps that warm up, from 0 to 1.
        decay: whether eta_t and mu_t change. If False, they are eta and mu after the warm-up.
    """

    counters = ("t",)

    def __init__(self, H: RoundLength, outer_lr: float, outer_momentum: float, warmup: float, decay: bool):
        super().__init__()
        self.take_rounds(H)
        check_number("warmup", warmup, least=0, most=1)
        OuterRule("sgd", outer_lr, outer_momentum=outer_momentum)  # checks both
        self.eta, self.mu, self.warmup, self.decay = outer_lr, outer_momentum, warmup, decay
        self.t = 0  # the last step with averaged gradients

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        warm = [Traffic("all_reduce", P * b, 1 / self.warmup)] if self.warmup else []
        late = [Traffic("all_reduce", P * b, self.interval_steps / (1 - self.warmup))] if self.warmup < 1 else []
        return warm + late

    def warm_steps(self, total_steps: int) -> int:
        """Return W, the warm-up's steps in a run of `total_steps`, in whole rounds."""
        step = 0
        while self.warmup and step < self.warmup * total_steps:
            step = self.next_event(step)
        return step

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        T, W = run.total_steps, self.warm_steps(run.total_steps)

        def rate(round_: int) -> float:
            t = min(self.end_of(round_), T)
            if t <= W:
                return 0.0
            if not self.decay:
                return 1.0
            return 9 / 11 if t >= 0.8 * T else min(1.0, (t - W) / (0.1 * T))

        def momentum(round_: int) -> float:
            t = min(self.end_of(round_), T)
            share = 0.1 if t < 0.15 * T else 0.5 if t < 0.2 * T else 1.0
            return (1 - share * (1 - self.mu)) / self.mu if t > W and self.decay and self.mu else 1.0

        rule = OuterRule(
            "sgd", self.eta, outer_lr_scheduler=rate, outer_momentum=self.mu, outer_momentum_scheduler=momentum
        )
        self.W, self.outer = W, OuterParameters(fleet, rule, self.round_of(T) + 1)

    def communicate(self, fleet: Fleet, step: int) -> None:
        if step > self.W:
            super().communicate(fleet, step)
            return
        outer = self.outer
        x = outer.equal_parameters(fleet)
        outer.optimizer.step(outer.views([t - x_k for t, x_k in zip(outer.theta, x, strict=True)]), self.round_of(step))
        for theta, x_k in zip(outer.theta, x, strict=True):  # the rate was 0: the step has changed v alone
            theta.copy_(x_k)

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        if step > self.W:
            super().finish(fleet, step, since)

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:  # type: ignore[override]
        return super().consensus(fleet) if self.t >= self.W else None


class WarmUp(GradientModule):
    """Average the nodes' gradients up to `outer`'s step W; later each node uses its own."""

    def __init__(self, outer: PierCommunicator):
        super().__init__()
        self.outer, self.average = outer, GradientAverage()

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []  # counted by `outer`

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.average.start(fleet, run)
        self.last = self.outer.warm_steps(run.total_steps)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        if step <= self.last:
            self.outer.t = step
            self.average.transform(fleet, step, lr)


class PierStrategy(CommunicateOptimizeStrategy):
    """Pier: DDP while the outer momentum warms up, then DiLoCo with a changing momentum and outer rate.

    Use it when DiLoCo's loss lags behind DDP's early in training and the network can carry DDP for a tenth of the run.

        t <= W:  as ddp; every H steps  v <- mu v + (theta - theta_i);   theta <- theta_i
        t >  W:  Delta = mean_i (theta - theta_i);   v <- mu_t v + Delta;   theta <- theta - eta_t (Delta + mu_t v)

    theta are the outer parameters, theta_i node i's parameters, v is the outer momentum, and W the steps of warm-up.
    `exogym.contrib.pier` gives eta_t and mu_t. Evaluation uses the nodes' model for the first W steps and theta
    afterward.

    Payload: P b bytes per node and step up to W, then P b every H steps, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The paper uses AdamW. Clipping
            acts on the averaged gradient up to W, and on each node's own gradient later.
        H, outer_lr, outer_momentum, warmup, decay: see `PierCommunicator`.

    >>> strategy = PierStrategy(H=50, lr=4e-4, max_norm=1.0, warmup=0.1)
    """

    name, title, paper, payload = "pier", "Pier", "arXiv:2511.17849", "P b (warmup + (1 - warmup) / H)"
    tried = ()
    ranges = ("outer_lr=0.3..1.5", "outer_momentum=0.0..0.95")
    equation = "t <= W: as ddp, v <- mu v + theta - theta_i; later as diloco with mu_t and eta_t"
    needs = "all nodes, every step up to W, then every H steps"
    identities = ("warmup=0, decay=False = diloco", "warmup=1 = ddp")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: RoundLength = 50,
        *,
        outer_lr: float = 1.1,
        outer_momentum: float = 0.9,
        warmup: float = 0.1,
        decay: bool = True,
        **options: Unpack[InnerOptions],
    ):
        outer = PierCommunicator(H, outer_lr, outer_momentum, warmup, decay)
        super().__init__(inner_optim, [outer], gradient_modules=[WarmUp(outer)] if warmup else [], **options)
