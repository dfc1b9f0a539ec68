"""The time and memory of a comparison or sweep, estimated before its start from a short trial of its strategies."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from exogym.callbacks import Callback
from exogym.core.base.devices import Device
from exogym.network import readable_seconds
from exogym.options import takes
from exogym.progress import readable_bytes
from exogym.study.cells import Cell
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.run import session_of

TRIAL_S = 0.5  # seconds of a trial's two parts, about; each part has at least one step
FIRST_STEPS = 2  # of the run that tells how many steps a part has


@dataclass(frozen=True)
class Trial:
    """A strategy's measured seconds: for a run's start, a step of all nodes, an evaluation, and a run (`run_s`).

    `memory_bytes` is the largest memory that this process, or the GPU, has used so far.
    """

    label: str
    start_s: float
    step_s: float
    evaluation_s: float
    run_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a comparison or sweep.

    Attributes:
        trials: a trial for each strategy, or for some cells of a sweep.
        runs: number of runs for all seeds together. `at_once` runs train at the same time.
        train_s: seconds of training, without starting Python, tables and pictures.
        memory_bytes: memory that the runs need, on this machine or on the GPU if the runs use a GPU.
        free_bytes: free memory of this machine, or of that GPU.
        took_s: seconds that the trials took.
    """

    trials: tuple[Trial, ...]
    runs: int
    at_once: int
    train_s: float
    memory_bytes: float
    free_bytes: float
    took_s: float

    def __str__(self) -> str:
        wide = max(len(trial.label) for trial in self.trials)
        rows = [
            f"  {trial.label:<{wide}}  {_short(trial.step_s)} a step, {_short(trial.run_s)} a run"
            for trial in self.trials
        ]
        together = f", {self.at_once} at a time" if self.at_once > 1 else ""
        return "\n".join([
            f"Time: about {_short(self.train_s)} of training, for {self.runs} runs{together}.",
            *rows,
            f"Memory: about {readable_bytes(self.memory_bytes)}; {readable_bytes(self.free_bytes)} are free.",
            f"Measured in {_short(self.took_s)}, by a short trial of each line on this machine, as busy as it is now. "
            "Starting, tables and pictures take some seconds more.",
        ])  # fmt: skip


def _short(seconds: float) -> str:
    return readable_seconds(float(f"{seconds:.2g}"))


@takes(ComparisonOptions)
def estimate(asked: ComparisonOptions) -> Estimate:
    """Return the time and memory that a comparison would need, after training each strategy for about half a second.

    Raises:
        ArgumentError, DataError: as in `compare`.
        TrainingError: a trial's loss is not a number.

    >>> found = estimate("digits", "single,ddp", max_steps=40, seeds=2)
    >>> found.runs, [trial.label for trial in found.trials], 0 < found.train_s < 60
    (4, ['single', 'ddp'], True)
    """
    session = session_of(replace(asked, out=None))
    seeds = session.setting.seeds
    return estimated([session.cell(label, seeds[0]) for label in session.entries], len(session.entries) * len(seeds))


def estimated(cells: Sequence[Cell], runs: int, at_once: int = 1) -> Estimate:
    """Return the estimate of `runs` runs, from trials of `cells`, if `at_once` runs train at the same time."""
    begun, place = time.perf_counter(), cells[0].place
    trials = tuple(map(_tried, cells))
    train_s = fmean(trial.run_s for trial in trials) * runs / at_once
    memory = max(trial.memory_bytes for trial in trials) * at_once
    free = float(Device(place).free_bytes())
    return Estimate(trials, runs, at_once, train_s, memory, free, time.perf_counter() - begun)


def _tried(cell: Cell) -> Trial:
    """Train a cell for a short time, and return what the whole run would take."""
    few = _parts(cell, 1, min(FIRST_STEPS, cell.steps))
    length = min(max(1, math.floor(TRIAL_S / max(few.step_s, 1e-6) / 2)), max(1, cell.steps // 2))
    found = _parts(cell, length, cell.steps)
    evaluations = math.ceil(cell.steps / cell.options["val_interval"])
    return replace(found, run_s=found.start_s + cell.steps * found.step_s + evaluations * found.evaluation_s)


class _Marks(Callback):
    """At the start, and after every `length` steps: the step, an evaluation's seconds, and the time after it."""

    def __init__(self, length: int):
        self.steps = length
        self.found: list[tuple[int, float, float]] = []

    def __call__(self, loop: Any) -> bool:
        if self.found and self.found[-1][0] == loop.step:
            return True  # the evaluation at the run's end
        reached = time.perf_counter()
        loop.evaluate()
        now = time.perf_counter()
        self.found.append((loop.step, now - reached, now))
        return len(self.found) > 2


def _parts(cell: Cell, length: int, steps: int) -> Trial:
    """Train two parts of `length` steps, each with an evaluation after it, and measure the second part."""
    trainer, marks = cell.trainer(), _Marks(length)
    of_parts = {"max_steps": steps, "val_interval": steps, "callbacks": [marks]}
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a run as short as a trial
        trainer.fit(cell.strategy, seed=cell.seed, **{**cell.options, **of_parts})
    (before, _, then), (last, evaluation_s, now) = marks.found[-2:]
    part_s = now - evaluation_s - then
    _, first_evaluation_s, first = marks.found[0]
    compiling_s = max(0.0, marks.found[1][2] - marks.found[1][1] - first - part_s)  # a first part may compile
    return Trial(
        cell.label,
        first - first_evaluation_s - begun + compiling_s,
        part_s / (last - before),
        evaluation_s,
        0.0,
        trainer.history.last["memory_bytes"],
    )
