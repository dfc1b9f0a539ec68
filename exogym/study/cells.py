"""Train a list of cells into folders: one after another, in several processes, or on a Ray cluster.

A cell is one run: a task, a strategy, options of `LocalTrainer.fit` and a seed. Its folder keeps the results, so a
finished cell is never trained again. After Ctrl-C or a kill, call `train` again: it resumes the cells that have not
ended from their checkpoints, if there are any. `exogym.compare.compare` and `exogym.sweep.sweep` train cells and
tabulate the results.

If there are several processes, each cell has its own forked process, which writes the results into the cell's folder.
Nothing is pickled, a killed run doesn't affect other runs, and each run's memory is freed at its end. Another run
begins only if a core is free and the free memory suffices for a run as large as the largest one so far. If processes
can't be forked (a GPU is in use, or the system isn't Linux), this process trains the cells one after another.

>>> import tempfile
>>> from pathlib import Path
>>> from exogym.strategy import DiLoCoStrategy
>>> from exogym.tasks import load_task
>>> task, options = load_task("digits"), {"num_nodes": 2, "max_steps": 10}
>>> with tempfile.TemporaryDirectory() as folder:
...     cells = [
...         Cell(task, DiLoCoStrategy(H=H), seed, Path(folder, f"{H}-{seed}"), options, label=f"H={H}")
...         for H in (2, 5)
...         for seed in (0, 1)
...     ]
...     outcomes: dict[Cell, Outcome] = train(cells)
...     again = train(cells)  # from the folders
>>> [(str(cell), outcomes[cell].error) for cell in cells]
[('H=2, seed 0', None), ('H=2, seed 1', None), ('H=5, seed 0', None), ('H=5, seed 1', None)]
>>> all(again[cell].history.last["val_loss"] == outcomes[cell].history.last["val_loss"] for cell in cells)
True
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exogym import LocalTrainer
from exogym.core.base.devices import CPU, Device
from exogym.engine import Forks, named_engine
from exogym.errors import ArgumentError, TrainingError, WorkerError, check_count
from exogym.files import write_json
from exogym.options import FitOptions
from exogym.progress import GOING_ON, without_notices
from exogym.record import History, read_status
from exogym.strategy import Strategy
from exogym.study.compare.folder import CHECKPOINTS, HISTORY, OUTCOME, STATUS, lock_of, read
from exogym.study.tasks import Task

__all__ = ["Cell", "Outcome", "train"]

SAVE_S = 60.0  # longer runs are saved about this often, at an evaluation


@dataclass(frozen=True)
class Outcome:
    """A finished cell's results.

    Attributes:
        history: the run's history, or None if the training failed.
        error: the reason why training failed, or None.
        wall_s: seconds of training.
        description: the run's description, as in its run.json.
    """

    history: History | None
    error: str | None
    wall_s: float
    description: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: a task, a strategy, options and a seed, with a folder for the results.

    Args:
        task: the model and the data.
        seed: determines weights, shards, order and all other random choices.
        folder: the cell's run folder, or None to only return the results.
        options: options of `LocalTrainer.fit`. Default: the task's nodes, steps, batch size and partitioner.
        label: the strategy's name in messages and results. Default: the call that creates the strategy.
        loss_fn, metrics: as in `LocalTrainer`.

    Raises:
        ArgumentError: `max_steps` is not a whole number of at least 1.
    """

    task: Task
    strategy: Strategy
    seed: int = 0
    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    loss_fn: Callable[..., Tensor] | None = None
    metrics: dict[str, Callable[[Tensor, Tensor], Any]] | None = None

    def __post_init__(self) -> None:
        of_task = {name: getattr(self.task, name) for name in ("num_nodes", "max_steps", "batch_size", "partitioner")}
        object.__setattr__(self, "options", {**of_task, "progress": False, **self.options})
        check_count("max_steps", self.options["max_steps"])
        object.__setattr__(self, "label", self.label or repr(self.strategy))

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def steps(self) -> int:
        steps: int = self.options["max_steps"]
        return steps

    @property
    def kind(self) -> tuple[int, str]:
        """The number of nodes and the label. Cells of the same kind take about the same time per step."""
        return self.options["num_nodes"], self.label

    @property
    def place(self) -> torch.device:
        return Device.named(self.options.get("device", FitOptions.device)).place

    def trainer(self) -> LocalTrainer:
        """Return a new trainer with this cell's model and data."""
        task = self.task
        return LocalTrainer(
            task.make_model(self.seed), task.train, task.val, loss_fn=self.loss_fn, metrics=self.metrics
        )

    def outcome(self) -> Outcome | None:
        """Return this cell's outcome from its folder, or None if it has no folder or has not ended."""
        if self.folder is None or not (self.folder / OUTCOME).exists():
            return None
        facts = read(self.folder / OUTCOME)
        history = None if facts.get("error") else History.load(self.folder / HISTORY)
        try:
            return Outcome(history, facts.get("error"), facts["wall_s"], facts["description"])
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"{self.folder} contains an incomplete result ({error}): remove this folder, and train again"
            ) from error

    def settle(self, *callbacks: Callable[[Any], object]) -> Outcome:
        """Train this cell to its end in this process, write the outcome into its folder if it has one, and return it.

        Args:
            callbacks: functions that receive the training loop at each evaluation.
        """
        # Checkpoints don't contain timelines, and can't contain the state of some user classes.
        saved = self.folder is not None and self.strategy.registered and not self.options.get("timeline")
        options = self.options | self._saving(saved)
        options["callbacks"] = [*(options.get("callbacks") or ()), *callbacks, *([_saver(self.steps)] if saved else ())]
        trainer, start, error = self.trainer(), time.perf_counter(), None
        with without_notices(GOING_ON):  # the caller's message says how to continue all cells
            try:
                trainer.fit(self.strategy, seed=self.seed, **options)
                _check_finite(trainer.history, self.seed)
            except TrainingError as failure:
                error = str(failure)
        wall_s = max(time.perf_counter() - start, *trainer.history.column("wall_s")[1][-1:], 0.0)
        outcome = Outcome(None if error else trainer.history, error, wall_s, trainer.description)
        if self.folder is not None:
            self._keep(self.folder, outcome)
        return outcome

    def _saving(self, saved: bool) -> dict[str, Any]:
        """Return options of `fit` for the folder. If `saved`, the run resumes; otherwise its folder is new."""
        if self.folder is None:
            return {}
        if saved:
            if read_status(self.folder).get("state") == "done":  # killed before its outcome was written
                (self.folder / STATUS).unlink()
            return {"run_dir": self.folder, "save_dir": self.folder / CHECKPOINTS, "resume": True}
        if self.folder.is_dir():
            lock_of(self.folder).release()  # raises if another process trains in it
        shutil.rmtree(self.folder, ignore_errors=True)
        return {"run_dir": self.folder}

    def _keep(self, folder: Path, outcome: Outcome) -> None:
        """Write the results into the folder, and remove its checkpoints."""
        folder.mkdir(exist_ok=True)
        if outcome.history is not None:
            outcome.history.save(folder / HISTORY)
        facts = {"strategy": self.label, "seed": self.seed, "state": "failed" if outcome.error else "finished"}
        facts |= {"error": outcome.error, "wall_s": outcome.wall_s, "description": outcome.description}
        write_json(folder / OUTCOME, facts)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _saver(steps: int) -> Callable[[Any], None]:
    """Return a callback that saves a long run once a minute, at an evaluation, except after the last of the `steps`."""
    saved_at = time.perf_counter()

    def save(loop: Any) -> None:
        nonlocal saved_at
        if loop.step < steps and time.perf_counter() - saved_at > SAVE_S:
            loop.save()
            saved_at = time.perf_counter()

    return save


