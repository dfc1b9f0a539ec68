"""Time of a run on spot machines (cheap machines that can be taken away), for two ways to continue.

Each of N machines is taken away lambda times a second on average. Another machine replaces it after r seconds.

If all machines restart from a checkpoint, a second of training takes

    1 + N lambda (r + c / 2)

seconds, where c is the number of seconds between two checkpoints. On average, a loss destroys c / 2 seconds of work.
You pay for all N machines during the whole time.

If the other machines continue (`min_hosts`), a machine is present for 1 / (1 + lambda r) of the time. A step takes as
long as before, but with fewer nodes. So the same number of examples takes (1 + lambda r) times as long. You pay only
for present machines, so the money is the same as without losses. The effect of absent nodes on the loss is not
included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from exogym.errors import ArgumentError, check_number
from exogym.network import parse_seconds, readable_seconds

HOUR_S = 3600.0


@dataclass(frozen=True)
class Spot:
    """How often spot machines are taken away, and the time that a loss costs.

    Args:
        rate_per_h: how often a machine is taken away per hour, on average: a number, or text such as "0.05/h".
        restart_s: time from the loss of a machine until another machine computes, in seconds or as text such as "5min".
        checkpoint_s: time between two checkpoints, in seconds or as text such as "10min".

    Raises:
        ArgumentError: a number is negative, or a text is not a time or has no unit.

    >>> spot = Spot(rate_per_h="0.1/h", restart_s="6min", checkpoint_s="12min")
    >>> round(spot.again_s(3600.0, num_nodes=10)), round(spot.going_on_s(3600.0))
    (4320, 3636)
    """

    rate_per_h: Any
    restart_s: Any = "5min"
    checkpoint_s: Any = "10min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_per_h", _rate(self.rate_per_h))
        check_number("rate_per_h", self.rate_per_h, least=0)
        for name in ("restart_s", "checkpoint_s"):
            object.__setattr__(self, name, parse_seconds(getattr(self, name), name))

    def again_s(self, seconds: float, num_nodes: int) -> float:
        """Return the time of a training that takes `seconds` without losses, if all machines restart."""
        return seconds * (self.redone(num_nodes) + num_nodes * self.rate_per_h / HOUR_S * self.restart_s)

    def redone(self, num_nodes: int) -> float:
        """Return how many steps are computed for each step that stays, if all machines restart."""
        return 1 + float(num_nodes * self.rate_per_h / HOUR_S * self.checkpoint_s / 2)

    def going_on_s(self, seconds: float) -> float:
        """Return the time of a training that takes `seconds` without losses, if the other machines continue."""
        return seconds * (1 + float(self.rate_per_h / HOUR_S * self.restart_s))

    def __str__(self) -> str:
        return (
            f"each machine is taken away {self.rate_per_h:g} times an hour; another machine computes after "
            f"{readable_seconds(self.restart_s)}, checkpoints are {readable_seconds(self.checkpoint_s)} apart. "
            "Going on trains the same number of examples, with fewer nodes at times"
        )


def _rate(given: Any) -> Any:
    """Return losses per hour from a number or a text."""
    if not isinstance(given, str):
        return given
    number, slash, unit = (part.strip() for part in given.partition("/"))
    try:
        rate = float(number)
    except ValueError:
        raise ArgumentError(f"spot={given!r} must be a rate such as '0.05/h' (times that a machine is lost)") from None
    if not slash:
        raise ArgumentError(f"spot={given!r} has no unit: write '{number}/h' (times an hour that a machine is lost)")
    if unit not in ("h", "day"):
        raise ArgumentError(f"spot={given!r} has no known unit: wanted /h or /day, as in '0.05/h'")
    if not 0 <= rate < math.inf:
        raise ArgumentError(f"spot={given!r} must be a rate of at least 0 and finite, such as '0.05/h'")
    return rate if unit == "h" else rate / 24
