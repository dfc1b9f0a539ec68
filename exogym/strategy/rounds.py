"""Rounds of H steps, after which nodes synchronize. H is a number or a function of the round's number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from exogym.core.combinations import refuse
from exogym.errors import ArgumentError, check_count


class Rounds:
    """The rounds of a run, for an H that is a number or a function of the round.

    Rounds end after the steps H, 2 H, ... or, if H is a function of the round's number, after H(0), H(0) + H(1), ...
    The function must be pure: it returns the same number for the same round in every process and after a resume.

    Args:
        H: steps of a round, at least 1, or a function that maps the round's number (from 0) to its steps.

    Raises:
        ArgumentError: H is anything else, or two calls of the function for a round return different numbers; a function
            may also raise it later, when a round begins.

    Attributes:
        foreseen: whether the lengths of future rounds are known.

    >>> rounds = Rounds(lambda r: 2 * (r + 1))  # 2, 4, 6, ...
    >>> [rounds.end_after(step) for step in (0, 1, 2, 6)], rounds.of_step(3), rounds.lengths(7)
    ([2, 2, 6, 12], 1, [2, 4, 6])
    """

    foreseen = True

    def __init__(self, H: RoundLength):
        self.H, self._ends = H, [0]  # the step after which each known round begins
        if callable(H):
            self._add()
        else:
            check_count("H", H)

    def _add(self) -> None:
        number = len(self._ends) - 1
        given: Any = self.H(number)  # type: ignore[operator]
        check_count(f"H({number})", given)
        if (again := self.H(number)) != given:  # type: ignore[operator]
            raise ArgumentError(
                f"H({number}) returned {given} and then {again}: H must be a pure function of the round, without "
                "random numbers or counters"
            )
        self._ends.append(self._ends[-1] + given)

    def end_after(self, step: int) -> int:
        """Return the first step after `step` at which a round ends."""
        if isinstance(self.H, int):
            return (step // self.H + 1) * self.H
        while self._ends[-1] <= step:
            self._add()
        return self._ends[bisect_right(self._ends, step)]

    def of_step(self, step: int) -> int:
        """Return the round (from 0) that contains step number `step` (from 1)."""
        if isinstance(self.H, int):
            return (step - 1) // self.H
        self.end_after(step)
        return bisect_left(self._ends, step) - 1

    def lengths(self, total_steps: int) -> list[int]:
        """Return the length of each round that begins within the first `total_steps` steps."""
        return self.first(self.of_step(total_steps) + 1)

    def first(self, count: int) -> list[int]:
        """Return the lengths of the first `count` rounds."""
        if isinstance(self.H, int):
            return [self.H] * count
        while len(self._ends) <= count:
            self._add()
        return [after - before for before, after in zip(self._ends[:count], self._ends[1 : count + 1], strict=True)]


RoundLength = int | Callable[[int], int] | Rounds


def check_one_length(H: Any, name: str) -> None:
    """Check that H is a number, for a strategy or module whose rounds all have the same length.

    Args:
        H: steps of a round.
        name: the strategy's or module's name, for the message.

    Raises:
        ArgumentError: H is a function, a tuner chooses H, or H is not a whole number of at least 1.
    """
    if callable(H) or isinstance(H, Rounds):
        lengths = f"H={H!r}" if callable(H) else "an H that a tuner chooses"
        refuse({"rounds of one length": name, "rounds of different lengths": lengths})
    check_count("H", H)