def _check_finite(history: History, seed: int) -> None:
    steps, losses = history.column("val_loss")
    if not np.isfinite(losses[-1:]).all():
        raise TrainingError(f"the validation loss of seed {seed} is {losses[-1]} after step {steps[-1]}: lower lr")


@dataclass(frozen=True)
class Standing:
    """The progress of several runs: `label` is in run number `run` of `runs`, at step `step` of `steps`.

    `left_s` is the remaining training time of all runs in seconds, without writing tables and pictures, or None if
    unknown.
    """

    label: str
    run: int
    runs: int
    step: int
    steps: int
    val_loss: float
    tx_bytes: float
    left_s: float | None = None

    @property
    def is_last(self) -> bool:
        return self.run == self.runs and self.step == self.steps


def train(
    cells: Iterable[Cell],
    processes: int | str = 1,
    *,
    engine: str | None = None,
    ended: Callable[[Cell, Outcome], object] = lambda cell, outcome: None,
    watch: Callable[[Standing], object] | None = None,
    beat: Callable[[], object] = lambda: None,
) -> dict[Cell, Outcome]:
    """Train cells to their end, unless their folders already have outcomes. Return the outcomes.

    If a run's loss is no longer finite, its outcome has an `error`, and the other runs continue.

    Args:
        cells: the cells. If there are several processes or an engine, each cell needs its own folder.
        processes: number of cells that train at the same time. "auto" is one per core, or one on a GPU.
        engine: "ray" trains the cells on a Ray cluster; "auto" processes then fill the cluster.
        ended: function that receives each cell and its outcome at the cell's end, also for cells that had already
            ended.
        watch: function that receives an `exogym.compare.Standing` after each evaluation in this process.
        beat: function that this process calls regularly while it trains, such as a lock's heartbeat.

    Raises:
        ArgumentError: an option is wrong, cells share a folder or lack one, or several processes are requested where
            processes can't be forked.
        WorkerError: a run ended without a result. Raised after all other runs have ended.
        KeyboardInterrupt: the user pressed Ctrl-C. Raised after the active runs have saved their state and ended.
    """
    cells, outcomes = list(cells), dict[Cell, Outcome]()
    folders = Counter(None if cell.folder is None else Path(cell.folder).absolute() for cell in cells)
    if twice := [folder for folder, count in folders.items() if folder is not None and count > 1]:
        raise ArgumentError(f"{folders[twice[0]]} cells have the folder {str(twice[0])!r}: use one folder per cell")
    pool, at_once = _pool_of(cells, processes, engine)
    if pool is not None and folders[None]:
        raise ArgumentError(
            f"{folders[None]} cells have no folder, but other processes write their results into folders: pass one "
            "folder per cell"
        )
    progress, left = _Progress(cells, watch, beat), list[Cell]()

    def end(cell: Cell, outcome: Outcome | None) -> None:
        assert outcome is not None
        outcomes[cell] = outcome
        progress.left.remove(cell)
        ended(cell, outcome)

    for cell in cells:
        if (known := cell.outcome()) is not None:
            end(cell, known)
            if known.history is not None:
                progress.tell(cell, cell.steps, known.history)
        elif pool is None:
            end(cell, cell.settle(functools.partial(progress.evaluated, cell)))
        else:
            left.append(cell)
    if pool is not None:
        _train_in(pool, left, at_once, lambda cell: end(cell, cell.outcome()), beat)
    return {cell: outcomes[cell] for cell in cells}


