"""A claim: cells to train, and a verdict that depends only on their results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from exogym.errors import ArgumentError

if TYPE_CHECKING:
    from exogym.strategy.strategy import Strategy
    from exogym.study.compare.entries import ComparisonSetting

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """A strategy to train on a task. The task gives the values of attributes that are not set.

    Attributes:
        strategy: text as for `exogym compare`, also "single"; or a function of the setting that returns a strategy.
        task: the name of a task in `research.reproduce.problems` or `exogym.tasks`.
        partition: how to divide the data among nodes, as on the command line.
        speeds: the nodes' speeds on the virtual clock, for methods in which no node waits.
        replicas: whether to evaluate also every node alone and the mean of all nodes.
    """

    strategy: str | Callable[[ComparisonSetting], Strategy]
    task: str = "characters"
    nodes: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    partition: str | None = None
    speeds: tuple[float, ...] | None = None
    replicas: bool = False

    @property
    def says(self) -> str:
        """The strategy as text."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy.__name__

    def describe(self) -> dict[str, Any]:
        """Return the attributes that this cell sets, as a dict for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"strategy": self.says}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def key(self) -> str:
        """A short hash of the cell's attributes. The cell's results are stored under this key."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Run:
    """A cell's results for one seed.

    Attributes:
        last: dict of the measures after the last step: val_loss (infinite if training failed), val_accuracy, a node's
            payload_bytes and tx_bytes, time_s, wall_s.
        curves: dict from measure to its values at the evaluations; "step" has the evaluations' steps.
        error: the reason why training failed, or None if it did not fail.
    """

    seed: int
    last: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    error: str | None = None


Found = Mapping[str, Sequence[Run]]  # label of a cell to its runs, one per seed


@dataclass(frozen=True)
class Seen:
    """A check's result: a sentence with its numbers, and whether the claim holds (None if the seeds disagree)."""

    says: str
    holds: bool | None


Check = Callable[[Found], Seen]


class WithCells(Protocol):
    """Something with cells to train: a claim, or a part of the benchmark."""

    @property
    def cells(self) -> Mapping[str, Cell]: ...


class Verdict(StrEnum):
    """A claim's verdict, from its checks."""

    YES = "confirmed"
    PART = "partly confirmed"
    NO = "not confirmed"
    UNCLEAR = "the seeds disagree"

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> Verdict:
        """Return a claim's verdict from the results of its checks.

        The verdict is YES if all checks hold, and PART if only some checks hold. It is UNCLEAR if no check holds, but
        the seeds disagree in at least one check. It is NO if all checks fail.

        >>> Verdict.of([Seen("", True), Seen("", None)]), Verdict.of([Seen("", False), Seen("", None)])
        (<Verdict.PART: 'partly confirmed'>, <Verdict.UNCLEAR: 'the seeds disagree'>)
        """
        holds = [each.holds for each in seen]
        if all(holds):
            return cls.YES
        if any(holds):
            return cls.PART
        return cls.UNCLEAR if None in holds else cls.NO


@dataclass(frozen=True)
class Claim:
    """A paper's claim.

    Attributes:
        name, title: the claim's name on the command line, and a line about the claim.
        paper: the paper's authors, title and number.
        found: the paper's finding and setting.
        asks: our question in a sentence, and the differences from the paper's setting.
        cells: dict from label to `Cell`.
        checks: pure functions of the results. The claim is confirmed if all checks hold.
        picture: "dots" (each cell's last loss), "curves" (losses against steps) or "spread" (the nodes' distance and
            the learning rate).
        notes: what we tried if the claim failed, and which checks we changed after the training.
    """

    name: str
    title: str
    paper: str
    found: str
    asks: str
    cells: Mapping[str, Cell]
    checks: Sequence[Check]
    picture: str = "dots"
    notes: str = ""

    def seen(self, found: Found) -> list[Seen]:
        """Return each check's result."""
        missing = self.cells.keys() - found.keys()
        if missing:
            raise ArgumentError(f"{self.name}: no results of {', '.join(sorted(missing))}: train these cells first")
        return [check(found) for check in self.checks]

    def verdict(self, found: Found) -> Verdict:
        return Verdict.of(self.seen(found))


def run_of(plain: Mapping[str, Any]) -> Run:
    """Return a run from its JSON, where null means a number that is not finite."""
    last = {name: math.inf if value is None else value for name, value in plain["last"].items()}
    curves = {name: [math.nan if x is None else x for x in line] for name, line in plain["curves"].items()}
    return Run(plain["seed"], last, curves, plain.get("error"))


def plain_of(run: Run) -> dict[str, Any]:
    """Return a run as a dict for JSON, with numbers rounded to six digits."""

    def short(x: float) -> float | None:
        return float(f"{x:.6g}") if math.isfinite(x) else None

    found: dict[str, Any] = {"seed": run.seed, "last": {name: short(x) for name, x in run.last.items()}}
    found["curves"] = {name: [short(x) for x in line] for name, line in run.curves.items()}
    return found if run.error is None else found | {"error": run.error}
