"""Optional costs of a collective beyond latency and rate: gloo's messages over TCP, copies and sums.

**Messages of gloo** (`tcp=True`). gloo sends a message only after its receiver has announced that it is ready, so every
message takes two latencies. If n members all send m bytes to each other (`exogym.core.engine.wire`), they take

    2 alpha + (n-1) m/B    for m of at most 14,600 bytes, because all messages travel at the same time
    n alpha + (n-1) m/B    for larger m: n - 1 rounds, for which all receivers say at the beginning that they are ready

    all_reduce, exact                 two such exchanges with m = S/n; one with m = S if S is at most 1,448 bytes and
                                      n S at most 14,600 bytes
    all_gather, gather                one exchange with m = S
    reduce_scatter, all_to_all        one exchange with m = S/n
    reduce                            (n-1) (2 alpha + S/B): the root gets one row after the other
    broadcast                         (L+1) alpha + L S/B: later receivers are ready early
    mix                               2 alpha + S/B for each turn (`exogym.core.base.turns`); d neighbors take about d
    barrier                           nothing: hosts do not wait
    push, pull, server, hierarchical  as without gloo: hosts have no server
    any other                         twice the latencies of its formula, also torch's own all-reduce, a ring

If nodes agree on a few bytes, they exchange them once.

**TCP** (`tcp=True`). 1,448 bytes of each packet of 1,514 are payload: Ethernet's header has 14 bytes, IP's 20, and
TCP's with timestamps 32. Every second packet is acknowledged by 66 bytes in the other direction (RFC 5681, 4.2), in
which nodes also send, so 1448 / (1514 + 66/2) = 93.6 % of a line's rate carries payload.

A connection fills a link of B bytes per second with a window of W = B RTT bytes, where RTT is two latencies. A new
connection starts with 10 segments (RFC 6928). Its earlier messages, also of m bytes, have grown the window to at least
min(W, m) bytes. An idle connection halves its window for each retransmission timeout RTO = RTT + 200 ms (Linux,
TCP_RTO_MIN), down to 10 segments (RFC 2861, as in Linux). Then the connection doubles the window in each round trip
until the window fills the link, or until all m bytes of the message are sent. After an idle time t the connection loses

    k RTT - w (2^k - 1) / B,   w = max(14,600, min(W, m) / 2^floor(t / RTO)),
                               k = min(ceil(log2(W / w)), ceil(log2(m / w + 1)) - 1)

Connections that send at the same time lose this time once. If all members send large messages to each other, n - 1
rounds use one connection after the other, and each round loses it. B is the line's rate in this formula. Queues and
losses are not included, so after a pause four hosts took up to 1.6 times as long as predicted.

**Copies and sums** (`memory=`, a host's memory speed in bytes per second). The exact all-reduce of S bytes among n
members moves more in memory than the network stack does: its own slices (4 S/n), the received slices put together
(2 S), their sum (3 (n-1)/n S), the result put together (2 S), and the result written to the parameters (2 S).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from exogym.network.costs import ALGORITHMS, MessageRound

HEADER_BYTES = 66  # of a packet
PAYLOAD_SHARE = 1448 / (1448 + HEADER_BYTES * 1.5)  # of a line's rate
TIMEOUT_S = 0.2  # retransmission timeout minus round trip
FIRST_WINDOW_BYTES = 10 * 1460
PACKET_BYTES = 1448  # of payload
MOST_PAIRED = 64  # the most members whose pairs are priced individually
MOST_HALVINGS = 64


def rounds_of_gloo(kind: str, way: str, n: int, payload_bytes: float) -> list[MessageRound] | None:
    """Return the rounds of a collective among n ExoGym hosts, or None if it is not in the table above.

    >>> [(r.count, r.bytes_, r.hops) for r in rounds_of_gloo("all_reduce", "exact", 2, 1e6)]
    [(1, 0.0, 1), (1, 500000.0, 1), (1, 0.0, 1), (1, 500000.0, 1)]
    >>> [(r.count, r.bytes_, r.hops) for r in rounds_of_gloo("all_reduce", "exact", 4, 1e3)]
    [(1, 1000.0, 2)]
    """
    S = payload_bytes
    if (kind, way) == ("all_reduce", "exact"):
        is_whole = S <= PACKET_BYTES and n * S <= FIRST_WINDOW_BYTES
        return _exchanged(n, S) if is_whole else 2 * _exchanged(n, S / n)
    if (kind, way) in (("all_gather", "ring"), ("gather", "direct")):
        return _exchanged(n, S)
    if (kind, way) in (("reduce_scatter", "ring"), ("all_to_all", "pairwise")):
        return _exchanged(n, S / n)
    if (kind, way) == ("reduce", "tree"):
        return [MessageRound(1, S, partial(_to_first, giver=k), hops=2) for k in range(1, n)]
    if (kind, way) == ("broadcast", "tree"):
        return [MessageRound(1, 0.0), *ALGORITHMS[kind][way](n, S)]
    return [] if kind == "barrier" else None


def _exchanged(n: int, message_bytes: float) -> list[MessageRound]:
    """Return the rounds in which each of `n` members sends a message to each other member."""
    if message_bytes <= FIRST_WINDOW_BYTES:
        return [MessageRound(1, message_bytes, all_pairs if n <= MOST_PAIRED else None, n - 1, n - 1, hops=2)]
    return [MessageRound(1, 0.0), *_rounds(n, message_bytes)]


def _rounds(n: int, message_bytes: float) -> list[MessageRound]:
    """Return n - 1 rounds: in round k each member sends to the member k places further.

    If there are many members, every round is as slow as the slowest pair of all.
    """
    if n > MOST_PAIRED:
        return [MessageRound(n - 1, message_bytes)]
    return [MessageRound(1, message_bytes, partial(shifted, hop=hop)) for hop in range(1, n)]


def _to_first(n: int, giver: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([giver]), np.zeros(1, dtype=int)


def all_pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all ordered pairs of n members, as the positions of senders and receivers."""
    senders, receivers = np.nonzero(~np.eye(n, dtype=bool))
    return senders, receivers