def processes_that_pay(asked: int | str, cells: int, device: torch.device) -> int:
    """Return how many of `cells` to train at the same time.

    `asked` is a number, or "auto": one cell per core, or one at a time on a GPU. Raise ArgumentError if it is over 1,
    but this process can't be forked.
    """
    forks = Forks.are_possible() and device == CPU
    if asked == "auto":
        return min(len(os.sched_getaffinity(0)), max(cells, 1)) if forks else 1
    check_count("processes", asked)
    if int(asked) > 1 and not forks:
        raise ArgumentError(
            f"processes={asked}: simultaneous runs need Linux and the CPU (here: {sys.platform}, {device}): leave "
            "processes at 1"
        )
    return int(asked)


# ---------------------------------------------------------------- several at a time


class Pool(Protocol):
    """Trains several cells at the same time. The value that `start` returns identifies a run."""

    def has_room(self) -> bool:
        """Return whether another run may begin now."""

    def start(self, cell: Cell) -> Any:
        """Start to train a cell, whose outcome is written into its folder."""

    def ended(self, running: Sequence[Any]) -> Iterable[tuple[Any, str]]:
        """Wait briefly, then yield each run that has ended, with the reason if it has no outcome, or ""."""

    def stop(self, running: Sequence[Any]) -> None:
        """End runs, after they save their state if they can."""


def _pool_of(cells: Sequence[Cell], processes: int | str, engine: str | None) -> tuple[Pool | None, int | None]:
    """Return the pool that trains the cells (None for this process), and the most simultaneous cells."""
    if not cells:
        return None, 1
    if engine is not None:
        if processes != "auto":
            check_count("processes", processes)
        room = importlib.import_module(named_engine(engine).__module__.rpartition(".")[0] + ".cells")
        return room.ClusterPool(cells), None if processes == "auto" else int(processes)
    at_once = min(processes_that_pay(processes, len(cells), cells[0].place), len(cells))
    return (Forks(lambda cell: cell.settle()) if at_once > 1 else None), at_once


