"""Delayed DiLoCo: DiLoCo with averages that arrive d steps late.

A round has H steps, and 0 < d <= H. Nodes send round r's average after step r H, and the average arrives after step r H
+ d. Then the outer step sets node i's parameters theta_i to the outer parameters theta, which drops the local steps in
between. With d = H (arXiv:2502.12996, "naive delay") outer step r uses the average of round r - 1, or 0 in the first
round. At that time nodes send the average of round r and continue from theta. Averages that are in flight at the end of
training are still used (`final_sync`).

Averages with a delay overlap with computing. On hosts, this overlap needs gloo and whole nodes in each process, without
`faults` or `min_hosts`. Otherwise nodes wait for each average right after they send it. Bytes and absent nodes are as
in DiLoCo.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.combinations import check
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count
from exogym.strategy.communicate_optimize import PeriodicModule
from exogym.strategy.options import taking
from exogym.strategy.outer import OuterSteps, OuterStepsOptions
from exogym.strategy.outer_parameters import OuterModule, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class DelayedCommunicator(OuterModule, OuterSteps):
    """Take DiLoCo's outer step `delay` steps after every step divisible by H.

    `OuterSteps` describes the other arguments. State: DiLoCo's state, and the average that has not arrived yet.
    """

    @taking
    def __init__(
        self, H: RoundLength = 100, outer_optim: Any = "sgd", *, delay: int, **options: Unpack[OuterStepsOptions]
    ):
        super().__init__(H, outer_optim, **options)
        check_count("delay", delay)
        check(PeriodicModule.features(self) | {"delay": f"delay={delay}"})
        if delay > self.interval_steps:
            raise ArgumentError(f"delay={delay} is more than the H={H} steps of a round: take at most H")
        self.delay = delay
        self.name = "DiLoCoCommunicator"  # checkpoints have always used this name

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps, overlap_steps=self.delay)]

    def couples_every(self, N: int) -> float:
        return self.interval_steps + self.delay

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.outer = OuterParameters(fleet, self.rule, self.outer_rounds, delay=self.delay, weights=self.weights)
        if self.delay == self.interval_steps:
            self.outer.expect_nothing(fleet)

    def next_event(self, step: int) -> int:
        end = super().next_event(step)
        if self.delay == self.interval_steps:
            return end
        H = self.interval_steps
        arrival = ((step - self.delay) // H + 1) * H + self.delay
        return min(end, max(arrival, H + self.delay))

    def is_turn(self, step: int) -> bool:
        return super().next_event(step - 1) == step
