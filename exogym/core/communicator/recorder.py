"""Record each collective: its members, their payload, tx and rx bytes, and when the members wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from exogym.core.communicator.ledger import FACTORS, Event, Ledger, children, together, tree_factors
from exogym.core.communicator.wire import Transfer, Wire
from exogym.errors import ArgumentError, check_choice

Groups = Sequence[Sequence[int]]


class Transfers:
    """The transfers of a communicator that nobody has waited for.

    Args:
        wire: carries the rows.

    Attributes:
        overlap: carry the results of flights while nodes compute, if the wire can.
    """

    def __init__(self, wire: Wire):
        self.wire, self.overlap = wire, False
        self._begun: dict[int, list[Transfer]] = {}

    def result_of(self, call: Callable[[Wire], Tensor], like: Tensor, flight: int | None) -> Tensor:
        """Return the result of `call(wire)`, a tensor like `like`.

        In a flight, the call may be under way when this method returns. Then the result's values are undefined until
        `settle`.
        """
        if flight is None or not (self.overlap and self.wire.carries_behind):
            return call(self.wire)
        transfer = self.wire.start(call, like)
        self._begun.setdefault(flight, []).append(transfer)
        return transfer.result

    def are_under_way(self, flight: int) -> bool:
        """Return whether results of `flight` are undefined, because nobody has waited for them."""
        return flight in self._begun

    def settle(self, flight: int | None = None) -> None:
        """Wait until the results of `flight` are complete. Without `flight`, wait for all flights.

        No virtual time passes.
        """
        self.wire.launch()
        for number in list(self._begun) if flight is None else [flight]:
            for transfer in self._begun.pop(number, []):
                transfer.wait()


class Recorder:
    """Records each collective in `ledger`.

    Each collective has a tag ("parameters" or "buffers"). A collective may also have a flight: a number that identifies
    collectives during which the members continue computing.

    Args:
        wire: carries the rows between processes.
        num_nodes: nodes in the whole fleet.
    """

    def __init__(self, wire: Wire, num_nodes: int):
        self.wire, self.num_nodes = wire, num_nodes
        self.ledger = Ledger(num_nodes)
        self.present: list[int] = list(range(num_nodes))
        self._tag = "parameters"
        self._held: list[Event] | None = None  # events of calls made `apart`
        self._numbers = 0  # of flights
        self.transfers = Transfers(wire)
        self._flight: int | None = None  # the flight of current calls

    @contextlib.contextmanager
    def counted_as(self, tag: str) -> Iterator[None]:
        """A context whose collectives count under `tag`, such as "buffers"."""
        before, self._tag = self._tag, tag
        try:
            yield
        finally:
            self._tag = before

    # Collectives during which their members continue computing

    def new_flight(self) -> int:
        """Return a new flight for `on_its_way`: a number for collectives during which members continue computing.

        The number is the same in every process, and in a resumed run.
        """
        self._numbers += 1
        return self._numbers

    @contextlib.contextmanager
    def on_its_way(self, flight: int | None) -> Iterator[None]:
        """A context in which members continue computing during collectives, in virtual time, until `arrive(flight)`.

        If `flight` is None, members wait for each collective.
        """
        before, self._flight = self._flight, flight
        try:
            yield
        finally:
            self._flight = before

    def arrive(self, flight: int) -> None:
        """Let the members of the collectives with the number `flight` wait for these collectives, from now on."""
        self.transfers.settle(flight)
        nothing = np.zeros(0)
        event = Event("arrive", "", (), 0.0, nothing, nothing, self._tag, (), flight=flight)
        self.ledger.tell(event) if self._held is None else self._held.append(event)

    # Calls that a node's processes make apart

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which each process of a node sends some whole tensors for the node.

        At the end, the events of all these processes become the node's events. Every process of the node must enter the
        context, even if it sends no tensor.
        """
        self._held = held = list[Event]()
        try:
            yield
        finally:
            self._held = None
        for event in together(self.wire.columns.tell([event.described() for event in held])):
            self.ledger.add(event) if event.kind != "arrive" else self.ledger.tell(event)

    # A server beside the nodes: every process plays it, so all processes hold its values

    def push(self, x: Tensor, src: int, algorithm: str = "server") -> Event:
        """Record that node `src` sends its row of `x` (rows, ...) up to the server.

        Args:
            algorithm: "server"; "island" for the server of the node's island; "relay" for a message from this server to
                the server above it. A relay counts for `src`, but occupies no node (`Clock.relay`).
        """
        return self.record("push", algorithm, [self._member(src)], self._row_bytes(x))

    def pull(self, x: Tensor, members: Sequence[int], algorithm: str = "server") -> Event:
        """Record that the server sends each of `members` a row like those in `x` (rows, ...)."""
        (group,) = self._sorted([members])
        return self.record("pull", algorithm, group, self._row_bytes(x))

    # Members and bytes

    def _sorted(self, groups: Groups | None) -> list[list[int]]:
        if groups is None:
            return [self.present]
        ordered = [sorted(group) for group in groups]
        members = [rank for group in ordered for rank in group]
        known = len(set(members)) == len(members) and all(0 <= rank < self.num_nodes for rank in members)
        if not (known and all(ordered)):
            raise ArgumentError(
                f"groups={ordered} must be disjoint and not empty, with nodes from 0 to {self.num_nodes - 1}"
            )
        return ordered

    def _member(self, rank: int) -> int:
        if rank not in self.present:
            raise ArgumentError(f"node {rank} does not take part; present: {self.present}")
        return rank

    def record(self, kind: str, algorithm: str, members: Sequence[int], size: float) -> Event:
        """Record and return a collective in which each of `members` hands over `size` bytes.

        In a "pull", each member receives `size` bytes instead.
        """
        check_choice("algorithm", algorithm, [name for known, name in FACTORS if known == kind])
        n = len(members)
        if kind in ("push", "pull"):
            moved, nothing = np.full(n, float(size) if self.num_nodes > 1 else 0.0), np.zeros(n)
            up, down = (moved, nothing) if kind == "push" else (nothing, moved)
            return self._add(kind, algorithm, members, size, up, down, givers=None if kind == "push" else [])
        if (kind, algorithm) == ("all_reduce", "tree"):
            moved = tree_factors(n) * size
        else:
            moved = np.full(n, FACTORS[kind, algorithm](n) * size if self._has_others(members, algorithm) else 0.0)
        return self._add(kind, algorithm, members, size, moved, moved)

    def _record_tree(self, kind: str, root: int, size: float, members: Sequence[int] | None = None) -> None:
        members = self.present if members is None else members
        n, at = len(members), members.index(root)
        down = np.array([children((k - at) % n, n) * float(size) for k in range(n)])
        up = np.array([0.0 if k == at else float(size) for k in range(n)])
        sent, got = (down, up) if kind == "broadcast" else (up, down)
        self._add(kind, "tree", members, size, sent, got, givers=[root] if kind == "broadcast" else None)

    def _add(
        self,
        kind: str,
        algorithm: str,
        members: Sequence[int],
        size: float,
        tx: np.ndarray,
        rx: np.ndarray,
        givers: Sequence[int] | None = None,
        links: tuple[tuple[int, int], ...] = (),
    ) -> Event:
        payload = size if self._has_others(members, algorithm) else 0.0
        gave = tuple(members if givers is None else givers)
        event = Event(kind, algorithm, tuple(members), float(payload), tx, rx, self._tag, gave, links, self._flight)
        self.ledger.add(event) if self._held is None else self._held.append(event)
        return event

    def _row_bytes(self, x: Tensor) -> int:
        """Return the bytes of a row of `x` (rows, ...), over all processes of a node.

        Numbers (rows,) and buffers are the same in all processes of a node, so they count once.
        """
        here = row_bytes(x)
        if self._held is not None or self._tag == "buffers" or x.dim() == 1:
            return here
        return self.wire.columns.total(here)

    def _has_others(self, members: Sequence[int], algorithm: str) -> bool:
        """Say whether there is anyone to send to; a server is, even for a single client."""
        return len(members) > 1 or (algorithm in ("server", "island", "relay") and self.num_nodes > 1)


def row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size()
