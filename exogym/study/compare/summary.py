"""Summarize several runs: a row per strategy with mean and spread over seeds, and a verdict in a few sentences.

The runs may be in memory (`Track.of_history`) or in run folders (`Track.of_rows`). This module does not import torch.

>>> runs = {("ddp", seed): Track.of_rows([
...     {"step": 0, "val_loss": 2.0, "tx_bytes": 0.0}, {"step": 10, "val_loss": 0.9 + seed / 100, "tx_bytes": 800.0},
... ]) for seed in range(2)} | {("diloco", seed): Track.of_rows([
...     {"step": 0, "val_loss": 2.0, "tx_bytes": 0.0}, {"step": 10, "val_loss": 0.92 + seed / 100, "tx_bytes": 80.0},
... ]) for seed in range(2)}
>>> found: Summary = summary_of({"ddp": ("DDP", ""), "diloco": ("DiLoCo", "")}, [0, 1], runs)
>>> print(found.verdict)
DiLoCo reached a validation loss of 0.9526 (95% of DDP's quality) with the fewest bytes: 77.9 B per node, 1/9.82 of \
DDP's. DDP ended with the lowest validation loss, 0.9050 ± 0.0071.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.errors import needs
from exogym.network import readable_seconds
from exogym.progress import readable_bytes

if TYPE_CHECKING:
    import pandas

    from exogym.record import History

SINGLE, BASELINE = "single", "ddp"
CLOSE = 0.95  # share of DDP's quality that defines the default target loss
MEASURES = (
    *("val_loss", "val_accuracy", "quality", "payload_bytes", "tx_bytes", "reduction", "examples_per_s"),
    "target_bytes",
)
TIMED = ("time_s", "waiting_share", "bandwidth_use", "target_s")  # additional measures with a network
OF_TARGET = {"target_bytes": "tx_bytes", "target_s": "time_s"}  # a measure at the target, and its column
MOST_NAMED = 3  # strategies that a sentence names
Row = dict[str, Any]
Key = tuple[str, int]  # a strategy as written, and a seed


@dataclass(frozen=True)
class Track:
    """A run's evaluations.

    Attributes:
        columns: step, val_loss, tx_bytes, time_s and wall_s, each (K,) for K evaluations, with NaN for missing values.
        last: the values at the last evaluation's step.
    """

    columns: Mapping[str, np.ndarray]
    last: Row

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]], before: Mapping[int, float] | None = None) -> Track | None:
        """Return the `Track` of a run's rows, which are in the order of steps. None if the rows have no evaluation.

        `before` has, for each evaluated step, the `wall_s` before its evaluation. If passed, `examples_per_s` leaves
        out the evaluations' time.
        """
        merged: dict[int, Row] = {}
        for row in rows:
            if row.get("node") is None:
                known = {name: value for name, value in row.items() if value is not None}
                merged[row["step"]] = merged.get(row["step"], {}) | known
        evaluated = [row for row in merged.values() if _is_number(row.get("val_loss"))]
        if not evaluated:
            return None
        names = ("step", "val_loss", "tx_bytes", "time_s", "wall_s")
        columns = {name: np.array([_number(row.get(name)) for row in evaluated]) for name in names}
        last = {name: value for name, value in evaluated[-1].items() if _is_number(value)}
        if before and last.get("examples_per_s"):
            last["examples_per_s"] /= 1 - _evaluating_share(columns, before)
        return cls(columns, last)

    @classmethod
    def of_history(cls, history: History) -> Track | None:
        """Return the `Track` of a run in memory; None if it has no evaluation."""
        before = dict(zip(*(column.tolist() for column in history.column("wall_s", node=0)), strict=True))
        return cls.of_rows(history.rows_after(-1, None), before)

    def has(self, name: str) -> bool:
        """Return whether every evaluation has a value in the column `name`."""
        return bool(np.isfinite(self.columns[name]).all())

    def until(self, target_loss: float, name: str) -> float | None:
        """Return a column's value (bytes, seconds, steps) at which the loss reached the target; None if it did not.

        Between two evaluations the loss is interpolated linearly.

        >>> rows = [{"step": k, "val_loss": 3.0 - k, "time_s": 10.0 * k} for k in range(3)]
        >>> track = Track.of_rows(rows)
        >>> track.until(1.75, "time_s"), track.until(0.5, "time_s"), track.until(1.75, "tx_bytes")
        (12.5, None, None)
        """
        losses, spent = self.columns["val_loss"], self.columns[name]
        there = np.flatnonzero(losses <= target_loss)
        if not len(there) or not self.has(name):
            return None
        k = int(there[0])
        if k == 0 or not np.isfinite(losses[k - 1]):
            return float(spent[k])
        done = (losses[k - 1] - target_loss) / (losses[k - 1] - losses[k])
        return float(spent[k - 1] + done * (spent[k] - spent[k - 1]))


Tracks = Mapping[Key, Track]


@dataclass(frozen=True)
class Summary:
    """The summary of several runs.

    Attributes:
        rows: a dict per strategy, with each measure's mean and `<name>_std` over seeds, and `target_runs`, the number
            of runs that reached the target loss. `target_bytes` and `target_s` have values only if all runs reached it.
        verdict: one to three sentences: the strategies with the fewest bytes, the least time and the lowest final loss.
        target_loss, target: the target loss, and its meaning in words.
        undecided: {measure: labels} of the strategies between which the seeds do not decide who has the lowest
            `val_loss`, `target_bytes` or `target_s`. A measure with one clear best, or with one seed, is left out.
        values: a dict from strategy to a dict from measure to its values, one per seed. {} if the summary was read from
            a file.
    """

    rows: list[Row]
    verdict: str
    target_loss: float
    target: str
    undecided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict, repr=False)

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a pandas DataFrame with one row per strategy or cell.

        Raises:
            ExoGymError: pandas is not installed.
        """
        frame: pandas.DataFrame = needs("pandas").DataFrame(self.rows)
        return frame

    def to_json(self) -> Row:
        """Return the fields that run.json stores of this summary."""
        return {
            "summary": self.rows, "target_loss": self.target_loss, "target": self.target, "undecided": self.undecided,
        }  # fmt: skip


