"""Record when each node computed, waited and sent, and write it as JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from exogym.core.base.files import write_json
from exogym.core.clock.steps import TICKS_PER_S

TIMELINE = "timeline.json"  # in the folder of a run
PARTS = {"compute": "computing", "send": "sending", "wait": "waiting"}  # a clock's part by span kind


@dataclass(frozen=True)
class Span:
    """A period of a node's virtual time in which the node did one thing.

    Attributes:
        kind: "compute", "wait" (for other nodes) or "send" (in a collective).
        start_s, end_s: virtual seconds.
        name: the collective, for example "ring all_reduce".
    """

    node: int
    kind: str
    start_s: float
    end_s: float
    name: str = ""


class Timeline:
    """Collect spans. Steps that a node computes without interruption become one span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._last: dict[int, int] = {}  # node -> index of its last span

    def computing(self, start: np.ndarray, end: np.ndarray) -> None:
        """Add the spans in which each node i computes from nanosecond `start[i]` to `end[i]`."""
        for node in np.flatnonzero(end > start).tolist():
            self._add(node, "compute", int(start[node]), int(end[node]))

    def collective(
        self, nodes: np.ndarray, start: np.ndarray, waiting: np.ndarray, sending: np.ndarray, name: str
    ) -> None:
        """Add the spans of a collective: from `start` on, each of `nodes` first waits and then sends.

        All times are in nanoseconds, (len(nodes),).
        """
        for node, begin, pause, busy in zip(*(x.tolist() for x in (nodes, start, waiting, sending)), strict=True):
            self._add(node, "wait", begin, begin + pause, name)
            self._add(node, "send", begin + pause, begin + pause + busy, name)

    def _add(self, node: int, kind: str, start: int, end: int, name: str = "") -> None:
        if end <= start:
            return
        begin_s, end_s = start / TICKS_PER_S, end / TICKS_PER_S
        before = self.spans[self._last[node]] if node in self._last else None
        if before is not None and kind == "compute" == before.kind and before.end_s == begin_s:
            self.spans[self._last[node]] = Span(node, kind, before.start_s, end_s)
            return
        self._last[node] = len(self.spans)
        self.spans.append(Span(node, kind, begin_s, end_s, name))


def save_spans(clock: Any, path: str | os.PathLike[str]) -> None:
    """Write a clock's spans, and each kind's mean share of time, as JSON. The clock must keep a timeline."""
    spans = [[span.node, span.kind, span.start_s, span.end_s, span.name] for span in clock.spans]
    shares = {kind: float(clock.share(part).mean()) for kind, part in PARTS.items()}
    write_json(path, {"title": "", "spans": spans, "shares": shares}, indent=None)
