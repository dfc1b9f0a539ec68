"""Say in sentences which of a run's nodes need attention."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

HIGH_LOSS, SLOW = 3.0, 1.5  # times the median over nodes
NEWEST, LEAST = 4, 8  # losses are means over the newest quarter of the steps, of at least eight steps
MOST_NAMED = 3


def health_of(found: dict[str, Any]) -> str:
    """Return sentences that name absent nodes, slow nodes and nodes with a high loss, from the result of `nodes_of`.

    A node is absent if the run's events say so, not because it is a client that is not sampled. It is slow if it
    computes over 1.5 times the median node's share of time, and the median node waits more than 10 %. Its loss, over
    the newest quarter of the steps, is high if it is over three times the median.

    >>> alike = {"nodes": [0, 1, 2], "of": 3, "steps": [1, 2, 3], "loss": [[1.0, 0.9, 0.8]] * 3, "shares": {}}
    >>> alike |= {"away": [[], [], []]}
    >>> health_of(alike)
    'All 3 nodes are healthy.'
    >>> health_of(alike | {"loss": [[1.0, 0.9, 0.8], [1.0, None, None], [1.0, 0.9, 0.8]], "away": [[], [[1, 3]], []]})
    'Node 1 has been absent since step 2.'
    """
    nodes = found["nodes"]
    if len(nodes) < 2:
        return ""
    said = [*_absent(found), *_high(found).values(), *_slow(found).values()]
    return " ".join(said) or f"All {found['of']} nodes are healthy."


def trouble_of(found: dict[str, Any]) -> str:
    """Return in a few words which node of a running run needs attention, or "" if none does.

    >>> alike = {"nodes": [0, 1], "of": 2, "steps": [1, 2], "loss": [[1.0, 0.9], [1.0, None]], "shares": {}}
    >>> trouble_of(alike | {"away": [[], [[1, 2]]]})
    '1 of 2 nodes'
    """
    if len(found["nodes"]) < 2:
        return ""
    if absent := absent_of(found):
        is_whole = len(found["nodes"]) == found["of"]  # of many nodes, only the first are known one by one
        return f"{found['of'] - len(absent)} of {found['of']} nodes" if is_whole else f"node {absent[0]} absent"
    if high := list(_high(found)):
        return f"node {high[0]} has a high loss"
    return "".join(f"node {node} slow" for node in _slow(found))


def silence_of(hosts: Sequence[dict[str, Any]]) -> str:
    """Return in a few words which of a running run's hosts are silent, or "" if none is.

    >>> silence_of([{"address": "a", "state": "silent"}, {"address": "b", "state": "running"}]), silence_of([])
    ('a silent', '')
    """
    silent = [host["address"] for host in hosts if host["state"] == "silent"]
    return f"{silent[0] if len(silent) == 1 else f'{len(silent)} hosts'} silent" if silent else ""


def absent_of(found: dict[str, Any]) -> list[int]:
    """Return the nodes that are absent now, from the result of `nodes_of`."""
    wide = len(found["steps"])
    return [node for node, away in zip(found["nodes"], found["away"], strict=True) if away and away[-1][1] == wide]


def _absent(found: dict[str, Any]) -> list[str]:
    gone, steps = absent_of(found), found["steps"]
    away = dict(zip(found["nodes"], found["away"], strict=True))
    since = f"has been absent since step {steps[away[gone[0]][-1][0]]}" if len(gone) == 1 else "are absent"
    said = [f"{_named(gone)} {since}."] if gone else []
    once = [node for node in away if away[node] and node not in gone]
    if len(once) == 1:
        first, last = away[once[0]][0][0], away[once[0]][-1][1] - 1
        return [*said, f"Node {once[0]} was absent earlier, at steps from {steps[first]} to {steps[last]}."]
    return [*said, f"{_named(once)} were absent earlier."] if once else said


def _high(found: dict[str, Any]) -> dict[int, str]:
    """Return {node: sentence} of the node with the highest loss, if it is high."""
    nodes, losses = found["nodes"], found["loss"]
    wide = max(map(len, losses))
    if wide < LEAST:
        return {}
    newest = [[loss for loss in row[-max(LEAST, wide // NEWEST) :] if loss is not None] for row in losses]
    means = {node: statistics.fmean(row) for node, row in zip(nodes, newest, strict=True) if row}
    usual = statistics.median(means.values()) if means else 0.0
    high = [node for node, mean in means.items() if mean > HIGH_LOSS * usual > 0]
    if not high:
        return {}
    worst = max(high, key=lambda node: means[node])
    others = f" ({len(high)} nodes have a high loss)" if len(high) > 1 else ""
    return {worst: f"Node {worst} has a high training loss: {means[worst]:.3g}, the median node {usual:.3g}{others}."}


def _slow(found: dict[str, Any]) -> dict[int, str]:
    """Return {node: sentence} of the slowest node, if it is slow."""
    nodes, shares = found["nodes"], found["shares"]
    newest = {
        part: [row[-1] if row else None for row in shares[part]]
        for part in ("computing", "waiting")
        if shares.get(part)
    }
    if len(newest) < 2 or None in newest["computing"] or None in newest["waiting"]:
        return {}
    computing: dict[int, Any] = dict(zip(nodes, newest["computing"], strict=False))
    usual, waits = (statistics.median(newest[part]) for part in ("computing", "waiting"))  # type: ignore[type-var]
    slow = [node for node, part in computing.items() if part > SLOW * usual > 0 and waits > 0.1]  # type: ignore[operator]
    if not slow:
        return {}
    worst = max(slow, key=lambda node: computing[node])
    return {
        worst: f"Node {worst} is slow: it computes {computing[worst]:.0%} of the time, the median node {usual:.0%}; "
        f"the median node waits {waits:.0%}."
    }


def _named(nodes: Sequence[int]) -> str:
    """Return node numbers as the subject of a sentence.

    >>> _named([2]), _named([1, 2, 3, 4])
    ('Node 2', '4 nodes (1, 2, 3, ...)')
    """
    if len(nodes) == 1:
        return f"Node {nodes[0]}"
    more = ", ..." if len(nodes) > MOST_NAMED else ""
    return f"{len(nodes)} nodes ({', '.join(map(str, nodes[:MOST_NAMED]))}{more})"
