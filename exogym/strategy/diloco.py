"""DiLoCo: Distributed Low-Communication training of language models.

Douillard et al., DiLoCo, arXiv:2311.08105. Every H inner steps, with the outer parameters theta:

    Delta_i = theta - theta_i                       # each node's outer gradient
    Delta   = (1/N) sum_i Delta_i                   # all-reduce of P elements
    theta   <- OuterOpt(theta, Delta)               # Nesterov: v <- mu v + Delta; theta <- theta - eta_r (Delta + mu v)
    theta_i <- theta                                # for all i

The outer learning rate eta_r is eta, or eta s(r) with a schedule s over the outer rounds r = 0, 1, ..., R - 1; with W
rounds of warm-up it is eta (r+1)/W for r < W, and then, by name, eta shape((r-W)/(R-W)) (`Schedule`, with rounds as
steps). The outer momentum may follow the rounds likewise, mu_r = mu s(r), and restart, v <- 0, every K rounds. H may be
a function of the round: round r takes H(r) steps, and R counts a last round that training cuts short.

Delayed by d steps (0 <= d <= H), the average that is sent after step r H arrives after step r H + d, and theta_i <-
theta drops what was trained meanwhile. With d = H (arXiv:2502.12996, "naive delay") outer step r takes the average of
round r - 1, and 0 in the first; what the nodes trained in round r is on its way, and they go on from theta. What is on
its way at the end of training arrives then (`final_sync`). In a simulation's clock, averages that arrive late overlap
with computing. On hosts, a run waits for them where it sends them.

In islands of s nodes, (0, ..., s-1), (s, ..., 2s-1), ..., nodes also average their parameters inside their island after
every H_island steps, but where an outer step follows at once.


Inner optimizer states stay local and are kept. Payload P b bytes per node every H steps; ring all-reduce,
tx = rx = 2 (N-1)/N P b. Islands: P b more every H_island steps, tx = rx = 2 (s-1)/s P b. With outer SGD(lr=1), no
momentum and the same weighting this is FedAvg.

With absent nodes: Delta is the mean over the n nodes that are there, each of which sends 2 (n-1)/n P b bytes (one alone
none, and its outer step is on its own Delta_i); with nobody there is no outer step. A node whose synchronisation was
lost keeps theta_i and goes on another H steps; its next Delta_i is measured against the theta it last received. A node
that was down comes back with theta: P b bytes, broadcast by one that stayed.

>>> outer_spec("sgd", None).kwargs["lr"]
0.7
>>> outer = DiLoCoCommunicator(H=20, outer_lr=0.5)
>>> inside = IslandCommunicator(island_size=2, H=5, above=outer)
>>> strategy = CommunicateOptimizeStrategy("adamw", [inside, outer], lr=1e-3)  # DiLoCoStrategy with islands
"""

from __future__ import annotations

import math
from typing import Any

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_choice, check_count, checked
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule, example_weights
from exogym.strategy.eager_diloco import EagerCommunicator
from exogym.strategy.outer import OuterModule, OuterParameters, OuterRule, outer_spec
from exogym.strategy.rounds import RoundLength
from exogym.strategy.schedule import Scheduler
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic

__all__ = ["DiLoCoCommunicator", "DiLoCoStrategy", "IslandCommunicator", "outer_spec"]


