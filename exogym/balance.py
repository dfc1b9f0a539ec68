"""Load shared out by speed: fast machines get more nodes, larger batches, or more local steps.

    nodes    the nodes are dealt to the processes by speed: the placement changes, and no bit of the result
    batch    node i takes b_i examples per step, the sum over nodes staying N b, and weighs b_i in every mean
    steps    node i takes a share v_i / max v of the local steps, and weighs that share in every mean

With v_i the speeds, and counts c_i of at least 1 that sum up to a total, all wait for the node with the largest
c_i / v_i. `share_out` makes that as small as it can be.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from exogym.errors import ArgumentError, check_choice, checked

KINDS = ("nodes", "batch", "steps")


class Balance:
    """How the load of a run is shared out.

    Args:
        kind: "nodes", "batch" or "steps", as above.
        speeds: relative speed of each process ("nodes") or node ("batch", "steps"), over 0; None: measured at the
            start of `fit`, by a few training steps of every process.

    Raises:
        ArgumentError: an unknown kind, or speeds that are not positive numbers.

    >>> balance = Balance("batch", speeds=[1, 3])
    >>> balance.counts(2 * 16)
    [8, 24]
    >>> [str(share) for share in Balance("steps", speeds=[1, 3]).shares()]
    ['1/3', '1']
    """

    @checked
    def __init__(self, kind: str, speeds: Sequence[float] | None = None):
        check_choice("balance", kind, KINDS)
        self.kind = kind
        self.speeds = None if speeds is None else _checked_speeds(speeds)

    @staticmethod
    def of(given: Any) -> Balance:
        """Return `given` as a Balance; text is its kind."""
        if isinstance(given, Balance):
            return given
        if not isinstance(given, str):
            raise ArgumentError(f"balance={given!r} must be one of {', '.join(map(repr, KINDS))}, or a Balance")
        return Balance(given)

    def check_speeds(self, count: int, of: str) -> None:
        """Raise ArgumentError unless there are `count` speeds, one for each `of`, or none are given."""
        if self.speeds is not None and len(self.speeds) != count:
            raise ArgumentError(
                f"balance={self.kind!r} has {len(self.speeds)} speeds for {count} {of}: give one for each, or leave "
                "speeds out to have them measured"
            )

    def counts(self, total: int) -> list[int]:
        """Return `total` whole things shared out by the speeds, at least one each."""
        assert self.speeds is not None
        return share_out(total, self.speeds)

    def shares(self) -> list[Fraction]:
        """Return each speed as a share of the largest, exactly as the numbers are written."""
        assert self.speeds is not None
        exact = [Fraction(str(speed)) for speed in self.speeds]
        return [speed / max(exact) for speed in exact]


def share_out(total: int, speeds: Sequence[float]) -> list[int]:
    """Return whole counts of at least 1 with sum `total` and the least possible largest count / speed.

    One after the other goes to whoever would be done with it first, the lowest of equals (D'Hondt's rule). With equal
    speeds the first ones get one more.

    Raises:
        ArgumentError: fewer than one for each.

    >>> share_out(10, [1.0, 1.0, 3.0]), share_out(5, [1.0, 1.0]), share_out(4, [100.0, 1.0, 1.0])
    ([2, 2, 6], [3, 2], [2, 1, 1])
    """
    n = len(speeds)
    if total < n:
        raise ArgumentError(f"{total} cannot be shared out among {n}: each needs at least one")
    whole = sum(speeds)
    counts = [max(1, math.floor((total - n) * (speed / whole))) for speed in speeds]  # no less in any case
    queue = [((counts[i] + 1) / speeds[i], i) for i in range(n)]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, ((counts[i] + 1) / speeds[i], i))
    return counts


def speeds_of(seconds: Sequence[float]) -> list[float]:
    """Return the speeds, relative to the fastest and with three digits, of those that take so many `seconds`.

    >>> speeds_of([0.01, 0.03])
    [1.0, 0.333]
    """
    return [float(f"{min(seconds) / each:.3g}") for each in seconds]


def _checked_speeds(given: Any) -> list[float]:
    numbers = not isinstance(given, str) and isinstance(given, Sequence) and len(given) > 0
    if not numbers or not all(_is_speed(speed) for speed in given):
        raise ArgumentError(f"speeds={given!r} must be a list of numbers over 0, as in speeds=[1, 2.5]")
    return list(given)


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
