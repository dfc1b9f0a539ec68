"""The code that an agent shows. A code is valid until a pairing succeeds, or until the third wrong attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable

from exogym.home.discovery.channel import draw_code

TRIES, WRONG_IN_A_ROW = 3, 9  # wrong attempts per code; in a row over all codes, after which pairing closes


class Codes:
    """Holds an agent's current code, and counts wrong attempts to pair.

    An attempt counts when the caller sends its proof that it had the code. Before this proof, the caller learns nothing
    about the code. Pairing closes after nine wrong attempts in a row, until somebody restarts the agent. So the chance
    that somebody guesses a code of six digits is at most nine in a million. But an attacker can use up all attempts.
    Then nobody can pair until the agent is restarted.

    Args:
        show: called with each new code, and with None when pairing closes.

    Attributes:
        now: the current code, or None if pairing is closed.
    """

    def __init__(self, show: Callable[[str | None], None]):
        self._show = show
        self._lock = threading.Lock()
        self._of_this = self._in_a_row = 0
        self.now: str | None = None
        self._next()

    def redeem(self, code: str, proves: Callable[[], bool]) -> bool:
        """Count an attempt that began with `code`. Return whether `code` is still current and `proves()` is true.

        Simultaneous attempts are checked and counted one after the other.
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