def _train_in(
    pool: Pool,
    cells: Sequence[Cell],
    most: int | None,
    ended: Callable[[Cell], None],
    beat: Callable[[], object],
) -> None:
    """Train all cells in a pool, at most `most` at the same time. Call `ended` after each in this process."""
    waiting, running, lost = list(cells), dict[Any, Cell](), list[str]()
    try:
        while waiting or running:
            while waiting and (most is None or len(running) < most) and (not running or pool.has_room()):
                running[pool.start(waiting[0])] = waiting[0]
                del waiting[0]
            for run, reason in pool.ended(list(running)):
                cell = running.pop(run)
                if reason:
                    lost.append(f"{cell} ({reason})")
                else:
                    ended(cell)
            beat()
    finally:
        pool.stop(list(running))
    if lost:
        raise WorkerError(
            f"{len(lost)} of {len(cells)} runs ended without a result: {'; '.join(lost)}. The others are complete; "
            "resume trains only the lost runs"
        )


# ---------------------------------------------------------------- progress in this process


class _Progress:
    """The progress of the cells that this process trains, with the seconds taken and remaining."""

    def __init__(
        self, cells: Sequence[Cell], watch: Callable[[Standing], object] | None, beat: Callable[[], object]
    ) -> None:
        self.left, self.watch, self.beat = list(cells), watch, beat
        self.seeds: dict[str, list[Cell]] = {}  # the cells of each label
        for cell in cells:
            self.seeds.setdefault(cell.label, []).append(cell)
        self._spent: dict[tuple[int, str], tuple[int, float]] = {}  # steps and seconds, by kind of cell
        self._last: tuple[Cell, int, float] | None = None  # the last evaluation's cell, step and time.perf_counter()
        self._starts_s: list[float] = []  # seconds from a run's last evaluation to the next run's first

    def evaluated(self, cell: Cell, loop: Any) -> None:
        """Record an evaluation of a cell's run, and report it. The first run's start is not timed."""
        now = time.perf_counter()
        if self._last is not None:
            before, step, then = self._last
            if before is not cell:
                self._starts_s.append(now - then)
            elif loop.step > step:
                steps, seconds = self._spent.get(cell.kind, (0, 0.0))
                self._spent[cell.kind] = steps + loop.step - step, seconds + now - then
        self._last = cell, loop.step, now
        self.beat()
        self.tell(cell, loop.step, loop.history)

    def tell(self, cell: Cell, step: int, history: History) -> None:
        if self.watch is None:
            return
        row, seeds = next(iter(history.rows_after(step - 1, None))), self.seeds[cell.label]
        place = cell.label, seeds.index(cell) + 1, len(seeds), step, cell.steps
        self.watch(Standing(*place, row["val_loss"], row["tx_bytes"], self._left_s(cell, step)))

    def _left_s(self, here: Cell, step: int) -> float | None:
        """Return the seconds until all cells have ended if the cell `here` is at `step`; None if unknown."""
        start_s = fmean(self._starts_s) if self._starts_s else 0.0
        left_s = [
            self._seconds(cell, cell.steps - step) if cell is here else start_s + self._seconds(cell, cell.steps)
            for cell in self.left
        ]
        return None if math.isnan(sum(left_s)) else sum(left_s)

    def _seconds(self, cell: Cell, steps: int) -> float:
        """Return the seconds of a cell's steps; NaN if nothing is known.

        A kind that has not trained yet is estimated by the slowest kind with the same number of nodes, because
        expensive strategies mostly come last. A step of N nodes takes between one and N times as long as a step of one
        node, so if only other numbers of nodes are known, scaling by sqrt(N) is wrong by a factor of at most sqrt(N).
        """
        if not steps:
            return 0.0
        known = {kind: spent_s / done for kind, (done, spent_s) in self._spent.items()}
        if cell.kind in known:
            return steps * known[cell.kind]
        nodes = cell.kind[0]
        alike = [step_s for (count, _), step_s in known.items() if count == nodes]
        return steps * max(alike or (s * math.sqrt(nodes / n) for (n, _), s in known.items()), default=math.nan)
