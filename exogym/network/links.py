"""Links between nodes: equal for all pairs, one per pair, or fast inside islands and slow between them.

All kinds of links have the same methods, which accept one id or an array of ids:

- `link(i, j)`: the link from i to j.
- `crowd(i, j)`: how many messages share a message's narrowest line if all messages from i to j start at the same time.
- `line(i)`: node i's own connection (its line), which all its messages share.
- `outside(i)`: the link to a server, which is not a node.
- `near(i)`: the link to a server in node i's own island.
- `connection(i, near)`: the highest rate of one connection to such a server, however fast the lines are.
- `slowest(ids)`: the slowest link if each of the nodes sends to another one of them at the same time.

Bandwidths are in bits per second, latencies in seconds one way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from exogym.errors import ArgumentError
from exogym.network.units import parse_bandwidth, parse_seconds

Pair = tuple[Any, Any]  # bandwidth_bps and latency_s: numbers, or arrays of the ids' shape


class Links(Protocol):
    """Base class of all kinds of links.

    `size` is the number of nodes, or None if the links fit any number of nodes.
    """

    @property
    def size(self) -> int | None: ...
    def link(self, i: Any, j: Any) -> Pair: ...
    def crowd(self, i: np.ndarray, j: np.ndarray) -> Any: ...
    def line(self, i: Any) -> Pair: ...
    def outside(self, i: Any) -> tuple[Any, Any, Any]: ...
    def near(self, i: Any) -> tuple[Any, Any, Any]: ...
    def connection(self, i: Any, near: bool) -> Any: ...
    def slowest(self, ids: np.ndarray) -> Pair: ...


@dataclass(frozen=True)
class UniformLinks:
    """Links between nodes whose lines are equal: `up_bps` and `down_bps`.

    Two nodes communicate at the slower of the two rates, and at most at `stream_bps`.
    """

    up_bps: float
    down_bps: float
    latency_s: float
    stream_bps: float = math.inf
    size: None = None

    @property
    def bandwidth_bps(self) -> float:
        return min(self.up_bps, self.down_bps, self.stream_bps)

    def link(self, i: Any, j: Any) -> Pair:
        return self.bandwidth_bps, self.latency_s

    def crowd(self, i: np.ndarray, j: np.ndarray) -> Any:
        return 1.0

    def line(self, i: Any) -> Pair:
        return self.up_bps, self.down_bps

    def outside(self, i: Any) -> tuple[Any, Any, Any]:
        return self.up_bps, self.down_bps, self.latency_s

    near = outside

    def connection(self, i: Any, near: bool) -> Any:
        return self.stream_bps

    def slowest(self, ids: np.ndarray) -> Pair:
        return self.bandwidth_bps, self.latency_s


class MatrixLinks:
    """One link for each ordered pair of nodes: `bandwidth_bps[i, j]` and `latency_s[i, j]` from i to j.

    Diagonals are unused. A node's line is as fast as its fastest link. The latency between a node and a server is the
    node's largest latency to or from another node, or its smallest one for a server in the node's own island.
    """

    def __init__(self, bandwidth: Any, latency: Any):
        self.bandwidth_bps = _square(bandwidth, "bandwidth", parse_bandwidth)
        self.size = len(self.bandwidth_bps)
        if np.ndim(latency) == 0 or isinstance(latency, str):
            latency = np.full((self.size, self.size), parse_seconds(latency))
        self.latency_s = _square(latency, "latency", parse_seconds)
        if len(self.latency_s) != self.size:
            raise ArgumentError(
                f"the latency matrix has {len(self.latency_s)} nodes, but the bandwidth matrix has {self.size}: pass "
                "both for the same nodes"
            )
        others = ~np.eye(self.size, dtype=bool)
        fast = np.where(others, self.bandwidth_bps, 0.0)
        self.up_bps, self.down_bps = fast.max(1), fast.max(0)
        far = np.where(others, self.latency_s, 0.0)
        self.far_s = np.maximum(far.max(1), far.max(0))
        near = np.where(others, self.latency_s, np.inf)
        self.near_s = np.minimum(near.min(1), near.min(0)) if self.size > 1 else self.far_s
        self.far_stream_bps = self.near_stream_bps = np.full(self.size, np.inf)

    def link(self, i: Any, j: Any) -> Pair:
        return self.bandwidth_bps[i, j], self.latency_s[i, j]

    def crowd(self, i: np.ndarray, j: np.ndarray) -> Any:
        return 1.0

    def line(self, i: Any) -> Pair:
        return self.up_bps[i], self.down_bps[i]

    def outside(self, i: Any) -> tuple[Any, Any, Any]:
        return self.up_bps[i], self.down_bps[i], self.far_s[i]

    def near(self, i: Any) -> tuple[Any, Any, Any]:
        return self.up_bps[i], self.down_bps[i], self.near_s[i]

    def connection(self, i: Any, near: bool) -> Any:
        return (self.near_stream_bps if near else self.far_stream_bps)[i]

    def slowest(self, ids: np.ndarray) -> Pair:
        both = ~np.eye(len(ids), dtype=bool)
        among = np.ix_(ids, ids)
        return self.bandwidth_bps[among][both].min(), self.latency_s[among][both].max()


class LineLinks:
    """Links between nodes whose lines differ. Two nodes communicate at the slower line's rate; all latencies are equal.

    Args:
        lines: each node's bandwidth, the same in both directions.
        latency: between any two nodes, and between a node and a server.
    """

    def __init__(self, lines: Sequence[Any], latency: Any):
        if len(lines) < 2:
            raise ArgumentError(f"bandwidth={list(lines)!r} must list at least two lines")
        self.lines_bps = np.array([parse_bandwidth(line) for line in lines])
        self.size, self.latency_s, self.stream_bps = len(lines), parse_seconds(latency), math.inf

    def link(self, i: Any, j: Any) -> Pair:
        lines = np.minimum(self.lines_bps[i], self.lines_bps[j])
        return np.minimum(lines, self.stream_bps), self.latency_s

    def crowd(self, i: np.ndarray, j: np.ndarray) -> Any:
        return 1.0

    def line(self, i: Any) -> Pair:
        return self.lines_bps[i], self.lines_bps[i]

    def outside(self, i: Any) -> tuple[Any, Any, Any]:
        return self.lines_bps[i], self.lines_bps[i], self.latency_s

    near = outside

    def connection(self, i: Any, near: bool) -> Any:
        return self.stream_bps

    def slowest(self, ids: np.ndarray) -> Pair:
        return min(self.lines_bps[ids].min(), self.stream_bps), self.latency_s


class GroupLinks:
    """Links of islands: pairs in island g use `inside[g]`; other pairs use `between`, whose nodes are the islands.

    An island has `shared` lines to the other islands (True means one), over which its messages are spread. If the links
    of `between` differ, the island has that many lines to each other island. If `shared` is 0 or False, each node has
    its own line to the other islands. A node's line is as fast as the faster of its two kinds of links. Nodes reach a
    server over `between`, and a server in their own island over `inside`.
    """

    def __init__(self, groups: Sequence[Any], inside: Sequence[UniformLinks], between: Links, shared: int = 1):
        self.group_of = _membership(groups)
        self.size = len(self.group_of)
        count = int(self.group_of.max()) + 1
        if len(inside) != count:
            raise ArgumentError(
                f"inside has {len(inside)} networks for {count} groups: pass one network, or one per group"
            )
        if between.size is not None and between.size != count:
            raise ArgumentError(f"between must have one node per group, {count}, but has {between.size}")
        self.between, self.shared = between, shared
        self.bandwidth_bps = np.array([links.bandwidth_bps for links in inside])
        self.latency_s = np.array([links.latency_s for links in inside])
        self.stream_bps = np.array([links.stream_bps for links in inside])
        self.up_bps, self.down_bps = (np.array([line[k] for line in (x.line(0) for x in inside)]) for k in (0, 1))

    def link(self, i: Any, j: Any) -> Pair:
        a, b = self.group_of[i], self.group_of[j]
        bandwidth, latency = self.between.link(a, b)
        same = a == b
        return np.where(same, self.bandwidth_bps[a], bandwidth), np.where(same, self.latency_s[a], latency)

    def line(self, i: Any) -> Pair:
        g = self.group_of[i]
        up, down = self.between.line(g)
        return np.maximum(self.up_bps[g], up), np.maximum(self.down_bps[g], down)

    def crowd(self, i: np.ndarray, j: np.ndarray) -> Any:
        a, b = self.group_of[i], self.group_of[j]
        across = a != b
        if not self.shared or not across.any():
            return np.ones(len(a))
        if isinstance(self.between, UniformLinks):
            most = int(max(a.max(), b.max())) + 1
            out, into = (np.bincount(g[across], minlength=most) for g in (a, b))
            many = np.maximum(out[a], into[b])
        else:  # each pair of islands has its own line
            _, place, counts = np.unique(a * (int(b.max()) + 1) + b, return_inverse=True, return_counts=True)
            many = counts[place]
        return np.where(across, self._on_a_line(many), 1)

    def _on_a_line(self, many: Any) -> Any:
        """Return how many of an island's messages share a line if each has the rate of a pair of nodes."""
        if not self.shared:
            return 1
        x = self.between
        share = x.bandwidth_bps / min(x.up_bps, x.down_bps) if isinstance(x, UniformLinks) else 1.0
        return np.maximum(1, share * np.ceil(many / self.shared))

    def outside(self, i: Any) -> tuple[Any, Any, Any]:
        g = np.atleast_1d(self.group_of[i])
        up, down, latency = self.between.outside(g)
        many = self._on_a_line(np.bincount(g)[g])
        return up / many, down / many, latency

    def near(self, i: Any) -> tuple[Any, Any, Any]:
        g = self.group_of[i]
        return self.up_bps[g], self.down_bps[g], self.latency_s[g]

    def connection(self, i: Any, near: bool) -> Any:
        g = self.group_of[i]
        return self.stream_bps[g] if near else self.between.connection(g, near)

    def slowest(self, ids: np.ndarray) -> Pair:
        groups, counts = np.unique(self.group_of[ids], return_counts=True)
        pairs = groups[counts > 1]
        bandwidth = self.bandwidth_bps[pairs].min(initial=np.inf)
        latency = self.latency_s[pairs].max(initial=0.0)
        if len(groups) > 1:
            across = self.between.slowest(groups)
            many = self._on_a_line(np.minimum(counts, len(ids) - counts).max())
            bandwidth, latency = min(bandwidth, across[0] / many), max(latency, across[1])
        return bandwidth, latency


