"""A comparison's pictures: validation loss against steps, bytes and time."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.core.record.views import picture
from exogym.errors import ArgumentError, check_choice
from exogym.files import replacing
from exogym.progress import readable_bytes
from exogym.study.compare.colors import COLORS, GRAYED, MOST_COLORED, ON_DARK, each_look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

DARK = {"#FFFFFF": "#101418", "#E6E6E6": "#30363C", "#555555": "#A8B0B8"}  # background, grid, notes
SIZE_INCHES, DOTS_PER_INCH = (7.2, 4.4), 120
# Marks in each decade of the loss, depending on its range.
FEW_TICKS, SOME_TICKS, MANY_TICKS = [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7], [i / 10 for i in range(10, 100, 2)]
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
UNITS_AT_LEAST = 3  # the fewest units on an axis
FAR_APART = 8  # time has a logarithmic axis from this ratio of the runs' lengths on
LABEL_POINTS, LETTER_POINTS = 9.0, 5.4
WIDEST_LEGEND = 0.65  # share of the picture
LEGEND_POINTS = 40  # width of a legend without titles: its strokes and spaces
AXES = ("step", "bytes", "time")  # that a curve can be drawn against
MOST_LETTERS = 36  # of a title in a picture


@dataclass(frozen=True)
class Curve:
    """A strategy's validation loss, as a curve of a picture.

    Attributes:
        title: the strategy's name in the picture.
        steps: (K,) steps of the K evaluations.
        losses: (S, K) validation losses for S seeds.
        tx_bytes: (K,) bytes that a node had sent before each evaluation, mean over seeds.
        time_s: (K,) predicted seconds before each evaluation, mean over seeds. None without a network.
        label: the strategy as written, which decides the curve's color; if it is "", the title does.
    """

    title: str
    steps: np.ndarray
    losses: np.ndarray
    tx_bytes: np.ndarray
    time_s: np.ndarray | None = None
    label: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether this strategy's nodes send no bytes at all."""
        return not self.tx_bytes.any()


def figure_of(
    curves: Sequence[Curve], x: str = "step", log: bool | None = None, heading: str = "", network: str = "",
    target_loss: float | None = None,
) -> Figure:  # fmt: skip
    """Plot mean validation loss, with a band from the lowest to the highest seed (see `Comparison.plot`).

    Args:
        network: the network's name, for the label of the axis "time".
        target_loss: the loss to mark with a dotted line.
    """
    check_choice("x", x, AXES)
    if x == "step":
        return _figure(
            curves, [curve.steps for curve in curves], heading, "steps of each node", None, bool(log), target_loss
        )
    if x == "bytes":
        is_log = log is None or log
        sent = [None if curve.is_silent and is_log else curve.tx_bytes for curve in curves]
        return _figure(curves, sent, heading, "bytes sent per node", readable_bytes, is_log, target_loss)
    known = [curve.time_s for curve in curves if curve.time_s is not None]
    if len(known) < len(curves):
        raise ArgumentError(
            "x='time': some runs have no predicted time: pass a network to compare, or choose another x"
        )
    ends = [float(time_s[-1]) for time_s in known]
    unit, unit_s = _unit_of(max(ends, default=1.0))
    label = f"predicted {unit}{network and f' on {network}'}"
    far = bool(ends) and max(ends) >= FAR_APART * min(ends) > 0 if log is None else log
    return _figure(curves, [time_s / unit_s for time_s in known], heading, label, "{:g}".format, far, target_loss)


def new_figure(size_inches: tuple[float, float], **options: Any) -> Figure:
    """Return a new figure of a picture's resolution. A notebook shows it."""
    return picture(figsize=size_inches, dpi=DOTS_PER_INCH, **options)


def draw(
    paths: Sequence[str | os.PathLike[str]], curves: Sequence[Curve], x: str, log: bool | None, heading: str,
    network: str = "", target_loss: float | None = None,
) -> None:  # fmt: skip
    """Write the figure that `figure_of` returns into files. Each file's name decides its format, PNG or SVG."""
    figure = figure_of(curves, x, log, heading, network, target_loss)
    for path in paths:
        save(figure, path)


