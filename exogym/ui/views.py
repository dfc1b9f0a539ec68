"""Make the limited amounts of data for the page's pictures: nodes over steps, a run's timeline, a sweep's cells."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exogym.clock import TIMELINE
from exogym.core.record.schema import is_finite
from exogym.errors import ArgumentError
from exogym.record import read_file
from exogym.study import runs
from exogym.study.compare.colors import looks_of
from exogym.study.compare.folder import Folder
from exogym.ui.repeat import seeds_of

MOST_NODES = 64
MOST_IN_BAND = 1 << 16  # nodes whose losses the band holds
QUANTILES, WORST = {"low": 0.1, "median": 0.5, "high": 0.9}, 10
MOST_COLUMNS = 300  # columns of the nodes' picture
MOST_HELD = 2 * MOST_COLUMNS
MOST_SPANS = 4000
EVENT_S = 5e-6  # events round the parts of a clock to microseconds
MOST_RUNS = 100_000  # in a grid
SHARES = ("computing", "sending", "waiting")
Row = dict[str, Any]


def nodes_of(records: Iterable[Row], events: Iterable[Row]) -> Row:
    """Return each node's losses and shares of time over steps, in at most 300 columns for at most 64 nodes.

    Returns:
        steps, nodes, of: the first step of each column, the shown nodes, and the number of all nodes.
        loss: for each shown node, its loss in each column, or None where the node has no loss.
        share_steps, shares: for each of "computing", "sending" and "waiting", each node's share of the predicted time
            since the previous step in `share_steps`.
        away: for each shown node, its absences as [first column, column after the last]. Events tell of absences: a
            sampled client without a loss is not absent.
        stood: lists [node, predicted seconds]. At this time the node's clock stood still while other nodes computed.
        band, worst: with more than 64 nodes, quantiles of all losses in each column, and the highest newest losses.
    """
    picture = NodesPicture()
    for row in records:
        picture.take_record(row)
    for event in events:
        picture.take_event(event)
    return picture.found()


class NodesPicture:
    """Collects the result of `nodes_of` from records and events, one by one. Its memory does not grow with the steps.

    The object holds at most twice as many columns as are shown. When the object is full, it merges every two
    neighboring columns into one column with the later values.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []  # first step of each column
        self._each, self._filled = 1, 0  # steps per column; steps in the last column so far
        self._step = -1  # the newest
        self._loss: dict[int, np.ndarray] = {}  # losses of the first nodes
        self._begun = 0  # columns begun so far
        self._last = -1  # the last of these nodes
        self._band = np.full((len(QUANTILES), MOST_HELD), np.nan)  # quantiles over nodes in each column
        self._newest: dict[int, tuple[int, float]] = {}  # node to the column and loss of its newest record
        self._seen, self._of = bytearray(), 0  # one bit per known node; number of known nodes
        self._told: list[tuple[Any, np.ndarray]] = []  # step and array (parts, nodes) of every n-th clock event
        self._every, self._clocks = 1, 0
        self._away: dict[int, list[list[float]]] = {}  # node to the steps of the events of its leaving and its return

    @property
    def size_bytes(self) -> int:
        """Approximate memory of this object in bytes."""
        return (
            8 * MOST_HELD * (len(self._loss) + 8)
            + 200 * (len(self._newest) + sum(map(len, list(self._away.values()))))
            + len(self._seen)
            + sum(200 + told.nbytes for _, told in self._told)
        )

    def take_record(self, row: Row) -> None:
        node = row.get("node")
        if type(node) is not int or type(row.get("step")) is not int:
            return
        self._count(node)
        self._reach(row["step"])
        if is_finite(row.get("train_loss")) and (node in self._newest or len(self._newest) < MOST_IN_BAND):
            self._newest[node] = self._begun, row["train_loss"]
        if node not in self._loss:
            if len(self._loss) == MOST_NODES and node > self._last:
                return
            self._loss[node] = np.full(MOST_HELD, np.nan)
            if len(self._loss) > MOST_NODES:
                del self._loss[self._last]
            self._last = max(self._loss)
        if is_finite(row.get("train_loss")):
            self._loss[node][len(self._steps) - 1] = row["train_loss"]

    def _count(self, node: int) -> None:
        byte, bit = node >> 3, 1 << (node & 7)
        if byte >= len(self._seen):
            self._seen.extend(bytes(byte + 1 - len(self._seen)))
        if not self._seen[byte] & bit:
            self._seen[byte] |= bit
            self._of += 1

    def _reach(self, step: int) -> None:
        """Begin a column for `step`, if needed."""
        if step <= self._step:
            return
        self._step = step
        if self._steps and self._filled < self._each:
            self._filled += 1
            return
        self._settle()
        if len(self._steps) == MOST_HELD:
            self._steps, self._each = self._steps[::2], 2 * self._each
            pairs = self._band.reshape(len(QUANTILES), -1, 2)
            halved = np.where(np.isnan(pairs[:, :, 1]), pairs[:, :, 0], pairs[:, :, 1])
            self._band = np.concatenate([halved, np.full_like(halved, np.nan)], 1)
            for node, losses in self._loss.items():
                early, late = losses[::2], losses[1::2]
                self._loss[node] = np.full(MOST_HELD, np.nan)
                self._loss[node][: MOST_HELD // 2] = np.where(np.isnan(late), early, late)
        self._steps.append(step)
        self._begun += 1
        self._filled = 1

    def _settle(self) -> None:
        """Take the quantiles of the newest column, if there are more nodes than rows."""
        losses = [loss for begun, loss in self._newest.values() if begun == self._begun]
        if self._of > MOST_NODES and losses:
            self._band[:, len(self._steps) - 1] = np.quantile(losses, [*QUANTILES.values()])

    def take_event(self, event: Row) -> None:
        if event.get("kind") != "clock":
            self._take_absence(event)
            return
        parts = [event.get(part) for part in SHARES]
        if not all(isinstance(part, list) and all(map(is_finite, part)) for part in parts):
            return
        self._clocks += 1
        if (self._clocks - 1) % self._every:
            return
        size = min(MOST_NODES, *(len(part) for part in parts if part is not None))
        self._told.append((event.get("step"), np.array([(part or [])[:size] for part in parts], float)))
        if len(self._told) == MOST_HELD:
            self._told, self._every = self._told[::2], 2 * self._every

    def _take_absence(self, event: Row) -> None:
        kind, step, nodes = (event.get(name) for name in ("kind", "step", "nodes"))
        if kind == "start":  # all nodes of a resumed run are back
            nodes = list(self._away)
        if kind not in ("away", "back", "start") or type(step) is not int or not isinstance(nodes, list):
            return
        for node in nodes:
            if type(node) is not int or (node not in self._away and len(self._away) == MOST_IN_BAND):
                continue
            told = self._away.setdefault(node, [])
            is_open = bool(told) and told[-1][1] == math.inf
            if kind == "away" and not is_open:
                told.append([step, math.inf])
            elif kind != "away" and is_open:
                told[-1][1] = step
            if len(told) == MOST_HELD:
                self._away[node] = [[a[0], b[1]] for a, b in zip(told[::2], told[1::2], strict=True)]

    def _absences(self, node: int, losses: list[float | None], columns: list[int]) -> list[list[int]]:
        """Return the columns without a loss during an absence that events tell of."""
        found, ends = [], [*columns[1:], math.inf]
        for is_gone, group in itertools.groupby(range(len(losses)), lambda k: losses[k] is None):
            first, *rest = group
            last = rest[-1] if rest else first
            if is_gone and any(left < ends[last] and columns[first] < back for left, back in self._away.get(node, ())):
                found.append([first, last + 1])
        return found

    def found(self) -> Row:
        shown, many = sorted(self._loss), len(self._steps)
        wide = min(many, MOST_COLUMNS)
        loss = [_in_columns(self._loss[node][:many], wide) for node in shown]
        columns = [self._steps[(k * many + wide - 1) // wide] for k in range(wide)]
        away = [self._absences(node, row, columns) for node, row in zip(shown, loss, strict=True)]
        own = {"steps": columns, "nodes": shown, "of": self._of, "loss": loss, "away": away}
        return own | self._crowd(wide) | self._shares()

    def _crowd(self, wide: int) -> Row:
        """Return the band and the worst nodes; {} if each node has a row."""
        if self._of <= MOST_NODES:
            return {}
        self._settle()
        shown = self._band[:, : len(self._steps)]
        band = {name: _in_columns(values, wide) for name, values in zip(QUANTILES, shown, strict=True)}
        worst = sorted(self._newest.items(), key=lambda item: -item[1][1])[:WORST]
        return {"band": band, "worst": [{"node": node, "loss": loss} for node, (_, loss) in worst]}

    def _shares(self) -> Row:
        told, many = self._told, len(self._told)
        if many > MOST_COLUMNS:
            told = [told[k * many // MOST_COLUMNS] for k in range(MOST_COLUMNS)]
        size = min((clock.shape[1] for _, clock in told), default=0)
        found: dict[str, list[list[float | None]]] = {part: [[] for _ in range(size)] for part in SHARES}
        stood: dict[tuple[int, float], None] = {}
        for (_, before), (_, now) in itertools.pairwise(told):
            with np.errstate(all="ignore"):
                spent = now[:, :size] - before[:, :size]
                whole = spent.sum(0)
                if (spent[SHARES.index("computing")] > 0).any():
                    still = [node for node in np.flatnonzero(~spent.any(0)).tolist() if node in self._away]
                    stood |= {(node, float(before[:, node].sum())): None for node in still}
                shares = np.where(whole > 0, spent / whole, np.nan)
            for part, of_nodes in zip(SHARES, shares.tolist(), strict=True):
                for node, share in enumerate(of_nodes):
                    found[part][node].append(round(share, 4) if math.isfinite(share) else None)
        steps = [step for step, _ in told[1:]]
        own: Row = {"stood": [list(pair) for pair in stood]} if stood else {}
        return {"share_steps": steps, "shares": found if steps else {}} | own


def _in_columns(values: np.ndarray, wide: int) -> list[float | None]:
    """Return the values in `wide` columns: each column's last value, or None if it has only NaN."""
    found: list[float | None] = [None] * wide
    for k, value in enumerate(values.tolist()):
        if not math.isnan(value):
            found[k * wide // len(values)] = float(f"{value:.4g}")
    return found


def timeline_of(
    path: Path, from_s: float = 0.0, to_s: float = math.inf, stood: Iterable[tuple[int, float]] = ()
) -> Row:
    """Return the first 4,000 spans of a run's timeline in a window of time, or {} if the run has no timeline.

    `spans` are lists [node, kind, start_s, end_s, name], cut at the window. A wait that begins where a node's clock
    `stood` (see `nodes_of`) has the kind "absent". `shares` are of the run's whole time, `whole_s`.
    """
    found = read_file(path / TIMELINE)
    spans = found.get("spans")
    if not isinstance(spans, list):
        return {}
    spans = [span for span in spans if isinstance(span, list) and len(span) == 5 and all(map(is_finite, span[2:4]))]
    nodes = sorted({span[0] for span in spans if type(span[0]) is int and span[0] >= 0})[:MOST_NODES]
    spans = sorted((span for span in spans if type(span[0]) is int and span[0] in nodes), key=lambda span: span[2])
    away: dict[int, list[float]] = {}
    for node, second in stood:
        away.setdefault(node, []).append(second)
    for times in away.values():
        times.sort()
    for k, (node, kind, start_s, end_s, name) in enumerate(spans):
        times = away.get(node, []) if kind == "wait" else []
        near = bisect.bisect_left(times, start_s - EVENT_S)
        if near < len(times) and times[near] <= start_s + EVENT_S:
            spans[k] = [node, "absent", start_s, end_s, name]
    whole_s = max((span[3] for span in spans), default=0.0)
    from_s, to_s = max(0.0, from_s), min(to_s, whole_s)
    spans = [span for span in spans if span[3] > from_s and span[2] <= to_s]
    until_s = spans[MOST_SPANS][2] if len(spans) > MOST_SPANS else to_s
    shown = [[*span[:2], max(span[2], from_s), min(span[3], until_s), span[4]] for span in spans[:MOST_SPANS]]
    shares = {kind: x for kind, x in (found.get("shares") or {}).items() if is_finite(x)}
    return {
        "nodes": nodes, "spans": shown, "from_s": from_s, "until_s": until_s, "whole_s": whole_s, "shares": shares,
    }  # fmt: skip


def grid_of(path: Path, listed: Mapping[str, Row]) -> Row:
    """Return a sweep's cells: each cell's options, and the mean and spread of its validation loss over finished seeds.

    `listed` is {name of a run, as PARENT/CHILD: the run's entry in the list of runs}.
    """
    sweep = read_file(path / "sweep.json")
    cells, axes = sweep.get("cells"), sweep.get("axes")
    if cells is None or axes is None:
        return {}
    folder, found = Folder(path, cells), []
    seeds = seeds_of(sweep.get("arguments") or {})
    if len(cells) * len(seeds) > MOST_RUNS:
        raise ArgumentError(
            f"sweep.json has {len(cells)} cells with {len(seeds)} seeds each: the page shows at most {MOST_RUNS} runs"
        )
    for label, options in cells.items():
        inside = [listed.get(f"{path.name}/{folder.child(label, seed).name}") for seed in seeds]
        ended = [run["loss"] for run in inside if run is not None and run["state"] == "done" and is_finite(run["loss"])]
        sent = [run["tx_bytes"] for run in inside if run is not None and is_finite(run["tx_bytes"])]
        found.append({
            "cell": label, "options": options, "seeds": len(ended), "wanted": len(seeds),
            "loss": statistics.fmean(ended) if ended else None,
            "loss_std": statistics.stdev(ended) if len(ended) > 1 else None,
            "tx_bytes": statistics.fmean(sent) if len(sent) == len(seeds) else None,
        })  # fmt: skip
    values = {name: given for name, given in axes.items() if isinstance(given, list)}
    return {"axes": values, "cells": found, "best": sweep.get("best"), "is_grid": values.keys() == axes.keys()}


def verdict_of(path: Path) -> Row:
    """Return the results so far of the comparison or sweep in the folder `path`. Return {} for any other folder.

    Beside the summary's fields: `members` is {name of a run: label of its strategy or cell}, and `colors` is {label:
    [color, color on a dark page, lengths of dashes and gaps]}.
    """
    kind, about = runs.what_is(path)
    labels = about.get("cells" if kind == "sweep" else "strategies")
    if kind == "run" or not isinstance(labels, dict):
        return {}
    seeds = seeds_of(about.get("setting") or {}) or seeds_of(about.get("arguments") or {})
    if len(labels) * len(seeds) > MOST_RUNS:
        raise ArgumentError(
            f"{path.name} has {len(labels)} strategies with {len(seeds)} seeds each: the page shows at most "
            f"{MOST_RUNS} runs"
        )
    folder, found = Folder(path, labels), runs.summary(path)
    members = {f"{path.name}/{folder.child(label, seed).name}": label for label in labels for seed in seeds}
    losses = {str(row.get("cell", row["strategy"])): row["val_loss"] for row in found.rows} if found else {}
    looks = looks_of(labels, losses if kind == "sweep" else None)
    colors = {label: [look.color, look.dark, look.dash] for label, look in looks.items()}
    if found is None:
        return {"rows": [], "verdict": "", "undecided": {}, "members": members, "colors": colors}
    return {"rows": found.rows, "verdict": found.verdict, "undecided": found.undecided,
            "target_loss": found.target_loss, "target": found.target, "members": members, "colors": colors,
            "network": (about.get("timing") or {}).get("title")}  # fmt: skip
