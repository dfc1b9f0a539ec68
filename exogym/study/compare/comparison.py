"""The result of a comparison: its table, its verdict in a few sentences, and its files."""

from __future__ import annotations

import base64
import csv
import html
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.errors import needs
from exogym.files import replacing
from exogym.network import readable_seconds
from exogym.progress import readable_bytes
from exogym.record import History
from exogym.study.compare.plots import Curve, draw, figure_of, save
from exogym.study.compare.summary import Row, Track, spread_text

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

MOST_LETTERS = 240  # of a strategy in a file's name
OTHER_FILES = ("run.json", "summary.csv", "metrics.csv")
FILES = (*OTHER_FILES, "loss_vs_steps.png", "loss_vs_bytes.png")
SVG_FILES = ("loss_vs_steps.svg", "loss_vs_bytes.svg")  # the same pictures
TIMED_FILES = ("loss_vs_time.png",)  # additional files with a network
OF_PICTURE = {"loss_vs_steps.png": "step", "loss_vs_bytes.png": "bytes", "loss_vs_time.png": "time"}  # to its axis
Histories = Mapping[tuple[str, int], History]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        heading: one line about the training.
        finding: the verdict in one to three sentences: the strategies with the fewest bytes, the least time on the
            network and the lowest final loss, and which of these results the seeds leave undecided.
        rows: a dict per strategy with the columns of summary.csv. `<name>_std` is the standard deviation across seeds.
        histories: a dict from (strategy as written, seed) to the run's `History`.
        description: the options and the machine, as JSON values; enough to repeat the comparison.
        folder, paths: the comparison's folder and its files; None and () without `out`.
        target_loss: the validation loss for which the rows have the bytes and, with a network, the seconds to reach it.
    """

    heading: str
    finding: str
    rows: list[Row]
    histories: Histories = field(repr=False)
    description: dict[str, Any] = field(repr=False)
    folder: Path | None = None
    paths: tuple[Path, ...] = ()
    target_loss: float | None = None

    def __str__(self) -> str:
        return self.to_markdown()

    @property
    def is_timed(self) -> bool:
        """Whether the rows have predicted times."""
        return "time_s" in self.rows[0]

    def plot(self, x: str = "bytes", log: bool | None = None) -> Figure:
        """Plot each strategy's mean validation loss, with a band over its seeds. Return a matplotlib figure.

        Args:
            x: the horizontal axis: "bytes" that a node has sent, "step", or "time" (predicted seconds, with a network).
            log: whether the horizontal axis is logarithmic. By default, it is for bytes, and for seconds if the longest
                run takes at least eight times as long as the shortest.

        A notebook shows the figure; `figure.savefig("loss.svg")` writes it to a file.

        Raises:
            ArgumentError: `x` is unknown, or it is "time" and the comparison had no network.
            ExoGymError: matplotlib is not installed.
        """
        return figure_of(*_asked(self, x, log, self.description["description"]))

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a pandas DataFrame with one row per strategy.

        Raises:
            ExoGymError: pandas is not installed."""
        frame: pandas.DataFrame = needs("pandas").DataFrame(self.rows)
        return frame

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(row['strategy'] for row in self.rows)}: {self.finding}>"

    def _repr_html_(self) -> str:
        return html_of(self.heading, self.finding, self.plot, *self.table())

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's headers and rows as text. Values are mean ± standard deviation across seeds.

        The last column has notes. With a network, the columns before it are the predicted seconds to the end, the
        nodes' share of waiting time, and the seconds to the target loss; without a network, it is this machine's
        examples per second.
        """
        headers = ["strategy", "validation loss", "accuracy", "quality", "sent/node", "reduction"]
        to = "" if self.target_loss is None else f" to loss {self.target_loss:.4g}"
        headers += [f"sent{to}"] if to else []
        headers += ["predicted", "waiting", f"time{to}"] if self.is_timed else ["examples/s"]
        rows = [
            [
                row["strategy"],
                spread_text(row, "val_loss", "{:.4f}"),
                spread_text(row, "val_accuracy", "{:.1%}"),
                spread_text(row, "quality", "{:.1%}"),
                "" if row["tx_bytes"] is None else readable_bytes(row["tx_bytes"]),
                "" if row["reduction"] is None else f"{row['reduction']:.3g}×",
                *([reached_text(row, "target_bytes", readable_bytes)] if to else []),
                *(_timed_cells(row) if self.is_timed else [spread_text(row, "examples_per_s", "{:.0f}")]),
                row["notes"],
            ]
            for row in self.rows
        ]
        return [*headers, "notes"], rows

    def to_markdown(self) -> str:
        """Return a heading, the verdict and the table in Markdown."""
        return "\n".join([self.heading, "", self.finding, "", markdown(*self.table())])


def html_of(
    heading: str, finding: str, plot: Callable[[], Any], headers: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a heading, the verdict, the picture if matplotlib is installed, and the table as HTML, for a notebook.

    >>> from matplotlib.figure import Figure
    >>> text = html_of("one", "1 < 2", Figure, ["a"], [["<b>"]])
    >>> text.partition("<img")[0], text.partition("<table>")[2]
    ('<p>one</p><p><b>1 &lt; 2</b></p>', '<tr><th>a</th></tr><tr><td>&lt;b&gt;</td></tr></table>')
    """
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in headers)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    picture = ""
    if importlib.util.find_spec("matplotlib"):
        made = io.BytesIO()
        save(plot(), made)
        picture = f'<img src="data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}" alt="the curves">'
    return f"<p>{html.escape(heading)}</p><p><b>{html.escape(finding)}</b></p>{picture}<table>{table}</table>"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. The first column is left-aligned, and the last one if it contains words.

    >>> print(markdown(["a", "bb", "c"], [["x", "1", "y"]]))
    | a | bb | c |
    | - | -: | - |
    | x |  1 | y |
    >>> print(markdown(["a", "bb"], [["x", "1 s"]]))
    | a |  bb |
    | - | --: |
    | x | 1 s |
    """
    columns = list(zip(*rows, strict=True))
    numbers = bool(rows) and all(cell[:1].isdigit() for cell in columns[-1])
    left = (0,) if numbers else (0, len(headers) - 1)
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for cells in (headers, rule, *rows):
        pads = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append(f"| {' | '.join(pads)} |")
    return "\n".join(lines)


class ComparisonInterrupted(KeyboardInterrupt):
    """A KeyboardInterrupt stopped a comparison. The exception holds the finished runs' results.

    Attributes:
        result: the results of the runs that completed training, or None if there are none.
        folder: the folder from which you can resume, or None without `out`.
    """

    def __init__(self, message: str, result: Comparison | None, folder: Path | None) -> None:
        super().__init__(message)
        self.result, self.folder = result, folder


def reached_text(row: Mapping[str, Any], name: str, form: Callable[[float], str]) -> str:
    """Return the bytes or seconds to the target loss as text, or the number of runs that reached it if not all did."""
    if row[name] is None:
        if not row["seeds"]:
            return ""
        return "not reached" if not row["target_runs"] else f"in {row['target_runs']} of {row['seeds']} runs"
    mean, std = row[name], row[f"{name}_std"] or 0.0
    is_shown = form(max(mean - std, 0.0)) != form(mean + std)  # otherwise the spread is below the digits of the mean
    return form(mean) + (f" ± {form(std)}" if is_shown else "")


def _timed_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the predicted seconds, the share of waiting, and the seconds to the target or the number of runs there."""
    if row["time_s"] is None:
        return ["", "", ""]
    time_s, reached = (reached_text(row, name, readable_seconds) for name in ("time_s", "target_s"))
    return [time_s, spread_text(row, "waiting_share", "{:.1%}"), reached]