def save(figure: Figure, path: str | os.PathLike[str] | io.BytesIO) -> None:
    """Write a figure into a PNG or SVG file, by the file's name, or as PNG into a stream. Equal figures, equal bytes.

    If the reader's system is set to dark pages, an SVG has dark colors.
    """
    import matplotlib

    if isinstance(path, io.BytesIO) or not os.fspath(path).endswith(".svg"):
        figure.savefig(path, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True})
        return
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "exogym"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    with replacing(path) as file:
        file.write(text.getvalue().replace("</style>", f"\n{_dark_style()}</style>", 1))


def _dark_style() -> str:
    """Return the style sheet that gives an SVG the page's dark colors."""
    colors = dict(zip(COLORS, ON_DARK, strict=True)) | DARK
    rules = [
        f'[style*="{kind}: {light.lower()}"] {{{kind}: {dark} !important}}'
        for light, dark in colors.items()
        for kind in ("fill", "stroke")
    ]
    black = ON_DARK[COLORS.index("#000000")]  # matplotlib does not write a black fill
    rules += [f'text, [style^="fill-opacity"] {{fill: {black}}}']
    return "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"


def short_titles(titles: Sequence[str]) -> list[str]:
    """Return titles that fit beside a plot.

    A long title loses the options that it shares with all other titles of the same strategy. If the picture has no
    other title of this strategy, the long title loses the options that all titles share. A title that is still too long
    loses options from its end. Titles that are then equal get numbers.

    >>> long = [f"Streaming DiLoCo (H=20, num_fragments={n}, fragment_sync_delay=2)" for n in (2, 4)]
    >>> short_titles(["DDP", *long])
    ['DDP', 'Streaming DiLoCo (num_fragments=2)', 'Streaming DiLoCo (num_fragments=4)']
    >>> short_titles(["DDP", *long[:1]])
    ['DDP', 'Streaming DiLoCo (H=20, …)']
    >>> short_titles([f"{name} (H=20, inner_optim=sgd, lr=0.05)" for name in ("FedAvg", "SCAFFOLD")])
    ['FedAvg', 'SCAFFOLD']
    >>> short_titles([f"DiLoCo (H=20, outer_lr={n:030})" for n in (20, 21)])
    ['DiLoCo (…)', 'DiLoCo (…) 2']
    """
    parts = [(name, given.split(", ") if given else []) for name, _, given in
             (title.removesuffix(")").partition(" (") for title in titles)]  # fmt: skip
    found: list[str] = []
    for title, (name, given) in zip(titles, parts, strict=True):
        short = title
        if len(title) > MOST_LETTERS:
            alike = [options for same, options in parts if same == name]
            alike = alike if len(alike) > 1 else [options for _, options in parts if options]
            shared = set.intersection(*map(set, alike)) if len(alike) > 1 else set()
            kept = own = [option for option in given if option not in shared]
            short = _with_options(name, own)
            while len(short) > MOST_LETTERS and kept:
                kept = kept[:-1]
                short = _with_options(name, [*kept, "…"])
        if len(short) > MOST_LETTERS:
            short = short[: MOST_LETTERS - 1] + "…"
        equal = sum(each == short or each.startswith(f"{short} ") for each in found) if short != title else 0
        found.append(f"{short} {equal + 1}" if equal else short)
    return found


def _with_options(name: str, options: Sequence[str]) -> str:
    return f"{name} ({', '.join(options)})" if options else name


