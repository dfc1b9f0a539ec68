"""Advice by simulation: formulas, and a short run of each strategy with a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exogym.data.partition import IID, label_skew, partitioner_of
from exogym.data.stream import is_iterable
from exogym.errors import ArgumentError, checked
from exogym.network import Network
from exogym.strategy.traffic import ModelSize, Plan
from exogym.study.advise.advice import Advice, Row
from exogym.study.advise.costs import Run, narrowed, notes
from exogym.study.advise.plans import plan_of
from exogym.study.advise.prediction import DEFAULT_STRATEGIES, Predicted, predicted
from exogym.study.compare import Standing, compare, measured_step_s, split_strategies
from exogym.study.compare.comparison import Comparison
from exogym.study.compare.entries import Setting, entries_of, setting_of
from exogym.study.compare.forecast import check_timed, forecast_of
from exogym.study.tasks import Task

SHORT = 4  # a simulation takes the task's steps divided by this
LONGER = 4  # a strategy that is fast on the network takes at most this many times the steps
ROUNDS = 2  # rounds that a strategy needs for a meaningful simulation


@checked
def simulate(
    task: Task,
    *,
    network: Network | str,
    step_seconds: Any = None,
    speeds: Sequence[float] | None = None,
    num_nodes: int | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    seeds: int | Sequence[int] = 1,
    strategies: str | Sequence[str] = DEFAULT_STRATEGIES,
    target_loss: float | None = None,
    run: Run | None = None,
    processes: int | str = 1,
    device: str = "auto",
    watch: Callable[[Standing], object] | None = None,
) -> Advice:
    """Predict by formula, then train each strategy for a short time and rank by time to a target loss.

    At first all strategies take the same number of steps. Let t be the shortest predicted time in which a strategy
    reached the target loss. A strategy that took less time than t and did not reach this loss trains again. It then
    takes as many steps as fit into t, but at most four times as many as before. Strategies that would communicate less
    than twice are not trained.

    Args:
        task: the task to train. The task also gives the number of parameters and, without step_seconds, a measured
            step.
        network, step_seconds, speeds, target_loss, processes, device, watch: as in `exogym.compare.compare`.
        num_nodes, batch_size: number of nodes, and examples per node and step; by default the task's numbers.
        max_steps: steps of each node; by default a quarter of the task's steps.
        strategies: texts as in `advise`. The task sets the options that a text does not give.
        run: prices, limits and spot machines as in `advise`, for a run until the target loss, without `steps`.

    Raises:
        ArgumentError, DataError: an argument or the data are wrong; raised before training.
        TrainingError: no strategy completed its training.

    >>> from exogym.tasks import load_task
    >>> advice = simulate(load_task("digits"), network="wan,jitter=0", step_seconds="10ms", max_steps=200,
    ...     strategies="ddp,diloco:H=10")
    >>> advice.recommended.strategy, [row.final_loss is None for row in advice.rows]
    ('diloco:H=10', [False, False])
    """
    setting = setting_of(
        task, num_nodes, math.ceil(task.max_steps / SHORT) if max_steps is None else max_steps, batch_size, seeds, None
    )
    run = Run() if run is None else run
    if run.steps is not None:
        raise ArgumentError("run: a simulation counts the steps until the target loss, so leave steps out of Run")
    check_timed(network, step_seconds, speeds, target_loss, timeline=False)
    plans = plans_of(task, setting, strategies)
    slow = [p.name for p in plans if min((t.every_steps for t in p.traffic), default=math.inf) * ROUNDS > setting.steps]
    trained = [plan.name for plan in plans if plan.name not in slow]
    if not trained:
        raise ArgumentError(
            f"none of strategies={','.join(plan.name for plan in plans)!r} communicates twice in "
            f"max_steps={setting.steps}: name other strategies, or give more steps"
        )
    forecast = forecast_of(
        network, step_seconds, speeds, setting.nodes, lambda: measured_step_s(task, setting.batch_size, device)
    )
    by_formula = predicted(
        parameters=size_of(task), num_nodes=setting.nodes, network=forecast.network,
        step_seconds=forecast.step_time, strategies=plans, algorithm="recorded",
    )  # fmt: skip

    def train(texts: Sequence[str], steps: int, target_loss: float | None) -> Comparison:
        return compare(
            task, texts, num_nodes=setting.nodes, max_steps=steps, batch_size=setting.batch_size, seeds=setting.seeds,
            processes=processes, device=device, network=forecast.network, step_seconds=forecast.step_time,
            target_loss=target_loss, watch=watch, progress=False,
        )  # fmt: skip

    result = train(trained, setting.steps, target_loss)
    rows = {row["strategy"]: row | {"steps": setting.steps} for row in result.rows}
    for text in trained:  # strategies with less predicted time than the first at the target loss train for as long
        more = _steps_to_match(rows, text)
        if more > setting.steps:
            (again,) = train([text], more, result.target_loss).rows
            rows[text] = again | {"steps": more}
    left = [plan.name for plan in plans if plan.name not in trained]
    return _with_losses(by_formula, setting.nodes, result, rows, left, run)


def _steps_to_match(rows: Mapping[str, Mapping[str, Any]], text: str) -> int:
    """Return the steps that take as long as the first strategy at the target loss, at most four times its own."""
    row, ends_s = rows[text], [row["target_s"] for row in rows.values() if row["target_s"] is not None]
    if not ends_s or row["target_s"] is not None or not row["time_s"]:
        return int(row["steps"])
    return min(math.ceil(min(ends_s) / row["time_s"] * row["steps"]), LONGER * int(row["steps"]))


def parameters_of(task: Task) -> int:
    """Return the number of trainable parameters in a task's model."""
    return int(size_of(task))


