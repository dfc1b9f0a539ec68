"""What comes out of a comparison: the value, the rules by which runs become rows and a sentence, and its files."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exogym.errors import ArgumentError
from exogym.history import History
from exogym.plots import Curve, plot_against_bytes, plot_against_steps
from exogym.progress import readable_bytes

SINGLE, BASELINE = "single", "ddp"
CLOSE = 0.95  # of DDP's quality: what the finding calls good enough to look at bytes
FILES = ("run.json", "summary.csv", "metrics.csv", "loss_vs_steps.png", "loss_vs_bytes.png")
MEASURES = ("val_loss", "val_accuracy", "quality", "payload_bytes", "tx_bytes", "reduction", "examples_per_s")
Histories = Mapping[tuple[str, int], History]


@dataclass(frozen=True)
class Comparison:
    """What came out of `compare`.

    Attributes:
        heading: one line saying what was trained.
        finding: one sentence saying what came out, made by the rules of `find`.
        rows: a dict per strategy with the columns of summary.csv; `<name>_std` is the standard deviation over seeds.
        histories: (strategy as written, seed) to the `History` of that run.
        description: what was compared and where, as JSON: enough to repeat it.
        folder, paths: where the files are; None and () if none were wanted.
    """

    heading: str
    finding: str
    rows: list[dict[str, Any]]
    histories: Histories = field(repr=False)
    description: dict[str, Any] = field(repr=False)
    folder: Path | None = None
    paths: tuple[Path, ...] = ()

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the headers and the rows of the table as text, mean ± standard deviation over seeds."""
        headers = ["strategy", "validation loss", "accuracy", "quality", "sent/node", "reduction", "examples/s"]
        rows = [
            [
                row["strategy"],
                spread_text(row, "val_loss", "{:.4f}"),
                spread_text(row, "val_accuracy", "{:.1%}"),
                spread_text(row, "quality", "{:.1%}"),
                "" if row["tx_bytes"] is None else readable_bytes(row["tx_bytes"]),
                "" if row["reduction"] is None else f"{row['reduction']:.3g}×",
                spread_text(row, "examples_per_s", "{:.0f}"),
                row["notes"],
            ]
            for row in self.rows
        ]
        return [*headers, "notes"], rows

    def to_markdown(self) -> str:
        """Return heading, table and finding as Markdown."""
        headers, rows = self.table()
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        last = len(widths) - 1
        rule = ["-" * width if i in (0, last) else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
        lines = []
        for cells in (headers, rule, *rows):
            pads = [
                c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append(f"| {' | '.join(pads)} |")
        return "\n".join([self.heading, "", *lines, "", self.finding])


def spread_text(row: Mapping[str, Any], name: str, form: str) -> str:
    """Return mean ± standard deviation of a measure, "" where there is none.

    >>> spread_text({"quality": 0.5, "quality_std": 0.01}, "quality", "{:.0%}")
    '50% ± 1%'
    """
    mean, std = row[name], row[f"{name}_std"]
    if mean is None:
        return ""
    return form.format(mean) + ("" if std is None else f" ± {form.format(std)}")


def summarise(
    strategies: Mapping[str, tuple[str, str]], seeds: Sequence[int], histories: Histories
) -> list[dict[str, Any]]:
    """Return a row per strategy: the measures after its last step, mean and standard deviation over seeds.

    quality = val_loss of DDP / val_loss and reduction = tx_bytes of DDP / tx_bytes, seed by seed; None without DDP, and
    reduction also where nothing was sent. `tx_bytes`, `payload_bytes` are of a node, from first step to last;
    `examples_per_s` is the fleet's on this machine, in training only: the seconds of evaluations are left out.

    Args:
        strategies: label to (title, notes).
        seeds: those asked for.
        histories: of the runs that ended well.
    """
    final = {key: list(history.rows(None))[-1] for key, history in histories.items()}
    for (label, seed), last in final.items():
        if last.get("examples_per_s") is not None:
            last["examples_per_s"] /= 1 - _evaluating_share(histories[label, seed])
        base = next((row for (label, s), row in final.items() if s == seed and _name(label) == BASELINE), None)
        last["quality"] = base["val_loss"] / last["val_loss"] if base is not None and last["val_loss"] else None
        last["reduction"] = base["tx_bytes"] / last["tx_bytes"] if base is not None and last["tx_bytes"] else None
    rows = []
    for label, (title, notes) in strategies.items():
        runs = [final[label, seed] for seed in seeds if (label, seed) in final]
        row: dict[str, Any] = {"strategy": label, "title": title, "seeds": len(runs)}
        for name in MEASURES:
            values = [run[name] for run in runs if run.get(name) is not None]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        rows.append(row | {"notes": notes})
    return rows


def _evaluating_share(history: History) -> float:
    """Return the share of the seconds of a run that went into evaluations (0 to 1)."""
    ends, seconds = history.column("wall_s")
    starts, before = history.column("wall_s", node=0)  # a node's row has the time before the evaluation of its step
    evaluated = np.intersect1d(history.column("val_loss")[0], starts)
    spent = seconds[np.searchsorted(ends, evaluated)] - before[np.searchsorted(starts, evaluated)]
    return float((spent.sum() + seconds[0] * (ends[0] == 0)) / seconds[-1])


def find(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the finding of a comparison as one sentence.

    With DDP: of the strategies that sent less, the one with the fewest bytes that came to 95 % of DDP's quality; where
    none did, the one of best quality; and what one node alone came to. Without: the lowest validation loss.
    """
    trained = [row for row in rows if row["val_loss"] is not None]
    frugal = [row for row in trained if row["quality"] is not None and (row["reduction"] or 0) > 1]
    if not frugal:
        best = min(trained, key=lambda row: row["val_loss"])
        text = f"{best['title']} reached the lowest validation loss, {spread_text(best, 'val_loss', '{:.4f}')}, "
        return text + f"and sent {readable_bytes(best['tx_bytes'])} per node."
    close = [row for row in frugal if row["quality"] >= CLOSE]
    best = max(close, key=lambda row: row["reduction"]) if close else max(frugal, key=lambda row: row["quality"])
    text = f"{best['title']} reached {spread_text(best, 'quality', '{:.0%}')} of DDP's quality with "
    text += f"1/{best['reduction']:.3g} of its bytes"
    for row in trained:
        if _name(row["strategy"]) == SINGLE:
            text += f"; {row['title']} reached {spread_text(row, 'quality', '{:.0%}')}"
    return text + "."


def _name(label: str) -> str:
    return label.partition(":")[0].strip().lower()


class NewFolder:
    """Makes the folder `<out>/<name>-<time>`, which was not there before, with all its files or not at all.

    While it is entered, `path` is a hidden folder beside; leaving it well gives it its name, and an error or Ctrl-C
    removes it and what had to be made above it.

    Raises:
        ArgumentError: `out` cannot be made or written; known on entering.
    """

    def __init__(self, out: str | os.PathLike[str], name: str) -> None:
        self.out, self.name = Path(out).expanduser(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = self.out / f".{self.name}-{uuid.uuid4().hex[:8]}"
        self._above = [above for above in (self.out, *self.out.parents) if not above.exists()]

    def __enter__(self) -> NewFolder:
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            self._remove()
            raise ArgumentError(
                f"out={os.fspath(self.out)!r} cannot be written ({error.strerror}): give another folder"
            ) from error
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._remove()
            return
        final, count = self.out / self.name, 1
        while final.exists():
            count += 1
            final = self.out / f"{self.name}-{count}"
        self.path = self.path.rename(final)

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for above in self._above:
            with contextlib.suppress(OSError):
                above.rmdir()


def write(result: Comparison, folder: Path) -> None:
    """Write the files of a comparison into `folder`.

    metrics.csv has the averaged model's row of each evaluation, under strategy and seed.
    """
    (folder / "run.json").write_text(json.dumps(result.description, indent=1) + "\n", encoding="utf-8")
    _write_csv(folder / "summary.csv", list(result.rows[0]), [list(row.values()) for row in result.rows])
    columns = list(dict.fromkeys(name for history in result.histories.values() for name in history.columns))
    columns.remove("node")
    lines = [
        [label, seed, *(row.get(name) for name in columns)]
        for (label, seed), history in result.histories.items()
        for row in history.rows(None)
        if row["val_loss"] is not None
    ]
    _write_csv(folder / "metrics.csv", ["strategy", "seed", *columns], lines)
    curves = [_curve(row["strategy"], row["title"], result.histories) for row in result.rows if row["seeds"]]
    heading = result.description["description"]
    plots: dict[str, Callable[..., None]] = {
        "loss_vs_steps.png": plot_against_steps,
        "loss_vs_bytes.png": plot_against_bytes,
    }
    for name, plot in plots.items():
        plot(curves, folder / name, heading)


def _curve(label: str, title: str, histories: Histories) -> Curve:
    runs = [history for (other, _), history in histories.items() if other == label]
    steps, _ = runs[0].column("val_loss")
    losses = np.stack([history.column("val_loss")[1] for history in runs])
    sent = []
    for history in runs:
        at, tx_bytes = history.column("tx_bytes")
        sent.append(tx_bytes[np.searchsorted(at, steps)])
    return Curve(title, steps, losses, np.mean(sent, axis=0))


def _write_csv(path: Path, header: list[str], lines: list[list[Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header, *lines])