def _figure(
    curves: Sequence[Curve], places: Sequence[np.ndarray | None], heading: str, x_label: str,
    readable: Callable[[float], str] | None, logarithmic: bool, target_loss: float | None,
) -> Figure:  # fmt: skip
    titles = short_titles([curve.title for curve in curves])
    curves = [replace(curve, title=title, label=curve.label or curve.title)
              for curve, title in zip(curves, titles, strict=True)]  # fmt: skip
    figure = new_figure(SIZE_INCHES)
    axes = figure.add_subplot()
    longest = max((len(curve.title) for curve in curves), default=0)
    room = (LEGEND_POINTS + longest * LETTER_POINTS) / 72 / SIZE_INCHES[0]  # right of the axes, for the longest title
    room = min(room, WIDEST_LEGEND)  # a longer title is cut off
    figure.subplots_adjust(left=0.09, right=0.99 - room, bottom=0.12, top=0.88)
    lines = _lines(axes, curves, places, logarithmic)
    if target_loss is not None:
        axes.axhline(target_loss, color="#555555", linestyle=(0, (1, 2)), linewidth=1)
    _scale(axes, [x for x in places if x is not None], readable, logarithmic)
    axes.set_xlabel(x_label)
    seeds = max((len(curve.losses) for curve in curves), default=1)
    note = f"mean of {seeds} seeds, band: lowest to highest" if seeds > 1 else "one seed"
    note += "" if target_loss is None else f"; dotted: loss {target_loss:.4g}"
    axes.set_title(heading, loc="left", fontsize=11, pad=20)
    axes.annotate(note, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8, color="#555555")
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, lines)
    return figure


def _lines(
    axes: Axes, curves: Sequence[Curve], places: Sequence[np.ndarray | None], logarithmic: bool
) -> dict[str, tuple[Line2D, float]]:
    """Draw the curves; return title to curve and last loss. Of more than eight, the lowest ends have colors."""
    lines: dict[str, tuple[Line2D, float]] = {}
    ends = sorted(float(curve.losses.mean(0)[-1]) for curve in curves)
    most = ends[MOST_COLORED - 1] if len(ends) > MOST_COLORED else math.inf
    is_shown = [float(curve.losses.mean(0)[-1]) <= most for curve in curves]
    found = iter(each_look(curve.label for curve, shown in zip(curves, is_shown, strict=True) if shown))
    looks = [next(found) if shown else None for shown in is_shown]
    rest = f"{is_shown.count(False)} more"
    # The gray ones come first, below the others.
    for k, look in sorted(enumerate(looks), key=lambda each: each[1] is not None):
        curve, x, title = curves[k], places[k], rest if look is None else curves[k].title
        look = GRAYED if look is None or curve.is_silent else look
        style, colour = (0, look.dash) if look.dash else "-", look.color
        mean = curve.losses.mean(0)
        if x is None:
            line = axes.axhline(mean[-1], color=colour, linestyle=(0, (4, 3)), linewidth=1.4)
        else:
            shown = x > 0 if logarithmic else np.ones(len(x), bool)
            (line,) = axes.plot(x[shown], mean[shown], color=colour, linestyle=style, linewidth=1.8)
            line.set_solid_capstyle("round")
            if len(curve.losses) > 1 and title != rest:
                low, high = curve.losses.min(0)[shown], curve.losses.max(0)[shown]
                axes.fill_between(x[shown], low, high, color=colour, alpha=0.15, linewidth=0)
        lines[title] = line, float(mean[-1])
    return lines


def _scale(
    axes: Axes, places: Sequence[np.ndarray], readable: Callable[[float], str] | None, logarithmic: bool
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = FEW_TICKS if high / low > 8 else SOME_TICKS if high / low > 2 else MANY_TICKS
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("validation loss")
    if logarithmic and places:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max((float(x[-1]) for x in places), default=1.0) or 1.0)
    if places and readable is not None:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value)))


def _unit_of(longest_s: float) -> tuple[str, float]:
    """Return the unit for an axis of so many seconds, and the unit's seconds.

    >>> _unit_of(84.0), _unit_of(600.0)
    (('seconds', 1.0), ('minutes', 60.0))
    """
    return next(((name, size) for name, size in UNITS if longest_s >= UNITS_AT_LEAST * size), UNITS[-1])


def _legend(axes: Axes, lines: Mapping[str, tuple[Line2D, float]]) -> None:
    """Write the titles to the right of the axes, from the highest final loss to the lowest."""
    order = sorted(lines, key=lambda title: -lines[title][1])
    legend = axes.legend(
        [lines[title][0] for title in order], order, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0,
        fontsize=LABEL_POINTS, frameon=False, handlelength=1.8,
    )  # fmt: skip
    for text, title in zip(legend.get_texts(), order, strict=True):
        text.set_color(lines[title][0].get_color())
