"""The small pictures of the benchmark's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.study.compare.colors import COLORS, GRAY, looks_of
from research.benchmark.results import COUNTS, DEVICE, SHARED, WIRE
from research.reproduce.plots import save_small, small_figure

MARKS, COLOURS_KEPT = "osD^vP*Xhp<>", 128
ROWS = 17  # rows of the legend
FAR, DECIMALS = 4, [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]  # for a logarithmic axis


def draw_task(task: str, parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a task's picture: losses of one part, quality against reduction, and quality against the number of nodes.

    The losses are from the part with four nodes, or from the first part if no part has four nodes.
    """
    methods = list(dict.fromkeys(row["strategy"] for part in parts for row in part["rows"]))
    columns = 1 + (len(methods) - 1) // ROWS  # columns of the legend
    figure, (losses, left, right) = small_figure(9.9 + 1.7 * columns, 3.6, 3)
    shown, looks = middle_of(parts), looks_of(methods)
    for k, method in enumerate(methods):
        rows = [(part["nodes"], row) for part in parts for row in part["rows"] if row["strategy"] == method]
        colour, dash = looks[method].color, looks[method].dash
        look = {"color": colour, "marker": MARKS[k % len(MARKS)], "markersize": 5, "linewidth": 1.2}
        style: Any = (0, dash) if dash else "-"
        _draw_losses(losses, dict(rows).get(shown["nodes"]), look | {"linestyle": style, "markersize": 3})
        rows = [(nodes, row) for nodes, row in rows if row["quality"] is not None]
        if not rows:
            continue
        quality = [100 * row["quality"] for _, row in rows]
        spread = [100 * (row["quality_std"] or 0.0) for _, row in rows]
        sent = [row["reduction"] for _, row in rows]
        if None not in sent:
            left.errorbar(sent, quality, spread, linestyle="", capsize=2, **look)
        right.errorbar([nodes for nodes, _ in rows], quality, spread, linestyle=style, capsize=2, label=method, **look)
    losses.set_xlabel(f"step, with {shown['nodes']} nodes", fontsize=8)
    losses.set_ylabel("validation loss", fontsize=8)
    low, high = losses.dataLim.intervaly
    if low > 0 and high > FAR * low:
        losses.set_yscale("log")
        losses.set_yticks([x for x in DECIMALS if low <= x <= high], minor=False)
        losses.set_yticks([], minor=True)
        losses.yaxis.set_major_formatter("{x:g}")
    left.set_xscale("log")
    left.set_xlabel("reduction: DDP's bytes / the method's", fontsize=8)
    left.set_ylabel("quality, % of DDP's", fontsize=8)
    right.set_xscale("log", base=2)
    counts = [part["nodes"] for part in parts]
    right.set_xticks(counts, [str(n) for n in counts])
    right.set_xlabel("nodes, which share each step's examples", fontsize=8)
    figure.legend(fontsize=7, frameon=False, loc="outside right center", ncols=columns)
    save_small(figure, path, f"{task}: what less communication costs", COLOURS_KEPT)


def middle_of(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the part that the page shows with all measures: the part with four nodes, or else the first part."""
    return next((part for part in parts if part["nodes"] == 4), parts[0])


def _draw_losses(axes: Any, row: Mapping[str, Any] | None, look: Mapping[str, Any]) -> None:
    """Draw the mean loss over seeds against steps, without the first evaluation, which precedes training."""
    if row is None:
        return
    curve = row["curve"]
    axes.errorbar(curve["steps"][1:], curve["val_loss"][1:], curve["val_loss_std"][1:], elinewidth=0.7, **look)


def draw_scaling(scaling: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw each method's predicted speed-up against the number of nodes."""
    figure, (axes,) = small_figure(6.4, 3.6)
    axes.plot(COUNTS, COUNTS, color=GRAY, linestyle=":", linewidth=1.2, label="equal to the number of nodes")
    for k, method in enumerate(SHARED):
        line = [scaling[str(nodes)][k] for nodes in COUNTS]
        axes.plot(COUNTS, line, color=COLORS[k], marker=MARKS[k], markersize=5, linewidth=1.2, label=method)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(COUNTS, [str(n) for n in COUNTS])
    axes.set_xlabel("nodes", fontsize=8)
    axes.set_ylabel("speed-up over one node", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    save_small(figure, path, f"GPT-2 small on {DEVICE}, {WIRE} between the nodes: predicted", COLOURS_KEPT)
