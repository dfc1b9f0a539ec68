"""Connect the launchers of several machines, and give all ranks access to one torch store.

The launchers connect to a `Door` on machine 0. The ranks find each other through torch's `TCPStore`, which checks no
secret and therefore listens only on the loopback of machine 0. On every other machine, a `Relay` listens on the
loopback and sends the ranks' data through the door to the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from exogym.core.base.shelf import LineStore, Shelf, packed
from exogym.machines.launch.door import Door, knock, listen
from exogym.machines.launch.lines import CHUNK_BYTES, Line

LOOPBACK = "127.0.0.1"
NODE, STORE = "node", "store"  # services of the door
LEFT = "exogym/left"  # key: the node that has left
LOOK_S = 1.0


class MeetingPlace:
    """Machine 0's server for the launchers of all machines, which answers in a thread until it is closed.

    Args:
        address, port: where the server listens. With `port=0` it chooses a free port.
        secret: the run's secret. Connections without the secret are refused.

    Attributes:
        store_port: port of the ranks' store, on the loopback.

    Raises:
        OSError: the server cannot listen at this address and port.
    """

    def __init__(self, address: str, port: int, secret: str):
        listener = listen(address, port)
        self.selector = selectors.DefaultSelector()
        self.door = Door(self.selector, listener, secret, {NODE: self._welcome, STORE: self._lead_on})
        self.port, self.store_port = self.door.port, 0
        self.shelf: Shelf[Line | None] = Shelf()
        self._lines: list[Line] = []
        self._awake, self._wake = os.pipe()
        self.selector.register(self._awake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="exogym-meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        os.close(self._wake)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self.selector.select(LOOK_S):
                    if key.fd == self._awake:
                        return
                    key.data()
                self.door.tidy()
        finally:
            self.door.close()
            for line in self._lines:
                line.close()
            self.selector.close()
            os.close(self._awake)

    def _welcome(self, connection: socket.socket) -> None:
        self._lines.append(Line(self.selector, connection, self._take, self._lose))

    def _lead_on(self, connection: socket.socket) -> None:
        place = LOOPBACK, self.store_port
        threading.Thread(target=_lead, args=(connection, lambda: socket.create_connection(place)), daemon=True).start()

    def _take(self, line: Line, said: dict[str, Any]) -> None:
        line.name = ascii(said["name"]).strip("'")[:99] if "name" in said else line.name
        self._tell(self.shelf.take(line, said) if said["say"] == "store" else [])

    def _tell(self, told: list[tuple[Line | None, dict[str, Any]]]) -> None:
        for line, what in told:
            if line is not None and line.is_open:
                line.say(what)

    def _lose(self, line: Line, why: str) -> None:
        self._lines.remove(line)
        self.shelf.leave(line)
        self._tell(self.shelf.take(None, {"id": 0, "do": "set", "keys": [LEFT], "values": [packed(line.name)]}))


class Link:
    """A launcher's connection to the `MeetingPlace` on machine 0.

    Args:
        address, port: where the `MeetingPlace` listens.
        secret: the run's secret.
        rank: number of this launcher's machine.
        timeout_s: seconds to wait until the connection succeeds.

    Attributes:
        store: values that all launchers share. Its calls fail after the connection is lost.

    Raises:
        WrongSecret, ConnectionError: see `knock`.
    """

    def __init__(self, address: str, port: int, secret: str, rank: int, timeout_s: float):
        self.connection = knock(address, port, secret, NODE, timeout_s)
        self.store = LineStore(self._say)
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="exogym-link", daemon=True)
        self._thread.start()
        self._say({"say": "name", "name": f"node {rank}"})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _say(self, what: dict[str, Any]) -> None:
        try:
            with self._sending:
                self.connection.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            self.store.fail(f"the launcher of machine 0 cannot be reached: {error}")

    def _listen(self) -> None:
        why = "it has ended"
        with self.connection, self.connection.makefile("rb") as file:
            try:
                for line in file:
                    self.store.hear(json.loads(line))
            except (OSError, ValueError, KeyError) as error:
                why = str(error)
        self.store.fail(f"the connection to the launcher of machine 0 is lost: {why}")


class Relay:
    """Replace the ranks' store on a machine other than machine 0, until it is closed.

    It listens on the machine's loopback, at its attribute `port`, and sends the ranks' data to the store on machine 0.

    Args: see `knock`.
    """

    def __init__(self, address: str, port: int, secret: str, timeout_s: float):
        self.call: Callable[[], socket.socket] = lambda: knock(address, port, secret, STORE, timeout_s)
        self.listener = listen(LOOPBACK)
        self.port: int = self.listener.getsockname()[1]
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="exogym-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            socket.create_connection((LOOPBACK, self.port), timeout=1.0).close()  # wakes the thread
        self._thread.join()

    def _serve(self) -> None:
        with self.listener:
            while True:
                connection, _ = self.listener.accept()
                if self._closing:
                    connection.close()
                    return
                threading.Thread(target=_lead, args=(connection, self.call), daemon=True).start()


def _lead(connection: socket.socket, call: Callable[[], socket.socket]) -> None:
    """Copy data both ways between `connection` and the connection from `call`, until one end closes."""
    with connection:
        try:
            other = call()
        except OSError:
            return
        with other:
            back = threading.Thread(target=_copy, args=(other, connection), daemon=True)
            back.start()
            _copy(connection, other)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
