"""The two pictures of a comparison: validation loss against steps, and against bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.errors import ExoGymError
from exogym.progress import readable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito 2008, told apart with every common kind of colour-blindness; without their yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)))  # for more curves than colours
LONER = "#7F7F7F"
SIZE_INCHES, DOTS_PER_INCH = (7.2, 4.4), 120
# Of each decade of the loss, according to how far it falls.
FEW_TICKS, SOME_TICKS, MANY_TICKS = [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7], [i / 10 for i in range(10, 100, 2)]
LABEL_POINTS, LETTER_POINTS, LINE_SPACING = 9.0, 5.4, 1.2


@dataclass(frozen=True)
class Curve:
    """Validation loss of one strategy.

    Attributes:
        title: what it is called in the picture.
        steps: (K,) where it was evaluated.
        losses: (S, K) validation loss of each seed.
        tx_bytes: (K,) bytes a node had sent by then, mean over seeds.
    """

    title: str
    steps: np.ndarray
    losses: np.ndarray
    tx_bytes: np.ndarray

    @property
    def is_silent(self) -> bool:
        """Whether its nodes never sent a byte."""
        return not self.tx_bytes.any()


def check_matplotlib() -> None:
    """Raise ExoGymError if matplotlib, which draws the pictures, is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ExoGymError("the pictures need matplotlib, which is not installed: pip install 'exogym[demo]'") from None


def plot_against_steps(curves: Sequence[Curve], path: str | os.PathLike[str], heading: str = "") -> None:
    """Draw mean validation loss against steps, with a band from the lowest to the highest seed, into a PNG file."""
    _draw(curves, path, heading, against_bytes=False)


def plot_against_bytes(curves: Sequence[Curve], path: str | os.PathLike[str], heading: str = "") -> None:
    """Draw mean validation loss against the bytes each node has sent (logarithmic), into a PNG file.

    A strategy that sends nothing has no place on that axis: a dashed line marks the loss it ends with.
    """
    _draw(curves, path, heading, against_bytes=True)


def _draw(curves: Sequence[Curve], path: str | os.PathLike[str], heading: str, against_bytes: bool) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max((len(curve.title) for curve in curves), default=0)
    room = (10 + longest * LETTER_POINTS) / 72 / SIZE_INCHES[0]  # right of the axes, for the longest label
    figure.subplots_adjust(left=0.09, right=0.99 - room, bottom=0.12, top=0.88)
    ends = []
    looks = itertools.product(STYLES, COLOURS)
    for curve in curves:
        style, colour = ("-", LONER) if curve.is_silent else next(looks)
        mean = curve.losses.mean(0)
        if against_bytes and curve.is_silent:
            axes.axhline(mean[-1], color=LONER, linestyle=(0, (4, 3)), linewidth=1.4)
            ends.append((None, mean[-1], curve.title, LONER))
            continue
        x = curve.tx_bytes if against_bytes else curve.steps
        shown = x > 0 if against_bytes else np.ones(len(x), bool)
        axes.plot(x[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8, solid_capstyle="round")
        if len(curve.losses) > 1:
            low, high = curve.losses.min(0)[shown], curve.losses.max(0)[shown]
            axes.fill_between(x[shown], low, high, color=colour, alpha=0.15, linewidth=0)
        ends.append((x[-1], mean[-1], curve.title, colour))

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = FEW_TICKS if high / low > 8 else SOME_TICKS if high / low > 2 else MANY_TICKS
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("validation loss")
    if against_bytes and not all(curve.is_silent for curve in curves):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("bytes sent per node" if against_bytes else "steps of each node")
    if not against_bytes:
        axes.set_xlim(0, max(curve.steps[-1] for curve in curves))
    seeds = max((len(curve.losses) for curve in curves), default=1)
    note = f"mean of {seeds} seeds, band: lowest to highest" if seeds > 1 else "one seed"
    axes.set_title(heading, loc="left", fontsize=11, pad=20)
    axes.annotate(note, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8, color="#555555")
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _label(axes, ends)
    figure.savefig(path, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})


def _label(axes: Axes, ends: list[tuple[Any, float, str, str]]) -> None:
    """Write each title right of where its curve ends, moved up or down where titles would overlap."""
    from matplotlib.patheffects import withStroke

    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    line = LABEL_POINTS * LINE_SPACING / 72 * DOTS_PER_INCH
    right = axes.get_xlim()[1]
    placed: list[list[float]] = []
    spots = []
    for x, y, title, colour in ends:
        across, up = axes.transData.transform((right if x is None else x, y))
        spots.append((up, across, title, colour))
    for up, across, title, colour in sorted(spots):
        width = len(title) * LETTER_POINTS / 72 * DOTS_PER_INCH
        height = up
        for other_left, other_right, other_up in sorted(placed, key=lambda box: box[2]):
            if across < other_right and other_left < across + width and height < other_up + line:
                height = max(height, other_up + line)
        placed.append([across, across + width, height])
        axes.annotate(
            title,
            xy=(across, up),
            xycoords="figure pixels",
            xytext=(6, (height - up) * 72 / DOTS_PER_INCH),
            textcoords="offset points",
            color=colour,
            fontsize=LABEL_POINTS,
            va="center",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
