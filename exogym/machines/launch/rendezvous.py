"""A rendezvous handler for torch's elastic agent that connects the machines of a launch in order of their node_rank.

Unlike torch's c10d rendezvous, this handler unpickles nothing and checks the run's secret. The launchers exchange
messages through machine 0 (see `exogym.machines.launch.meeting`).

For every attempt (the first start and each restart), machine 0 opens a new store for the ranks on its loopback, and the
launchers' keys begin with the attempt's number, so nothing remains from a failed attempt.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from exogym.core.base.shelf import unpacked
from exogym.core.progress import notice
from exogym.errors import ArgumentError
from exogym.machines.launch.door import SECRET, listen
from exogym.machines.launch.meeting import LEFT, LOOPBACK, Link, MeetingPlace, Relay

NAME = "exogym"
FAREWELL_S = 10


@dataclass
class Machine:
    """One machine of a launch, with its node_rank, machine 0's address and port, and the current attempt's number.

    Attempts are counted from 0. The attempt's number is -1 before the first attempt.
    """

    rank: int
    address: str
    port: int
    start_timeout_s: int
    attempt: int = -1


class OrderedRendezvous(RendezvousHandler):
    """Connect `nnodes` machines for torch's elastic agent, in the order of `node.rank`.

    Args:
        node: this machine.
        nnodes: number of machines.

    Raises:
        RendezvousConnectionError: machine 0 cannot listen, cannot be reached, or has another secret.
        ArgumentError: two machines have the same `node.rank`. Raised on every machine.
    """

    def __init__(self, node: Machine, nnodes: int):
        self.node, self.nnodes = node, nnodes
        self.server: TCPStore | None = None
        self.host: MeetingPlace | None = None
        self.link: Link | None = None
        self.relay: Relay | None = None
        self._next: Future[Any] | None = None  # whether another node waits for the next attempt
        if nnodes == 1:
            return
        try:
            self._come(os.environ.get(SECRET, ""))
        except OSError as error:
            self.shutdown()
            raise RendezvousConnectionError(str(error)) from error
        except BaseException:
            self.shutdown()
            raise

    def _come(self, secret: str) -> None:
        node, port = self.node, self.node.port
        if node.rank == 0:
            if not secret:
                notice(
                    f"{SECRET} is not set, so anybody who can reach port {port} of {node.address} can disturb this "
                    "run: set it to the same long random text on all machines"
                )
            self.host = MeetingPlace(node.address, port, secret)
            port = self.host.port
        else:
            self.relay = Relay(node.address, port, secret, node.start_timeout_s)
        self.link = Link(node.address, port, secret, node.rank, node.start_timeout_s)

    def next_rendezvous(self) -> RendezvousInfo:
        self.node.attempt += 1
        if self.node.rank == 0:
            self._open_store()
        store: Store = HashStore()
        if self.link is not None:
            try:
                self._meet(self.link)
            except RuntimeError as error:  # torch's store raises RuntimeError
                raise RendezvousConnectionError(str(error)) from error
            store = PrefixStore(f"exogym/{self.node.attempt}", self.link.store)
        port = self.relay.port if self.relay is not None else self.server.port if self.server is not None else 0
        return RendezvousInfo(store, self.node.rank, self.nnodes, RendezvousStoreInfo(LOOPBACK, port))

    def _open_store(self) -> None:
        """Open a new store for the ranks. A single node uses the given port."""
        self.server = None
        try:
            listener = listen(LOOPBACK, self.node.port if self.nnodes == 1 else 0)
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error
        self.server = TCPStore(
            LOOPBACK, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=self.node.start_timeout_s), master_listen_fd=listener.detach(),
        )  # fmt: skip
        if self.host is not None:
            self.host.store_port = self.server.port

    def _meet(self, link: Link) -> None:
        """Wait until all nodes have reached this attempt."""
        store, n = link.store, self.nnodes
        before = f"exogym/{self.node.attempt}"
        place = store.add(f"{before}/came", 1) - 1
        if place >= n:
            raise ArgumentError(
                f"nnodes={n} machines have connected already, so there is no place for node_rank={self.node.rank} on "
                "this machine: start the launcher once per machine, or raise nnodes"
            )
        store.set(f"{before}/claim/{place}", str(self.node.rank))
        all_came = store.later("get", [f"{before}/claim/{i}" for i in range(n)])
        left = store.later("get", [LEFT])
        wait([all_came, left], self.node.start_timeout_s, FIRST_COMPLETED)
        if not all_came.done() and not left.done():
            raise RendezvousTimeoutError(f"only {store.add(f'{before}/came', 0)} of {n} machines connected")
        if not all_came.done():
            raise RendezvousClosedError(f"{unpacked(_said(left)[0]).decode()} has ended")
        claims = sorted(int(unpacked(text)) for text in _said(all_came))
        if claims != list(range(n)):
            store.set(f"{before}/seen/{place}", "")
            seen = store.later("get", [f"{before}/seen/{i}" for i in range(n)])
            wait([seen], FAREWELL_S)  # the meeting ends with its node, so all wait until all know
            raise ArgumentError(
                f"the {n} machines have node_rank={', '.join(map(str, claims))}: use each of 0 to {n - 1} once"
            )
        self._next = store.later("get", [f"exogym/{self.node.attempt + 1}/came"])

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.shutdown()

    def num_nodes_waiting(self) -> int:
        return int(self._next is not None and self._next.done() and bool(_said(self._next)))

    def get_run_id(self) -> str:
        return NAME

    def shutdown(self) -> bool:
        self.server = None
        for end in (self.link, self.relay, self.host):
            if end is not None:
                end.close()
        self.link = self.relay = self.host = None
        return True


def _said(asked: Future[Any]) -> Any:
    """Return the answer that has arrived."""
    try:
        return asked.result(0)
    except RuntimeError as error:
        raise RendezvousConnectionError(str(error)) from error


def _create(parameters: RendezvousParameters) -> OrderedRendezvous:
    return OrderedRendezvous(parameters.get("node"), parameters.max_nodes)


def register() -> None:
    """Register `OrderedRendezvous` with torch's launcher under the name "exogym". A second call changes nothing."""
    rendezvous_handler_registry.register(NAME, _create)


def check_address(master: str) -> None:
    """Raise ArgumentError unless `master` is the name or address of a machine.

    >>> check_address("127.0.0.1")

    Raises:
        ArgumentError: no machine has this name.
    """
    try:
        socket.getaddrinfo(master, 9, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ArgumentError(
            f"master_addr={master!r} is unknown on this network ({error}): pass a name or address of machine 0"
        ) from None
