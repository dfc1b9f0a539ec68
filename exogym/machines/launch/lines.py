"""The server's end of a connection that came through a door: it exchanges lines of JSON."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from exogym.core.base.shelf import SENSELESS

SEND_S = 10.0
CHUNK_BYTES, LONGEST_LINE = 1 << 16, 1 << 20


class Line:
    """A connection to one of the run's processes, in the loop of `selector`.

    Args:
        take: called with this connection and each value it receives. A value that `take` cannot read, or an endless
            line, closes the connection.
        lose: called with this connection and the reason, after it is lost and closed.

    Attributes:
        rank: the process's rank, once it has sent it.
        name: the rank in words.
        heard: time of the last message, or of the connection.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        take: Callable[[Line, dict[str, Any]], None],
        lose: Callable[[Line, str], None],
    ):
        self.selector, self.connection, self._take, self._lose = selector, connection, take, lose
        self.rank: int | None = None
        self.name, self.heard, self.is_open, self._rest = "a node", time.monotonic(), True, b""
        connection.settimeout(SEND_S)
        selector.register(connection, selectors.EVENT_READ, self._hear)

    def say(self, what: dict[str, Any]) -> None:
        """Send a value to the other end, if it is reachable."""
        try:
            self.connection.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            self.lost("cannot be reached")

    def lost(self, why: str) -> None:
        if self.is_open:
            self.close()
            self._lose(self, why)

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.connection)
        self.connection.close()

    def _hear(self) -> None:
        if not self.is_open:
            return  # another connection's message has closed it
        try:
            data = self.connection.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data or len(self._rest) + len(data) > LONGEST_LINE:
            return self.lost("is gone")
        *whole, self._rest = (self._rest + data).split(b"\n")
        for text in whole:
            self.heard = time.monotonic()
            try:
                self._take(self, json.loads(text))
            except SENSELESS:
                self.lost("sent an invalid message")
            if not self.is_open:
                return
