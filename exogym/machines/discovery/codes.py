"""The code that an agent shows: good for a few attempts, and then another one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from exogym.machines.discovery.channel import draw_code

TRIES, WRONG_IN_A_ROW = 3, 9  # of one code; of all codes, before the agent pairs with nobody any more


class Codes:
    """The code of the moment.

    An attempt counts when a caller proves, or fails to prove, that it had the code: before that the exchange tells it
    nothing. So with codes of six digits who guesses gets in with a chance of at most `WRONG_IN_A_ROW` in a million,
    until somebody starts the agent again. Who only wants to disturb can use up all attempts: nobody pairs then.

    Args:
        show: called with each new code, and with None where there are no more.

    Attributes:
        now: the code; None where there are no more.
    """

    def __init__(self, show: Callable[[str | None], None]):
        self._show = show
        self._lock = threading.Lock()
        self._of_this = self._in_a_row = 0
        self.now: str | None = None
        self._next()

    def redeem(self, code: str, proves: Callable[[], bool]) -> bool:
        """Count an attempt that was begun with `code`; return whether it was still the code, and `proves()`.

        Attempts wait for each other, so those that were begun at the same time count one after the other.
        """
        with self._lock:
            if code != self.now:
                return False
            good = proves()
            if good:
                self._in_a_row = 0
                self._next()
                return True
            self._of_this += 1
            self._in_a_row += 1
            if self._in_a_row >= WRONG_IN_A_ROW:
                self.now = None
                self._show(None)
            elif self._of_this >= TRIES:
                self._next()
            return False

    def _next(self) -> None:
        self.now, self._of_this = draw_code(), 0
        self._show(self.now)
