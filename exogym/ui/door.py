"""Limits for connections that have not sent the token, so that strangers cannot block the page.

A connection is a stranger until it sends the token (see `exogym.ui.guard`). The page closes a stranger after `HEADER_S`
seconds, whatever it has sent. At most `MOST_OF_ONE_ADDRESS` strangers of one address and `MOST_WAITING` in total may
wait. If one more connects, the page closes the oldest.

So a new connection always has room. The owner needs this room for only one request, because a connection with the token
no longer counts. All connections of one machine share an address, so no address is ever refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
MOST_WAITING, MOST_OF_ONE_ADDRESS = 256, 128
AT_ONCE = 16  # connections accepted before the next read of data; must be below the limits above
QUEUE = 1024  # connections that the system holds until they are accepted
LINE_S = 60.0  # seconds between two lines of a log
LOG = logging.getLogger("uvicorn.error")
Place = tuple[str, int]


class Gate:
    """The connections that have not sent the token, oldest first."""

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
        """Forget this client's connection: it has sent the token."""
        if client is not None:
            self._waiting.pop(tuple(client), None)

    def send_away_late(self, connection: Connection) -> None:
        """Close a connection whose time is over, if it is still a stranger."""
        if connection.client is not None and self._waiting.get(connection.client) is connection:
            self._send_away(connection.client)

    def _send_away(self, place: Place) -> None:
        self._waiting.pop(place).transport.abort()
        LOG.warning("closed a connection from %s: it did not send the token in time", place[0])

    def protocol(self) -> type[H11Protocol]:
        """Return the protocol class for uvicorn's connections."""
        return type("Connection", (Connection,), {"door": self})


class Connection(H11Protocol):
    """A connection that waits at a `Gate` until it has sent the token."""

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
    """Limits a log to one line per level in `LINE_S` seconds. The next line counts the dropped ones.

    A system error, such as too many open files, has no traceback.

    >>> log = logging.getLogger("example")
    >>> with seldom(log):
    ...     [log.filter(logging.LogRecord("x", logging.WARNING, "", 1, "no", (), None)) for _ in range(3)]
    [True, False, False]
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
def seldom(*logs: logging.Logger) -> Iterator[None]:
    """Limit these logs to one line per level and minute."""
    filters = [(log, Seldom()) for log in logs]
    for log, one in filters:
        log.addFilter(one)
    try:
        yield
    finally:
        for log, one in filters:
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
