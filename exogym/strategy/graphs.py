"""Communication graphs: each node's neighbors, and the weights with which neighbors mix their rows."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError, check_choice

GRAPHS = ("ring", "torus", "exponential", "random", "complete", "matching")
ALIKE = ("ring", "torus", "exponential", "complete")  # graphs that look the same from each node
Edges = frozenset[tuple[int, int]]


def edges_of(graph: Any, num_nodes: int, seed: int = 0, turn: int = 0) -> Edges:
    """Return the edges (i, j), i < j, of an undirected graph over the nodes.

    Args:
        graph: a networkx graph of the nodes 0, 1, ... (its weights are ignored), or a name: "ring"; "complete";
            "torus", a grid as near to a square as `num_nodes` allows; "exponential", edges from node i to i + 1, i + 2,
            i + 4, ...; "random", each edge with probability min(1, 2 ln N / N), drawn from the seed until the graph is
            connected; "matching", pairs drawn anew for each mix.

    Raises:
        ArgumentError: the name is unknown, or the graph has other nodes, is directed, or is not connected.

    >>> sorted(edges_of("ring", 4)), len(edges_of("torus", 6)), len(edges_of("exponential", 8))
    ([(0, 1), (0, 3), (1, 2), (2, 3)], 9, 20)
    """
    if graph == "matching":
        order = numpy_generator(seed, "matching", turn).permutation(num_nodes).tolist()
        return _undirected(zip(order[::2], order[1::2], strict=False))
    if isinstance(graph, str):
        check_choice("graph", graph, GRAPHS)
        return _named(graph, num_nodes, seed)
    check_graph(graph, num_nodes, directed=False)
    return _undirected(graph.edges)


def _undirected(pairs: Iterable[tuple[int, int]]) -> Edges:
    return frozenset((min(i, j), max(i, j)) for i, j in pairs if i != j)


def _nx() -> Any:
    import networkx  # type: ignore[import-untyped]  # takes a while, and most runs need none

    return networkx


def check_graph(graph: Any, num_nodes: int, directed: bool) -> None:
    """Raise ArgumentError unless `graph` is a connected networkx graph of the nodes, directed only if `directed`."""
    nx = _nx()
    if not isinstance(graph, nx.Graph) or graph.is_multigraph():
        raise ArgumentError(f"graph={graph!r} must be one of {', '.join(map(repr, GRAPHS))} or a networkx graph")
    if set(graph.nodes) != set(range(num_nodes)):
        raise ArgumentError(f"graph={graph} must have the nodes 0 to {num_nodes - 1}: see networkx.relabel_nodes")
    if graph.is_directed() and not directed:
        raise ArgumentError(f"graph={graph} is directed, so weights would not keep the mean: use GradientPushStrategy")
    if num_nodes > 1 and not nx.is_connected(graph.to_undirected()):
        raise ArgumentError(f"graph={graph} is not connected, so some nodes could never exchange anything: add edges")


@functools.cache
def _named(graph: str, n: int, seed: int) -> Edges:
    if graph == "ring":
        return _undirected((i, (i + 1) % n) for i in range(n))
    if graph == "torus":
        across = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
        along = n // across
        right = [(i, i // along * along + (i + 1) % along) for i in range(n)]
        return _undirected([*right, *((i, (i + along) % n) for i in range(n))])
    if graph == "exponential":
        return _undirected((i, (i + hop) % n) for i in range(n) for hop in hops_of(n))
    if graph == "complete":
        return _undirected((i, j) for i in range(n) for j in range(i))
    for attempt in range(1000):
        draws = numpy_generator(seed, "graph", attempt).random((n, n))
        chance = min(1.0, 2 * math.log(n) / n) if n > 1 else 0.0
        edges = _undirected((i, j) for i in range(n) for j in range(i) if draws[i, j] < chance)
        if n == 1 or _nx().is_connected(_graph_of(edges, n)):
            return edges
    raise ArgumentError(f"could not draw a connected graph='random' over {n} nodes: use another seed")


def diameter(graph: Any, num_nodes: int) -> int:
    """Return the largest number of hops between two nodes of a graph (see `edges_of`) other than "matching".

    >>> diameter("ring", 9), diameter("torus", 9), diameter("complete", 9)
    (4, 2, 1)
    """
    found = _graph_of(edges_of(graph, num_nodes), num_nodes)
    alike = isinstance(graph, str) and graph in ALIKE
    hops: int = _nx().eccentricity(found, 0) if alike else _nx().diameter(found, usebounds=True)
    return hops


def _graph_of(edges: Edges, n: int) -> Any:
    graph = _nx().empty_graph(n)
    graph.add_edges_from(edges)
    return graph


def hops_of(n: int) -> list[int]:
    """Return 1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]


@functools.lru_cache(maxsize=256)
def metropolis(edges: Edges, present: tuple[int, ...], num_nodes: int) -> Tensor:
    """Return Metropolis's mixing weights W, (N, N), for the edges between present nodes.

    W_ij = 1 / (1 + max(d_i, d_j)) if such an edge connects i and j, where d_i is the number of node i's present
    neighbors, and W_ii is 1 minus the other weights in row i. W is symmetric and its rows sum to 1, so mixing does not
    change the mean. If all nodes have degree d, every edge has the weight 1 / (d + 1).

    >>> metropolis(edges_of("complete", 4), (0, 1, 3), 4)[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64)
    """
    active = set(present)
    kept = [(i, j) for i, j in sorted(edges) if i in active and j in active]
    degrees = Counter(node for edge in kept for node in edge)
    W = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    for i, j in kept:
        W[i, j] = W[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    return W + torch.diag(1 - W.sum(1))