def summary_of(
    strategies: Mapping[str, tuple[str, str]], seeds: Sequence[int], tracks: Tracks,
    target: tuple[float, str] | None = None, network: str = "",
) -> Summary:  # fmt: skip
    """Return the summary of several strategies' runs.

    For each seed, the quality is DDP's val_loss divided by the strategy's, and the reduction is DDP's tx_bytes divided
    by the strategy's. Without DDP, quality and reduction are None. A strategy that sends nothing has no reduction.
    `tx_bytes` and `payload_bytes` are the mean over nodes, summed over all steps. `examples_per_s` is the number of
    examples that all nodes together process per second on this machine, without the time for evaluations.

    Args:
        strategies: a dict from label to (title, notes).
        seeds: the requested seeds.
        tracks: a dict from (label, seed) to the `Track` of each run that completed its training, at least one.
        target: the target loss, and its meaning in words, by default from `target_of`.
        network: the network's name for the verdict.
    """
    target_loss, why = target_of(tracks) if target is None else target
    is_timed = any(track.has("time_s") for track in tracks.values())
    measures = MEASURES + TIMED if is_timed else MEASURES
    final = {key: dict(track.last) for key, track in tracks.items()}
    for (label, seed), last in final.items():
        base = next((row for (other, s), row in final.items() if s == seed and name_of(other) == BASELINE), None)
        sent, base_sent = last.get("tx_bytes"), None if base is None else base.get("tx_bytes")
        last["quality"] = base["val_loss"] / last["val_loss"] if base is not None and last["val_loss"] else None
        last["reduction"] = base_sent / sent if base_sent is not None and sent else None
        last |= {name: tracks[label, seed].until(target_loss, of) for name, of in OF_TARGET.items()}
    rows, values = [], dict[str, dict[str, list[float]]]()
    for label, (title, notes) in strategies.items():
        runs = [final[label, seed] for seed in seeds if (label, seed) in final]
        row: Row = {"strategy": label, "title": title, "seeds": len(runs)}
        own = values[label] = {}
        for name in measures:
            own[name] = [run[name] for run in runs if run.get(name) is not None]
            if name == "target_bytes":
                row |= {"target_loss": target_loss, "target_runs": len(own[name])}
            if name in OF_TARGET and len(own[name]) < len(runs):
                own[name] = []  # a mean over only the runs that reached it would mislead
            row[name] = statistics.fmean(own[name]) if own[name] else None
            row[f"{name}_std"] = statistics.stdev(own[name]) if len(own[name]) > 1 else None
        rows.append(row | {"notes": notes})
    verdict = _verdict(rows, values, f"a validation loss of {target_loss:.4g} ({why})", network)
    return Summary(rows, verdict, target_loss, why, _undecided(rows, values), values)


