"""What a collective costs beside latency and rate, where a network is asked for it: TCP's slow start, copies and sums.

**TCP** (`tcp=True`). A connection that fills the way has a window of W = B RTT bytes. For each retransmission timeout
that it is idle, RTO = RTT + 200 ms (Linux, TCP_RTO_MIN), it halves that (RFC 2861, as Linux does), down to 10 segments
(RFC 6928), with which a new one starts. Then it doubles it each round trip until it fills the way again, or until its m
bytes are gone. After an idle time t it loses

    k RTT - w (2^k - 1) / B,   w = max(14,600, W / 2^floor(t / RTO)),
                               k = min(ceil(log2(W / w)), ceil(log2(m / w + 1)) - 1)

once for each collective, whose connections all ramp up at once; RTT is two latencies. Queues and losses are not in it.

**Copies and sums** (`memory=`, bytes per second that a host reads and writes). The exact all-reduce of S bytes among n
reads and writes, beside what the network stack does: its own slices (4 S/n), the slices it got, put together (2 S),
their sum (3 (n-1)/n S), the result put together (2 S), and written to the parameters (2 S).
"""

from __future__ import annotations

import math

TIMEOUT_S = 0.2  # of a retransmission, beside the round trip
FIRST_WINDOW_BYTES = 10 * 1460
MOST_HALVINGS = 64


def slow_start_s(payload_bytes: float, bandwidth_bps: float, latency_s: float, idle_s: float = math.inf) -> float:
    """Return the seconds that a connection loses on `payload_bytes` in a row, because it starts slowly after idling.

    >>> round(slow_start_s(1e9, 500e6, 0.075), 3)  # 10 round trips, 15 MB less than the line carries in them
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
    """Return the bytes that a host reads and writes for each byte of a collective's payload; 0 where it is not known.

    >>> moved_in_memory("all_reduce", "exact", 2), moved_in_memory("broadcast", "tree", 2)
    (9.5, 0.0)
    """
    if kind != "all_reduce" or way not in ("ring", "exact") or n < 2:
        return 0.0
    return 4 / n + 2 + 3 * (n - 1) / n + 2 + 2