def size_of(task: Task) -> ModelSize:
    """Return the number of trainable parameters in a task's model, with their shapes."""
    return ModelSize.of(p.shape for p in task.make_model().parameters() if p.requires_grad)


def skew_of(task: Task, num_nodes: int) -> float | None:
    """Return the label skew of a task's data among nodes, or None if it is unknown."""
    if is_iterable(task.train):
        return None
    return label_skew(partitioner_of(task.partitioner or IID()), task.train, num_nodes)


def plans_of(task: Task, setting: Setting, strategies: str | Sequence[str]) -> list[Plan]:
    """Return each strategy's plan. The task sets the options that its text leaves open."""
    size, plans = size_of(task), []
    for text in split_strategies(strategies):
        (entry,) = entries_of([text], setting).values()
        if entry.alone:
            raise ArgumentError(f"strategies: {text!r} sends nothing, so no network changes its time: leave it out")
        plans.append(replace(plan_of(entry.strategy, size, setting.nodes), name=text))
    return plans


def _with_losses(
    by_formula: Predicted,
    num_nodes: int,
    result: Comparison,
    found: Mapping[str, Mapping[str, Any]],
    left: Sequence[str],
    run: Run,
) -> Advice:
    """Return the advice from the formulas and the simulation's results, sorted by time to the target loss."""

    def joined(row: Row) -> Row:
        own = found.get(row.strategy, {"steps": None, "val_loss": None, "target_s": None})
        end_s = own["target_s"]
        cost = None if end_s is None else run.cost(row, num_nodes, end_s / row.seconds_per_step)
        return replace(row, simulated_steps=own["steps"], final_loss=own["val_loss"], target_s=end_s, cost=cost)

    rows = sorted(
        map(joined, by_formula.rows),
        key=lambda row: (row.target_s is None, row.target_s or row.seconds_per_step),
    )
    target = f"a validation loss of {result.target_loss:.4g} ({result.description['forecast']['target']})"
    fit, kept, reason = narrowed(rows, run)
    best, because = kept or fit[0], reason if kept else f"it came first to {target}"
    if kept is None and reason:
        because += f" within {reason}"
    if best.target_s is None:
        best = min((row for row in rows if row.final_loss is not None), key=lambda row: row.final_loss or math.inf)
        because = (
            f"none reached {target}; this one came closest, {best.final_loss:.4g} after {best.simulated_steps} steps"
        )
    lines = [
        f"simulated: {result.heading.partition('. Time')[0]}; strategies that took less time than the first strategy "
        f"needed to reach the loss had up to {LONGER} times as many steps; longer runs may end in another order"
    ]
    lines += [f"not simulated: {', '.join(left)}: by formula alone, or fewer than {ROUNDS} rounds"] if left else []
    return Advice(
        rows, best, because, [*by_formula.notes, *notes(run), *lines], result.target_loss, num_nodes, run,
        left_out=by_formula.left_out,
    )  # fmt: skip