def limited(links: Any, share: float, stream_bps: Callable[[Any], Any]) -> Any:
    """Return links whose lines reach a share of their rates, and whose pairs reach at most `stream_bps(latency_s)`."""
    if isinstance(links, UniformLinks):
        most = float(min(links.stream_bps, stream_bps(links.latency_s)))
        return replace(links, up_bps=share * links.up_bps, down_bps=share * links.down_bps, stream_bps=most)
    links = copy.copy(links)
    if isinstance(links, LineLinks):
        links.lines_bps, links.stream_bps = share * links.lines_bps, stream_bps(links.latency_s)
        return links
    links.bandwidth_bps = np.minimum(share * links.bandwidth_bps, stream_bps(links.latency_s))
    links.up_bps, links.down_bps = share * links.up_bps, share * links.down_bps
    if isinstance(links, GroupLinks):
        links.between = limited(links.between, share, stream_bps)
        links.stream_bps = np.minimum(links.stream_bps, stream_bps(links.latency_s))
    else:
        links.far_stream_bps = np.minimum(links.far_stream_bps, stream_bps(links.far_s))
        links.near_stream_bps = np.minimum(links.near_stream_bps, stream_bps(links.near_s))
    return links


def _square(given: Any, name: str, read: Any) -> np.ndarray:
    """Return a square matrix of checked numbers. The diagonal may hold anything."""
    rows = given.tolist() if hasattr(given, "tolist") else list(given)
    n = len(rows)
    lengths = {len(row) if isinstance(row, list | tuple) else -1 for row in rows}
    if n == 0 or lengths != {n}:
        shape = ", ".join(map(str, sorted(lengths)))
        raise ArgumentError(
            f"the {name} matrix must be square with one row per node, but has {n} rows of {shape} numbers"
        )
    table = np.asarray(rows)
    if table.dtype.kind in "if":
        fine = np.isfinite(table) & (table > 0 if name == "bandwidth" else table >= 0)
        if (fine | np.eye(n, dtype=bool)).all():
            return table.astype(float)
    out = np.full((n, n), np.inf if name == "bandwidth" else 0.0)
    for i in range(n):
        for j in range(n):
            if i != j:
                try:
                    out[i, j] = read(rows[i][j], name)
                except ArgumentError as error:
                    raise ArgumentError(
                        f"node {i} cannot reach node {j}: {error}. Every pair needs a {name}; if two nodes have no "
                        "direct link, pass the value for the route between them"
                    ) from None
    return out


