"""What comes out of a comparison: the value, the rules by which runs become rows and a sentence, and its files."""

from __future__ import annotations

import csv
import functools
import os
import re
import statistics
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

SINGLE, BASELINE = "single", "ddp"
MOST_LETTERS = 240  # of a strategy, in the name of a file
CLOSE = 0.95  # of DDP's quality: what the finding calls good enough to look at bytes
FILES = ("run.json", "summary.csv", "metrics.csv", "loss_vs_steps.png", "loss_vs_bytes.png")
TIMED_FILES = ("loss_vs_time.png",)  # these too with a network
MEASURES = ("val_loss", "val_accuracy", "quality", "payload_bytes", "tx_bytes", "reduction", "examples_per_s")
TIMED = ("time_s", "waiting_share", "bandwidth_use", "target_s")  # these too with a network
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
        target_loss: with a network, the validation loss whose time of arrival is in the rows.
        strips: label to what the nodes did in the first rounds, where a timeline was wanted.
    """

    heading: str
    finding: str
    rows: list[dict[str, Any]]
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

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the headers and the rows of the table as text, mean ± standard deviation over seeds.

        With a network the last columns are predicted seconds to the end, share of them waited and seconds to the
        target loss, in place of the examples per second of this machine.
        """
        headers = ["strategy", "validation loss", "accuracy", "quality", "sent/node", "reduction"]
        timed = self.target_loss is not None
        headers += ["predicted", "waiting", f"to loss {self.target_loss:.4g}"] if timed else ["examples/s"]
        rows = [
            [
                row["strategy"],
                spread_text(row, "val_loss", "{:.4f}"),
                spread_text(row, "val_accuracy", "{:.1%}"),
                spread_text(row, "quality", "{:.1%}"),
                "" if row["tx_bytes"] is None else readable_bytes(row["tx_bytes"]),
                "" if row["reduction"] is None else f"{row['reduction']:.3g}×",
                *(_timed_cells(row) if timed else [spread_text(row, "examples_per_s", "{:.0f}")]),
                row["notes"],
            ]
            for row in self.rows
        ]
        return [*headers, "notes"], rows

    def to_markdown(self) -> str:
        """Return heading, table and finding as Markdown."""
        return "\n".join([self.heading, "", markdown(*self.table()), "", self.finding])


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown: from the left the first column, and the last one where it has words.

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
    """A comparison was interrupted; what had come out by then is kept.

    Attributes:
        result: of the runs that had ended well; None if none had.
        folder: in which it can be gone on with; None without `out`.
    """

    def __init__(self, message: str, result: Comparison | None, folder: Path | None) -> None:
        super().__init__(message)
        self.result, self.folder = result, folder


def _timed_cells(row: Mapping[str, Any]) -> list[str]:
    """Return predicted seconds, share waited, and seconds to the target or how many runs came to it."""
    if row["time_s"] is None:
        return ["", "", ""]
    reached = "not reached" if not row["target_runs"] else f"in {row['target_runs']} of {row['seeds']} runs"
    if row["target_s"] is not None:
        reached = _seconds_text(row, "target_s")
    return [_seconds_text(row, "time_s"), spread_text(row, "waiting_share", "{:.1%}"), reached]


def _seconds_text(row: Mapping[str, Any], name: str) -> str:
    mean, std = row[name], row[f"{name}_std"]
    return readable_seconds(mean) + (f" ± {readable_seconds(std)}" if std else "")


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
    strategies: Mapping[str, tuple[str, str]],
    seeds: Sequence[int],
    histories: Histories,
    target_loss: float | None = None,
) -> list[dict[str, Any]]:
    """Return a row per strategy: the measures after its last step, mean and standard deviation over seeds.

    quality = val_loss of DDP / val_loss and reduction = tx_bytes of DDP / tx_bytes, seed by seed; None without DDP, and
    reduction also where nothing was sent. `tx_bytes`, `payload_bytes` are of a node, from first step to last;
    `examples_per_s` is the fleet's on this machine, in training only: the seconds of evaluations are left out.

    Args:
        strategies: label to (title, notes).
        seeds: those asked for.
        histories: of the runs that ended well.
        target_loss: the rows then have the measures of `TIMED`, and in `target_runs` how many runs came to that loss;
            `target_s` only where all did.
    """
    measures = MEASURES if target_loss is None else MEASURES + TIMED
    final = {key: history.last for key, history in histories.items()}
    for (label, seed), last in final.items():
        if last.get("examples_per_s") is not None:
            last["examples_per_s"] /= 1 - _evaluating_share(histories[label, seed])
        base = next((row for (label, s), row in final.items() if s == seed and name_of(label) == BASELINE), None)
        last["quality"] = base["val_loss"] / last["val_loss"] if base is not None and last["val_loss"] else None
        last["reduction"] = base["tx_bytes"] / last["tx_bytes"] if base is not None and last["tx_bytes"] else None
        if target_loss is not None:
            last["target_s"] = seconds_to(histories[label, seed], target_loss)
    rows = []
    for label, (title, notes) in strategies.items():
        runs = [final[label, seed] for seed in seeds if (label, seed) in final]
        row: dict[str, Any] = {"strategy": label, "title": title, "seeds": len(runs)}
        for name in measures:
            values = [run[name] for run in runs if run.get(name) is not None]
            if name == "target_s":
                row["target_runs"] = len(values)
                values = values if len(values) == len(runs) else []  # a mean of the lucky ones would mislead
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        rows.append(row | {"notes": notes})
    return rows