def target_of(tracks: Tracks, given: float | None = None) -> tuple[float, str]:
    """Return the target loss, and its meaning in words.

    The target loss is `given` or, by default, DDP's mean final loss over seeds / 0.95 or, without DDP, the highest
    final loss of any run, so that all runs reach it.
    """
    if given is not None:
        return given, "as asked for"
    last = {key: float(track.last["val_loss"]) for key, track in tracks.items()}
    base = [loss for (label, _), loss in last.items() if name_of(label) == BASELINE]
    if base:
        return statistics.fmean(base) / CLOSE, f"{CLOSE:.0%} of DDP's quality"
    return max(last.values()), "which all runs reach"


def target_of_best(tracks: Tracks) -> tuple[float, str]:
    """Return a sweep's target loss (the lowest mean final loss of any cell / 0.95), and its meaning in words."""
    losses: dict[str, list[float]] = {}
    for (label, _), track in tracks.items():
        losses.setdefault(label, []).append(float(track.last["val_loss"]))
    return min(map(statistics.fmean, losses.values())) / CLOSE, f"{CLOSE:.0%} of the best cell's quality"


def are_apart(low: Sequence[float], high: Sequence[float]) -> bool:
    """Return whether `low` is clearly below `high`: without overlap, and with means further apart than either spread.

    >>> are_apart([1.0, 1.1], [1.2, 1.3]), are_apart([1.0, 1.2], [1.1, 1.3]), are_apart([1.0, 1.1], [1.11, 1.6])
    (True, False, False)
    """
    spread = max(statistics.stdev(x) if len(x) > 1 else 0.0 for x in (low, high))
    return max(low) < min(high) and statistics.fmean(high) - statistics.fmean(low) > spread


def name_of(label: str) -> str:
    """Return the strategy's name that is in a text with options, such as "diloco" in "diloco:H=20"."""
    return label.partition(":")[0].strip().lower()


def spread_text(row: Mapping[str, Any], name: str, form: str) -> str:
    """Return a measure's mean ± standard deviation, or "" without values.

    >>> spread_text({"quality": 0.5, "quality_std": 0.01}, "quality", "{:.0%}")
    '50% ± 1%'
    """
    mean, std = row[name], row[f"{name}_std"]
    if mean is None:
        return ""
    return form.format(mean) + ("" if std is None else f" ± {form.format(std)}")


def _verdict(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]], loss: str, network: str) -> str:
    """Return the verdict. `loss` names the target loss in words."""
    trained = [row for row in rows if row["val_loss"] is not None]
    sentences = [_of_bytes(trained, values, loss)]
    if any(row.get("target_s") for row in trained):
        sentences.append(_of_time(trained, values, loss, network))
    if len(trained) > 1 and all(row["seeds"] == 1 for row in trained):
        sentences.append("One seed shows no spread: train with more seeds before you choose.")
    elif trained:
        sentences.append(_of_loss(trained, values))
    return " ".join(text[0].upper() + text[1:] if text.startswith("one node") else text for text in sentences)


def _of_bytes(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]], loss: str) -> str:
    """Return the sentence on the fewest bytes to the target loss, among strategies that send any."""
    silent = [row for row in rows if row["target_bytes"] is not None and not row["tx_bytes"]]
    there = [row for row in rows if row["target_bytes"] is not None and row["tx_bytes"]]
    some = [row for row in rows if row["target_bytes"] is None and row["target_runs"]]
    more = "".join(f"; {row['title']} only in {row['target_runs']} of {row['seeds']} runs" for row in some)
    more += f"; {_list([row['title'] for row in silent])} reached it without sending a byte" if silent else ""
    if not there:
        who = "no strategy that communicates" if silent else "no strategy"
        return f"{who.capitalize()} reached {loss} in all its runs{more}."
    first = _leaders(there, values, "target_bytes")
    if not first[0]["target_bytes"]:
        return f"Training starts at {loss} or below: train longer, or name a lower loss to reach."
    sent = {row["strategy"]: f"{readable_bytes(row['target_bytes'])} per node" for row in there}
    if len(first) > 1:
        who = _list([f"{row['title']} ({sent[row['strategy']]})" for row in first])
        text = f"{who} reached {loss} with the fewest bytes; which of them needs fewest is undecided"
        return f"{text}: their seeds don't separate them{more}."
    best = first[0]
    text, own = f"{best['title']}{_later(best)} reached {loss}", sent[best["strategy"]]
    if len(there) == 1:
        return f"{f'Only {text} in all its runs' if len(rows) > 1 else text}, with {own}{more}."
    base = next((row for row in there if name_of(row["strategy"]) == BASELINE and row is not best), None)
    than = ""
    if base is not None and best["target_bytes"]:
        than = f", 1/{base['target_bytes'] / best['target_bytes']:.3g} of DDP's"
    return f"{text} with the fewest bytes: {own}{than}{more}."


