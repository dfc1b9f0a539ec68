"""The pictures of the benchmark's page, small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.benchmark.results import COUNTS, DEVICE, SHARED, WIRE
from exogym.compare.plots import COLOURS, LONER, STYLES, check_matplotlib
from exogym.reproduce.plots import DOTS_PER_INCH, save_small

MARKS, COLOURS_KEPT = "osD^vP*Xhp<>", 128


def draw_task(task: str, parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw quality against reduction, a mark for each number of nodes; and quality against the number of nodes."""
    figure, (left, right) = _figure(8.4, 3.6, 2)
    methods = list(dict.fromkeys(row["strategy"] for part in parts for row in part["rows"]))
    for k, method in enumerate(methods):
        rows = [(part["nodes"], row) for part in parts for row in part["rows"] if row["strategy"] == method]
        rows = [(nodes, row) for nodes, row in rows if row["quality"] is not None]
        if not rows:
            continue
        colour = LONER if method == "single" else COLOURS[k % len(COLOURS)]
        look = {"color": colour, "marker": MARKS[k % len(MARKS)], "markersize": 5, "linewidth": 1.2}
        style = STYLES[k // len(COLOURS) % len(STYLES)]
        quality = [100 * row["quality"] for _, row in rows]
        spread = [100 * (row["quality_std"] or 0.0) for _, row in rows]
        sent = [row["reduction"] for _, row in rows]
        if None not in sent:
            left.errorbar(sent, quality, spread, linestyle="", capsize=2, **look)
        right.errorbar([nodes for nodes, _ in rows], quality, spread, linestyle=style, capsize=2, label=method, **look)
    left.set_xscale("log")
    left.set_xlabel("reduction: DDP's bytes / the method's", fontsize=8)
    left.set_ylabel("quality, % of DDP's", fontsize=8)
    right.set_xscale("log", base=2)
    counts = [part["nodes"] for part in parts]
    right.set_xticks(counts, [str(n) for n in counts])
    right.set_xlabel("nodes, which share each step's examples", fontsize=8)
    right.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"{task}: what less communication costs", x=0.01, ha="left", fontsize=9)
    save_small(figure, path, COLOURS_KEPT)


def draw_scaling(scaling: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the predicted speed-up of each method against the number of nodes."""
    figure, (axes,) = _figure(6.4, 3.6, 1)
    axes.plot(COUNTS, COUNTS, color=LONER, linestyle=":", linewidth=1.2, label="as many as there are nodes")
    for k, method in enumerate(SHARED):
        line = [scaling[str(nodes)][k] for nodes in COUNTS]
        axes.plot(COUNTS, line, color=COLOURS[k], marker=MARKS[k], markersize=5, linewidth=1.2, label=method)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(COUNTS, [str(n) for n in COUNTS])
    axes.set_xlabel("nodes", fontsize=8)
    axes.set_ylabel("speed-up over one node", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"GPT-2 small on {DEVICE}, {WIRE} between the nodes: predicted", x=0.01, ha="left", fontsize=9)
    save_small(figure, path, COLOURS_KEPT)


def _figure(width: float, height: float, panels: int) -> tuple[Any, Any]:
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(True, color="#E6E6E6", linewidth=0.7)
        axes.tick_params(labelsize=8, which="both")
    return figure, all_axes
