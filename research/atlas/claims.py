"""Central claims of papers at three model sizes, with tuned rates, and a verdict with four values.

The cells and checks come from `research.reproduce`. But the options that their methods declare for tuning
are free, unless the claim is about them. Each cell is a study of the atlas: trials on validation data choose its
options. Then its loss is measured on test data with three other seeds, at two inner rates that all cells share. A trial
has one seed and would choose rates at which every third run fails to learn. P are the parameters of a model.

The effect of a claim in a seed is log(loss of the worse cell / loss of the better cell), where the claim says which
cell is better. Its slope is the least-squares slope of the effect over log P. Intervals are Student's t over the three
seeds, at 95 %. The seeds share their settings and test data, so an interval says nothing about those.

The rules for a verdict at an inner rate:

    comes out                  all checks hold at all sizes
    comes out more with size   not so, but all checks hold at the largest size, and the slope's interval is above 0
    is contradicted            a check fails at the largest size, the effect's interval there is below what the claim
                               allows, and the slope's interval is not above 0; if a run failed, the effect is below
                               it in every seed
    does not at these sizes    otherwise

If the two inner rates disagree, a claim does not come out at these sizes; but it comes out more with size if it does at
one rate, and comes out at the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from exogym.strategy.registry import STRATEGIES
from research.atlas.intervals import interval
from research.atlas.table import RATES, SEEDS, Table, run_of
from research.atlas.training import Study
from research.atlas.tuning import INNER_RATES, declared
from research.reproduce.catalogue import CLAIMS
from research.reproduce.checks import late_mean
from research.reproduce.claim import Cell, Claim, Found, Run, Seen

SIZES = {"small": "/4", "medium": "/2", "full": ""}  # a name to what the task's name ends in
TRIALS = 4  # of a cell, on the page of the documentation
LONG = 2000  # a claim with so many steps in a cell is tested only at the low inner rate
APART = 0.1  # if a cell's losses differ by more between seeds, some of its runs hardly learn
TINY = {"tiny": "/8"}  # one size more, for the gap over sizes (`research.atlas.gaps`)


@dataclass(frozen=True)
class Central:
    """A claim of `research.reproduce` that is tested with tuned rates at several sizes.

    Attributes:
        name: the claim's name on the command line.
        better, worse: labels of the two cells whose losses make the effect.
        kept: options that the claim is about, so they are not tuned.
        also: dict from a cell's label to an option that its text lacks, such as "outer_momentum=0.9".
        allowed: how much higher the loss of `better` may be, as a share, so that the claim still holds.
        of_worse: the loss of `worse` that counts. If it is not "val_loss", the claim compares losses of the same run.
            Then the effect is of their means late in training, as in the claim's check.
    """

    name: str
    better: str
    worse: str
    kept: tuple[str, ...] = ()
    allowed: float = 0.0
    of_worse: str = "val_loss"
    also: Mapping[str, str] = field(default_factory=dict)

    @property
    def claim(self) -> Claim:
        return CLAIMS[self.name]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows that decide: both inner rates, or only the low one if the claim's runs are long."""
        return RATES[:1] if any((cell.steps or 0) >= LONG for cell in self.claim.cells.values()) else RATES


