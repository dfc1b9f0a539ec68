"""The collectives of NCCL and gloo: which algorithms each library runs, and how long they take.

`Network(..., library="nccl")` or `"gloo"` limits a network to the library's own algorithms and predicts their times
with the formulas below. "any" uses the fastest of all algorithms in `exogym.network.costs`, whose formulas also apply
to a library's other collectives. There are n members, the payload is S, the latency alpha, the bandwidth B, and L =
ceil(log2 n).

**gloo** (github.com/pytorch/gloo, commit 70dc360). A member sends after its receiver has said that it is ready.

    all_reduce  ring    2(n-1)/n N (max(alpha, T) + min(alpha, T)/2)
    reduce      ring    (N-2) (max(alpha, T) + min(alpha, T)/2) + 2 alpha + (n-1)/n S/B
    all_gather  ring    2(n-1) (max(alpha, T) + min(alpha, T)/2), T = S/(2B)
    broadcast   tree    (L+1) alpha + L(L+1)/2 S/B
    all_to_all, gather, send    2 alpha + the bytes on the busiest line

allreduce.cc cuts the payload into N segments of at most 1 MiB (`kMaxSegmentSize`), at least 2n of them, and has "two in
flight at all times". T = S/(NB) is a segment's time. On a free line, two segments would take 2 alpha + T: the
receiver's announcement travels, then the segment. If T > alpha, the announcement waits behind the segment that its
sender is sending. torch calls the ring (`UNSPECIFIED`) and never gloo's halving-doubling ("bcube"). reduce.cc
passes N - 2 segments around the ring; then each member sends its slice to the root. allgather.cc passes halves of a
part. In broadcast.cc a member posts all of its sends at once, so they share its line: first L, then L - 1. alltoall.cc
posts all sends at once, too.

**NCCL** (github.com/NVIDIA/nccl, commit 5067397).

    all_reduce  ring          2(n-1) max(S/(nB), l alpha + S/(2nB)),  l = max(1, S/(n 4 MiB))
                double_tree   as in `costs`
    all_gather, reduce_scatter  ring    half of the all-reduce; in all_gather S/n is S
    broadcast, reduce  chain  (n-1) alpha + ((n-2) 1 MiB + S)/B

Each of 2 channels (connect.cc doubles the ring that a single line allows) has a buffer of 4 MiB (init.cc) in 8 steps
(device.h). all_reduce.h passes chunks of half a buffer to each member, and begins the next loop when the last chunk is
back. While one channel's chunk travels, the other channel sends, so the time is limited by either the line or the
latency. NCCL uses the tree if its own model (tuning.cc) predicts that it is faster, with 14 us per hop regardless of
the network's latency. broadcast.h and reduce.h cut the ring at the root and forward one step of each channel at a time,
1 MiB together.

The formulas ignore sums, copies, the library's threads and slowly starting connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from exogym.errors import ArgumentError
from exogym.network.costs import (
    ALGORITHMS,
    Cost,
    MessageRound,
    algorithms_of,
    around,
    price,
    price_hierarchical,
    price_server,
)
from exogym.network.links import Links

LIBRARIES = ("gloo", "nccl", "any")
SEGMENT_BYTES = 1 << 20  # gloo: allreduce.h, kMaxSegmentSize
SLICE_BYTES = 1 << 21  # NCCL: half of a buffer of 4 MiB, as ALLREDUCE_CHUNKSTEPS is half of NCCL_STEPS
CHANNELS = 2  # NCCL: connect.cc, "Duplicate ringPrev/ringNext"
HOP_S = 14e-6  # NCCL: tuning.cc, hwLatencies of NET for trees and rings in protocol Simple
TREE_SHARE = 0.92 * 0.85  # NCCL: tuning.cc, a tree's bandwidth beside a ring's
OWN: dict[str, dict[str, tuple[str, ...]]] = {
    "gloo": {"all_reduce": ("ring",), "all_gather": ("ring",), "broadcast": ("tree",), "reduce": ("ring",)},
    "nccl": {
        "all_reduce": ("ring", "double_tree"),
        **dict.fromkeys(("all_gather", "reduce_scatter"), ("ring",)),
        **dict.fromkeys(("broadcast", "reduce"), ("chain",)),
    },
}
Rounds = list[MessageRound]


def own_algorithms(library: str | None, kind: str) -> list[str]:
    """Return the names of a library's algorithms for a collective.

    >>> own_algorithms("nccl", "all_reduce"), own_algorithms("gloo", "broadcast")
    (['ring', 'double_tree'], ['tree'])
    """
    return list(OWN.get(library or "any", {}).get(kind, algorithms_of(kind)))


def chosen(library: str, kind: str, n: int, S: float, bandwidth_bps: float) -> str:
    """Return the algorithm that a library uses for a collective among n members on lines of `bandwidth_bps`.

    >>> chosen("nccl", "all_reduce", 16, 1e9, 1e10), chosen("nccl", "all_reduce", 16, 1e3, 1e10)
    ('ring', 'double_tree')
    """
    first, *others = own_algorithms(library, kind)
    if (library, kind) != ("nccl", "all_reduce"):
        return first
    hops = 2 * (n - 1) - 2 * int(math.log2(n))  # fewer in a tree
    more = 2 / TREE_SHARE - 2 * (n - 1) / n  # of the payload, on a tree's line
    return others[0] if hops * HOP_S > more * 8 * S / bandwidth_bps else first


def cost_among(
    links: Links, server_bps: float | None, kind: str, way: str, payload_bytes: float, ids: Sequence[int],
    root: int | None = None, fan: Sequence[float] | None = None, library: str | None = None,
) -> Cost:  # fmt: skip
    """Return a collective's cost by formula, before loss and jitter. The arguments are the same as in `Network.cost`.

    Raises:
        ArgumentError: `root` is not a member, or the algorithm needs islands and the network has none.
    """
    n = len(ids)
    if kind in ("push", "pull") or way == "server":
        if n == 1 and kind not in ("push", "pull"):
            return Cost()
        ways = {"push": ["up"], "pull": ["down"]}.get(kind, ["up", "down"])
        near = way == "island"
        return price_server(links, ids, payload_bytes, None if near else server_bps, ways, near)
    if n == 1:
        return Cost()
    if way == "hierarchical":
        return price_hierarchical(links, ids, payload_bytes)
    if fan is not None:
        out, into = fan
        busy = max(out, into) > 0
        return price([MessageRound(1, payload_bytes, None, out, into)] if busy else [], links, ids)
    if root is not None and ids[0] != root and kind in ("broadcast", "reduce", "gather", "scatter"):
        if root not in ids:
            raise ArgumentError(f"root={root!r} is not among the {n} members: pass one of them")
        at = list(ids).index(root)
        ids = [*ids[at:], *ids[:at]]
    own = _ROUNDS.get((library or "any", kind, way))
    limits = [ALGORITHMS[kind][way](n, payload_bytes)] if own is None else own(n, payload_bytes)
    return max((price(rounds, links, ids) for rounds in limits), key=lambda cost: cost.seconds)


# A library's collective as alternative lists of rounds; the longest list determines the time


def _in_flight(count: float, bytes_: float) -> list[Rounds]:
    """Return the lower bounds on `count` messages around a ring with two messages in flight.

    A message takes max(alpha, T) + min(alpha, T)/2, the larger of T + alpha/2 and alpha + T/2.
    """
    return [[MessageRound(1, count * share * bytes_, around, hops=count * (1.5 - share))] for share in (1.0, 0.5)]


def _segments(n: int, S: float) -> int:
    """Return the number of segments that gloo uses, a multiple of n."""
    return n * math.ceil(max(math.ceil(S / SEGMENT_BYTES), 2 * n) / n)


def _gloo_all_reduce(n: int, S: float) -> list[Rounds]:
    N = _segments(n, S)
    return _in_flight(2 * (n - 1) * N / n, S / N)


def _gloo_reduce(n: int, S: float) -> list[Rounds]:
    N = _segments(n, S)
    return [[*rounds, *_posted("gather", n, S / n)[0]] for rounds in _in_flight(N - 2, S / N)]


def _gloo_broadcast(n: int, S: float) -> list[Rounds]:
    levels = (n - 1).bit_length()
    sends = [MessageRound(1, S, partial(_next_level, level=k), fan_out=levels - k) for k in range(levels)]
    return [[MessageRound(1, 0.0), *sends]]


def _next_level(n: int, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of gloo's tree: on level k, the first 2^k members send to the member 2^k places further."""
    senders = np.arange(min(1 << level, n - (1 << level)))
    return senders, senders + (1 << level)


