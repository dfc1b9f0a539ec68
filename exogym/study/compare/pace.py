"""The remaining time of runs, from the time that others took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean


class Pace:
    """Seconds per unit of work for each kind of run, such as a strategy.

    A kind that has run uses only its own time, because strategies' steps differ in cost by several times. A kind that
    has not run uses `unknown` of its group's times, by default the mean.

    >>> pace = Pace()
    >>> pace.add("fleet", "ddp", work=10, seconds=20.0)
    >>> pace.add("fleet", "diloco", work=10, seconds=10.0)
    >>> pace.seconds("fleet", "ddp", 5), pace.seconds("fleet", "sparta", 10), pace.seconds("alone", "single", 10)
    (10.0, 15.0, nan)
    """

    def __init__(self, unknown: Callable[[Iterable[float]], float] = fmean) -> None:
        self.unknown = unknown
        self._spent: dict[str, dict[str, tuple[float, float]]] = {}

    def add(self, group: str, kind: str, work: float, seconds: float) -> None:
        """Record that `work` of a kind took `seconds`."""
        kinds = self._spent.setdefault(group, {})
        before = kinds.get(kind, (0.0, 0.0))
        kinds[kind] = before[0] + work, before[1] + seconds

    def seconds(self, group: str, kind: str, work: float) -> float:
        """Return the seconds for `work` of a kind; NaN if its group has not run."""
        kinds = self._spent.get(group, {})
        known = [kinds[kind]] if kind in kinds else list(kinds.values())
        return work * self.unknown(spent / done for done, spent in known) if known else math.nan

    def spent(self, group: str) -> float:
        """Return the total seconds of a group."""
        return sum(seconds for _, seconds in self._spent.get(group, {}).values())
