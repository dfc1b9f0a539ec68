"""What the page draws of a run beside its curves, cut down to what a screen shows: nodes over steps, timeline, grid."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.clock import TIMELINE
from exogym.compare.folder import Folder
from exogym.record.run_folder import read_object

MOST_NODES = 64
MOST_COLUMNS = 300  # steps of the picture of nodes
MOST_SPANS = 4000
SHARES = ("computing", "sending", "waiting", "down")
Row = dict[str, Any]


def nodes_of(records: Sequence[Row], events: Sequence[Row]) -> Row:
    """Return what each node did over steps, at most 300 columns of at most 64 nodes.

    steps, nodes; loss: a row for each node, null where it was absent; and where the run has a clock, share_steps and
    shares: by part, the share of a node's time since the column before.
    """
    rows = [row for row in records if type(row.get("node")) is int]
    ids = sorted({row["node"] for row in rows})
    steps = sorted({row["step"] for row in rows})
    shown, place = ids[:MOST_NODES], {step: k for k, step in enumerate(steps)}
    wide = min(len(steps), MOST_COLUMNS)
    loss: list[list[float | None]] = [[None] * wide for _ in shown]
    line = {node: k for k, node in enumerate(shown)}
    for row in rows:
        if row["node"] in line and _is_number(row.get("train_loss")):
            loss[line[row["node"]]][place[row["step"]] * wide // len(steps)] = float(f"{row['train_loss']:.4g}")
    columns = [steps[(k * len(steps) + wide - 1) // wide] for k in range(wide)]
    return {"steps": columns, "nodes": shown, "of": len(ids), "loss": loss} | _shares(events)


def _shares(events: Sequence[Row]) -> Row:
    told = [event for event in events if event.get("kind") == "clock" and _are_parts(event)]
    told = [told[k * len(told) // MOST_COLUMNS] for k in range(MOST_COLUMNS)] if len(told) > MOST_COLUMNS else told
    size = min((len(event["computing"]) for event in told), default=0)
    found: dict[str, list[list[float | None]]] = {part: [[] for _ in range(size)] for part in SHARES}
    steps, before = [], None
    for event in told:
        if before is not None:
            steps.append(event.get("step"))
            for node in range(size):
                spent = {part: event[part][node] - before[part][node] for part in SHARES}
                whole = sum(spent.values())
                for part in SHARES:
                    found[part][node].append(round(spent[part] / whole, 4) if whole > 0 else None)
        before = event
    return {"share_steps": steps, "shares": found if steps else {}}


def _are_parts(event: Row) -> bool:
    parts = [event.get(part) for part in SHARES]
    return all(isinstance(part, list) and all(map(_is_number, part)) for part in parts)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def timeline_of(path: Path) -> Row:
    """Return the first spans of a run's timeline, as many as can be told apart; {} where it keeps none.

    nodes; spans: [node, kind, start_s, end_s, name]; until_s of whole_s; shares of the whole run.
    """
    found = read_object(path / TIMELINE)
    spans = found.get("spans")
    if not isinstance(spans, list):
        return {}
    spans = [span for span in spans if isinstance(span, list) and len(span) == 5 and all(map(_is_number, span[2:4]))]
    nodes = sorted({span[0] for span in spans if type(span[0]) is int})[:MOST_NODES]
    spans = sorted((span for span in spans if span[0] in nodes), key=lambda span: span[2])
    whole_s = max((span[3] for span in spans), default=0.0)
    until_s = spans[MOST_SPANS][2] if len(spans) > MOST_SPANS else whole_s
    shown = [[*span[:3], min(span[3], until_s), span[4]] for span in spans[:MOST_SPANS]]
    shares = {kind: x for kind, x in (found.get("shares") or {}).items() if _is_number(x)}
    return {"nodes": nodes, "spans": shown, "until_s": until_s, "whole_s": whole_s, "shares": shares}


def grid_of(path: Path, listed: Mapping[str, Row]) -> Row:
    """Return the cells of a sweep: their options, and mean and spread of the validation loss over seeds so far.

    Args:
        listed: name, PARENT/CHILD, to the line of each run.
    """
    sweep = read_object(path / "sweep.json")
    cells, axes = sweep.get("cells"), sweep.get("axes")
    if not isinstance(cells, dict) or not isinstance(axes, dict):
        return {}
    folder, found = Folder(path, cells), []
    seeds = _seeds(sweep)
    for label, options in cells.items():
        runs = [listed.get(f"{path.name}/{folder.child(label, seed).name}") for seed in seeds]
        ended = [run["loss"] for run in runs if run is not None and run["state"] == "done" and _is_number(run["loss"])]
        found.append({
            "cell": label, "options": options, "seeds": len(ended), "wanted": len(seeds),
            "loss": statistics.fmean(ended) if ended else None,
            "loss_std": statistics.stdev(ended) if len(ended) > 1 else None,
        })  # fmt: skip
    values = {name: given for name, given in axes.items() if isinstance(given, list)}
    return {"axes": values, "cells": found, "best": sweep.get("best"), "is_grid": values.keys() == axes.keys()}


def _seeds(sweep: Row) -> list[int]:
    seeds = (sweep.get("arguments") or {}).get("seeds")
    return list(range(seeds)) if type(seeds) is int else list(seeds or [])