def _of_time(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]], loss: str, network: str) -> str:
    """Return the sentence on the least predicted time to the target loss."""
    there = [row for row in rows if row["target_s"] is not None]
    where = f"On the network {network}, " if network else "On the network, "
    first = _leaders(there, values, "target_s")
    took = {row["strategy"]: readable_seconds(row["target_s"]) for row in there}
    if len(first) > 1:
        who = _list([f"{row['title']} ({took[row['strategy']]})" for row in first])
        return f"{where}{who} reached it first; which of them is faster is undecided: their seeds don't separate them."
    best = first[0]
    others = sorted((row for row in there if row is not best), key=lambda row: row["target_s"])
    after = next((row for row in others if name_of(row["strategy"]) == BASELINE), others[0] if others else None)
    than = "" if after is None else f"; {after['title']} after {took[after['strategy']]}"
    who = "only " if after is None and len(rows) > 1 else ""
    first_of = "" if after is None else " first"
    return f"{where}{who}{best['title']}{_later(best)} reached it{first_of}, after {took[best['strategy']]}{than}."


def _of_loss(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the sentence on the lowest final validation loss."""
    first = _leaders(rows, values, "val_loss")
    ends = {row["strategy"]: spread_text(row, "val_loss", "{:.4f}") for row in rows}
    if len(first) > 1:
        who = _list([f"{row['title']} ({ends[row['strategy']]})" for row in first])
        return f"The lowest final loss is undecided between {who}: their seeds don't separate them."
    lowest = "the lowest validation loss," if len(rows) > 1 else "a validation loss of"
    return f"{first[0]['title']} ended with {lowest} {ends[first[0]['strategy']]}."


def _undecided(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, list[str]]:
    """Return the labels of the strategies that may have the lowest value of a measure, for measures with several."""
    found = {}
    for name in ("val_loss", *OF_TARGET):
        there = [row for row in rows if row.get(name) is not None and (name == "val_loss" or row["tx_bytes"])]
        first = _leaders(there, values, name) if any(row["seeds"] > 1 for row in there) else []
        if len(first) > 1:
            found[name] = [row["strategy"] for row in first]
    return found


def _leaders(rows: Sequence[Row], values: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> list[Row]:
    """Return the row with the lowest mean, then the rows that are not clearly higher."""
    best, *others = sorted(rows, key=lambda row: row[name])
    lowest = values[best["strategy"]][name]
    return [best, *(row for row in others if not are_apart(lowest, values[row["strategy"]][name]))]


def _later(row: Row) -> str:
    """Return the final loss as text, if a run ended above the target loss that it had reached."""
    return f" (which ended at {row['val_loss']:.4g})" if row["val_loss"] > row["target_loss"] else ""


def _list(names: Sequence[str]) -> str:
    """Return names as a list in a sentence.

    >>> _list(["a"]), _list(["a", "b"]), _list(list("abcde"))
    ('a', 'a and b', 'a, b, c and 2 more')
    """
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _evaluating_share(columns: Mapping[str, np.ndarray], before: Mapping[int, float]) -> float:
    """Return the share (0 to 1) of a run's seconds that evaluations took."""
    steps, ends = columns["step"].astype(int).tolist(), columns["wall_s"].tolist()
    spent = sum(end - before[step] for step, end in zip(steps, ends, strict=True) if step in before)
    return float((spent + ends[0] * (steps[0] == 0)) / ends[-1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else np.nan