def write(result: Comparison, folder: Path) -> list[str]:
    """Write a comparison's files, except run.json, into `folder`. Return the names of all files.

    metrics.csv has the averaged model's row for each evaluation, with strategy and seed.
    """
    write_csv(folder / "summary.csv", list(result.rows[0]), result.rows)
    columns = list(dict.fromkeys(name for history in result.histories.values() for name in history.columns))
    columns.remove("node")
    lines = (
        {"strategy": label, "seed": seed} | row
        for (label, seed), history in result.histories.items()
        for row in history.rows(None)
        if row["val_loss"] is not None
    )
    write_csv(folder / "metrics.csv", ["strategy", "seed", *columns], lines)
    names = [*FILES, *(TIMED_FILES if result.is_timed else ())]
    for name in names[len(OTHER_FILES) :]:
        heading = result.description["description"]
        draw([folder / name, folder / _as_svg(name)], *_asked(result, OF_PICTURE[name], None, heading))
    svgs = [_as_svg(name) for name in names[len(OTHER_FILES) :]]
    return [*names, *svgs]


def _as_svg(name: str) -> str:
    return name.removesuffix(".png") + ".svg"


def _asked(result: Comparison, x: str, log: bool | None, heading: str) -> tuple[Any, ...]:
    """Return the arguments of `figure_of`."""
    curves = [_curve(row["strategy"], row["title"], result.histories) for row in result.rows if row["seeds"]]
    if x != "time":
        return curves, x, log, heading
    network = result.description["forecast"]["title"] if result.is_timed else ""
    return curves, x, log, heading, network, result.target_loss


def plain_name(label: str) -> str:
    """Return a strategy's text with only characters that are safe in file names.

    >>> plain_name("diloco:H=20")
    'diloco-H-20'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:MOST_LETTERS].strip("-.") or "strategy"


def _curve(label: str, title: str, histories: Histories) -> Curve:
    tracks = [Track.of_history(history) for (other, _), history in histories.items() if other == label]
    runs = [track for track in tracks if track is not None]

    def mean(name: str) -> np.ndarray:
        found: np.ndarray = np.mean([run.columns[name] for run in runs], axis=0)
        return found

    losses = np.stack([run.columns["val_loss"] for run in runs])
    time_s = mean("time_s") if runs[0].has("time_s") else None
    return Curve(title, runs[0].columns["step"], losses, mean("tx_bytes"), time_s, label)


def write_csv(path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the named columns of the rows to a CSV file. Missing values are empty."""
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
