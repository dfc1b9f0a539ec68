"""Predict the seconds that runs will take, from the seconds that earlier runs took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean


class Pace:
    """Seconds per unit of work for each kind of run, such as a strategy.

    The steps of one strategy may take several times as long as another's. So if a kind has already run, its estimate
    uses only its own runs. For a kind that has not run yet, the function `unknown` computes an estimate from the
    seconds per unit of the other kinds in its group. By default, this is their mean.

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
        """Record that a run of this kind took `seconds` for `work` units of work."""
        kinds = self._spent.setdefault(group, {})
        before = kinds.get(kind, (0.0, 0.0))
        kinds[kind] = before[0] + work, before[1] + seconds

    def seconds(self, group: str, kind: str, work: float) -> float:
        """Return the expected seconds for `work` units of a kind of run; NaN if no run of its group is known."""
        kinds = self._spent.get(group, {})
        known = [kinds[kind]] if kind in kinds else list(kinds.values())
        return work * self.unknown(spent / done for done, spent in known) if known else math.nan

    def spent(self, group: str) -> float:
        """Return the total seconds of all runs in a group."""
        return sum(seconds for _, seconds in self._spent.get(group, {}).values())
