"""The traffic record: events, totals per node, the traffic of each collective algorithm, and its recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exogym.core.communicator.wire import Transfer, Wire
from exogym.errors import ArgumentError, check_choice

Groups = Sequence[Sequence[int]]
TRAFFIC = ("calls", "payload_bytes", "tx_bytes", "rx_bytes")


@dataclass(frozen=True)
class Event:
    """One collective: who took part, and the bytes of each member.

    Attributes:
        kind: the collective ("all_reduce").
        algorithm: the algorithm of the collective ("ring").
        members: global ids that took part.
        payload_bytes: bytes that each giver passed. In a mix, they are the bytes for one neighbor.
        givers: the members that send something. In a broadcast or scatter, only the root does.
        tx_bytes, rx_bytes: (members,) bytes that each member sent and received.
        tag: "parameters" or "buffers", whose bytes are counted separately.
        flight: a number that identifies collectives during which the members continue computing, or None if the members
            wait for the collective. At an event of kind "arrive", which sends nothing, the members wait for the
            collectives with this number.
        links: in a mix, the (giver, taker) pair of each message. A member waits only for its givers.
    """

    kind: str
    algorithm: str
    members: tuple[int, ...]
    payload_bytes: float
    tx_bytes: np.ndarray
    rx_bytes: np.ndarray
    tag: str
    givers: tuple[int, ...]
    links: tuple[tuple[int, int], ...] = ()
    flight: int | None = None

    @property
    def handed_bytes(self) -> np.ndarray:
        """Bytes that each giver passed, to all its neighbors together: an array (givers,)."""
        return self.tx_bytes if self.links else np.full(len(self.givers), self.payload_bytes)


class Ledger:
    """Totals of all events' bytes: per node, in arrays (num_nodes,), and per collective over all nodes, in `traffic`.

    `inside_bytes` counts the bytes between a node's devices, which no other total contains.
    """

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self.payload_bytes, self.tx_bytes, self.rx_bytes = np.zeros((3, num_nodes))
        self.buffer_bytes, self.inside_bytes = np.zeros((2, num_nodes))
        self.traffic: dict[str, dict[str, float]] = {}
        self.listeners: list[Callable[[Event], None]] = []

    def add(self, event: Event) -> None:
        members = list(event.members)
        if event.tag == "buffers":
            self.buffer_bytes[members] += event.tx_bytes
        else:
            self.payload_bytes[list(event.givers)] += event.handed_bytes
            self.tx_bytes[members] += event.tx_bytes
            self.rx_bytes[members] += event.rx_bytes
        name = f"{event.algorithm} {event.kind}" + ("" if event.tag == "parameters" else f" of {event.tag}")
        row = self.traffic.setdefault(name, dict.fromkeys(TRAFFIC, 0.0))
        seen = (1.0, *(float(x.sum()) for x in (event.handed_bytes, event.tx_bytes, event.rx_bytes)))
        for key, value in zip(TRAFFIC, seen, strict=True):
            row[key] += value
        self.tell(event)

    def tell(self, event: Event) -> None:
        """Pass an event to all listeners, without counting its bytes."""
        for listen in self.listeners:
            listen(event)

    def state(self) -> dict[str, Tensor]:
        names = ["payload_bytes", "tx_bytes", "rx_bytes", "buffer_bytes"]
        names += ["inside_bytes"] if self.inside_bytes.any() else []
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in names}
        rows = {f"traffic.{name}": [row[key] for key in TRAFFIC] for name, row in self.traffic.items()}
        return arrays | {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.traffic = {}
        for name, value in state.items():
            if name.startswith("traffic."):
                self.traffic[name.removeprefix("traffic.")] = dict(zip(TRAFFIC, value.tolist(), strict=True))
            else:
                setattr(self, name, value.numpy().copy())


# A member's traffic as a multiple of its payload, by (collective, algorithm), for n members
FACTORS: dict[tuple[str, str], Callable[[int], float]] = {
    ("all_reduce", "ring"): lambda n: 2 * (n - 1) / n,
    ("all_reduce", "exact"): lambda n: 2 * (n - 1) / n,  # slices to all, results gathered
    ("all_reduce", "server"): lambda n: 1.0,
    ("all_reduce", "tree"): lambda n: 2 * (n - 1) / n,  # in the mean; see `tree_factors`
    ("all_gather", "ring"): lambda n: n - 1.0,
    ("reduce_scatter", "ring"): lambda n: (n - 1) / n,
    ("all_to_all", "pairwise"): lambda n: (n - 1) / n,
    ("barrier", "tree"): lambda n: 0.0,
    ("push", "server"): lambda n: 1.0,
    ("pull", "server"): lambda n: 0.0,  # a member sends nothing; it receives its payload
    ("push", "island"): lambda n: 1.0,
    ("pull", "island"): lambda n: 0.0,
    ("push", "relay"): lambda n: 1.0,
    ("pull", "relay"): lambda n: 0.0,
    ("broadcast", "tree"): lambda n: (n - 1) / n,  # in the mean, as also in a reduce: see `children`
    ("reduce", "tree"): lambda n: (n - 1) / n,
}


def sent_factor(kind: str, algorithm: str | None, n: int) -> float:
    """Return a member's sent bytes as a multiple of its payload, averaged over a collective's n members.

    If the algorithm is None or doesn't belong to this collective, the collective's default algorithm is used. A message
    from one node to another is one payload.

    >>> sent_factor("all_reduce", "ring", 4), sent_factor("all_reduce", "server", 4), sent_factor("exchange", None, 2)
    (1.5, 1.0, 1.0)
    """
    ways = {way: factor for (known, way), factor in FACTORS.items() if known == kind}
    usual = next(iter(ways.values()), lambda n: 1.0)
    return ways.get(algorithm or "", usual)(n)


def children(position: int, n: int) -> int:
    """Return the number of children of `position` in a binomial broadcast tree over positions 0..n-1, rooted at 0."""
    limit = n if position == 0 else position & -position
    count, hop = 0, 1
    while hop < limit and position + hop < n:
        count, hop = count + 1, hop * 2
    return count


def tree_factors(n: int) -> np.ndarray:
    """Return how many payloads each of n members sends in a tree all-reduce, (n,).

    Each member receives as many payloads as it sends.

    A member exchanges one payload with its parent, and one with each child.

    >>> tree_factors(5).tolist()
    [3.0, 1.0, 2.0, 1.0, 1.0]
    """
    return np.array([children(k, n) + float(k > 0) for k in range(n)])


class Recorder:
    """Records each collective in `ledger`.

    Each collective has a tag ("parameters" or "buffers"). A collective may also have a flight: a number that identifies
    collectives during which the members continue computing.

    Args:
        wire: carries the rows between processes.
        num_nodes: nodes in the whole fleet.

    Attributes:
        overlap: whether flights' results are sent while nodes compute, if the wire supports it.
    """

    def __init__(self, wire: Wire, num_nodes: int):
        self.wire, self.num_nodes = wire, num_nodes
        self.ledger = Ledger(num_nodes)
        self.present: list[int] = list(range(num_nodes))
        self._tag = "parameters"
        self.held: list[Event] | None = None  # events of calls that a node's processes make apart (`fleet.dealing`)
        self._numbers = 0  # of flights
        self.overlap = False
        self._begun: dict[int, list[Transfer]] = {}  # pending transfers of flights
        self._flight: int | None = None  # the flight of current calls

    @contextlib.contextmanager
    def counted_as(self, tag: str) -> Iterator[None]:
        """A context whose collectives count under `tag`, such as "buffers"."""
        before, self._tag = self._tag, tag
        try:
            yield
        finally:
            self._tag = before

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
        """Record and return a collective in which each of `members` passes `size` bytes.

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
        self.ledger.add(event) if self.held is None else self.held.append(event)
        return event

    def _row_bytes(self, x: Tensor) -> int:
        """Return the bytes of a row of `x` (rows, ...), over all processes of a node.

        Numbers (rows,) and buffers are the same in all processes of a node and count once.
        """
        here = x[0].numel() * x.element_size()
        if self.held is not None or self._tag == "buffers" or x.dim() == 1:
            return here
        return self.wire.columns.total(here)

    def _has_others(self, members: Sequence[int], algorithm: str) -> bool:
        """Return whether there is a receiver; a server is one, even for a single client."""
        return len(members) > 1 or (algorithm in ("server", "island", "relay") and self.num_nodes > 1)
