"""Share the load by speed: fast machines get more nodes, or fast nodes larger batches or more local steps.

    nodes    fast processes hold more nodes; only the placement changes, so the result is bitwise identical
    batch    node i takes b_i examples per step, and has the weight b_i in every mean; the sum of all b_i is N b
    steps    node i takes the share v_i / max v of the local steps; this share is also its weight in every mean

v_i is the speed of process or node i, N the number of nodes, and b the option `batch_size`. If c_i >= 1 is the number
of nodes of process i, or of examples of node i, all wait for the largest c_i / v_i, which `share_out` minimizes.
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
    """Share a run's load by speed.

    Args:
        kind: "nodes" shares the nodes among processes; "batch" or "steps" shares examples or local steps among nodes.
        speeds: relative speeds above 0, one per process ("nodes") or per node ("batch", "steps"). None means that `fit`
            first measures them by a few training steps in every process.

    Raises:
        ArgumentError: `kind` is unknown, or a speed is not a positive number.

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
        """Return `given`, a `Balance` or its kind, as a `Balance`."""
        if isinstance(given, Balance):
            return given
        if not isinstance(given, str):
            raise ArgumentError(f"balance={given!r} must be one of {', '.join(map(repr, KINDS))}, or a Balance")
        return Balance(given)

    def check_speeds(self, count: int, of: str) -> None:
        """Raise ArgumentError unless there are `count` speeds; `of` is the text "nodes" or "processes"."""
        if self.speeds is not None and len(self.speeds) != count:
            raise ArgumentError(
                f"balance={self.kind!r} has {len(self.speeds)} speeds for {count} {of}: pass one speed for each, "
                "or leave speeds out, so that fit measures them"
            )

    def counts(self, total: int) -> list[int]:
        """Divide `total` items by speed, into one integer of at least 1 per speed."""
        assert self.speeds is not None
        return share_out(total, self.speeds)

    def shares(self) -> list[Fraction]:
        """Return each speed as an exact fraction of the largest, computed from the speeds' decimal digits."""
        assert self.speeds is not None
        exact = [Fraction(str(speed)) for speed in self.speeds]
        return [speed / max(exact) for speed in exact]


def share_out(total: int, speeds: Sequence[float]) -> list[int]:
    """Divide `total` items into counts of at least 1 with the smallest maximum of count / speed.

    Each item in turn goes to the member (a process or node, one per speed) that would finish it first, or to the lower
    index if equal (D'Hondt's rule). With equal speeds, the first members get one item more if `total` cannot be divided
    evenly.

    Raises:
        ArgumentError: `total` is smaller than the number of speeds.

    >>> share_out(10, [1.0, 1.0, 3.0]), share_out(5, [1.0, 1.0]), share_out(4, [100.0, 1.0, 1.0])
    ([2, 2, 6], [3, 2], [2, 1, 1])
    """
    n = len(speeds)
    if total < n:
        raise ArgumentError(f"total={total} is too small for {n} speeds: expected at least one item per speed")
    whole = sum(speeds)
    counts = [max(1, math.floor((total - n) * (speed / whole))) for speed in speeds]  # lower bounds
    queue = [((counts[i] + 1) / speeds[i], i) for i in range(n)]
    heapq.heapify(queue)
    for _ in range(total - sum(counts)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, ((counts[i] + 1) / speeds[i], i))
    return counts


def speeds_of(seconds: Sequence[float]) -> list[float]:
    """Return speeds relative to the fastest, rounded to three digits, from the `seconds` for equal work.

    >>> speeds_of([0.01, 0.03])
    [1.0, 0.333]
    """
    return [float(f"{min(seconds) / each:.3g}") for each in seconds]


def _checked_speeds(given: Any) -> list[float]:
    numbers = not isinstance(given, str) and isinstance(given, Sequence) and len(given) > 0
    if not numbers or not all(_is_speed(speed) for speed in given):
        raise ArgumentError(f"speeds={given!r} must be a list of numbers over 0, such as speeds=[1, 2.5]")
    return list(given)


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