def _posted(kind: str, n: int, S: float) -> list[Rounds]:
    return [[MessageRound(1, 0.0), *ALGORITHMS[kind]["direct"](n, S)]]


def _nccl_ring(passes: int, n: int, part_bytes: float) -> list[Rounds]:
    """Return the lower bounds on NCCL's ring, around which each member's part travels once or twice (`passes`)."""
    loops, count = max(1.0, part_bytes / (CHANNELS * SLICE_BYTES)), passes * (n - 1)
    line = [MessageRound(1, 0.0, around), MessageRound(count, part_bytes, around, hops=0)]
    return [line, [MessageRound(count, part_bytes / CHANNELS, around, hops=loops)]]


_ROUNDS: dict[tuple[str, str, str], Callable[[int, float], list[Rounds]]] = {
    ("gloo", "all_reduce", "ring"): _gloo_all_reduce,
    ("gloo", "all_gather", "ring"): lambda n, S: _in_flight(2 * (n - 1), S / 2),
    ("gloo", "all_to_all", "pairwise"): lambda n, S: [[MessageRound(1, S / n, None, n - 1, n - 1, hops=2)]],
    ("gloo", "broadcast", "tree"): _gloo_broadcast,
    ("gloo", "gather", "direct"): partial(_posted, "gather"),
    ("gloo", "reduce", "ring"): _gloo_reduce,
    ("gloo", "send", "direct"): partial(_posted, "send"),
    ("nccl", "all_reduce", "ring"): lambda n, S: _nccl_ring(2, n, S / n),
    ("nccl", "all_gather", "ring"): partial(_nccl_ring, 1),
    ("nccl", "reduce_scatter", "ring"): lambda n, S: _nccl_ring(1, n, S / n),
}
