"""Draw a claim's small picture: the last losses, losses against steps, or the nodes' consensus distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exogym.errors import check_choice, needs
from exogym.study.compare.colors import COLORS
from research.reproduce.claim import Claim, Found

WIDTH_INCHES, DOTS_PER_INCH, COLOURS_KEPT = 6.4, 90, 32
LINES = {"val_loss": "", "mean_val_loss": ", mean of nodes", "node_val_loss": ", one node"}


def draw_claim(claim: Claim, found: Found, path: Path) -> None:
    """Draw a claim's picture into a PNG file of a few kilobytes."""
    check_choice("picture", claim.picture, PICTURES)
    figure, (axes,) = small_figure(WIDTH_INCHES, 1.1 + 0.3 * len(found) if claim.picture == "dots" else 3.6)
    if claim.picture == "dots":
        axes.grid(False, axis="y")
    PICTURES[claim.picture](axes, found)
    save_small(figure, path, f"{claim.name}: {claim.title}")


def small_figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    """Return a new figure, and the axes of its `panels` side by side. `width` and `height` are inches."""
    needs("matplotlib", "demo")
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


def save_small(figure: Any, path: Path, title: str, colours: int = COLOURS_KEPT) -> None:
    """Write the figure with `title` as a PNG file. With few colors the file needs only a quarter of the bytes."""
    from PIL import Image

    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())
    picture.quantize(colours).save(path, format="png", optimize=True)


def _dots(axes: Any, found: Found) -> None:
    """Draw a row for each cell, a dot for each seed, and a stroke at the mean."""
    for row, runs in enumerate(found.values()):
        losses = [run.last["val_loss"] for run in runs]
        finite = [x for x in losses if np.isfinite(x)]
        axes.plot(finite, [row] * len(finite), "o", color=COLORS[0], markersize=5, alpha=0.7)
        if finite:
            axes.plot([float(np.mean(finite))], [row], "|", color="#000000", markersize=14, markeredgewidth=1.6)
        if len(finite) < len(losses):
            axes.annotate("failed", (1, row), xycoords=("axes fraction", "data"), ha="right", fontsize=8)
    axes.set_yticks(range(len(found)), [*found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("validation loss after the last step; dots are seeds, strokes their means", fontsize=8)


def _curves(axes: Any, found: Found) -> None:
    """Draw the mean loss over seeds against steps, also for the nodes if they were evaluated."""
    number = 0
    for label, runs in found.items():
        whole = [run for run in runs if run.error is None]
        for measure, extra in LINES.items():
            if whole and all(measure in run.curves for run in whole):
                mean = np.mean([run.curves[measure] for run in whole], axis=0)
                colour = COLORS[number % len(COLORS)]
                axes.plot(whole[0].curves["step"], mean, color=colour, linewidth=1.5, label=f"{label}{extra}")
                number += 1
    axes.set_yscale("log")
    axes.set_xlabel("steps of each node", fontsize=8)
    axes.set_ylabel("validation loss, mean of seeds", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def _spread(axes: Any, found: Found) -> None:
    """Draw each run's distance between nodes and its learning rate, as shares of their maxima."""
    for number, (label, runs) in enumerate(found.items()):
        for run in runs:
            for name, style in (("consensus_distance", "-"), ("lr", "--")):
                line = np.asarray(run.curves[name], float)
                text = f"{label}, {'learning rate' if name == 'lr' else 'distance of nodes'}"
                first = text if run is runs[0] else None
                axes.plot(
                    run.curves["step"], line / np.nanmax(line), style, color=COLORS[number], linewidth=1.3, label=first
                )  # fmt: skip
    axes.set_xlabel("steps of each node", fontsize=8)
    axes.set_ylabel("share of the highest", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


PICTURES = {"dots": _dots, "curves": _curves, "spread": _spread}
