"""How the nodes of a launch meet: torch's c10d rendezvous, with the nodes in the order of their node_rank.

Torch's own handler numbers the nodes by address and process id. Here each node claims its `node_rank`, so that node 0
holds the first ranks and is the master. For every attempt node 0 opens a fresh store for the processes, on a port that
is held from the start: nothing is left in it from an attempt that failed, and no other program can take the port.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from exogym.errors import ArgumentError

NAME = "exogym"
POLL_S = 0.2
FAREWELL_S = 10


@dataclass
class Node:
    """What a node brings to the meeting, and what it learns there: the number of the attempt, counted from 0."""

    rank: int
    address: str
    start_timeout_s: int
    attempt: int = -1


class OrderedRendezvous(RendezvousHandler):
    """Torch's c10d rendezvous with the nodes in the order of `node.rank`.

    Raises:
        ArgumentError: (on every node) two nodes claim the same rank.
    """

    def __init__(self, inner: RendezvousHandler, node: Node):
        self.inner, self.node = inner, node
        self.server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        met = self.inner.next_rendezvous()
        node, store = self.node, met.store
        if node.rank == 0:
            timeout = timedelta(seconds=node.start_timeout_s)
            self.server = TCPStore(node.address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            store.set("exogym/port", str(self.server.port))
            store.set("exogym/attempt", str(node.attempt + 1))
        store.set(f"exogym/claim/{met.rank}", str(node.rank))
        claims = sorted(int(store.get(f"exogym/claim/{i}")) for i in range(met.world_size))
        if claims != list(range(met.world_size)):
            store.set(f"exogym/seen/{met.rank}", "")
            with contextlib.suppress(RuntimeError):  # the store goes with its node, so nobody leaves before all know
                store.wait([f"exogym/seen/{i}" for i in range(met.world_size)], timedelta(seconds=FAREWELL_S))
            raise ArgumentError(
                f"the {met.world_size} nodes gave node_rank={', '.join(map(str, claims))}: "
                f"each of 0 to {met.world_size - 1} is wanted once"
            )
        node.attempt = int(store.get("exogym/attempt"))
        master = RendezvousStoreInfo(node.address, int(store.get("exogym/port")))
        return RendezvousInfo(store, node.rank, met.world_size, master)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        self.server = None
        return self.inner.shutdown()


def _create(parameters: RendezvousParameters) -> OrderedRendezvous:
    backend, store = create_backend(parameters)
    return OrderedRendezvous(create_handler(store, backend, parameters), parameters.get("node"))


def register() -> None:
    """Make the handler known to torch's launcher under `NAME`; a second time changes nothing."""
    rendezvous_handler_registry.register(NAME, _create)


def own_address(master: str) -> str:
    """Return the address of this machine on the way to `master`. Sends nothing.

    Raises:
        ArgumentError: no machine of that name.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ArgumentError(f"master_addr={master!r} leads to no machine: {error}") from None
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def wait_for_store(address: str, port: int, timeout_s: float) -> None:
    """Wait until node 0 listens. (Torch's own wait cannot be interrupted.)

    Raises:
        ConnectionError: nobody listened there within `timeout_s`; it carries the last reason.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(left_s, POLL_S)).close()
            return
        except OSError as error:
            if left_s < POLL_S:
                raise ConnectionError(str(error)) from error
        time.sleep(POLL_S)
