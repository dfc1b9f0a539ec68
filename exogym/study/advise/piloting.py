"""Advice that learns from a pilot: some methods train for a few steps on the user's own task.

`exogym.study.advise.halving` decides who trains and what this shows, `trainings` trains.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exogym.core.progress import notice
from exogym.errors import ArgumentError, check_number, checked
from exogym.network import Network, readable_seconds
from exogym.study.advise.advice import Advice, Row
from exogym.study.advise.beliefs import REFERENCE, Earlier, beliefs_of, known, known_skews, likeness
from exogym.study.advise.costs import Run
from exogym.study.advise.curves import LEAST, StepsTo, fit_curve
from exogym.study.advise.halving import Found, Z, halve
from exogym.study.advise.plans import period_of
from exogym.study.advise.prediction import DEFAULT_STRATEGIES, predicted
from exogym.study.advise.simulation import ROUNDS, plans_of, size_of, skew_of
from exogym.study.advise.trainings import Trainings, Watch
from exogym.study.compare import measured_step_s, split_strategies
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.folder import RUN, saved_in
from exogym.study.compare.forecast import check_timed
from exogym.study.compare.run import session_of
from exogym.study.tasks import Task

SHARE = 0.1
ENOUGH, MORE = 0.9, 0.05  # name the smallest pilot that is this sure, if it is this much surer


@dataclass(frozen=True)
class Piloted:
    """Advice after a pilot. `print` shows the answer, how sure it is, and a table of all candidates.

    Attributes:
        advice: the predictions by formula, with the pilot's recommendation.
        found: the pilot's measurements, and the beliefs about each candidate.
        steps: the planned run's steps.
        target: the target loss in words.
        ddp_steps: DDP's steps to the target.
        here_s: seconds that a step of all nodes takes on this machine.
        failed: dict from each method whose training failed to the reason.
    """

    advice: Advice
    found: Found
    steps: int
    target: str
    ddp_steps: StepsTo
    here_s: float
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """The answer in three lines, then its time's interval, and what a surer answer would cost."""
        return "\n".join([str(self.advice.answer), *self._lines()])

    def _lines(self) -> list[str]:
        choice, scale = self.found.choice, self.ddp_steps.median / self.steps
        lines = [f"time to {self.target}: unknown, because the pilot's curves end too far from this loss"]
        if math.isfinite(scale):
            low, high = (readable_seconds(scale * seconds) for seconds in (choice.low, choice.high))
            lines = [f"time to {self.target}: {low} to {high}, with a probability of 90 %, if it reaches this loss"]
        if choice.is_safe:
            lines.append(f"the likeliest best choice is {choice.likely}, with {choice.odds[choice.likely]:.0%}")
        cost = self.surer()
        if cost is not None:
            share, seconds = cost / self.steps, (cost - self.found.spent) * self.here_s
            lines.append(
                f"to be about {self.found.more[cost]:.0%} sure: --pilot {share:.2g}, which trains {cost} steps in all, "
                f"about {readable_seconds(seconds)} more here"
            )
        return lines

    def surer(self) -> int | None:
        """Return the steps of a larger pilot that is worth its steps, or None. It is shorter than the planned run."""
        more = {cost: chance for cost, chance in self.found.more.items() if round(cost / self.steps, 2) < 1}
        worth = {cost: chance for cost, chance in more.items() if chance > self.found.choice.sure + MORE}
        enough = [cost for cost, chance in worth.items() if chance >= ENOUGH]
        return min(enough, default=max(worth, key=lambda cost: worth[cost], default=None))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the headers and rows of a table of all candidates, the probably best first."""
        headers = [
            "strategy",
            "time/step",
            "pilot's steps",
            "loss there",
            "steps/DDP's",
            "time to target",
            "within 5 %",
        ]
        found, rows = self.found, []
        for row in sorted(self.advice.rows, key=lambda row: -found.choice.odds.get(row.strategy, -1.0)):
            name = row.strategy
            if name not in found.choice.odds:
                continue
            belief, curve = found.beliefs[name], found.curves.get(name)
            low, high = (math.exp(belief.mean + z * belief.sd) for z in (-Z, Z))
            to_s = row.seconds_per_step * self.ddp_steps.median * belief.steps
            rows.append([
                name + (" *" if name == found.choice.method else ""), readable_seconds(row.seconds_per_step),
                str(found.trained.get(name, 0)), "" if not curve else f"{curve[-1][1]:.4f}",
                f"{belief.steps:.2f}" + ("" if low == high else f" ({low:.2f} to {high:.2f})"),
                readable_seconds(to_s) if math.isfinite(to_s) else "unknown", f"{found.choice.odds[name]:.0%}",
            ])  # fmt: skip
        return headers, rows

    def __str__(self) -> str:
        headers, rows = self.table()
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        table = [
            "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in (headers, *rows)
        ]
        return "\n".join([self.answer, "", *table, "", *self.notes()])

    def notes(self) -> list[str]:
        """Return the lines below the table: each assumption."""
        return self.advice.notes()

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as a dict for JSON, with the pilot's measurements under "pilot"."""
        choice, found = self.found.choice, self.found

        def known(x: float) -> float | None:
            return x if math.isfinite(x) else None

        scale = self.ddp_steps.median / self.steps
        candidates = {
            name: {
                "probability": odds, "mean": found.beliefs[name].mean, "sd": found.beliefs[name].sd,
                "never": found.beliefs[name].never, "trained_steps": found.trained.get(name, 0),
                "curve": [[step, known(loss)] for step, loss in found.curves.get(name, [])],
            }
            for name, odds in choice.odds.items()
        }  # fmt: skip
        about = {
            "steps": found.spent, "planned_steps": self.steps, "sure": choice.sure, "is_safe": choice.is_safe,
            "likely": choice.likely, "seconds": known(scale * choice.seconds),
            "interval": [known(scale * choice.low), known(scale * choice.high)], "candidates": candidates,
            "hopeless": list(found.hopeless), "failed": dict(self.failed),
            "larger": [{"steps": steps, "sure": sure} for steps, sure in found.more.items()],
        }  # fmt: skip
        return self.advice.to_dict() | {"pilot": about}