def seconds_to(history: History, target_loss: float) -> float | None:
    """Return the predicted seconds until the validation loss of a run came to `target_loss`, or None.

    The loss is taken to be linear in time between evaluations.

    >>> history = History()
    >>> for step, loss in enumerate([3.0, 2.0, 1.0]):
    ...     history.add_evaluation(step, 0, {"val_loss": loss, "time_s": 10.0 * step})
    >>> seconds_to(history, 1.75), seconds_to(history, 0.5)
    (12.5, None)
    """
    steps, losses = history.column("val_loss")
    at, times = history.column("time_s")
    times = times[np.searchsorted(at, steps)]
    there = np.flatnonzero(losses <= target_loss)
    if not len(there):
        return None
    k = int(there[0])
    if k == 0 or not np.isfinite(losses[k - 1]):
        return float(times[k])
    done = (losses[k - 1] - target_loss) / (losses[k - 1] - losses[k])
    return float(times[k - 1] + done * (times[k] - times[k - 1]))


def target_of(histories: Histories, given: float | None = None) -> tuple[float, str]:
    """Return the loss to reach, and what it is.

    That is the one given; or DDP's final loss, mean over seeds, over 0.95; without DDP the highest final loss of any
    run, so that all come to it.
    """
    if given is not None:
        return given, "as asked for"
    last = {key: float(history.column("val_loss")[1][-1]) for key, history in histories.items()}
    base = [loss for (label, _), loss in last.items() if name_of(label) == BASELINE]
    if base:
        return statistics.fmean(base) / CLOSE, f"{CLOSE:.0%} of DDP's quality"
    return max(last.values()), "which all runs reach"


def find_first(rows: Sequence[Mapping[str, Any]], target_loss: float, why: str) -> str:
    """Return as one sentence who came to the target loss first, in predicted time, and when DDP (or the next) did.

    First is who came there in all its runs and took the least time on average. Who came there in some runs only is
    named too, and where the first did not stay there, what it ended at.
    """
    loss = f"a validation loss of {target_loss:.4g} ({why})"
    there = sorted((row for row in rows if row["target_s"] is not None), key=lambda row: row["target_s"])
    some = [row for row in rows if row["target_s"] is None and row["target_runs"]]
    partly = "".join(f"; {row['title']} only in {row['target_runs']} of {row['seeds']} runs" for row in some)
    if not there:
        return f"No strategy came to {loss} in all its runs{partly}."
    first, *others = there
    text = f"{first['title']} came to {loss} first{' of those that did in all runs' if some else ''}, "
    text += f"after {readable_seconds(first['target_s'])}"
    if first["val_loss"] > target_loss:
        text += f" (and ended at {first['val_loss']:.4g})"
    after = next((row for row in others if name_of(row["strategy"]) == BASELINE), others[0] if others else None)
    after_it = "" if after is None else f"; {after['title']} after {readable_seconds(after['target_s'])}"
    return f"{text}{after_it}{partly}."


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
        if name_of(row["strategy"]) == SINGLE:
            text += f"; {row['title']} reached {spread_text(row, 'quality', '{:.0%}')}"
    return text + "."


def name_of(label: str) -> str:
    """Return the name of a strategy, of its text with options."""
    return label.partition(":")[0].strip().lower()


def write(result: Comparison, folder: Path) -> list[str]:
    """Write the files of a comparison, but for run.json, into `folder`; return the names of all.

    metrics.csv has the averaged model's row of each evaluation, under strategy and seed.
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
    if result.target_loss is not None:
        network = result.description["forecast"]["title"]
        plots[TIMED_FILES[0]] = functools.partial(plot_against_time, network=network, target_loss=result.target_loss)
    for name, plot in plots.items():
        plot(curves, folder / name, heading)
    return [*FILES, *(TIMED_FILES if result.target_loss is not None else ()), *_write_strips(result, folder)]


def plain_name(label: str) -> str:
    """Return what names a file of a strategy.

    >>> plain_name("diloco:H=20")
    'diloco-H-20'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:MOST_LETTERS].strip("-.") or "strategy"


def _write_strips(result: Comparison, folder: Path) -> list[str]:
    """Draw the timelines and write the traces, of the first rounds; return the names of the files."""
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
    """Write the columns of rows as CSV; what is missing is empty."""
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
