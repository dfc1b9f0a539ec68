"""The door: a listening socket that checks the run's secret before it reads anything else from a new connection.

The door and the connecting process, the guest, prove to each other that they know the secret without sending it:

    door  -> guest  a: 32 random bytes
    guest -> door   b: 32 random bytes; the proof HMAC-SHA256(secret, "guest", service, a, b)
    door  -> guest  the proof HMAC-SHA256(secret, "door", service, a, b), or 32 zero bytes if the guest's proof is wrong

A guest must send its proof within ten seconds. If too many guests wait, the door closes the oldest connection, and a
process of the run tries again. A correct proof needs only one message, so strangers who flood the door with connections
can't keep the run's processes out.
"""

from __future__ import annotations

import functools
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECRET = "EXOGYM_SECRET"  # environment variable with the secret
SIZE = 32
REFUSAL = bytes(SIZE)
NAME_S = 10.0  # seconds for a guest's proof
MOST_UNNAMED, MOST_OF_ONE_ADDRESS = 256, 64
AT_ONCE = 64  # new connections per turn of the loop
BACKLOG = 1024
RETRY_S, TRY_S = 0.1, 10.0
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}  # three minutes of silence end a connection


class WrongSecret(ConnectionError):
    """The other end of a connection doesn't know the run's secret."""


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens only on `address`, at `port` (0 means a free port).

    >>> with listen("127.0.0.1") as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'

    Raises:
        OSError: the address belongs to another machine, or the port is taken.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def proof(secret: str, who: str, service: str, drawn: bytes) -> bytes:
    """Return the HMAC-SHA256 that proves knowledge of `secret`.

    Args:
        who: the end that proves its knowledge, "guest" or "door".
        service: name of the service to which the guest connects.
        drawn: the random bytes that both ends have sent.
    """
    return hmac.new(secret.encode(), f"exogym {who} {service}\n".encode() + drawn, "sha256").digest()


@dataclass(eq=False)
class _Guest:
    """A connection that has not sent a proof yet."""

    connection: socket.socket
    address: str
    drawn: bytes
    came: float
    said: bytes = b""


class Door:
    """Accept connections, and pass each to its service once the other end has proved that it knows `secret`.

    Args:
        selector: waits for data on the connections. A selector key's `data` is the function to call when the connection
            has data.
        listener: the listening socket, which `close` closes.
        secret: the run's secret.
        services: {service: function}. The function gets each connection that has proved the secret for this service.

    Attributes:
        port: the listening port.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        secret: str,
        services: Mapping[str, Callable[[socket.socket], None]],
    ):
        self.selector, self.listener, self.secret, self.services = selector, listener, secret, services
        self.port: int = listener.getsockname()[1]
        self._guests: dict[_Guest, None] = {}  # in order of arrival
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._open)

    def tidy(self) -> None:
        """Close connections that have not proved the secret in time."""
        late = time.monotonic() - NAME_S
        for guest in [guest for guest in self._guests if guest.came < late]:
            self._send_away(guest)

    def close(self) -> None:
        """Stop listening, and close all connections that have not proved the secret."""
        for guest in list(self._guests):
            self._send_away(guest)
        self.selector.unregister(self.listener)
        self.listener.close()

    def _open(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, place = self.listener.accept()
            except OSError:  # no connection is waiting, or it has closed again
                return
            guest = _Guest(connection, str(place[0]), secrets.token_bytes(SIZE), time.monotonic())
            self._make_room(guest.address)
            connection.setblocking(False)
            self._guests[guest] = None
            self.selector.register(connection, selectors.EVENT_READ, functools.partial(self._hear, guest))
            self._say(guest, guest.drawn)

    def _make_room(self, address: str) -> None:
        alike = [guest for guest in self._guests if guest.address == address]
        if len(alike) >= MOST_OF_ONE_ADDRESS:
            self._send_away(alike[0])
        elif len(self._guests) >= MOST_UNNAMED:
            self._send_away(next(iter(self._guests)))

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(2 * SIZE - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.said += data
        if not data:
            self._send_away(guest)
        elif len(guest.said) == 2 * SIZE:
            self._judge(guest)

    def _judge(self, guest: _Guest) -> None:
        drawn, given = guest.drawn + guest.said[:SIZE], guest.said[SIZE:]
        for service, welcome in self.services.items():
            if hmac.compare_digest(given, proof(self.secret, "guest", service, drawn)):
                if self._say(guest, proof(self.secret, "door", service, drawn)):
                    del self._guests[guest]
                    self.selector.unregister(guest.connection)
                    guest.connection.setblocking(True)
                    make_lively(guest.connection)
                    welcome(guest.connection)
                return
        self._say(guest, REFUSAL)
        self._send_away(guest)

    def _say(self, guest: _Guest, data: bytes) -> bool:
        """Send a few bytes. A new connection always has room for them."""
        try:
            if guest.connection.send(data) == len(data):
                return True
        except OSError:
            pass
        self._send_away(guest)
        return False

    def _send_away(self, guest: _Guest) -> None:
        if guest in self._guests:
            del self._guests[guest]
            self.selector.unregister(guest.connection)
            guest.connection.close()


def knock(address: str, port: int, secret: str, service: str, timeout_s: float) -> socket.socket:
    """Connect to a door, and return the connection once both ends have proved the secret.

    If nothing answers or the connection is lost, try again until `timeout_s` seconds have passed.

    Raises:
        WrongSecret: one end does not know the secret.
        ConnectionError: no attempt succeeded in time. The message is the last attempt's error.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _knock(address, port, secret, service, min(TRY_S, max(RETRY_S, deadline - time.monotonic())))
        except WrongSecret:
            raise
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise ConnectionError(str(error)) from error
        time.sleep(RETRY_S)


def _knock(address: str, port: int, secret: str, service: str, try_s: float) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=try_s)
    try:
        make_lively(connection)
        theirs, own = _exactly(connection), secrets.token_bytes(SIZE)
        connection.sendall(own + proof(secret, "guest", service, theirs + own))
        said = _exactly(connection)
        if not hmac.compare_digest(said, proof(secret, "door", service, theirs + own)):
            raise WrongSecret(f"{address} port {port} belongs to a run with another secret")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _exactly(connection: socket.socket) -> bytes:
    found = b""
    while len(found) < SIZE:
        data = connection.recv(SIZE - len(found))
        if not data:
            raise ConnectionResetError("the connection was closed before both ends had proved the secret")
        found += data
    return found


def make_lively(connection: socket.socket) -> None:
    """Send small messages without delay, and detect the loss of the other end within three minutes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
