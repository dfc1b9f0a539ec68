"""The data of the benchmark's page as JSON: rows from training, and predictions for these rows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exogym.core.base.files import regular_text, write_json
from exogym.core.clock import DEVICES, seconds_of
from exogym.core.record.history import History
from exogym.core.record.run_folder import versions
from exogym.errors import ArgumentError
from exogym.strategy.strategy import Strategy
from exogym.study.advise import advise
from exogym.study.compare.run import heading_of, said_of
from exogym.study.compare.session import Session
from exogym.study.compare.summary import SINGLE, Track, summary_of
from exogym.study.tasks import size_of
from research.benchmark.parts import Part
from research.benchmark.speed import rates_of
from research.reproduce import Reproduction

RATES = ("examples_per_s", "examples_per_s_std")
NETWORKS = ("infiniband", "lan-10g", "lan-1g", "wifi", "home")
# The model in the tables of devices and of many nodes: GPT-2 small, with a node's step on 8 windows of 1,024 tokens.
# A token takes about six operations per parameter (Kaplan et al., arXiv:2001.08361).
PARAMETERS, TOKENS = 124e6, 8 * 1024
COUNTS, DEVICE, WIRE = (2, 4, 8, 16, 32, 64), "rtx4090", "lan-1g"
SHARED = ("ddp", "diloco:H=10", "diloco:H=30", "sparta:p_sparta=0.005", "demo")  # FedAvg sends the same as DiLoCo


class Results:
    """The results of all finished parts, stored in <page>.json beside the page.

    Raises:
        ArgumentError: the file exists but cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"parts": {}}
        if path.exists():
            try:
                self.found = json.loads(regular_text(path))
                self.parts  # noqa: B018
            except (OSError, ValueError, KeyError) as error:
                raise ArgumentError(f"{path} holds no results ({error}): correct or remove this file") from error

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """A dict from a part's name to its results."""
        return dict(self.found["parts"])

    def add(self, part: Part, work: Reproduction, command: str) -> str:
        """Add a part whose cells `work` has trained, and write the file. A part with the same name is replaced.

        The method `time` measures the part's throughput later, because other programs may have slowed the training.

        Returns:
            The part's finding, in a sentence.
        """
        sessions = {label: work.session(cell) for label, cell in part.cells.items()}
        said: dict[str, tuple[str, str]] = {}
        histories: dict[tuple[str, int], History] = {}
        tracks, wall_s = dict[tuple[str, int], Track](), 0.0
        for session in sessions.values():
            said |= said_of(session)
            histories |= session.histories
            tracks |= session.tracks
            wall_s += sum(outcome.wall_s for outcome in session.outcomes.values())
        summary = summary_of(said, work.seeds, tracks)
        rows = summary.rows
        for row in rows:
            row["curve"] = _curve([history for (label, _), history in histories.items() if label == row["strategy"]])
        first = next(iter(sessions.values()))
        setting = first.setting
        new = {
            "task": part.task, "nodes": part.nodes, "batch_size": setting.batch_size, "steps": setting.steps,
            "seeds": len(work.seeds), "parameters": int(size_of(first.task)), "heading": heading_of(first),
            "finding": summary.verdict, "device": str(first.place), "wall_s": wall_s, "rows": rows,
            "predicted": {},
        }  # fmt: skip
        before = self.parts.get(part.name, {})
        is_same = all(before.get(name) == new[name] for name in ("heading", "device"))
        known = {row["strategy"]: row for row in before["rows"]} if is_same else {}
        is_same = known.keys() == said.keys()
        for row in rows:
            row |= {name: known[row["strategy"]][name] if is_same else None for name in RATES}
        if is_same:
            new["predicted"] = before["predicted"]
        self._write(part, new, command)
        return str(new["finding"])

    def is_timed(self, part: Part) -> bool:
        """Return whether a part's throughput is known."""
        return any(row[RATES[0]] is not None for row in self.parts[part.name]["rows"])

    def time(self, part: Part, work: Reproduction, command: str) -> None:
        """Measure the throughput of a part that was added, predict its speed on networks, and write the file."""
        new = self.parts[part.name]
        for label, rates in rates_of(part, work).items():
            (row,) = (row for row in new["rows"] if row["strategy"] == label)
            spread = statistics.stdev(rates) if len(rates) > 1 else None
            row |= dict(zip(RATES, (statistics.fmean(rates), spread), strict=True))
        sessions = {label: work.session(cell) for label, cell in part.cells.items()}
        size = size_of(next(iter(sessions.values())).task)
        new["predicted"] = _predicted(sessions, new["rows"], size)
        self._write(part, new, command)

    def _write(self, part: Part, new: Mapping[str, Any], command: str) -> None:
        order = {**self.parts, part.name: short(dict(new))}
        self.found["parts"] = dict(sorted(order.items(), key=lambda item: (item[1]["task"], item[1]["nodes"])))
        self.found |= short({"command": command, "versions": versions(), "hardware": hardware(), "scaling": scaling()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.found)


def _curve(histories: Sequence[History]) -> dict[str, list[float]]:
    """Return the evaluations' steps, and the mean validation loss and its spread over runs."""
    if not histories:
        return {"steps": [], "val_loss": [], "val_loss_std": []}
    steps = histories[0].column("val_loss")[0]
    losses = np.stack([history.column("val_loss")[1] for history in histories])
    spread = losses.std(0, ddof=1) if len(histories) > 1 else np.zeros(len(steps))
    return {"steps": steps.tolist(), "val_loss": losses.mean(0).tolist(), "val_loss_std": spread.tolist()}


def _predicted(sessions: Mapping[str, Session], rows: Sequence[Mapping[str, Any]], size: float) -> dict[str, Any]:
    """Return label to network to the fleet's examples per second, with a node's step as measured here."""
    alone = next((row["examples_per_s"] for row in rows if row["strategy"] == SINGLE), None)
    if alone is None:
        return {}
    predicted: dict[str, Any] = {}
    for label, session in sessions.items():
        (entry,) = session.entries.values()
        nodes, batch_size = session.setting.nodes, session.setting.batch_size
        for network in NETWORKS:
            step_s = _step_s(entry.strategy, network, size, 1 if entry.alone else nodes, batch_size / alone)
            together = batch_size * (1 if entry.alone else nodes)
            predicted.setdefault(label, {})[network] = None if step_s is None else together / step_s
    return predicted


def _step_s(strategy: str | Strategy, network: str, size: float, nodes: int, alone_s: float) -> float | None:
    """Return the predicted seconds of the fleet's step; None for a strategy without a known formula."""
    try:
        asked: dict[str, Any] = {"parameters": size, "num_nodes": nodes, "network": network, "step_seconds": alone_s}
        return advise(**asked, strategies=[strategy]).rows[0].seconds_per_step
    except ArgumentError:
        return None


def _speedups(network: str, nodes: int, alone_s: float) -> list[float]:
    """Return the predicted speed-up over one node for each strategy in `SHARED`."""
    asked: dict[str, Any] = {"num_nodes": nodes, "network": network, "step_seconds": alone_s, "strategies": SHARED}
    rows = {row.strategy: row.speedup for row in advise(parameters=PARAMETERS, **asked).rows}
    return [rows[method] for method in SHARED]


def hardware() -> dict[str, Any]:
    """Return a dict from device to its seconds per step and the predicted speed-ups of four nodes on each network.

    >>> [round(x, 1) for x in hardware()["m2-max"]["wifi"]]  # DDP, DiLoCo with H = 10 and 30, SPARTA, DeMo
    [0.1, 0.9, 1.8, 3.3, 2.2]
    """
    alone_s = {name: seconds_of(6 * PARAMETERS * TOKENS, name) for name in DEVICES if name != "cpu-core"}
    return {
        name: {"step_s": step_s, **{network: _speedups(network, 4, step_s) for network in NETWORKS}}
        for name, step_s in alone_s.items()
    }


def scaling() -> dict[str, list[float]]:
    """Return a dict from number of nodes to the methods' predicted speed-ups, with device `DEVICE`, network `WIRE`."""
    alone_s = seconds_of(6 * PARAMETERS * TOKENS, DEVICE)
    return {str(nodes): _speedups(WIRE, nodes, alone_s) for nodes in COUNTS}


def short(value: Any) -> Any:
    """Return JSON with numbers of six digits. Numbers that are not finite become None."""
    if isinstance(value, dict):
        return {name: short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
