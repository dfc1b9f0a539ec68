"""Optional costs of a collective in addition to latency and rate: gloo's messages over TCP, copies and sums.

**Messages of gloo** (`tcp=True`). gloo sends a message only after its receiver has said that it is ready, so every
message takes two latencies. If n members all send m bytes to each other (`exogym.core.engine.wire`), they take

    2 alpha + (n-1) m/B    for m of at most 14,600 bytes, because all messages travel at the same time
    n alpha + (n-1) m/B    for larger m: n - 1 rounds, for which all receivers say at the beginning that they are ready

An all-gather is one such exchange with m = S, a reduce-scatter one with m = S/n. The exact all-reduce is two with
m = S/n, or one with m = S if S is at most 1,448 bytes and n S at most 14,600 bytes. Nodes that agree on a few bytes
exchange them once. All other collectives take twice the latencies of their formula. Pushes and pulls stay as they are.

**TCP** (`tcp=True`). 1,448 bytes of each packet of 1,514 are payload: Ethernet's header has 14 bytes, IP's 20, and
TCP's with timestamps 32. Every second packet is acknowledged by 66 bytes the other way (RFC 5681, 4.2), where nodes
send, too. So a line's rate carries 1448 / (1514 + 66/2) = 93.6 % payload.

A connection fills a link of B bytes per second with a window of W = B RTT bytes, where RTT is two
latencies. A new connection starts with 10 segments (RFC 6928). An idle connection halves its window for each
retransmission timeout RTO = RTT + 200 ms (Linux, TCP_RTO_MIN), down to 10 segments (RFC 2861, as in Linux). Then the
connection doubles the window in each round trip until the window fills the link, or until all m bytes of the message
are sent. After an idle time t the connection loses

    k RTT - w (2^k - 1) / B,   w = max(14,600, W / 2^floor(t / RTO)),
                               k = min(ceil(log2(W / w)), ceil(log2(m / w + 1)) - 1)

once per collective, because all its connections speed up at the same time. Queues and losses are not included. B is
the line's rate in this formula.

**Copies and sums** (`memory=`, a host's memory speed in bytes per second). The exact all-reduce of S bytes among n
members moves more in memory than the network stack does: its own slices (4 S/n), the received slices put together
(2 S), their sum (3 (n-1)/n S), the result put together (2 S), and the result written to the parameters (2 S).
"""

from __future__ import annotations

import math

from exogym.network.costs import MessageRound

HEADER_BYTES = 66  # of a packet
PAYLOAD_SHARE = 1448 / (1448 + HEADER_BYTES * 1.5)  # of a line's rate
TIMEOUT_S = 0.2  # retransmission timeout minus the round trip
FIRST_WINDOW_BYTES = 10 * 1460
PACKET_BYTES = 1448  # of payload
MOST_HALVINGS = 64


def rounds_of_gloo(kind: str, way: str, n: int, payload_bytes: float) -> list[MessageRound] | None:
    """Return the rounds of a collective in which all of n hosts send to all, or None if it is no such collective.

    >>> [(r.count, r.bytes_, r.hops) for r in rounds_of_gloo("all_reduce", "exact", 4, 1e6)]
    [(1, 0.0, 1), (3, 250000.0, 1), (1, 0.0, 1), (3, 250000.0, 1)]
    >>> [(r.count, r.bytes_, r.hops) for r in rounds_of_gloo("all_reduce", "exact", 4, 1e3)]
    [(1, 1000.0, 2)]
    """
    S = payload_bytes
    if kind == "all_reduce" and way in ("ring", "exact"):
        is_whole = S <= PACKET_BYTES and n * S <= FIRST_WINDOW_BYTES
        return _exchanged(n, S) if is_whole else 2 * _exchanged(n, S / n)
    if way == "ring":
        return _exchanged(n, S if kind == "all_gather" else S / n)
    return None


def _exchanged(n: int, message_bytes: float) -> list[MessageRound]:
    """Return the rounds in which each of `n` members sends a message to each other member."""
    if message_bytes <= FIRST_WINDOW_BYTES:
        return [MessageRound(1, message_bytes, None, n - 1, n - 1, hops=2)]
    return [MessageRound(1, 0.0), MessageRound(n - 1, message_bytes)]


def slow_start_s(payload_bytes: float, bandwidth_bps: float, latency_s: float, idle_s: float = math.inf) -> float:
    """Return the seconds that a connection loses on `payload_bytes`, because it starts slowly after `idle_s` seconds.

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
    w = max(FIRST_WINDOW_BYTES, wanted / 2 ** math.floor(halvings))
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