class DiLoCoCommunicator(OuterModule):
    """The outer step of DiLoCo, after every step divisible by H.

    Args:
        H: inner steps between outer steps, or a pure function of the round (from 0) that gives them.
        outer_optim, outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler,
            outer_restarts: as `OuterRule`.
        weighting: "uniform", or "examples" to weight outer gradients by each node's examples (non-IID, section 6.1).
        delay: d.

    State: theta and the outer optimizer's, one copy for all nodes; of earlier thetas those that a node last received;
    the average on its way.
    """

    weighted_means = True

    @checked
    def __init__(
        self,
        H: RoundLength = 100,
        outer_optim: Any = "sgd",
        *,
        outer_lr: float | None = None,
        outer_lr_scheduler: Scheduler = None,
        outer_warmup_rounds: int = 0,
        outer_momentum: float | None = None,
        outer_momentum_scheduler: Scheduler = None,
        outer_restarts: int | None = None,
        weighting: str = "uniform",
        delay: int = 0,
    ):
        super().__init__()
        self.take_rounds(H)
        check_choice("weighting", weighting, ("uniform", "examples"))
        check_count("delay", delay, least=0)
        if delay and self.rounds is not None:
            raise ArgumentError(f"delay={delay} is of rounds of one length: give it with a number as H")
        if delay > self.interval_steps:
            raise ArgumentError(f"delay={delay} is more than the H={H} steps of a round: take at most H")
        self.rule = OuterRule(
            outer_optim, outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler,
            outer_restarts,
        )  # fmt: skip
        self.weighting, self.delay = weighting, delay

    def features(self) -> dict[str, str]:
        return {"outer steps in parts or late": f"delay={self.delay}"} if self.delay else {}

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps, overlap_steps=self.delay)]

    def couples_every(self, N: int) -> float:
        return self.interval_steps + self.delay

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        rounds, weights = self.round_of(run.total_steps) + 1, example_weights(run, self.weighting)
        self.outer = OuterParameters(fleet, self.rule, rounds, delay=self.delay, weights=weights)
        if self.delay == self.interval_steps:
            self.outer.expect_nothing(fleet)

    def next_event(self, step: int) -> int:
        end = super().next_event(step)
        if not 0 < self.delay < self.interval_steps:
            return end
        H = self.interval_steps
        arrival = ((step - self.delay) // H + 1) * H + self.delay
        return min(end, max(arrival, H + self.delay))

    def is_turn(self, step: int) -> bool:
        return super().next_event(step - 1) == step


class IslandCommunicator(PeriodicModule):
    """Average the parameters inside fixed islands of consecutive nodes, but where `above` acts after the same step.

    Args:
        island_size: s; the last island is smaller where s does not divide N.
        H: steps from one average to the next.
        above: what joins the islands; it is asked to synchronise what is left at the end.
    """

    weighted_means = True

    @checked
    def __init__(self, island_size: int, H: int, above: PeriodicModule):
        super().__init__()
        check_count("island_size", island_size)
        self.take_rounds(H)
        self.island_size, self.above = island_size, above

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        H, every = self.above.interval_steps, self.interval_steps
        share = 1 / every - 1 / math.lcm(H, every)
        members = min(self.island_size, N)
        return [Traffic("all_reduce", P * b, 1 / share, members)] if share and members > 1 else []

    def couples_every(self, N: int) -> float:
        return self.above.interval_steps

    def communicate(self, fleet: Fleet, step: int) -> None:
        if self.above.is_turn(step):
            return
        present = fleet.comm.present
        starts = range(0, fleet.num_nodes, self.island_size)
        islands = [[node for node in present if start <= node < start + self.island_size] for start in starts]
        groups = [island for island in islands if island]
        for block in fleet.blocks:
            fleet.comm.all_reduce(block.params, "mean", groups=groups, out=block.params)
        fleet.synchronise_buffers(groups)

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Leave it to what joins the islands."""


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """DiLoCo: H local steps with an inner optimizer, then one outer step on the average difference.

    Args:
        inner_optim: inner optimizer; the paper's is AdamW.
        outer_optim: outer optimizer; 'sgd' is Nesterov with lr 0.7 and momentum 0.9.
        H: inner steps between outer steps, or a pure function of the round (from 0) that gives them.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: of the inner optimizer, as `Strategy`.
        outer_lr: eta; it grows with N and H (arXiv:2503.09799: 0.4 to 0.8).
        outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler, outer_restarts: as
            `OuterRule`; both are constant by default, and there are no restarts.
        weighting: "uniform" or "examples".
        delay: d, steps by which the average comes late; 0 to H.
        eager: `EagerCommunicator` instead: the average arrives a whole round late, and each node's own part is fresh.
        island_size, island_H: s and H_island, which is below H; None: no islands.

    The evaluation model is theta. N=1 is a valid setting (an outer momentum over one node).

    In a simulation's clock, averages that arrive late overlap with computing. On hosts, a run waits for them where it
    sends them.

    >>> strategy = DiLoCoStrategy(inner_optim='adamw', outer_optim='sgd', H=100, lr=3e-4)
    """

    name, title, paper, payload = "diloco", "DiLoCo", "arXiv:2311.08105", "P b / H"
    equation = "Delta = mean_i (theta - theta_i); theta <- OuterOpt(theta, Delta); theta_i <- theta"
    needs = "all nodes every H steps"
    identities = (
        "outer SGD(lr=1) = fedavg",
        "H=1, inner SGD = ddp with Nesterov SGD",
        "N=1, outer SGD(lr=1) = the inner optimizer",
        "equal data = one node",
    )

    @checked
    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 100,
        *,
        lr: float | None = None,
        inner_lr: float | None = None,
        outer_lr: float | None = None,
        outer_lr_scheduler: Scheduler = None,
        outer_warmup_rounds: int = 0,
        outer_momentum: float | None = None,
        outer_momentum_scheduler: Scheduler = None,
        outer_restarts: int | None = None,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
        weighting: str = "uniform",
        delay: int = 0,
        eager: bool = False,
        island_size: int | None = None,
        island_H: int | None = None,
    ):
        rule: dict[str, Any] = dict(
            outer_lr=outer_lr, outer_lr_scheduler=outer_lr_scheduler, outer_warmup_rounds=outer_warmup_rounds,
            outer_momentum=outer_momentum, outer_momentum_scheduler=outer_momentum_scheduler,
            outer_restarts=outer_restarts, weighting=weighting,
        )  # fmt: skip
        if eager and delay:
            raise ArgumentError(f"eager=True waits a whole round for the average, so delay={delay} is not for it")
        outer = (
            EagerCommunicator(H, outer_optim, **rule)
            if eager
            else DiLoCoCommunicator(H, outer_optim, delay=delay, **rule)
        )
        modules: list[PeriodicModule] = [outer]
        if (island_size is None) != (island_H is None):
            raise ArgumentError("islands need both: island_size, their nodes, and island_H, the steps between averages")
        if island_size is not None and island_H is not None:
            if eager or outer.rounds is not None or island_H >= outer.interval_steps:
                raise ArgumentError(
                    f"island_H={island_H} must be below the steps of a round, H={outer.interval_steps} here, with H a "
                    "number, eager=False and no tuner of H"
                )
            modules = [IslandCommunicator(island_size, island_H, outer), outer]
        super().__init__(
            inner_optim, modules, lr=lr, inner_lr=inner_lr, max_norm=max_norm, lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
        )  # fmt: skip
