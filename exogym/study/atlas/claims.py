"""Central claims of papers at three model sizes, with tuned rates, and a verdict with four values.

The cells and checks come from `exogym.study.reproduce`. But the options that their methods declare for tuning
are free, unless the claim is about them. Each cell is a study of the atlas: its rates are tuned on validation data, and
its loss is measured on test data with three other seeds. P are the parameters of a model.

The effect of a claim in a seed is log(loss of the worse cell / loss of the better cell), where the claim says which
cell is better. Its slope is the least-squares slope of the effect over log P.

These rules were fixed before any training:

    comes out                  all checks hold at all sizes
    comes out more with size   not so, but all checks hold at the largest size, and the slope is above 0 in every seed
    is contradicted            the effect is below 0 in every seed at the largest size, and the slope is not above 0 in
                               every seed
    does not at these sizes    otherwise
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from exogym.strategy.registry import STRATEGIES
from exogym.study.atlas.table import Table
from exogym.study.atlas.training import Study
from exogym.study.atlas.tuning import declared
from exogym.study.reproduce.catalogue import CLAIMS
from exogym.study.reproduce.checks import late_mean
from exogym.study.reproduce.claim import Cell, Claim, Found, Run, Seen

SIZES = {"small": "/4", "medium": "/2", "full": ""}  # a name to what the task's name ends in
TINY = {"tiny": "/8"}  # one size more, for the gap over sizes (`exogym.study.atlas.gaps`)


@dataclass(frozen=True)
class Central:
    """A claim of `exogym.study.reproduce` that is tested with tuned rates at several sizes.

    Attributes:
        name: the claim's name on the command line.
        better, worse: labels of the two cells whose losses make the effect.
        kept: options that the claim is about, so they are not tuned.
        of_worse: the loss of `worse` that counts. If it is not "val_loss", the claim compares losses of the same run.
            Then the effect is of their means late in training, as in the claim's check.
    """

    name: str
    better: str
    worse: str
    kept: tuple[str, ...] = ()
    of_worse: str = "val_loss"

    @property
    def claim(self) -> Claim:
        return CLAIMS[self.name]


CENTRAL: dict[str, Central] = {  # the claims with tuned rates, by name
    each.name: each
    for each in (
        Central("R1", "DiLoCo", "one node"),
        Central("R2", "N=2", "N=8"),
        Central("R3", "H=10", "H=100"),
        Central("R4", "DiLoCo", "FedAvg"),
        Central("R5", "streaming, 4 bits", "DiLoCo"),
        Central("R6", "N=2, eager", "N=2, naive delay"),
        Central("R7", "delayed Nesterov, dynamic", "naive"),
        Central("R8", "delayed Nesterov, dynamic", "discounted"),
        Central("R11", "streaming", "streaming", of_worse="node_val_loss"),
        Central("R13", "SparseLoCo", "DiLoCo, 0.7"),
        Central("momentum", "H=64, momentum 0.9", "H=64, momentum 0.0", ("outer_momentum",)),
        Central("scaffold", "SCAFFOLD", "FedAvg"),
        Central("sparse-bytes", "SparseLoCo", "DiLoCo, 0.7"),
    )
}


def freed(cell: Cell, kept: Sequence[str] = ()) -> Cell:
    """Return a cell without the options that are tuned: the inner rate, and those that its method declares.

    >>> freed(Cell("diloco:H=30:outer_lr=0.7")).strategy, freed(Cell("diloco:H=8:outer_lr=1"), ["outer_lr"]).strategy
    ('diloco:H=30', 'diloco:H=8:outer_lr=1')
    """
    name, *options = cell.says.split(":")
    free = {"lr", *(declared(STRATEGIES[name]) if name in STRATEGIES else ())} - {*kept}
    left = [option for option in options if option.partition("=")[0] not in free]
    return replace(cell, strategy=":".join([name, *left]), lr=None)


def studies_at(central: Central, size: str) -> dict[str, Study]:
    """Return a dict from label to the study of a claim's cell at a size."""
    found = {}
    for label, cell in central.claim.cells.items():
        sized = freed(replace(cell, task=cell.task + (SIZES | TINY)[size]), central.kept)
        where = [sized.task, *(f"{name}={value}" for name, value in sized.describe().items() if name in SHOWN)]
        found[label] = Study(", ".join(where), sized.says, sized)
    return found


SHOWN = ("nodes", "steps", "batch_size", "partition", "speeds")