@checked
def pilot(  # noqa: PLR0913
    task: Task,
    *,
    network: Network | str,
    share: float = SHARE,
    step_seconds: Any = None,
    speeds: Sequence[float] | None = None,
    num_nodes: int | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    strategies: str | Sequence[str] = DEFAULT_STRATEGIES,
    target_loss: float | None = None,
    earlier: Earlier | None = None,
    out: str | os.PathLike[str] | None = None,
    processes: int | str = 1,
    device: str = "auto",
    watch: Watch | None = None,
) -> Piloted:
    """Predict by formula, train some strategies for a few steps, and choose with a stated probability.

    The planned run has `max_steps` steps. By default its target is the loss that DDP reaches at the end. The pilot
    trains strategies under this plan, with its learning rates, on this machine, and stops early
    (`exogym.study.advise.halving` has the rules). Strategies that would communicate less than twice in the planned run
    are no candidates.

    Args:
        task: the task to train. The task also gives the number of parameters and, without step_seconds, a measured
            step.
        network, step_seconds, speeds: as in `exogym.compare.compare`.
        share: steps to train, summed over strategies, as a share of the planned run's steps. With 0, the pilot trains
            nothing.
        num_nodes, max_steps, batch_size: of the planned run, by default the task's numbers.
        strategies: texts as in `advise`. The task sets the options that a text does not give.
        target_loss: the loss to reach, instead of DDP's last loss.
        earlier: steps of earlier runs as in `exogym.study.advise.beliefs.beliefs_of`. By default, those that ExoGym
            ships, weighted by the task's label skew.
        out: folder for the pilot's runs. If a pilot was killed, the same call continues it there. A pilot with a larger
            share continues, too. By default the runs are not kept.
        processes, device: as in `LocalTrainer.fit`.
        watch: function that gets a strategy, a step and the validation loss after each evaluation.

    Raises:
        ArgumentError, DataError: an argument or the data are wrong; raised before training.

    >>> from exogym.tasks import load_task
    >>> found: Piloted = pilot(load_task("digits"), network="50Mbps,10ms", step_seconds="10ms", max_steps=400,
    ...     share=0.4, strategies="ddp,diloco:H=10,diloco:H=50")
    >>> found.advice.recommended.strategy, found.found.spent <= 160
    ('diloco:H=10', True)
    """
    check_number("share", share, least=0)
    check_timed(network, step_seconds, speeds, target_loss, timeline=False)
    asked = ComparisonOptions(
        task, list(split_strategies(strategies)), num_nodes=num_nodes, max_steps=max_steps, batch_size=batch_size,
        seeds=1, processes=processes, device=device, network=network, step_seconds=step_seconds, speeds=speeds,
    )  # fmt: skip
    session = session_of(asked, _measured_before(out))
    setting, forecast = session.setting, session.forecast
    assert forecast is not None
    plans = plans_of(task, setting, strategies)
    periods = {plan.name: period_of(plan) for plan in plans}
    rare = [name for name, period in periods.items() if period * ROUNDS > setting.steps]
    if len(rare) == len(plans):
        raise ArgumentError(
            f"none of strategies={','.join(rare)!r} communicates twice in max_steps={setting.steps}: name other "
            "strategies, or give more steps"
        )
    by_formula = predicted(
        parameters=size_of(task), num_nodes=setting.nodes, network=forecast.network,
        step_seconds=forecast.step_time, strategies=plans, algorithm="recorded",
    )  # fmt: skip
    seconds = {row.strategy: row.seconds_per_step for row in by_formula.rows if row.strategy not in rare}
    here_s = setting.nodes * (forecast.measured_step_s or measured_step_s(task, setting.batch_size, device))
    budget = int(share * setting.steps)
    if budget:
        notice(
            f"the pilot trains at most {budget} steps of {setting.nodes} nodes on this machine, about "
            f"{readable_seconds(budget * here_s)} without evaluations"
        )
    runs, skew = known() if earlier is None else earlier, skew_of(task, setting.nodes)
    alike = likeness(skew, known_skews()) if earlier is None else {}
    beliefs = beliefs_of({name: periods[name] for name in seconds}, setting.steps, runs, alike)
    with _folder(out) as folder, Trainings(session, folder, watch) as trainings:
        found = halve(
            lambda method, until: trainings.train(method, until, periods[method]), seconds, beliefs,
            steps=setting.steps, budget=budget, periods=periods,
        )  # fmt: skip
        failed = {method: trainings.why(method) for method in found.failed}
    end = float(setting.steps)
    to_target = StepsTo(end, end, end, 0.0)
    target = f"the loss that DDP reaches after {setting.steps} steps"
    if target_loss is not None:
        to_target, target = _ddp_steps(found, target_loss), f"a validation loss of {target_loss:.4g}"
    run = Run(setting.steps)
    rows = [_believed(row, found, to_target.median, run, setting.nodes) for row in by_formula.rows]
    best = next(row for row in rows if row.strategy == found.choice.method)
    told = [
        f"pilot: {found.spent} steps of {setting.nodes} nodes, seed 0; the other steps of the planned run may differ",
        *([f"never trained, too slow on this network: {', '.join(found.hopeless)}"] if found.hopeless else []),
        *(f"{method} failed in the pilot: {why}" for method, why in failed.items()),
        *([f"no candidates, fewer than {ROUNDS} rounds: {', '.join(rare)}"] if rare else []),
    ]
    advice = Advice(
        rows, best, _because(found), [*by_formula.notes, *told], num_nodes=setting.nodes, run=run,
        left_out=by_formula.left_out,
    )  # fmt: skip
    return Piloted(advice, found, setting.steps, target, to_target, here_s, failed)


