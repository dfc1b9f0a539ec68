"""The pictures of the atlas's page: losses against costs, and mean ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exogym.core.progress import readable_bytes
from exogym.study.compare.colors import COLORS, GRAY
from research.atlas.measures import NETWORKS, Ranks, Result, front_of
from research.reproduce.plots import save_small, small_figure

COLOURS_KEPT = 64
MOST_MARKS = 5
TOO_HIGH = 1.5  # methods whose loss is this many times the median are not drawn


def draw_fronts(place: str, results: Sequence[Result], path: Path) -> None:
    """Draw test loss against bytes, and against the predicted time on each network. Names are those on the front."""
    finite = [result for result in results if math.isfinite(result.loss)]
    if not finite:
        return
    middle = sorted(result.loss for result in finite)[len(finite) // 2]
    drawn = [result for result in finite if result.loss <= TOO_HIGH * middle]
    figure, panels = small_figure(11.5, 3.9, 1 + len(NETWORKS))
    _draw(panels[0], {r.method: (r.tx_bytes, r.loss) for r in drawn}, "bytes that a node sends", readable_bytes)
    for axes, network in zip(panels[1:], NETWORKS, strict=True):
        points = {r.method: (r.predicted_s[network], r.loss) for r in drawn}
        _draw(axes, points, f"predicted time, {network}", lambda x: f"{x:g} s")
    panels[0].set_ylabel("test loss", fontsize=8)
    save_small(figure, path, f"{place}: every method tuned alike", COLOURS_KEPT)


def _draw(
    axes: Any, points: dict[str, tuple[float | None, float]], label: str, readable: Callable[[float], str]
) -> None:
    from matplotlib.ticker import NullFormatter

    front = front_of(points)
    known = {name: (x, y) for name, (x, y) in points.items() if x is not None and x > 0}
    others = [point for name, point in known.items() if name not in front]
    axes.plot([x for x, _ in others], [y for _, y in others], "o", color=GRAY, markersize=3.5)
    line = sorted((known[name], name) for name in front if name in known)
    axes.step(
        [x for (x, _), _ in line], [y for (_, y), _ in line], "o-", where="post", color=COLORS[0], markersize=5,
        linewidth=1.2,
    )  # fmt: skip
    for (x, y), name in line:
        axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=6.5, rotation=20)
    axes.set_xscale("log")
    axes.margins(x=0.15, y=0.1)
    marks = _marks(*axes.get_xlim())
    axes.set_xticks(marks, [readable(x) for x in marks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label, fontsize=8)


def _marks(low: float, high: float) -> list[float]:
    """Return at most five round numbers for a logarithmic axis, as many as possible."""
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [digit * 10.0**k for k in decades for digit in digits if low <= digit * 10.0**k <= high]
        found = marks if len(marks) <= MOST_MARKS else found
    return found


def draw_ranks(ranks: Ranks, path: Path) -> None:
    """Draw each method's mean rank with its interval, and the critical difference from the best method."""
    methods = list(ranks.mean)
    figure, (axes,) = small_figure(6.4, 1.2 + 0.2 * len(methods))
    best = ranks.mean[methods[0]]
    axes.axvspan(best, best + ranks.critical, color=COLORS[0], alpha=0.12, linewidth=0)
    for row, method in enumerate(methods):
        axes.plot([ranks.low[method], ranks.high[method]], [row, row], color=GRAY, linewidth=1.5)
        axes.plot(ranks.mean[method], row, "o", color=COLORS[0], markersize=4.5)
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("mean rank by test loss; shaded: not different from the best beyond chance", fontsize=8)
    save_small(figure, path, "Mean ranks over all places", COLOURS_KEPT)
