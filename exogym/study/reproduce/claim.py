"""What a claim is: cells to train, and a verdict that is a pure function of what came out of them."""

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
    from exogym.study.compare.entries import Setting

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """One thing to train: a strategy on a task. What is None is the task's.

    Attributes:
        strategy: as `exogym compare` takes it, "single" too; or a function of the setting that makes one.
        task: a name of `exogym.study.reproduce.problems`.
        partition: who gets what, as on the command line.
        speeds: of the nodes, on the virtual clock: for methods in which no node waits.
        replicas: also evaluate every node, and the mean of all nodes, at each evaluation.
    """

    strategy: str | Callable[[Setting], Strategy]
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
        """Return it as JSON, without what is the task's."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"strategy": self.says}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def key(self) -> str:
        """A name for it, by which results are kept."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Run:
    """What came out of a cell from one seed.

    Attributes:
        last: measures after the last step: val_loss (infinite where training failed), val_accuracy, payload_bytes and
            tx_bytes of a node, wall_s.
        curves: "step", and measures at these steps.
        error: why training failed.
    """

    seed: int
    last: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    error: str | None = None


Found = Mapping[str, Sequence[Run]]  # label of a cell to its runs, one per seed


@dataclass(frozen=True)
class Seen:
    """What a check saw: a sentence with its numbers, and whether it is as claimed (None: the seeds disagree)."""

    says: str
    holds: bool | None


Check = Callable[[Found], Seen]


class WithCells(Protocol):
    """What asks for cells to be trained: a claim, or a part of the benchmark."""

    @property
    def cells(self) -> Mapping[str, Cell]: ...


class Verdict(StrEnum):
    """Of a claim, from its checks."""

    YES = "confirmed"
    PART = "partly confirmed"
    NO = "not confirmed"
    UNCLEAR = "the seeds disagree"

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> Verdict:
        """Return the verdict: all checks hold, some, none; or none does and the seeds disagree about some.

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
    """A claim of a paper.

    Attributes:
        name, title: short, as on the command line; and in a line.
        paper: where it stands.
        found: what the paper found, in its setting.
        asks: what is asked here, in a sentence, and what differs from the paper's setting.
        cells: label to what is trained.
        checks: pure functions of the results; the claim comes out if all hold.
        picture: "dots" (the last loss of each cell), "curves" (losses against steps) or "spread" (how far nodes are
            apart, and the learning rate).
        notes: what was tried where it did not come out; how the rule was changed after the training, if it was.
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
        """Return what each check sees in the results."""
        missing = self.cells.keys() - found.keys()
        if missing:
            raise ArgumentError(f"{self.name}: no results of {', '.join(sorted(missing))}: train it first")
        return [check(found) for check in self.checks]

    def verdict(self, found: Found) -> Verdict:
        return Verdict.of(self.seen(found))


def run_of(plain: Mapping[str, Any]) -> Run:
    """Return a run from JSON, in which a number that is not finite is null."""
    last = {name: math.inf if value is None else value for name, value in plain["last"].items()}
    curves = {name: [math.nan if x is None else x for x in line] for name, line in plain["curves"].items()}
    return Run(plain["seed"], last, curves, plain.get("error"))


def plain_of(run: Run) -> dict[str, Any]:
    """Return a run as JSON, numbers to six digits."""

    def short(x: float) -> float | None:
        return float(f"{x:.6g}") if math.isfinite(x) else None

    found: dict[str, Any] = {"seed": run.seed, "last": {name: short(x) for name, x in run.last.items()}}
    found["curves"] = {name: [short(x) for x in line] for name, line in run.curves.items()}
    return found if run.error is None else found | {"error": run.error}
