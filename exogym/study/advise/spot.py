"""Time and money of a run on spot machines (cheap machines that can be taken away), for two ways to continue.

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

from dataclasses import dataclass
from typing import Any

from exogym.errors import check_number
from exogym.network import parse_seconds, readable_seconds
from exogym.study.advise.prediction import Advice

STEPS = 1000  # steps in the table
HOUR_S = 3600.0


@dataclass(frozen=True)
class Spot:
    """How often spot machines are taken away, and their price.

    Args:
        rate_per_h: how often a machine is taken away per hour, on average.
        price_per_h: a machine's price per hour, in any currency.
        restart_s: time from the loss of a machine until another machine computes, in seconds or as text such as "5min".
        checkpoint_s: time between two checkpoints, in seconds or as text such as "10min".

    Raises:
        ArgumentError: a number is negative, or a text is not a time.

    >>> spot = Spot(rate_per_h=0.1, price_per_h=2.0, restart_s="6min", checkpoint_s="12min")
    >>> again, on = spot.ways(seconds=3600.0, num_nodes=10)
    >>> [round(x, 3) for x in (again.seconds / 3600, again.money, on.seconds / 3600, on.money)]
    [1.2, 24.0, 1.01, 20.0]
    """

    rate_per_h: float
    price_per_h: float
    restart_s: Any = "5min"
    checkpoint_s: Any = "10min"

    def __post_init__(self) -> None:
        for name in ("rate_per_h", "price_per_h"):
            check_number(name, getattr(self, name), least=0)
        for name in ("restart_s", "checkpoint_s"):
            object.__setattr__(self, name, parse_seconds(getattr(self, name), name))

    def ways(self, seconds: float, num_nodes: int) -> tuple[Way, Way]:
        """Return time and money of two ways to continue after a loss: all machines restart, or the others continue.

        `seconds` is the time of the same training without losses.
        """
        lost = self.rate_per_h / HOUR_S
        again_s = seconds * (1 + num_nodes * lost * (self.restart_s + self.checkpoint_s / 2))
        paid = self.price_per_h * num_nodes / HOUR_S
        return Way(again_s, paid * again_s), Way(seconds * (1 + lost * self.restart_s), paid * seconds)

    def table(self, advice: Advice, num_nodes: int) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows of a table, as text: time and money of `STEPS` steps with each strategy."""
        headers = [f"{STEPS} steps", "without losses", "money", "from checkpoints", "money", "going on", "money"]
        rows = []
        for row in advice.rows:
            plain_s = STEPS * row.seconds_per_step
            plain = Way(plain_s, self.price_per_h * num_nodes * plain_s / HOUR_S)
            ways = (plain, *self.ways(plain_s, num_nodes))
            rows.append([row.strategy, *(cell for way in ways for cell in way.texts())])
        return headers, rows

    def to_dict(self, advice: Advice, num_nodes: int) -> dict[str, dict[str, float]]:
        """Return the numbers of `table` as a dict from strategy to seconds and money."""
        found = {}
        for row in advice.rows:
            again, on = self.ways(STEPS * row.seconds_per_step, num_nodes)
            found[row.strategy] = {
                "from_checkpoints_s": again.seconds, "from_checkpoints_money": again.money, "going_on_s": on.seconds,
                "going_on_money": on.money,
            }  # fmt: skip
        return found

    def __str__(self) -> str:
        return (
            f"each machine costs {self.price_per_h:g} an hour and is taken away {self.rate_per_h:g} times an hour; "
            f"another machine computes after {readable_seconds(self.restart_s)}, checkpoints are "
            f"{readable_seconds(self.checkpoint_s)} apart. Going on trains the same number of examples, with fewer "
            "nodes at times"
        )


@dataclass(frozen=True)
class Way:
    """Seconds that a run takes, and the money that it costs."""

    seconds: float
    money: float

    def texts(self) -> tuple[str, str]:
        return readable_seconds(self.seconds), f"{self.money:.4g}"