def _believed(row: Row, found: Found, ddp_steps: float, run: Run, num_nodes: int) -> Row:
    """Return a row with the pilot's belief about its steps, and their cost. If they are unknown: of the planned run.

    Then the row has no multiple of DDP's steps, so that the answer compares no times to the loss.
    """
    assert run.steps is not None
    belief = found.beliefs.get(row.strategy)
    steps = math.nan if belief is None else ddp_steps * belief.steps
    cost = run.cost(row, num_nodes, max(1, math.ceil(steps)) if math.isfinite(steps) else run.steps)
    return replace(row, ddp_steps=belief.steps if belief is not None and math.isfinite(steps) else None, cost=cost)


def _measured_before(out: str | os.PathLike[str] | None) -> float | None:
    """Return the seconds of a step that an earlier call measured in this folder."""
    if out is None or not (Path(out).expanduser() / RUN).exists():
        return None
    found: float | None = (saved_in(out).get("timing") or {}).get("measured_step_s")
    return found


def _because(found: Found) -> str:
    """Return the reason for the choice."""
    choice = found.choice
    base = f"after {found.spent} steps of training" if found.spent else "without training"
    sure = f"the probability that it takes at most 5 % longer than the best candidate is {choice.sure:.0%} {base}"
    if not choice.is_safe:
        return sure
    return f"no choice is sure {base}, and this one loses least in the worst 5 % of cases"


def _ddp_steps(found: Found, target_loss: float) -> StepsTo:
    """Return DDP's steps to a loss, from the longest curve of the pilot and this method's belief."""
    sound = {m: curve for m, curve in found.curves.items() if m not in found.failed and len(curve) > LEAST}
    if not sound:
        return StepsTo(math.inf, math.inf, math.inf, 1.0)
    method = max(sound, key=lambda m: (sound[m][-1][0], m == REFERENCE))
    steps = fit_curve(*zip(*sound[method], strict=True)).steps_to(target_loss)
    ratio = found.beliefs[method].steps
    return StepsTo(steps.median / ratio, steps.low / ratio, steps.high / ratio, steps.unknown)


@contextlib.contextmanager
def _folder(out: str | os.PathLike[str] | None) -> Iterator[str | os.PathLike[str]]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="exogym-pilot-") as folder:
        yield folder
