"""A server's connection to one of the run's processes, over which both ends send lines of JSON."""

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
    """A server's connection to one of the run's processes.

    Args:
        selector: waits for data on the connection. A selector key's `data` is the function to call when the connection
            has data.
        connection: the socket, whose other end has proved the run's secret.
        take: called with this `Line` and each received value. If `take` cannot read a value, or if a line is longer
            than 1 MiB, the connection is closed.
        lose: called with this `Line` and the reason, after the connection is lost and closed.

    Attributes:
        rank: the process's rank, or None until the process has sent its rank.
        name: a name of the process for messages.
        heard: time of the last message; before the first message, the time when the process connected.
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
        """Send a value to the process. If the process cannot be reached, close the connection."""
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
