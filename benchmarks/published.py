"""Predict times that others measured and published, from their own inputs, and compare them with the measurements.

    python benchmarks/published.py measured.csv more.csv --figure published.png
    python benchmarks/published.py benchmarks/published_cells.csv

The second file has cells of many sources; `published_cells.py` knows their inputs. Otherwise a file has a row for each
cell: nodes that average all parameters after every H steps, over links of one rate. Columns:
algorithm, H, nodes, parameters, bytes_per_element, requested_bps, measured_bps, compute_ms_per_step,
blocked_ms_per_sync (median), syncs and steps (during the measurement), `compute_utilisation`. Rows with the same
algorithm, size, nodes and requested rate belong to one link.

Three predictions of the time blocked per synchronization, each with more inputs than the one before:

- **rate**: a ring all-reduce on links of the measured rate, without latency.
- **probe**: `Network.measured` with one probe, the link's row with H = 1. That row is then no prediction.
- **cold**: a cell with a single synchronization measured its run's first one, which sets connections up. The extra
  time comes from another link: the cold cell minus its probe on the fastest other link. It is a fixed time, so it is
  clearest beside a short transfer. No cell is predicted from itself.

The utilization is steps x step / (steps x step + syncs x blocked). No constant is fitted: the rate, the step and the
probes come from the file, and the ring's 2 (n - 1)/n is arithmetic. A rate alone leaves out some costs (not headers,
because the measured rate counts payload). The probe includes them, whatever their cause.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import published_cells

from exogym.errors import ArgumentError, DataError
from exogym.network import Network, readable_bandwidth

WITHIN = 0.10
NUMBERS = {
    "H": int, "nodes": int, "parameters": float, "bytes_per_element": float, "requested_bps": float,
    "measured_bps": float, "compute_ms_per_step": float, "blocked_ms_per_sync": float, "syncs": int, "steps": int,
    "compute_utilisation": float,
}  # fmt: skip
WAYS = ("rate", "probe", "cold")


@dataclass(frozen=True)
class Cell:
    """A file's row."""

    algorithm: str
    H: int
    nodes: int
    parameters: float
    bytes_per_element: float
    requested_bps: float
    measured_bps: float
    compute_ms_per_step: float
    blocked_ms_per_sync: float
    syncs: int
    steps: int
    compute_utilisation: float

    @property
    def fleet(self) -> tuple[Any, ...]:
        """The values that all links of a table share."""
        return self.algorithm, self.nodes, self.payload_bytes

    @property
    def payload_bytes(self) -> float:
        return self.parameters * self.bytes_per_element

    @property
    def blocked_s(self) -> float:
        return self.blocked_ms_per_sync / 1e3

    @property
    def is_cold(self) -> bool:
        return self.syncs == 1

    def utilisation(self, blocked_s: float) -> float:
        """Return the share of time in which a node computes, if a synchronization blocks it for `blocked_s`."""
        computing_s = self.steps * self.compute_ms_per_step / 1e3
        return computing_s / (computing_s + self.syncs * blocked_s)


@dataclass(frozen=True)
class Prediction:
    """A cell, and its predicted seconds blocked per synchronization for each method that has inputs."""

    cell: Cell
    is_probe: bool
    blocked_s: dict[str, float]

    def off(self, way: str) -> float:
        """Return predicted / measured - 1 for the blocked time."""
        return self.blocked_s[way] / self.cell.blocked_s - 1

    def utilisation_off(self, way: str) -> float:
        """Return predicted / measured - 1 for the utilization."""
        return self.cell.utilisation(self.blocked_s[way]) / self.cell.compute_utilisation - 1


