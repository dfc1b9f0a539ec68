"""Goodput: the share of a fleet's time in which it computes results that no failure destroys.

The fleet has N learners (nodes) and `a` accelerators, which are a / N accelerators per learner. While nothing fails,
the nodes compute for the share `utilisation` of the time. An accelerator fails once per mtbf = `mtbf_s` of computing,
on average. A learner with a failed accelerator stands still for d = `restart_s`. If learners synchronize after every
round of t seconds, all wait for the learner that stood still longest. A learner's number of failures in a round is a
draw from the Poisson distribution with mean a t / (N mtbf) and distribution function F:

    goodput = `utilisation` t / (t + d E[max of N draws]),   E[max] = sum over k >= 0 of 1 - F(k)^N

For short rounds goodput is `utilisation` / (1 + a d / mtbf): every failure stops all learners. Learners that do not
wait for each other lose only their own time: goodput is `utilisation` / (1 + a d / (N mtbf)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from exogym.errors import ArgumentError, check_number
from exogym.network import parse_seconds, readable_seconds

NEGLIGIBLE = 1e-12
LOW_TAIL = 12  # standard deviations
MOST_FAILURES = 1e6  # of a learner in a round


@dataclass(frozen=True)
class Failures:
    """How often accelerators fail, and the time that a failure costs.

    Args:
        accelerators: a, the number of accelerators in the whole fleet; at least one per node.
        mtbf_s: an accelerator's mean time between failures, in seconds or as text such as "8760h".
        restart_s: time from a failure until the learner computes new steps, in seconds or as text. This time includes
            noticing the failure, restarting, loading a checkpoint, and repeating lost steps.

    Raises:
        ArgumentError: a number is not over 0.

    >>> often = Failures(1_000_000, "8760h", "5min")  # one every 32 s
    >>> [round(often.goodput(1.0, round_s=1.0, num_nodes=20, waits=waits), 2) for waits in (True, False)]
    [0.1, 0.68]
    """

    accelerators: float
    mtbf_s: Any
    restart_s: Any

    def __post_init__(self) -> None:
        check_number("accelerators", self.accelerators, over=0)
        for name in ("mtbf_s", "restart_s"):
            seconds = parse_seconds(getattr(self, name), name)
            if not seconds:
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be over 0 seconds")
            object.__setattr__(self, name, seconds)

    def goodput(self, utilisation: float, round_s: float, num_nodes: int, waits: bool) -> float:
        """Return the share of time in which the fleet computes results that no failure destroys.

        Args:
            utilisation: the share of time in which nodes would compute without failures.
            round_s: t, seconds from one synchronization to the next.
            num_nodes: N, the number of learners.
            waits: whether learners wait for each other at synchronizations.

        Raises:
            ArgumentError: the fleet has more nodes than accelerators, or a learner fails over a million times a round.
        """
        if num_nodes > self.accelerators:
            raise ArgumentError(
                f"accelerators={self.accelerators:g} for {num_nodes} nodes: give at least one accelerator per node"
            )
        mean = self.accelerators / num_nodes * round_s / self.mtbf_s
        if not mean <= MOST_FAILURES:
            raise ArgumentError(
                f"accelerators={self.accelerators:g}, mtbf_s={self.mtbf_s:g}: a learner would fail {mean:.3g} times in "
                f"a round of {readable_seconds(round_s)}, wanted at most {MOST_FAILURES:g}: give fewer accelerators, "
                "or a longer time between failures"
            )
        stops = most_of_poissons(mean, num_nodes) if waits and mean else mean
        return utilisation / (1 + stops * self.restart_s / round_s)

    def __str__(self) -> str:
        every_s = self.mtbf_s / self.accelerators
        down = readable_seconds(self.restart_s)
        return (
            f"{self.accelerators:.4g} accelerators; one of them fails every {readable_seconds(every_s)} (each after "
            f"{readable_seconds(self.mtbf_s)} of computing); its learner then stands still for {down}"
        )


def most_of_poissons(mean: float, draws: int) -> float:
    """Return the expected maximum of `draws` independent Poisson numbers that have the mean `mean`.

    >>> round(most_of_poissons(2.0, 1), 9), round(most_of_poissons(1e-6, 1000), 6)
    (2.0, 0.001)
    """
    k = max(0, int(mean - LOW_TAIL * math.sqrt(mean)))  # practically all draws are larger
    total, below, log_mean = float(k), 0.0, math.log(mean)
    while True:
        below += math.exp(k * log_mean - mean - math.lgamma(k + 1))
        above = -math.expm1(draws * math.log(min(below, 1.0))) if below > 0 else 1.0
        total += above
        if k > mean and above < NEGLIGIBLE * total + NEGLIGIBLE**2:
            return total
        k += 1
