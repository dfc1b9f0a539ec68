"""The record of traffic: events, totals per node, and the traffic of each collective algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

TRAFFIC = ("calls", "payload_bytes", "tx_bytes", "rx_bytes")


@dataclass(frozen=True)
class Event:
    """One collective: who took part, and the bytes of each member.

    Attributes:
        kind: the collective ("all_reduce").
        algorithm: the algorithm of the collective ("ring").
        members: global ids that took part.
        payload_bytes: bytes that each giver handed over. In a mix, these are the bytes for one neighbor.
        givers: the members that hand something over. In a broadcast or scatter, only the root does so.
        tx_bytes, rx_bytes: (members,) bytes that each member sent and received.
        tag: "parameters" or "buffers". Their bytes are counted separately.
        flight: a number that identifies collectives during which the members continue computing. If it is None, the
            members wait for the collective. An event of kind "arrive" sends nothing. After this event, the members wait
            for the collectives with this number.
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

    def described(self) -> list[Any]:
        """Return the event as a JSON list, which `together` reads."""
        sizes = [self.payload_bytes, self.tx_bytes.tolist(), self.rx_bytes.tolist()]
        rest = [list(self.givers), list(map(list, self.links)), self.flight]
        return [self.kind, self.algorithm, list(self.members), self.tag, *rest, *sizes]

    @property
    def handed_bytes(self) -> np.ndarray:
        """Bytes that each giver handed over, to all its neighbors together: an array (givers,)."""
        return self.tx_bytes if self.links else np.full(len(self.givers), self.payload_bytes)


class Ledger:
    """Adds up the bytes of all events: per node, in arrays (num_nodes,), and per collective over all nodes, in
    `traffic`.

    `inside_bytes` counts the bytes between a node's devices. No other total contains these bytes.
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
}


def together(reports: Sequence[Sequence[Any]]) -> list[Event]:
    """Join the events of a node's processes (from `Event.described`) into the events of the node.

    The k-th events of the same kind in all processes become one event with the sum of their bytes. The sum is rounded
    up to whole bytes. Buffers are the same in all processes, so they count once.
    """
    found: dict[str, list[Any]] = {}
    for events in reports:
        seen: dict[str, int] = {}
        for event in events:
            kind = json.dumps(event[:7])
            seen[kind] = seen.get(kind, 0) + 1
            key = f"{seen[kind]} {kind}"
            if key not in found:
                found[key] = [*event[:7], event[7], np.array(event[8]), np.array(event[9])]
            elif event[3] != "buffers":
                found[key][7] += event[7]
                found[key][8:] = [found[key][8] + np.array(event[8]), found[key][9] + np.array(event[9])]
    return [_whole(*event) for event in found.values()]


def _whole(
    kind: str, algorithm: str, members: list[int], tag: str, givers: list[int], links: list[list[int]],
    flight: int | None, payload: float, tx: np.ndarray, rx: np.ndarray,
) -> Event:  # fmt: skip
    if kind == "mix" and payload:  # each receiver gets a whole payload
        tx, rx = (np.rint(sent / payload) * math.ceil(payload) for sent in (tx, rx))
    payload, factor = math.ceil(payload), FACTORS.get((kind, algorithm))
    if factor is not None and kind not in ("push", "pull") and algorithm != "tree":  # one payload's bits, rounded once
        tx = rx = np.full(len(members), factor(len(members)) * payload)
    ways = tuple((giver, taker) for giver, taker in links)
    return Event(kind, algorithm, tuple(members), payload, tx, rx, tag, tuple(givers), ways, flight)


def children(position: int, n: int) -> int:
    """Return the number of children of `position` in a binomial broadcast tree over positions 0..n-1, rooted at 0."""
    limit = n if position == 0 else position & -position
    count, hop = 0, 1
    while hop < limit and position + hop < n:
        count, hop = count + 1, hop * 2
    return count


def tree_factors(n: int) -> np.ndarray:
    """Return an array (n,): how many payloads each of n members sends in a tree all-reduce.

    Each member receives as many payloads as it sends.

    A member exchanges one payload with its parent, and one with each child.

    >>> tree_factors(5).tolist()
    [3.0, 1.0, 2.0, 1.0, 1.0]
    """
    return np.array([children(k, n) + float(k > 0) for k in range(n)])
