"""The result of `advise`: a row of predictions per strategy, the recommended strategy, and the assumptions."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from exogym.errors import ArgumentError
from exogym.network import readable_seconds
from exogym.progress import readable_bytes
from exogym.strategy.registry import STRATEGIES
from exogym.study.advise.plans import plan_of

TRIAL_STEPS, TRIAL_NODES, TRIAL_PARAMETERS = 400, 100, 2410  # least steps, most nodes, size of a trial on digits


@dataclass(frozen=True)
class Answer:
    """The answer of `exogym advise`. `print` shows three lines.

    Attributes:
        run: a command to paste into a terminal.
        takes: the time of the run.
        because: the reason in one sentence.

    >>> print(Answer("exogym compare --strategies ddp", "2 min for 1000 steps", "it is the only strategy"))
    run: exogym compare --strategies ddp
    takes: 2 min for 1000 steps
    because it is the only strategy
    """

    run: str
    takes: str
    because: str

    def __str__(self) -> str:
        return f"run: {self.run}\ntakes: {self.takes}\nbecause {self.because}"


@dataclass(frozen=True)
class Row:
    """A prediction for one strategy.

    Attributes:
        seconds_per_step: seconds of the fleet's step, at least the slowest node's step time if nodes wait for each
            other.
        tx_bytes_per_step: bytes that a node sends per step, averaged over nodes.
        waiting_share: share of a node's time spent waiting for other nodes or for bytes, averaged over nodes.
        utilisation: share of a node's time spent computing; `waiting_share` and `utilisation` sum to 1.
        speedup: the fleet's examples per second, divided by the fastest node's examples per second alone.
        speedup_range: lowest and highest likely speed-up if collectives' times are off by the factors `SPREAD`.
        couples_every: steps until the whole model has been exchanged and received once.
        algorithms: the algorithm of each collective.
        keeps_up: whether the slowest node computes for at least 90 % of its time.
        can_train: False for a `Plan` that is only a formula.
        ddp_steps: the estimated number of steps to a loss, as a multiple of DDP's (`exogym.study.advise.beliefs`).
        source: the source of `ddp_steps` in words (`exogym.study.advise.published`); "" for DDP.
        steps, seconds: each node's steps, and the seconds, until the loss that DDP reaches in the given steps.
    """

    strategy: str
    seconds_per_step: float
    tx_bytes_per_step: float
    waiting_share: float
    utilisation: float
    speedup: float
    couples_every: float
    algorithms: tuple[str, ...]
    keeps_up: bool
    can_train: bool = True
    speedup_range: tuple[float, float] | None = None
    ddp_steps: float = math.nan
    source: str = ""
    steps: int = 0

    @property
    def seconds(self) -> float:
        """Seconds until the loss that DDP reaches in the given steps."""
        return self.steps * self.seconds_per_step


@dataclass(frozen=True)
class Advice:
    """Predictions, best first, and their assumptions. `print` shows the answer in three lines, then a table.

    Attributes:
        rows: sorted by the seconds to DDP's loss, with strategies that can't be trained last.
        recommended: the best strategy that can be trained, or None. It minimizes the expected logarithm of the ratio of
            its time to DDP's loss to the best strategy's, where the ratio is at most 10
            (`exogym.study.advise.beliefs`).
        because: the reason for the recommendation.
        num_nodes: N, the number of nodes.
        command: a command that runs the recommended strategy, or None for a trial on a small task.
        left_out: strategies without a formula, and the reasons.
    """

    rows: list[Row]
    recommended: Row | None
    because: str
    assumptions: list[str]
    num_nodes: int = 1
    command: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """The command to run, the run's time, and the reason."""
        best = self.recommended
        if best is None:
            return Answer("nothing", "no time", self.because)
        return Answer(self.command or self._trial(best), self._takes(best), self.because)

    def _trial(self, best: Row) -> str:
        """Return a command that tries the strategy on a small task, because ExoGym doesn't have the user's model."""
        kind = STRATEGIES.get(best.strategy.partition(":")[0])
        if kind is None or not kind.__module__.startswith("exogym."):
            return f"{best.strategy}, your own strategy"
        nodes = min(self.num_nodes, TRIAL_NODES)
        try:
            plan_of(best.strategy, TRIAL_PARAMETERS, nodes)
        except ArgumentError:  # the strategy needs more nodes, for a quorum
            nodes = self.num_nodes
        rounds = 2 * math.ceil(best.couples_every) if math.isfinite(best.couples_every) else 0
        return command(
            "compare", dataset="digits", strategies=beside_ddp(best.strategy), nodes=nodes,
            steps=max(TRIAL_STEPS, rounds), seeds=1,
        )  # fmt: skip

    def _takes(self, best: Row) -> str:
        each = readable_seconds(best.seconds_per_step)
        text = f"{readable_seconds(best.seconds)} to DDP's loss, for {best.steps} steps of {each}"
        if self.num_nodes == 1:
            return text
        low, high = best.speedup_range or (best.speedup, best.speedup)
        sooner, least, most = (speedup / best.ddp_steps for speedup in (best.speedup, low, high))
        alone = readable_seconds(best.seconds * sooner)
        if sooner < 1:
            text += f"; the fastest node alone reaches the loss sooner, probably in {alone}"
        else:
            likely = "" if f"{least:.3g}" == f"{most:.3g}" else f" (likely {least:.3g} to {most:.3g})"
            text += f"; {sooner:.3g}{likely} times as soon as the fastest node alone, which probably takes {alone}"
        if best.ddp_steps != 1:
            text += (
                f": the nodes compute {best.speedup:.3g} times as fast, and need {best.ddp_steps:.2g} times DDP's steps"
            )
        return text

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's headers and rows as text."""
        headers = ["strategy", "time to loss", "steps/DDP's", "time/step", "sent/node/step", "waiting", "computing"]
        rows = []
        for row in self.rows:
            mark = " *" if row is self.recommended else "" if row.can_train else " †"
            cells = [row.strategy + mark, readable_seconds(row.seconds), f"{row.ddp_steps:.2g}×"]
            cells += [readable_seconds(row.seconds_per_step), readable_bytes(row.tx_bytes_per_step)]
            cells += [f"{row.waiting_share:.1%}", f"{row.utilisation:.1%}", f"{row.speedup:.3g}×"]
            rows.append([*cells, ", ".join(row.algorithms)])
        return [*headers, "speed-up/one node", "by"], rows

    def notes(self) -> list[str]:
        """Return the lines below the table: each assumption."""
        lines = ["assumed:", *(f"- {a}" for a in self.assumptions)]
        if any(not row.can_train for row in self.rows):
            lines.append("- † not ranked: only a formula, which cannot be trained here")
        lines += [f"- not ranked: {reason}" for reason in self.left_out.values()]
        if self.recommended is not None and self.command is None and self.answer.run.startswith("exogym "):
            lines.append("- the command tries the strategy on a small task; --dataset MODULE:FUNCTION names your task")
        return lines

    def __str__(self) -> str:
        headers, rows = self.table()
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in (headers, *rows)
        ]
        return "\n".join([str(self.answer), "", *lines, "", *self.notes()])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as a dict of JSON values, with None for unknown values."""
        rows = [asdict(row) | {"seconds": row.seconds, "algorithms": list(row.algorithms)} for row in self.rows]
        for plain in rows:
            plain["speedup_range"] = plain["speedup_range"] and list(plain["speedup_range"])
            plain["couples_every"] = plain["couples_every"] if math.isfinite(plain["couples_every"]) else None
        name = None if self.recommended is None else self.recommended.strategy
        return {
            "run": self.answer.run, "takes": self.answer.takes, "because": self.because, "recommended": name,
            "rows": rows, "left_out": self.left_out, "assumptions": self.assumptions,
        }  # fmt: skip


def command(*words: str, **options: Any) -> str:
    """Return an `exogym` command. An option that is None is left out.

    >>> command("compare", dataset="digits", strategies="ddp,diloco:H=50", nodes=4, data=None)
    'exogym compare --dataset digits --strategies ddp,diloco:H=50 --nodes 4'
    """
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None]
    return " ".join(["exogym", *map(shlex.quote, words), *(f"{name} {shlex.quote(str(x))}" for name, x in given)])


def beside_ddp(strategy: str) -> str:
    """Return the strategies of a comparison between `strategy` and DDP.

    >>> beside_ddp("diloco:H=50"), beside_ddp("ddp")
    ('ddp,diloco:H=50', 'ddp')
    """
    return strategy if strategy.partition(":")[0] == "ddp" else f"ddp,{strategy}"
