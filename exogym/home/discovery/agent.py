"""An `Agent` tells other computers in the network its name, and pairs with computers that know its code."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from exogym.errors import ArgumentError
from exogym.home.discovery import login
from exogym.home.discovery.announcing import plain_name
from exogym.home.discovery.channel import (
    AGENT,
    VERSION,
    Exchange,
    Messages,
    PairingError,
    draw_code,
    shown_code,
)
from exogym.machines.launch.door import listen

CALL_S = 20.0  # seconds of a call, from first to last byte
MOST_CALLS, MOST_OF_ONE_ADDRESS = 64, 8
TRIES, WRONG_IN_A_ROW = 3, 9  # wrong attempts per code; in a row over all codes, after which pairing closes


class Agent:
    """Answers callers, the computers that connect to this agent. The agent pairs with callers that know its code.

    Args:
        name: the agent's name. Callers without the code learn nothing else.
        address: an address of this computer. The agent listens only at this address.
        port: port to listen on. With `port=0` the agent chooses a free port.
        user, ssh_port: this computer's user and SSH port, with which paired computers log in. The agent reads the SSH
            server's host keys when it is created.
        authorized_keys: the SSH file that permits logins. The agent adds a line for each paired computer.
        show: called with each line of text for the person at this computer.

    Raises:
        ArgumentError: the port is taken, or no SSH server answers at `ssh_port`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        *,
        user: str,
        ssh_port: int = 22,
        authorized_keys: str = login.AUTHORIZED_KEYS,
        show: Callable[[str], None] = print,
    ):
        self.name, self.address, self.show = name, address, show
        self._login = {
            "user": user, "ssh_port": ssh_port, "host_keys": login.host_keys(address, ssh_port),
            "python": sys.executable,
        }  # fmt: skip
        self._authorized_keys = authorized_keys
        try:
            self._listener = listen(address, port)
        except OSError as error:
            raise ArgumentError(
                f"cannot listen on port {port} of {address} ({error.strerror}): choose another --port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._calls: dict[socket.socket, str] = {}  # open calls, oldest first -> address
        self._lock = threading.Lock()
        self.codes = Codes(self._show_code)

    def serve(self) -> None:
        """Answer callers, each in its own thread, until `close` is called."""
        while True:
            try:
                connection, place = self._listener.accept()
            except OSError:
                if self._listener.fileno() == -1:
                    return
                time.sleep(0.05)  # for example too many open files
                continue
            self._make_room(str(place[0]))
            with self._lock:
                self._calls[connection] = str(place[0])
            threading.Thread(target=self._answer, args=(connection, str(place[0])), daemon=True).start()

    def close(self) -> None:
        """Stop answering, and close the connections of all callers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        for connection in list(self._calls):
            _hang_up(connection)

    def _show_code(self, code: str | None) -> None:
        if code is None:
            self.show("too many wrong codes: to pair again, restart exogym agent")
        else:
            self.show(f"code for pairing: {shown_code(code)}")

    def _make_room(self, address: str) -> None:
        """End the oldest call if there are too many. A genuine call lasts only a moment."""
        with self._lock:
            alike = [connection for connection, other in self._calls.items() if other == address]
            if len(alike) >= MOST_OF_ONE_ADDRESS:
                _hang_up(alike[0])
                del self._calls[alike[0]]
            elif len(self._calls) >= MOST_CALLS:
                oldest = next(iter(self._calls))
                _hang_up(oldest)
                del self._calls[oldest]

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            line = Messages(connection, CALL_S)
            asked = line.hear()
            if asked.get("exogym") == VERSION and asked.get("want") in ("name", "pair"):
                line.tell({"name": self.name})
                if asked["want"] == "pair":
                    self._pair(line, address)
        except PairingError:
            pass  # no answer to strangers, and no line on the screen
        finally:
            with self._lock:
                self._calls.pop(connection, None)
            connection.close()

    def _pair(self, line: Messages, address: str) -> None:
        code = self.codes.now
        if code is None:
            return line.tell({"refused": "closed"})
        exchange = Exchange(line, AGENT, code, self.name)
        exchange.meet()
        message = line.receive()
        request: dict[str, Any] = {}

        def proves() -> bool:
            opened = exchange.open(message)
            request.update(opened or {})
            return opened is not None

        if not self.codes.redeem(code, proves):
            self.show(f"{address} tried to pair with a wrong code")
            return line.tell({"refused": "code"})
        exchange.seal(self._welcome(exchange, request, address))

    def _welcome(self, exchange: Exchange, request: dict[str, Any], address: str) -> dict[str, Any]:
        """Let a caller that knew the code log in, and return the answer to seal for it."""
        name = plain_name(str(request.get("name"))[:100])
        told = (request.get("address"), request.get("agent_address"))
        if told != (address, self.address):
            self.show(f"not paired with {name}: it connects from {address}, but says that it is {str(told[0])[:40]!r}")
            return {"refused": "address"}
        try:
            key = login.public_key(request.get("public_key"))
            if not login.signed(key, exchange.statement(key), request.get("signature")):
                self.show(f"not paired with {name} at {address}: it did not prove that it owns the key that it sent")
                return {"refused": "key"}
            added = login.authorize(self._authorized_keys, key, address, name)
        except (OSError, ArgumentError) as error:
            self.show(f"not paired with {name} at {address}: {error}")
            return {"refused": "login"}
        where, user = os.path.expanduser(self._authorized_keys), self._login["user"]
        if added:
            how = f"it may now log in as {user}; to undo the pairing, remove the line exogym:{name} from {where}"
        else:
            how = f"your own line in {where} already permits its key, so the file was not changed"
        self.show(f"paired with {name} at {address}: {how}")
        return self._login


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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