# R7 and R8 are about momentum with stale gradients, and the paper's momentum is 0.9.
MOMENTUM = dict.fromkeys(("synchronous", "naive", "discounted", "delayed Nesterov, dynamic"), "outer_momentum=0.9")
CONTRIBUTORS = {"SparseLoCo": "aggregation=contributors"}  # as in the published code
CENTRAL: dict[str, Central] = {  # the claims with tuned rates, by name
    each.name: each
    for each in (
        Central("R1", "DiLoCo", "one node"),
        Central("R2", "N=2", "N=8"),
        Central("R3", "H=10", "H=100"),
        Central("R4", "DiLoCo", "FedAvg"),
        Central("R5", "streaming, 4 bits", "DiLoCo", allowed=0.005),
        Central("R6", "N=2, eager", "N=2, naive delay"),
        Central("R7", "delayed Nesterov, dynamic", "naive", also=MOMENTUM),
        Central("R8", "naive", "discounted", allowed=0.01, also=MOMENTUM),
        Central("R11", "streaming", "streaming", of_worse="node_val_loss"),
        Central("R13", "SparseLoCo", "DiLoCo, 0.7", also=CONTRIBUTORS),
        Central("momentum", "H=64, momentum 0.9", "H=64, momentum 0.0", ("outer_momentum",)),
        Central("scaffold", "SCAFFOLD", "FedAvg"),
        Central("sparse-bytes", "SparseLoCo", "DiLoCo, 0.7", allowed=0.03, also=CONTRIBUTORS),
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
        if label in central.also:
            sized = replace(sized, strategy=f"{sized.says}:{central.also[label]}")
        where = [sized.task, *(f"{name}={value}" for name, value in sized.describe().items() if name in SHOWN)]
        rates = INNER_RATES["sgd" if "inner_optim=sgd" in sized.says else "adamw"]
        found[label] = Study(", ".join(where), sized.says, sized, rates[: len(central.kinds)])
    return found


SHOWN = ("nodes", "steps", "batch_size", "partition", "speeds")


class Outcome(StrEnum):
    """The verdict on a claim over all sizes."""

    YES = "comes out"
    MORE = "comes out more with size"
    NO = "does not come out at these sizes"
    CONTRADICTED = "is contradicted"


@dataclass(frozen=True)
class AtSize:
    """A claim at a size: P, the checks' results, and each seed's effect.

    A seed's effect is infinite if one of its two runs failed, and NaN if both failed.
    """

    parameters: int
    seen: Sequence[Seen]
    effects: Sequence[float]

    @property
    def holds(self) -> bool:
        return all(each.holds for each in self.seen)

    @property
    def effect(self) -> float:
        """The mean effect over the seeds, or NaN if a run failed."""
        return statistics.fmean(self.effects) if all(map(math.isfinite, self.effects)) else math.nan

    def is_below(self, limit: float) -> bool:
        """Return whether the effect's interval is below `limit`. If a run failed: whether every seed's effect is."""
        if math.isnan(self.effect):
            return all(effect < limit for effect in self.effects)
        return interval(self.effects)[2] < limit


@dataclass(frozen=True)
class Judged:
    """A claim over all sizes at an inner rate, smallest first. `low` and `high` are the ends of the slope's interval.

    They and the slope are NaN if a run failed.
    """

    central: Central
    sizes: Mapping[str, AtSize]
    slope: float
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        largest = list(self.sizes.values())[-1]
        if all(at.holds for at in self.sizes.values()):
            return Outcome.YES
        if largest.holds and self.low > 0:
            return Outcome.MORE
        if not largest.holds and largest.is_below(-math.log1p(self.central.allowed)) and not self.low > 0:
            return Outcome.CONTRADICTED
        return Outcome.NO


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict. `at` is a dict from the kind of rows, such as "low rate", to the results at this rate."""

    central: Central
    at: Mapping[str, Judged]

    @property
    def outcome(self) -> Outcome:
        found = {each.outcome for each in self.at.values()}
        if len(found) == 1:
            return found.pop()
        return Outcome.MORE if found == {Outcome.YES, Outcome.MORE} else Outcome.NO


def judged(central: Central, table: Table) -> Verdict | None:
    """Return the verdict on a claim, or None while the table lacks a run of it."""
    found = {kind: _judged_at(central, table, kind) for kind in central.kinds}
    whole = {kind: each for kind, each in found.items() if each is not None}
    return Verdict(central, whole) if len(whole) == len(found) else None


def _judged_at(central: Central, table: Table, kind: str) -> Judged | None:
    sizes: dict[str, AtSize] = {}
    for size in SIZES:
        studies = studies_at(central, size)
        found = {label: runs_of(table, study, kind) for label, study in studies.items()}
        if not all(found.values()):
            return None
        parameters = table.places[studies[central.better].place]["parameters"]
        sizes[size] = AtSize(parameters, central.claim.seen(found), _effects(central, found))
    logs = np.log([at.parameters for at in sizes.values()])
    effects = np.array([at.effects for at in sizes.values()])  # (sizes, seeds)
    if not np.isfinite(effects).all():
        return Judged(central, sizes, math.nan, math.nan, math.nan)
    slopes = [slope(logs, seed) for seed in effects.T]
    return Judged(central, sizes, *interval(slopes))


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


def disagree(losses: Sequence[float]) -> bool:
    """Return whether a cell's losses, one per seed, differ by more than `APART`. The page marks failed runs anyway.

    >>> disagree([2.3, 2.35, 2.38]), disagree([2.3, 2.3, 2.5]), disagree([2.3, math.inf, 2.3])
    (False, True, False)
    """
    return APART < max(losses) - min(losses) < math.inf


def runs_of(table: Table, study: Study, kind: str) -> list[Run]:
    """Return a study's runs of a kind, such as "low rate", or [] while a seed is missing.

    Runs with another inner rate than the study's do not count.
    """
    key = (study.place, study.method, kind)
    rows = [row for row in table.rows if (row["place"], row["method"], row["kind"]) == key]
    runs = [run_of(row) for row in rows if row["options"]["lr"] == study.rates[RATES.index(kind)]]
    return runs if [run.seed for run in runs] == [*SEEDS] else []
