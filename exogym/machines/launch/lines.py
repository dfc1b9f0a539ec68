"""Lines of JSON over a connection that came through a door, at the server's end."""

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
    """A connection of a process of the run, in the loop of `selector`.

    Args:
        take: called with this line and each value that it brings. A line that brings what `take` cannot make sense of,
            or one without end, is lost.
        lose: called with this line and why, once it is lost, and closed.

    Attributes:
        rank: who it is, once it has said so; name: in words.
        heard: when it was last heard, or came.
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
        """Tell the other end, if it can be reached."""
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
            return  # it was closed by what another one said
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
                self.lost("says what nobody understands")
            if not self.is_open:
                return
