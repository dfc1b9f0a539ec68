"""What `advise` returns: a row of predictions for each strategy, the recommended strategy, and the assumptions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError
from exogym.network import readable_seconds
from exogym.strategy.registry import STRATEGIES
from exogym.study.advise.answer import TRIAL_NODES, TRIAL_PARAMETERS, Answer, trial
from exogym.study.advise.costs import Cost, Run, said
from exogym.study.advise.plans import plan_of


@dataclass(frozen=True)
class Row:
    """A prediction for one strategy.

    Attributes:
        seconds_per_step: seconds of the fleet's step. If nodes wait for each other, this is at least the time of the
            slowest node's step.
        tx_bytes_per_step: bytes that a node sends per step, mean over nodes.
        line_bytes_per_step: bytes that the busiest node's line sends and receives per step of the fleet. Sampled
            clients count as equally busy.
        waiting_share: share of a node's time in which it waits for other nodes or for bytes, mean over nodes.
        utilisation: share of a node's time in which it computes; `waiting_share` and `utilisation` sum to 1.
        speedup: the fleet's examples per second, divided by the fastest node's examples per second alone.
        goodput: share of time in which nodes compute results that no failure destroys, or None if no failures were
            given.
        speedup_range: lowest and highest likely speed-up, if the times of collectives differ by the factors `SPREAD`.
        couples_every: steps until the whole model has been exchanged once and has arrived.
        algorithms: the algorithm of each collective.
        meets_target: whether the slowest node computes for at least the target share of its time, by default 0.9.
        can_train: False for a `Plan` that is only a formula.
        simulated_steps, final_loss: steps of a simulation and its final validation loss, or None without a simulation.
        target_s: predicted seconds until the simulation reached the target loss, or None if it did not reach this loss.
        ddp_steps: the believed number of steps to a loss, as a multiple of DDP's steps
            (`exogym.study.advise.beliefs`).
        cost: time, bytes and money until the loss that DDP reaches in the given steps (after a simulation, until the
            target loss), or None if the simulation did not reach the target loss.
    """

    strategy: str
    seconds_per_step: float
    tx_bytes_per_step: float
    waiting_share: float
    utilisation: float
    speedup: float
    couples_every: float
    algorithms: tuple[str, ...]
    meets_target: bool
    can_train: bool = True
    simulated_steps: int | None = None
    final_loss: float | None = None
    target_s: float | None = None
    speedup_range: tuple[float, float] | None = None
    goodput: float | None = None
    line_bytes_per_step: float = 0.0
    cost: Cost | None = None
    ddp_steps: float | None = None


@dataclass(frozen=True)
class Advice:
    """Predictions, best first, and their assumptions. `print` shows the answer in three lines, then a table.

    Attributes:
        rows: sorted by seconds per step. After a simulation, strategies that reached the target loss come first, by
            time. Strategies that cannot be trained come last, sorted among themselves.
        recommended: the best strategy that can be trained, or None if no strategy can be trained. By formula, it is the
            strategy with the smallest expected logarithm of its time over the best time, at most 10, to DDP's loss
            (`exogym.study.advise.beliefs`).
            With a target utilization, it is the strategy that meets the target and exchanges the whole model most
            often, and among several such strategies the strategy with the most bytes; if no strategy meets the target,
            it is the fastest strategy. After a simulation, it is the strategy that reached the target loss first, or
            with the lowest loss if no strategy reached the target loss. With limits (`Run`), only strategies that keep
            all limits count: the fastest if money is limited, the cheapest if time is limited and prices are given. If
            no strategy keeps all limits, it is the strategy that exceeds its limits least.
        because: the reason for the recommendation.
        target_loss: the simulation's target loss.
        num_nodes: N, the number of nodes.
        run: the run's length, prices and limits.
        command: a command that runs the recommended strategy. None means a trial on a small task.
        left_out: strategies without a formula, with the reason.
    """

    rows: list[Row]
    recommended: Row | None
    because: str
    assumptions: list[str]
    target_loss: float | None = None
    num_nodes: int = 1
    run: Run = field(default_factory=Run)
    command: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        """The command to run, the time that the run takes, and the reason."""
        best = self.recommended
        if best is None:
            return Answer("nothing", "no time", self.because)
        return Answer(self.command or self._trial(best), self._takes(best), self.because)

    def _trial(self, best: Row) -> str:
        kind = STRATEGIES.get(best.strategy.partition(":")[0])
        if kind is None or not kind.__module__.startswith("exogym."):
            return f"{best.strategy}, your own strategy"
        nodes = min(self.num_nodes, TRIAL_NODES)
        try:
            plan_of(best.strategy, TRIAL_PARAMETERS, nodes)
        except ArgumentError:  # the strategy needs more nodes, for a quorum
            nodes = self.num_nodes
        return trial(best.strategy, nodes, best.couples_every)

    def _takes(self, best: Row) -> str:
        if best.cost is not None:
            text = said(best.cost, self.run, best.seconds_per_step)
        else:
            text = f"{readable_seconds(best.seconds_per_step)} a step"
        if self.target_loss is not None and best.target_s is not None:
            text += f", until the validation loss is {self.target_loss:.4g}"
        if self.num_nodes == 1:
            return text
        text += f"; {best.speedup:.3g} times as fast as the fastest node alone"
        low, high = (f"{speedup:.3g}" for speedup in best.speedup_range or (best.speedup, best.speedup))
        text += "" if low == high else f", likely {low} to {high}"
        multiple = best.ddp_steps or 0.0
        if self.target_loss is None and best.cost is not None and best.speedup < multiple:
            alone_s = best.cost.steps / multiple * best.seconds_per_step * best.speedup
            fewer = ", because it needs fewer steps" if multiple > 1 else ""
            text += f"; that node alone probably takes only {readable_seconds(alone_s)}{fewer}"
        return text

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table's headers and rows as text."""
        simulated = self.target_loss is not None
        headers = ["strategy", "time/step", "sent/node/step", "waiting/time", "computing/time", "speed-up/one node"]
        believes = not simulated and any(row.ddp_steps is not None for row in self.rows)
        headers += ["steps/DDP's"] if believes else []
        failing = any(row.goodput is not None for row in self.rows)
        headers += ["goodput"] if failing else []
        headers += ["steps/node", "validation loss", f"time to loss {self.target_loss:.4g}"] if simulated else []
        headers += self._run_headers()
        rows = []
        for row in self.rows:
            mark = " *" if row is self.recommended else "" if row.can_train else " †"
            cells = [row.strategy + mark, readable_seconds(row.seconds_per_step), readable_bytes(row.tx_bytes_per_step)]
            cells += [f"{row.waiting_share:.1%}", f"{row.utilisation:.1%}", f"{row.speedup:.3g}×"]
            cells += [f"{row.ddp_steps:.2g}×"] if believes and row.ddp_steps is not None else []
            cells += [f"{row.goodput:.1%}"] if row.goodput is not None else []
            if simulated:
                steps = "" if row.simulated_steps is None else str(row.simulated_steps)
                loss = "" if row.final_loss is None else f"{row.final_loss:.4f}"
                reached = "" if row.target_s is None else readable_seconds(row.target_s)
                cells += [steps, loss, reached or ("not reached" if steps else "")]
            rows.append([*cells, *self._run_cells(row.cost), ", ".join(row.algorithms)])
        return [*headers, "by"], rows

    def _run_headers(self) -> list[str]:
        run = self.run
        if not run.is_asked:
            return []
        headers = ["run", *(["money"] if run.prices else [])]
        headers += [f"line/{run.limits.period}"] if run.limits.cap_bytes else []
        headers += ["going on", *(["money"] if run.prices else [])] if run.spot else []
        return headers + (["over the limits"] if run.within else [])

    def _run_cells(self, cost: Cost | None) -> list[str]:
        run = self.run
        if not run.is_asked or cost is None:
            return [""] * len(self._run_headers())
        cells = [readable_seconds(cost.seconds), *([str(cost.money)] if run.prices else [])]
        cells += [readable_bytes(cost.line_bytes)] if run.limits.cap_bytes else []
        if cost.going_on_s is not None:
            cells += [readable_seconds(cost.going_on_s), *([str(cost.going_on_money)] if run.prices else [])]
        return cells + ([", ".join(cost.over) or "no"] if run.within else [])

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
        """Return the advice as a dict for JSON: plain numbers, text, lists, and None for unknown values."""
        rows = [asdict(row) | {"algorithms": list(row.algorithms)} for row in self.rows]
        for row, plain in zip(self.rows, rows, strict=True):
            plain["speedup_range"] = plain["speedup_range"] and list(plain["speedup_range"])
            plain["couples_every"] = plain["couples_every"] if math.isfinite(plain["couples_every"]) else None
            plain["cost"] = row.cost and row.cost.to_dict()
        name = None if self.recommended is None else self.recommended.strategy
        costs = {row.strategy: row.cost for row in self.rows if row.cost is not None}
        return {
            "run": self.answer.run, "takes": self.answer.takes, "because": self.because, "recommended": name,
            "target_loss": self.target_loss, "rows": rows, "left_out": self.left_out, "assumptions": self.assumptions,
        } | ({"spot": {text: cost.of_spot() for text, cost in costs.items()}} if self.run.spot else {})  # fmt: skip
