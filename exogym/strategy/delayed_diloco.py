"""Delayed DiLoCo: DiLoCo with averages that arrive d steps late.

A round has H steps, and 0 < d <= H. Nodes send round r's average after step r H, and it arrives after step r H + d. The
outer step then sets theta_i, node i's parameters, to the outer parameters theta, which discards the local steps taken
in between. With d = H ("naive delay" in arXiv:2502.12996), nodes send the average of round r, then take outer step r
with the average of round r - 1 (0 in the first round), and continue from theta. Pending averages are still used at the
end of training (`final_sync`).

Bytes and absent nodes are as in DiLoCo.
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

    `OuterSteps` describes the other arguments. State: DiLoCo's state and the pending average.
    """

    @taking
    def __init__(
        self, H: RoundLength = 100, outer_optim: Any = "sgd", *, delay: int, **options: Unpack[OuterStepsOptions]
    ):
        super().__init__(H, outer_optim, **options)
        check_count("delay", delay)
        check(PeriodicModule.features(self) | {"delay": f"delay={delay}"})
        if delay > self.interval_steps:
            raise ArgumentError(f"delay={delay} exceeds the H={H} steps of a round: use a delay of at most H")
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
