"""What failures leave of a fleet's time: goodput, the share of it that is spent computing what is kept.

N learners (nodes) of a / N accelerators each, one of which fails every `mtbf_s` of its own. A learner with a failed
accelerator stands still for `restart_s`. Learners that meet after every round of t seconds wait for whichever stood
still for longest, so with mu = a t / (N mtbf) failures of a learner in a round, Poisson,

    goodput = utilisation t / (t + d E[max of N draws]),   E[max] = sum over k >= 0 of 1 - F(k)^N,   d = restart_s

which for short rounds is 1 / (1 + a d / mtbf): every failure stops all. Learners that do not wait for each other lose
only their own time: utilisation / (1 + a d / (N mtbf)). F is the distribution function of the Poisson law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from exogym.errors import ArgumentError, check_number
from exogym.network import parse_seconds, readable_seconds

NEGLIGIBLE = 1e-12
LOW_TAIL = 12  # standard deviations


@dataclass(frozen=True)
class Failures:
    """How often accelerators fail, and what a failure costs.

    Args:
        accelerators: a, of the whole fleet; at least one for each node.
        mtbf_s: mean time between failures of one accelerator; seconds, or text such as "8760h".
        restart_s: from a failure until the learner computes something new: to notice, restart, load, and compute again
            what was lost. Seconds or text.

    Raises:
        ArgumentError: a number that is not over 0.

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
        """Return the share of time that is spent on computing what is kept.

        Args:
            utilisation: that share without failures.
            round_s: t, seconds from one meeting to the next.
            waits: whether learners wait for each other at meetings.

        Raises:
            ArgumentError: more nodes than accelerators.
        """
        if num_nodes > self.accelerators:
            raise ArgumentError(f"accelerators={self.accelerators:g} for {num_nodes} nodes: at least one for each")
        mean = self.accelerators / num_nodes * round_s / self.mtbf_s
        stops = most_of_poissons(mean, num_nodes) if waits else mean
        return utilisation / (1 + stops * self.restart_s / round_s)

    def __str__(self) -> str:
        every_s = self.mtbf_s / self.accelerators
        down = readable_seconds(self.restart_s)
        return (
            f"{self.accelerators:.4g} accelerators, of which one fails every {readable_seconds(every_s)} (each after "
            f"{readable_seconds(self.mtbf_s)} of computing); its learner then stands still for {down}"
        )


def most_of_poissons(mean: float, draws: int) -> float:
    """Return the mean of the largest of `draws` independent Poisson numbers.

    >>> round(most_of_poissons(2.0, 1), 9), round(most_of_poissons(1e-6, 1000), 6)
    (2.0, 0.001)
    """
    k = max(0, int(mean - LOW_TAIL * math.sqrt(mean)))  # all draws are over what is below that
    total, below, log_mean = float(k), 0.0, math.log(mean)
    while True:
        below += math.exp(k * log_mean - mean - math.lgamma(k + 1))
        above = -math.expm1(draws * math.log(min(below, 1.0))) if below > 0 else 1.0
        total += above
        if k > mean and above < NEGLIGIBLE * total + NEGLIGIBLE**2:
            return total
        k += 1