def _membership(groups: Sequence[Any]) -> np.ndarray:
    """Return each node's group, (nodes,), from group sizes or from lists of ids that contain each node once."""
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not groups:
        raise ArgumentError(f"groups={groups!r} must be a list of sizes, as [4, 4], or of lists of ids")
    if all(isinstance(g, int) and not isinstance(g, bool) for g in groups):
        if min(groups) < 1:
            raise ArgumentError(f"groups={list(groups)}: every group needs at least one node")
        return np.repeat(np.arange(len(groups)), groups)
    if any(isinstance(g, int | str) or not len(g) for g in groups):
        raise ArgumentError(f"groups={groups!r} must be a list of sizes, as [4, 4], or of nonempty lists of ids")
    ids = [i for group in groups for i in group]
    if sorted(ids) != list(range(len(ids))):
        raise ArgumentError(f"groups={groups!r} must contain each node from 0 to {len(ids) - 1} once")
    out = np.zeros(len(ids), dtype=np.int64)
    for number, group in enumerate(groups):
        out[list(group)] = number
    return out


def without_diagonal(tables: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return the matrices by name, with zeros on the diagonals, which nothing uses."""
    return {
        name: [[0.0 if i == j else value for j, value in enumerate(row)] for i, row in enumerate(rows)]
        for name, rows in tables.items()
    }
