"""The result of a sweep: a row per cell, the best cell, and the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym.errors import needs
from exogym.network import readable_seconds
from exogym.progress import readable_bytes
from exogym.study.compare.colors import COLORS
from exogym.study.compare.comparison import Histories, html_of, markdown, reached_text, write_csv
from exogym.study.compare.plots import new_figure, save
from exogym.study.compare.summary import spread_text
from exogym.study.sweep.axes import Axes, as_number

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

SUMMARY, PLOT = "summary.csv", "sweep.png"
PANEL_INCHES, MOST_LINES = (4.2, 3.6), len(COLORS)
FAR_APART = 8  # an option has a logarithmic axis from this ratio of its values on


@dataclass(frozen=True)
class Swept:
    """The result of `sweep`.

    Attributes:
        heading: one line about the training.
        finding: the verdict in one to three sentences. The verdict names results that the seeds leave undecided.
        axes: dict from option to its values or range.
        rows: a dict per cell: the cell's name `cell`, then the options' values, then the means of measures and their
            standard deviations `<name>_std` over seeds.
        histories: dict from (cell, seed) to the run's `History`.
        description: the options and the machine, for JSON; also in sweep.json.
        folder, paths: the sweep's folder and its files; None and () without `out`.
        target_loss: the target validation loss: 95 % of the best cell's quality. The rows have the bytes and, with a
            network, the time that a cell needed to reach this loss.
    """

    heading: str
    finding: str
    axes: Axes
    rows: list[dict[str, Any]]
    histories: Histories = field(repr=False)
    description: dict[str, Any] = field(repr=False)
    folder: Path | None = None
    paths: tuple[Path, ...] = ()
    target_loss: float | None = None

    @property
    def best(self) -> dict[str, Any]:
        """The row with the lowest mean validation loss."""
        return best_of(self.rows)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas table. An option's column has numbers if all the option's values are numbers."""
        frame: pandas.DataFrame = needs("pandas").DataFrame(self.rows)
        for name in self.axes:
            numbers = [as_number(value) for value in frame[name]]
            if None not in numbers:
                frame[name] = numbers
        return frame

    def plot(self) -> Figure:
        """Return a matplotlib figure: final loss against each option, with bars of one standard deviation.

        A notebook shows the figure; `figure.savefig("sweep.svg")` writes it into a file.

        Raises:
            ExoGymError: matplotlib is not installed.
        """
        return _figure(self)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        return f"<Swept: {len(self.rows)} cells of {', '.join(self.axes)}: {self.finding}>"

    def _repr_html_(self) -> str:
        return html_of(self.heading, self.finding, self.plot, *self.table())

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's headers and rows as text: mean ± standard deviation over seeds."""
        timed = "time_s" in self.rows[0]
        to = "" if self.target_loss is None else f" to loss {self.target_loss:.4g}"
        headers = [
            *self.axes, "validation loss", "accuracy", "sent/node", *([f"sent{to}"] if to else []),
            *(["predicted", f"time{to}"] if timed and to else ["predicted"] if timed else ["examples/s"]), "notes",
        ]  # fmt: skip
        rows = []
        for row in self.rows:
            cells = [row[name] for name in self.axes]
            cells += [spread_text(row, "val_loss", "{:.4f}"), spread_text(row, "val_accuracy", "{:.1%}")]
            cells += ["" if row["tx_bytes"] is None else readable_bytes(row["tx_bytes"])]
            cells += [reached_text(row, "target_bytes", readable_bytes)] if to else []
            if not timed:
                cells += [spread_text(row, "examples_per_s", "{:.0f}")]
            else:
                cells += ["" if row["time_s"] is None else readable_seconds(row["time_s"])]
                cells += [reached_text(row, "target_s", readable_seconds)] if to else []
            rows.append([*cells, row["notes"]])
        return headers, rows

    def to_markdown(self) -> str:
        """Return the heading, the verdict and the table in Markdown."""
        return "\n".join([self.heading, "", self.finding, "", markdown(*self.table())])


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min((row for row in rows if row["val_loss"] is not None), key=lambda row: row["val_loss"])


def write(result: Swept, folder: Path) -> tuple[Path, ...]:
    """Write summary.csv and sweep.png into `folder`. Return their paths."""
    write_csv(folder / SUMMARY, list(result.rows[0]), result.rows)
    save(_figure(result), folder / PLOT)
    return folder / SUMMARY, folder / PLOT


def _figure(result: Swept) -> Figure:
    """Return a figure, a panel for each option with several values: mean loss and standard deviation over seeds.

    A panel has a line for each combination of the other options if there are few; otherwise each value's best cell.
    """
    rows = [row for row in result.rows if row["val_loss"] is not None]
    axes = [name for name in result.axes if len({row[name] for row in rows}) > 1] or list(result.axes)[:1]
    figure = new_figure((PANEL_INCHES[0] * len(axes), PANEL_INCHES[1] + 0.4), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        lines = _lines(rows, name, [other for other in axes if other != name])
        numbers = {row[name]: as_number(row[name]) for row in rows}
        is_number = None not in numbers.values()
        texts = sorted(numbers, key=lambda text: numbers[text] or 0.0) if is_number else list(numbers)
        places = {text: numbers[text] if is_number else float(k) for k, text in enumerate(texts)}
        for colour, (label, cells) in zip(COLORS, lines.items(), strict=False):
            cells = sorted(cells, key=lambda row: places[row[name]] or 0.0)
            panel.errorbar(
                [places[row[name]] for row in cells], [row["val_loss"] for row in cells],
                [row["val_loss_std"] or 0.0 for row in cells], color=colour, marker="o", markersize=4, capsize=3,
                linewidth=1.5, label=label,
            )  # fmt: skip
        found = [place for place in places.values() if place is not None]
        if is_number and min(found) > 0 and max(found) / min(found) >= FAR_APART:
            panel.set_xscale("log")
        if len(texts) <= 8:
            panel.set_xticks(found, texts)
            panel.set_xticks([], minor=True)
        panel.set_xlabel(name)
        panel.grid(True, color="#E6E6E6", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
        if any(lines):
            panel.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("validation loss, mean ± standard deviation")
    figure.suptitle(result.description["description"], x=0.01, ha="left", fontsize=10)
    return figure


def _lines(rows: Sequence[dict[str, Any]], name: str, others: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return a panel's lines: label to cells."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(", ".join(f"{other}={row[other]}" for other in others), []).append(row)
    if len(lines) <= MOST_LINES:
        return lines
    best = {value: best_of([row for row in rows if row[name] == value]) for value in {row[name] for row in rows}}
    return {"the best of the others": list(best.values())}
