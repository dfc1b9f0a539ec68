"""The time of a collective in the alpha-beta model.

On a link, a message of m bytes takes alpha + m / B: the link's latency plus the bytes divided by its bandwidth
(Hockney, Parallel Computing 20, 1994). Links are full duplex: a node sends and receives at the same time. **A
collective is a list of rounds.** In a round, some pairs of members exchange messages at the same time, and the round
lasts as long as its slowest pair. Adding numbers takes no time.

With n members, payload S, the same bandwidth B and latency alpha everywhere, a server's bandwidth B_server, and
L = ceil(log2 n):

    all_reduce      ring              2(n-1) (alpha + S/(n B))                 Patarasuk, Yuan, JPDC 69, 2009
                    exact             2(n-1) (alpha + S/(n B))                 slices all to all by pairwise exchange
                                                                               (Thakur et al. 2005), then a ring
                                                                               all-gather: exogym.core.engine.wire
                    halving_doubling  2k alpha + 2(1 - 2^-k) S/B, n = 2^k      Thakur et al. 2005; other n: + 2(alpha + S/B)
                    tree              2L (alpha + S/B)                         binomial reduce and broadcast, ibid.
                    double_tree       2L alpha + 2 S/B                         pipelined; Sanders et al., Par. Comp. 35, 2009
                    hierarchical      ring inside islands, ring or halving_doubling between their first nodes, broadcast inside
                    server            2 alpha + 2 max(1, n B / B_server) S/B   all members send, then all receive
    all_gather      ring              (n-1) (alpha + S/B)                      S is one member's own part
                    bruck             L alpha + (n-1) S/B                      Bruck et al., IEEE TPDS 8, 1997
    reduce_scatter  ring              (n-1) (alpha + S/(n B))
                    halving           k alpha + (1 - 2^-k) S/B, n = 2^k        Thakur et al. 2005
    all_to_all      pairwise          (n-1) (alpha + S/(n B))                  Thakur et al. 2005
    broadcast       tree              L (alpha + S/B)                          binomial; reduce likewise
                    chain             (n-1) alpha + ((n-2) C + S)/B            in pieces of C = 1 MiB; reduce likewise
                    scatter_gather    (L + n-1) alpha + 2(n-1)/n S/B           van de Geijn; Thakur et al. 2005
    reduce          ring              n alpha + 2(n-1)/n S/B                   reduce-scatter by a ring, then a gather
    gather          direct            alpha + (n-1) S/B                        the root's line carries all
    scatter         direct            alpha + (n-1)/n S/B
    exchange        pairwise          alpha + S/B
    send            direct            alpha + S/B                              the first member to the second
    mix             `neighbours`      alpha + d S/B                            d: the most neighbors that a node has
    barrier         tree              2L alpha;  dissemination: L alpha        Hensgen et al., IJPP 17, 1988
    push, pull      server            alpha + S/B                              a member sends to the server, or receives
                    island            alpha + S/B                              likewise, a server in the member's island
                    relay             alpha + S/B                              an island's server and the server above

Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19, 2005. NCCL calls
`ring` Ring and `double_tree` Tree. Gloo has the all-reduces `ring` and `halving_doubling`. If every member holds S
bytes, no all-reduce needs less transfer time than the ring's 2(n-1)/n S/B (Patarasuk, Yuan).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_choice
from exogym.network.links import GroupLinks, Links, MatrixLinks, UniformLinks

CHUNK_BYTES = 1 << 20  # a chain's piece: what NCCL's two channels forward at a time (see `exogym.network.libraries`)
MOST_SPLITS = 8  # partitions of a matrix's nodes into islands that a hierarchical all-reduce tries
Pairs = Callable[[int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Cost:
    """The time of a collective: `latency_s` for `hops` sequential messages, plus `transfer_s` for the bytes."""

    latency_s: float = 0.0
    transfer_s: float = 0.0
    hops: int = 0

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.latency_s + other.latency_s, self.transfer_s + other.transfer_s, self.hops + other.hops)


@dataclass(frozen=True)
class MessageRound:
    """Messages that start at the same time, in a round that is repeated `count` times.

    Attributes:
        bytes_: bytes of each message.
        pairs: function of n, the number of members, that returns the senders' and the receivers' positions among the
            members. None means all pairs; then the slowest pair counts.
        fan_out, fan_in: the number of messages that share a sender's line and a receiver's line.
        hops: how many latencies the round takes: 0 if it follows the previous round without a gap, a fraction if other
            messages travel in the meantime.
    """

    count: int
    bytes_: float
    pairs: Pairs | None = None
    fan_out: float = 1
    fan_in: float = 1
    hops: float = 1


# The pairs of a round


def around(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n), (np.arange(n) + 1) % n


def _first_to_second(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(1, dtype=int), np.ones(1, dtype=int)


def _down(hop: int) -> Pairs:
    """One level of a binomial tree from position 0: every multiple of 2 hop sends to the position + `hop`."""

    def pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
        senders = np.arange(0, n - hop, 2 * hop)
        return senders, senders + hop

    return pairs


def _up(hop: int) -> Pairs:
    return lambda n: _down(hop)(n)[::-1]


def _across(hop: int, size: int) -> Pairs:
    """Pair each of the first `size` positions with the position whose number differs in bit `hop`."""
    return lambda n: (np.arange(size), np.arange(size) ^ hop)


def _along(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n - 1), np.arange(1, n)


def _onto(n: int, hop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n), (np.arange(n) - hop) % n


def _hops(n: int) -> list[int]:
    """The powers of two below n: 1, 2, 4, ...; ceil(log2 n) numbers."""
    return [1 << k for k in range((n - 1).bit_length())]


# Rounds of each algorithm, for n members and payload S


def _tree_down(n: int, S: float) -> list[MessageRound]:
    return [MessageRound(1, S, _down(hop)) for hop in reversed(_hops(n))]


def _tree_up(n: int, S: float) -> list[MessageRound]:
    return [MessageRound(1, S, _up(hop)) for hop in _hops(n)]


def _halving(n: int, S: float, count: int) -> list[MessageRound]:
    """Vector halving, distance doubling. With `count=2` it also goes back the same way, as an all-reduce does."""
    k = n.bit_length() - 1
    size, extra = 1 << k, n - (1 << k)
    rounds = [MessageRound(count, S / 2 ** (r + 1), _across(1 << r, size)) for r in range(k)]
    if extra:  # members beyond the power of two first send their data to a partner and receive the result last
        late, early = np.arange(size, n), np.arange(extra)
        back = S if count == 2 else S / n  # a reduce-scatter returns only the member's slice
        rounds = [MessageRound(1, S, lambda _: (late, early)), *rounds, MessageRound(1, back, lambda _: (early, late))]
    return rounds


def _bruck(n: int, S: float) -> list[MessageRound]:
    blocks = [min(hop, n - hop) for hop in _hops(n)]
    return [MessageRound(1, b * S, lambda n, h=h: _onto(n, h)) for h, b in zip(_hops(n), blocks, strict=True)]  # type: ignore[misc]


def _direct(n: int, S: float, inward: bool) -> list[MessageRound]:
    others, root = np.arange(1, n), np.zeros(n - 1, dtype=np.int64)
    pairs = (others, root) if inward else (root, others)
    return [MessageRound(1, S, lambda _: pairs, **{"fan_in" if inward else "fan_out": n - 1})]


def _scatter_gather(n: int, S: float) -> list[MessageRound]:
    scatter = [MessageRound(1, S * min(hop, n - hop) / n, _down(hop)) for hop in reversed(_hops(n))]
    return [*scatter, MessageRound(n - 1, S / n, around)]


def _chain(n: int, S: float, inward: bool) -> list[MessageRound]:
    pairs: Pairs = (lambda n: _along(n)[::-1]) if inward else _along
    fill = MessageRound(n - 2, min(S, CHUNK_BYTES), pairs, hops=0)
    return [MessageRound(n - 1, 0.0, pairs), fill, MessageRound(1, S, pairs, hops=0)]


ALGORITHMS: dict[str, dict[str, Callable[[int, float], list[MessageRound]]]] = {
    "all_reduce": {
        "ring": lambda n, S: [MessageRound(2 * (n - 1), S / n, around)],
        "exact": lambda n, S: [MessageRound(n - 1, S / n), MessageRound(n - 1, S / n, around)],
        "halving_doubling": lambda n, S: _halving(n, S, 2),
        "tree": lambda n, S: _tree_up(n, S) + _tree_down(n, S),
        "double_tree": lambda n, S: [MessageRound(2 * len(_hops(n)), 0.0), MessageRound(1, 2 * S, hops=0)],
    },
    "all_gather": {"ring": lambda n, S: [MessageRound(n - 1, S, around)], "bruck": _bruck},
    "reduce_scatter": {
        "ring": lambda n, S: [MessageRound(n - 1, S / n, around)],
        "halving": lambda n, S: _halving(n, S, 1),
    },
    "all_to_all": {"pairwise": lambda n, S: [MessageRound(n - 1, S / n)]},
    "broadcast": {
        "tree": _tree_down,
        "scatter_gather": _scatter_gather,
        "chain": lambda n, S: _chain(n, S, False),
    },
    "reduce": {
        "tree": _tree_up,
        "ring": lambda n, S: [MessageRound(n - 1, S / n, around), *_direct(n, S / n, True)],
        "chain": lambda n, S: _chain(n, S, True),
    },
    "gather": {"direct": lambda n, S: _direct(n, S, True)},
    "scatter": {"direct": lambda n, S: _direct(n, S / n, False)},
    "exchange": {"pairwise": lambda n, S: [MessageRound(1, S)]},
    "send": {"direct": lambda n, S: [MessageRound(1, S, _first_to_second)]},
    "mix": {"neighbours": lambda n, S: [MessageRound(1, S, None, n - 1, n - 1)]},
    "barrier": {
        "tree": lambda n, S: [MessageRound(2 * len(_hops(n)), 0.0)],
        "dissemination": lambda n, S: [MessageRound(len(_hops(n)), 0.0)],
    },
}
# Algorithms that need a server or islands
SPECIAL: dict[str, tuple[str, ...]] = {
    "all_reduce": ("server", "hierarchical"),
    "push": ("server", "island", "relay"),
    "pull": ("server", "island", "relay"),
}
NAMES = {  # the names in NCCL, gloo and MPI -> our names
    "nccl_ring": "ring",
    "nccl_tree": "double_tree",
    "gloo_ring": "ring",
    "gloo_halving_doubling": "halving_doubling",
}


def algorithms_of(kind: str) -> list[str]:
    """Return the names of the algorithms of the collective `kind`.

    Raises:
        ArgumentError: the collective is unknown.

    >>> algorithms_of("all_gather")
    ['ring', 'bruck']
    """
    check_choice("kind", kind, [*ALGORITHMS, "push", "pull"])
    return [*ALGORITHMS.get(kind, {}), *SPECIAL.get(kind, ())]


def price(rounds: Sequence[MessageRound], links: Links, members: Any) -> Cost:
    """Return the cost of consecutive `rounds` among `members` (ids, in order)."""
    latency = transfer = hops = 0.0
    ids = None
    for r in rounds:
        if isinstance(links, UniformLinks):  # all pairs are equal
            bandwidth, alpha = links.bandwidth_bps, links.latency_s
            slots = max(1 / bandwidth, r.fan_out / links.up_bps, r.fan_in / links.down_bps)
        else:
            ids = np.asarray(members) if ids is None else ids
            alpha, slots = _slowest_pair(r, links, ids)
        latency += r.count * r.hops * alpha
        transfer += r.count * 8 * r.bytes_ * slots
        hops += r.count * r.hops
    return Cost(float(latency), float(transfer), round(hops))


def _slowest_pair(r: MessageRound, links: Links, ids: np.ndarray) -> tuple[float, float]:
    """Return the latency of the slowest pair and its seconds per bit."""
    if r.pairs is None:
        bandwidth, alpha = links.slowest(ids)
        up, down = links.line(ids)
        return alpha, max(1 / bandwidth, r.fan_out / np.min(up), r.fan_in / np.min(down))
    senders, receivers = r.pairs(len(ids))
    i, j = ids[senders], ids[receivers]
    bandwidth, alpha = links.link(i, j)
    slots = links.crowd(i, j) / bandwidth
    if r.fan_out > 1:
        slots = np.maximum(slots, r.fan_out / links.line(i)[0])
    if r.fan_in > 1:
        slots = np.maximum(slots, r.fan_in / links.line(j)[1])
    alpha, slots = np.broadcast_arrays(alpha, slots)
    last = int(np.argmax(r.hops * alpha + 8 * r.bytes_ * slots))
    return float(alpha[last]), float(slots[last])


def price_server(
    links: Links, members: Any, size: float, server_bps: float | None, ways: Sequence[str], near: bool = False
) -> Cost:
    """Return the cost of sending `size` bytes from every member to a server ("up") or back ("down").

    All bytes share the server's line, whose rate is `server_bps` in each direction. If `server_bps` is None, the
    server's line is as fast as the fastest member's line. If `near`, the server is in the members' island.
    """
    n = len(members)
    up, down, alpha = (links.near if near else links.outside)(
        members if isinstance(links, UniformLinks) else np.asarray(members)
    )
    far, total = float(np.max(alpha)), Cost()
    most_bps = links.connection(members if isinstance(links, UniformLinks) else np.asarray(members), near)
    for way in ways:
        line = np.minimum(up if way == "up" else down, most_bps)
        total += Cost(far, 8 * size * max(1 / float(np.min(line)), n / line_of_server(up, down, server_bps)), 1)
    return total


def line_of_server(up: Any, down: Any, server_bps: float | None) -> float:
    """Return the rate of a server's line in each direction, given its members' lines `up` and `down`."""
    return float(np.max([up, down])) if server_bps is None else server_bps


def price_hierarchical(links: Links, members: Any, size: float) -> Cost:
    """Return the cost of a hierarchical all-reduce over islands.

    Each island runs a ring all-reduce, the islands' first nodes run an all-reduce by a ring or by halving-doubling, and
    each island runs a broadcast. Islands work in parallel, so the slowest one counts. On a matrix of links, an island
    is a set of nodes connected by links of at least some bandwidth; the bandwidth that gives the fastest all-reduce
    counts.

    Raises:
        ArgumentError: the network has no islands.
    """
    ids = np.sort(np.asarray(members))
    if isinstance(links, GroupLinks):
        splits = [links.group_of[ids]]
    elif isinstance(links, MatrixLinks):
        splits = _splits(links.bandwidth_bps[np.ix_(ids, ids)])
    else:
        raise ArgumentError("algorithm='hierarchical' needs a network with islands: Network.groups(...) or a matrix")
    costs = [_price_split(links, [ids[split == g] for g in np.unique(split)], size) for split in splits]
    return min(costs, key=lambda cost: cost.seconds)


def _price_split(links: Links, islands: list[np.ndarray], size: float) -> Cost:
    def price_of(kind: str, ways: Sequence[str], ids: np.ndarray) -> Cost:
        costs = [price(ALGORITHMS[kind][way](len(ids), size), links, ids) for way in ways if len(ids) > 1]
        return min(costs, key=lambda cost: cost.seconds, default=Cost())

    def slowest(kind: str, way: str) -> Cost:
        return max((price_of(kind, [way], island) for island in islands), key=lambda cost: cost.seconds)

    first = np.array([island[0] for island in islands])
    across = price_of("all_reduce", ("ring", "halving_doubling"), first)
    return slowest("all_reduce", "ring") + across + slowest("broadcast", "tree")


def _splits(bandwidth_bps: np.ndarray) -> list[np.ndarray]:
    """Return each node's island, (n,), for up to MOST_SPLITS bandwidths at which links start to connect nodes."""
    n = len(bandwidth_bps)
    both = np.minimum(bandwidth_bps, bandwidth_bps.T)
    levels = np.unique(both[~np.eye(n, dtype=bool)])
    splits = []
    for level in levels[np.unique(np.linspace(0, len(levels) - 1, MOST_SPLITS).round().astype(int))]:
        joined, island = (both >= level) | np.eye(n, dtype=bool), np.arange(n)
        while (island != (least := np.where(joined, island, n).min(1))).any():
            island = least
        splits.append(island)
    return splits
