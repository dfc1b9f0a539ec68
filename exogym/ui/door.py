"""Limits for connections that have not sent the token, so that strangers cannot block the page.

A stranger is a connection over which no request with the token has come (see `exogym.ui.guard`). The page's server
closes a stranger after 10 seconds, even if it has sent other data. At most 128 strangers from one address, and 256 in
total, may be open. One more closes the oldest, so the server can always accept a new connection. It never refuses a
whole address, because all users of one machine share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
MOST_WAITING, MOST_OF_ONE_ADDRESS = 256, 128
AT_ONCE = 16  # connections accepted before the next read of data; must be below the limits above
QUEUE = 1024  # connections that the system holds until they are accepted
LINE_S = 60.0  # seconds between two lines of a log
LOG, ASYNCIO = logging.getLogger("uvicorn.error"), logging.getLogger("asyncio")
Place = tuple[str, int]


class Gate:
    """Holds the open connections that have not sent the token, and closes the oldest if there are too many."""

    def __init__(self) -> None:
        self._waiting: dict[Place, Connection] = {}

    def enter(self, connection: Connection) -> None:
        if connection.client is None:
            return
        connection.network = _network(connection.client[0])
        alike = [place for place, other in self._waiting.items() if other.network == connection.network]
        if len(alike) >= MOST_OF_ONE_ADDRESS:
            self._send_away(alike[0])
        elif len(self._waiting) >= MOST_WAITING:
            self._send_away(next(iter(self._waiting)))
        self._waiting[connection.client] = connection

    def leave(self, connection: Connection) -> None:
        if connection.client is not None and self._waiting.get(connection.client) is connection:
            del self._waiting[connection.client]

    def know(self, client: Any) -> None:
        """Stop counting this client's connection, because it has sent the token."""
        if client is not None:
            self._waiting.pop(tuple(client), None)

    def send_away_late(self, connection: Connection) -> None:
        """Close a connection that has been open for 10 seconds, unless it has sent the token."""
        if connection.client is not None and self._waiting.get(connection.client) is connection:
            self._send_away(connection.client)

    def _send_away(self, place: Place) -> None:
        self._waiting.pop(place).transport.abort()
        LOG.warning("closed a connection from %s: it did not send the token in time", place[0])

    def protocol(self) -> type[H11Protocol]:
        """Return the protocol class with which uvicorn creates connections that this `Gate` limits."""
        return type("Connection", (Connection,), {"door": self})


class Connection(H11Protocol):
    """A connection of uvicorn that a `Gate` limits until it has sent the token."""

    door: Gate
    network = ""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.door.enter(self)
        self._late = self.loop.call_later(HEADER_S, self.door.send_away_late, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self.door.leave(self)
        super().connection_lost(exc)


class Seldom(logging.Filter):
    """A filter that lets a log write one line per level in `line_s` seconds. The next line counts the omitted lines.

    For a system error, such as too many open files, the filter also removes the traceback.
    """

    def __init__(self, line_s: float = LINE_S):
        super().__init__()
        self._line_s, self._next, self._held = line_s, dict[int, float](), dict[int, int]()

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next.get(record.levelno, float("-inf")):
            self._held[record.levelno] = self._held.get(record.levelno, 0) + 1
            return False
        self._next[record.levelno] = time.monotonic() + self._line_s
        if held := self._held.pop(record.levelno, 0):
            record.msg, record.args = f"{record.getMessage()} (and {held} more like this)", ()
        if record.exc_info and isinstance(record.exc_info[1], OSError):
            record.exc_info = record.exc_text = None
        return True


@contextlib.contextmanager
def filtered(log: logging.Logger, *filters: Callable[[logging.LogRecord], bool] | logging.Filter) -> Iterator[None]:
    """Inside the block, filter what a log writes."""
    for one in filters:
        log.addFilter(one)
    try:
        yield
    finally:
        for one in filters:
            log.removeFilter(one)


def _network(address: str) -> str:
    """Return the key of an address. For IPv6 this is its /64 network, because one host may have all its addresses.

    >>> _network("127.0.0.1"), _network("2001:db8::1") == _network("2001:db8::2")
    ('127.0.0.1', True)
    """
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if known.version == 4 else str(ipaddress.ip_network((known, 64), strict=False))