def shifted(n: int, hop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n), (np.arange(n) + hop) % n


def messages_of(kind: str, way: str, n: int, payload_bytes: float) -> tuple[int, float]:
    """Return how many consecutive messages a host sends in a collective, and the bytes of each.

    >>> messages_of("all_reduce", "exact", 4, 1e6), messages_of("broadcast", "tree", 4, 1e6)
    ((3, 250000.0), (1, 1000000.0))
    """
    if (kind, way) in (("all_reduce", "exact"), ("reduce_scatter", "ring"), ("all_to_all", "pairwise")):
        return n - 1, payload_bytes / n
    return (n - 1 if (kind, way) == ("all_gather", "ring") else 1), payload_bytes


def slow_start_s(payload_bytes: float, bandwidth_bps: float, latency_s: float, idle_s: float = math.inf) -> float:
    """Return the seconds that a connection loses on `payload_bytes` by starting slowly after `idle_s` seconds.

    >>> round(slow_start_s(1e9, 500e6, 0.075), 3)  # 10 round trips, minus the time of the 15 MB sent in them
    1.261
    >>> slow_start_s(14_600, 500e6, 0.075), slow_start_s(1e9, 500e6, 0.0)
    (0.0, 0.0)
    >>> round(slow_start_s(1e9, 500e6, 0.075, idle_s=1.0), 3)  # two timeouts: a quarter of the window is left
    0.188
    """
    trip_s = 2 * latency_s
    wanted = bandwidth_bps / 8 * trip_s
    halvings = min(idle_s / (trip_s + TIMEOUT_S), MOST_HALVINGS)
    w = max(FIRST_WINDOW_BYTES, min(wanted, payload_bytes) / 2 ** math.floor(halvings))
    if wanted <= w or payload_bytes <= w:
        return 0.0
    k = min(math.ceil(math.log2(wanted / w)), math.ceil(math.log2(payload_bytes / w + 1)) - 1)
    return max(0.0, k * trip_s - 8 * w * (2**k - 1) / bandwidth_bps)


def moved_in_memory(kind: str, way: str, n: int) -> float:
    """Return the bytes that a host moves in memory for each byte of a collective's payload; 0 if unknown.

    >>> moved_in_memory("all_reduce", "exact", 2), moved_in_memory("broadcast", "tree", 2)
    (9.5, 0.0)
    """
    if kind != "all_reduce" or way not in ("ring", "exact") or n < 2:
        return 0.0
    return 4 / n + 2 + 3 * (n - 1) / n + 2 + 2
