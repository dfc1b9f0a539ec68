"""What a collective costs beside latency and rate, where a network is asked for it: TCP's slow start, copies and sums.

**TCP** (`tcp=True`). A connection that was idle for longer than its retransmission timeout, at least 200 ms (Linux,
TCP_RTO_MIN), starts again with a window of 10 segments (RFC 5681, section 4.1; RFC 6928), and doubles it each round
trip until it fills the way, W = B RTT bytes, or until its m bytes are gone. It loses, with w = 10 x 1,460 bytes,

    k RTT - w (2^k - 1) / B,   k = min(ceil(log2(W / w)), ceil(log2(m / w + 1)) - 1)

once for each collective, whose connections all ramp up at once; RTT is two latencies. Queues and losses are not in it.

**Copies and sums** (`memory=`, bytes per second that a host reads and writes). The exact all-reduce of S bytes among n
reads and writes, beside what the network stack does: its own slices (4 S/n), the slices it got, put together (2 S),
their sum (3 (n-1)/n S), the result put together (2 S), and written to the parameters (2 S).
"""

from __future__ import annotations

import math

IDLE_S = 0.2
FIRST_WINDOW_BYTES = 10 * 1460


def slow_start_s(payload_bytes: float, bandwidth_bps: float, latency_s: float) -> float:
    """Return the seconds that a connection loses on `payload_bytes` in a row, because it starts slowly.

    >>> round(slow_start_s(1e9, 500e6, 0.075), 3)  # 10 round trips, 15 MB less than the line carries in them
    1.261
    >>> slow_start_s(14_600, 500e6, 0.075), slow_start_s(1e9, 500e6, 0.0)
    (0.0, 0.0)
    """
    trip_s, w = 2 * latency_s, FIRST_WINDOW_BYTES
    wanted = bandwidth_bps / 8 * trip_s
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
