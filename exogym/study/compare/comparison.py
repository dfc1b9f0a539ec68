"""The result of a comparison: its table, its finding in a sentence, and its files."""

from __future__ import annotations

import csv
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exogym.core.base.files import replacing
from exogym.core.clock import save_trace
from exogym.core.progress import readable_bytes
from exogym.core.record.history import History
from exogym.network import readable_seconds
from exogym.study.compare.plots import (
    Curve,
    Strip,
    draw_strips,
    first_rounds_s,
    plot_against_bytes,
    plot_against_steps,
    plot_against_time,
)
from exogym.study.compare.summary import Row, spread_text

MOST_LETTERS = 240  # of a strategy in a file's name
FILES = ("run.json", "summary.csv", "metrics.csv", "loss_vs_steps.png", "loss_vs_bytes.png")
TIMED_FILES = ("loss_vs_time.png",)  # additional files with a network
Histories = Mapping[tuple[str, int], History]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        heading: one line about the training.
        finding: the verdict in one to three sentences: the strategies with the fewest bytes, the least time on the
            network, and the lowest final loss. It names results that the seeds leave undecided.
        rows: a dict per strategy with the columns of summary.csv; `<name>_std` is the standard deviation over seeds.
        histories: (strategy as written, seed) to the run's `History`.
        description: the options and the machine, for JSON: enough to repeat the comparison.
        folder, paths: the folder and its files; None and () without `out`.
        target_loss: the target validation loss; the rows have the bytes and, with a network, the time until then.
        strips: label to the nodes' timeline in the first rounds, with `timeline`.
    """

    heading: str
    finding: str
    rows: list[Row]
    histories: Histories = field(repr=False)
    description: dict[str, Any] = field(repr=False)
    folder: Path | None = None
    paths: tuple[Path, ...] = ()
    target_loss: float | None = None
    strips: Mapping[str, Strip] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    @property
    def is_timed(self) -> bool:
        """Whether the rows have predicted times."""
        return "time_s" in self.rows[0]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's headers and rows as text: mean ± standard deviation over seeds.

        With a network the last columns are the predicted seconds to the end, the share of waiting, and the seconds to
        the target loss. They replace this machine's examples per second.
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
        """Return heading, verdict and table in Markdown."""
        return "\n".join([self.heading, "", self.finding, "", markdown(*self.table())])


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
    """A comparison was interrupted. Finished runs are kept.

    Attributes:
        result: results of the runs that ended well; None if none did.
        folder: folder in which to resume; None without `out`.
    """

    def __init__(self, message: str, result: Comparison | None, folder: Path | None) -> None:
        super().__init__(message)
        self.result, self.folder = result, folder


def reached_text(row: Mapping[str, Any], name: str, form: Callable[[float], str]) -> str:
    """Return the bytes or seconds to the target loss as text, or how many runs reached it."""
    if row[name] is None:
        if not row["seeds"]:
            return ""
        return "not reached" if not row["target_runs"] else f"in {row['target_runs']} of {row['seeds']} runs"
    return form(row[name]) + (f" ± {form(row[f'{name}_std'])}" if row[f"{name}_std"] else "")


def _timed_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the predicted seconds, the share of waiting, and the seconds to the target or the number of runs there."""
    if row["time_s"] is None:
        return ["", "", ""]
    time_s, reached = (reached_text(row, name, readable_seconds) for name in ("time_s", "target_s"))
    return [time_s, spread_text(row, "waiting_share", "{:.1%}"), reached]


def write(result: Comparison, folder: Path) -> list[str]:
    """Write a comparison's files, except run.json, into `folder`. Return the names of all files.

    metrics.csv has the averaged model's row of each evaluation, with strategy and seed.
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
    curves = [_curve(row["strategy"], row["title"], result.histories) for row in result.rows if row["seeds"]]
    heading = result.description["description"]
    plots: dict[str, Callable[..., None]] = {
        "loss_vs_steps.png": plot_against_steps,
        "loss_vs_bytes.png": plot_against_bytes,
    }
    if result.is_timed:
        network = result.description["forecast"]["title"]
        plots[TIMED_FILES[0]] = functools.partial(plot_against_time, network=network, target_loss=result.target_loss)
    for name, plot in plots.items():
        plot(curves, folder / name, heading)
    return [*FILES, *(TIMED_FILES if result.is_timed else ()), *_write_strips(result, folder)]


def plain_name(label: str) -> str:
    """Return a strategy's text in a form that suits file names.

    >>> plain_name("diloco:H=20")
    'diloco-H-20'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:MOST_LETTERS].strip("-.") or "strategy"


def _write_strips(result: Comparison, folder: Path) -> list[str]:
    """Draw the timelines and write the traces of the first rounds. Return the files' names."""
    if not result.strips:
        return []
    until_s = first_rounds_s(result.strips.values())
    heading = f"{result.description['description']}\n{result.description['forecast']['title']}"
    draw_strips(list(result.strips.values()), folder / "timeline.png", until_s, heading)
    names = ["timeline.png"]
    for label, strip in result.strips.items():
        name = f"trace-{plain_name(label)}.json"
        if name in names:
            name = f"trace-{plain_name(label)}-{len(names)}.json"
        save_trace(strip.until(until_s), folder / name)
        names.append(name)
    return names


def _curve(label: str, title: str, histories: Histories) -> Curve:
    runs = [history for (other, _), history in histories.items() if other == label]
    steps, _ = runs[0].column("val_loss")
    losses = np.stack([history.column("val_loss")[1] for history in runs])

    def mean(name: str) -> np.ndarray:
        columns = [history.column(name) for history in runs]
        return np.mean([values[np.searchsorted(at, steps)] for at, values in columns], axis=0)

    timed = "time_s" in runs[0].columns
    return Curve(title, steps, losses, mean("tx_bytes"), mean("time_s") if timed else None)


def write_csv(path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write columns of rows as CSV. Missing values are empty."""
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