class Outcome(StrEnum):
    """The verdict on a claim over all sizes."""

    YES = "comes out"
    MORE = "comes out more with size"
    NO = "does not come out at these sizes"
    CONTRADICTED = "is contradicted"
    UNTUNED = "is hardly tuned: no verdict"


@dataclass(frozen=True)
class AtSize:
    """A claim at a size: P, the checks' results, each seed's effect, and each cell's failed trials.

    A seed's effect is infinite if one of its two runs failed, and NaN if both failed.

    Attributes:
        hardly_tuned: dict from a cell's label to its failed trials and all its trials, if at least half of them failed.
    """

    parameters: int
    seen: Sequence[Seen]
    effects: Sequence[float]
    hardly_tuned: Mapping[str, tuple[int, int]]

    @property
    def holds(self) -> bool:
        return all(each.holds for each in self.seen)

    @property
    def effect(self) -> float:
        """The mean effect over the seeds, or NaN if a run failed."""
        return statistics.fmean(self.effects) if all(map(math.isfinite, self.effects)) else math.nan


@dataclass(frozen=True)
class Judged:
    """A claim over all sizes, smallest first. `low` and `high` are the lowest and the highest slope of a seed.

    The slopes are NaN if a run failed.
    """

    central: Central
    sizes: Mapping[str, AtSize]
    slope: float
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        largest = list(self.sizes.values())[-1]
        if largest.hardly_tuned:
            return Outcome.UNTUNED
        if all(at.holds for at in self.sizes.values()):
            return Outcome.YES
        if largest.holds and self.low > 0:
            return Outcome.MORE
        if not largest.holds and all(effect < 0 for effect in largest.effects) and not self.low > 0:
            return Outcome.CONTRADICTED
        return Outcome.NO


def judged(central: Central, table: Table) -> Judged | None:
    """Return the verdict on a claim, or None while the table lacks a run of it."""
    sizes: dict[str, AtSize] = {}
    for size in SIZES:
        studies = studies_at(central, size)
        found = {label: runs_of(table, study) for label, study in studies.items()}
        if not all(found.values()):
            return None
        parameters = table.places[studies[central.better].place]["parameters"]
        sizes[size] = AtSize(
            parameters, central.claim.seen(found), _effects(central, found), _hardly_tuned(studies, table)
        )
    logs = np.log([at.parameters for at in sizes.values()])
    effects = np.array([at.effects for at in sizes.values()])  # (sizes, seeds)
    if not np.isfinite(effects).all():
        return Judged(central, sizes, math.nan, math.nan, math.nan)
    slopes = [slope(logs, seed) for seed in effects.T]
    return Judged(central, sizes, statistics.fmean(slopes), min(slopes), max(slopes))


def _hardly_tuned(studies: Mapping[str, Study], table: Table) -> dict[str, tuple[int, int]]:
    found = {}
    for label, study in studies.items():
        key = (study.place, study.method, "trial")
        losses = [row["loss"] for row in table.rows if (row["place"], row["method"], row["kind"]) == key]
        if 2 * losses.count(None) >= len(losses) > 0:
            found[label] = losses.count(None), len(losses)
    return found


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the least-squares slope of y over x."""
    centered = x - x.mean()
    return float(centered @ y / (centered @ centered))


def _effects(central: Central, found: Found) -> list[float]:
    pairs = zip(found[central.worse], found[central.better], strict=True)
    if central.of_worse != "val_loss":
        return [
            math.log(_late(worse, central.of_worse)) - math.log(_late(better, "val_loss")) for worse, better in pairs
        ]
    return [math.log(worse.last["val_loss"]) - math.log(better.last["val_loss"]) for worse, better in pairs]


def _late(run: Run, loss: str) -> float:
    return late_mean(run.curves[loss]) if run.error is None else math.inf


def runs_of(table: Table, study: Study) -> list[Run]:
    """Return a study's runs with the chosen settings, as the checks want them."""
    runs = []
    for row in table.rows:
        if (row["place"], row["method"], row["kind"]) == (study.place, study.method, "tuned"):
            loss = math.inf if row["loss"] is None else row["loss"]
            sent = {name: math.nan if row[name] is None else row[name] for name in ("payload_bytes", "tx_bytes")}
            curves = {"step": row["steps"], "val_loss": row["losses"], **row.get("curves", {})}
            runs.append(Run(row["seed"], {"val_loss": loss, **sent}, curves, row.get("error")))
    return runs