def read(path: Path) -> list[Cell]:
    """Return the cells of a file.

    Raises:
        DataError: it cannot be read, lacks a column, or has a value that is no number over 0.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    lacking = {"algorithm", *NUMBERS} - set(rows[0] if rows else ())
    if lacking:
        raise DataError(f"{path} has no column {', '.join(sorted(lacking))}: see benchmarks/published.py --help")
    cells = []
    for line, row in enumerate(rows, 2):
        values: dict[str, Any] = {"algorithm": row["algorithm"]}
        for name, kind in NUMBERS.items():
            try:
                values[name] = kind(row[name])
            except (TypeError, ValueError):
                values[name] = -1
            if not 0 < values[name] < float("inf"):
                raise DataError(f"{path}, line {line}: {name}={row[name]!r} must be a number over 0")
        cells.append(Cell(**values))
    return cells


def predict(cells: Sequence[Cell]) -> list[Prediction]:
    """Return each cell's predictions from the rate, from its link's probe, and with a cold probe."""
    probes = {(cell.fleet, cell.requested_bps): cell for cell in cells if cell.H == 1}
    out = []
    for cell in cells:
        payload, nodes = cell.payload_bytes, cell.nodes
        found = {"rate": Network(cell.measured_bps).cost("all_reduce", payload, nodes, "ring").seconds}
        probe = probes.get((cell.fleet, cell.requested_bps))
        if probe is not None:
            warm = {payload: probe.blocked_s}
            found["probe"] = Network.measured(warm, num_nodes=nodes).cost("all_reduce", payload, nodes).seconds
            if not cell.is_cold:
                found["cold"] = found["probe"]
            elif (late_s := _set_up_s(cell, cells, probes)) is not None:
                network = Network.measured(warm, num_nodes=nodes, first=probe.blocked_s + late_s)
                found["cold"] = found["probe"] + network.set_up_s("all_reduce")
        out.append(Prediction(cell, cell is probe, found))
    return out


def _set_up_s(cell: Cell, cells: Sequence[Cell], probes: dict[Any, Cell]) -> float | None:
    """Return the extra time of a first synchronization on the fastest other link, or None."""
    others = [
        other
        for other in cells
        if other.is_cold and other.H > 1 and other.fleet == cell.fleet and other.requested_bps != cell.requested_bps
    ]
    for other in sorted(others, key=lambda other: -other.measured_bps):
        warm = probes.get((other.fleet, other.requested_bps))
        if warm is not None:
            return max(0.0, other.blocked_s - warm.blocked_s)
    return None


def counts(predictions: Sequence[Prediction]) -> dict[str, tuple[int, int]]:
    """Return for each predicted quantity how many cells are within a tenth, and the number of cells."""
    out = {}
    for way in WAYS:
        held = [p for p in predictions if way in p.blocked_s and (way == "rate" or not p.is_probe)]
        for what, off in (("blocked", Prediction.off), ("utilisation", Prediction.utilisation_off)):
            out[f"{what} by {way}"] = (sum(abs(off(p, way)) <= WITHIN for p in held), len(held))
    return out


def table(predictions: Sequence[Prediction]) -> str:
    """Return the rows in Markdown: seconds blocked per synchronization, and the utilization."""
    head = ["link", "H", "blocked, s", *(f"by {way}" for way in WAYS), "utilisation", "by rate", "by cold"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for p in predictions:
        cell = p.cell
        row = [readable_bandwidth(cell.requested_bps), str(cell.H), f"{cell.blocked_s:.3f}"]
        for way in WAYS:
            known = way in p.blocked_s
            row.append(_cell(p.off(way)) if known and (way == "rate" or not p.is_probe) else "probe" if known else "")
        row.append(f"{cell.compute_utilisation:.4f}")
        row += [_cell(p.utilisation_off(way)) if way in p.blocked_s else "" for way in ("rate", "cold")]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _cell(off: float) -> str:
    text = f"{off:+.1%}".replace("%", " %")
    return text if abs(off) <= WITHIN else f"**{text}**"


def draw(tables: dict[str, list[Prediction]], path: str) -> None:
    """Draw predicted over measured blocked time, with a panel for each table."""
    from matplotlib.figure import Figure

    figure = Figure((4.8 * len(tables), 3.6), layout="constrained")
    styles = {"rate": ("x", "tab:gray", "rate alone"), "probe": ("o", "tab:blue", "one probe per link")}
    styles["cold"] = ("^", "tab:orange", "and a cold probe")
    for place, (name, predictions) in enumerate(tables.items(), 1):
        axes = figure.add_subplot(1, len(tables), place)
        axes.axhspan(1 - WITHIN, 1 + WITHIN, color="tab:green", alpha=0.12)
        axes.axhline(1, color="tab:green", lw=0.8)
        for shift, (way, (marker, colour, label)) in enumerate(styles.items()):
            shown = [p for p in predictions if way in p.blocked_s and (way == "rate" or not p.is_probe)]
            if way == "cold":
                shown = [p for p in shown if p.cell.is_cold]
            x = [p.cell.requested_bps / 1e6 * 1.12 ** (shift - 1) for p in shown]
            axes.plot(x, [1 + p.off(way) for p in shown], marker, color=colour, label=label, ms=5, fillstyle="none")
        axes.set(xscale="log", xlabel="link, Mbit/s", ylabel="predicted / measured time blocked", title=name)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path, help="CSV files of what was measured")
    parser.add_argument("--figure", help="file for a picture, such as published.png")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--csv", type=Path, help="file for the cells of many sources with their predictions")
    given = parser.parse_args()
    if "cell" in given.data[0].read_text(encoding="utf-8").partition("\n")[0].split(","):
        found = [cell for path in given.data for cell in published_cells.read(path)]
        print(published_cells.table(found))
        if given.csv:
            published_cells.write(found, given.csv)
        return
    tables: dict[str, list[Prediction]] = {}
    try:
        for path in given.data:
            cells = read(path)
            for fleet in dict.fromkeys(cell.fleet for cell in cells):
                own = [cell for cell in cells if cell.fleet == fleet]
                name = f"{fleet[0]}, {fleet[1]} nodes, {fleet[2] / 1e6:.4g} MB"
                tables[name if name not in tables else f"{name} ({path.name})"] = predict(own)
    except (ArgumentError, DataError) as error:
        raise SystemExit(f"published: {error}") from None
    for name, predictions in tables.items():
        print(f"{name}; off is predicted over measured, less 1\n\n{table(predictions)}\n")
        for what, (good, all_) in counts(predictions).items():
            print(f"{what}: {good} of {all_} within {WITHIN:.0%}")
        print()
    if given.figure:
        draw(tables, given.figure)
    if given.json:
        rows = {name: [asdict(p) for p in predictions] for name, predictions in tables.items()}
        Path(given.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
