"""Run a sweep: check its arguments, train its cells, and make its table."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from exogym.errors import ArgumentError, TrainingError, check_choice, check_count, needs
from exogym.files import temporary_folder, write_json
from exogym.options import FitOptions, RunOptions, describe, in_full, placed, takes
from exogym.progress import notice
from exogym.record import check_file, read_object
from exogym.study.cells import Cell, Outcome, processes_that_pay, train
from exogym.study.compare.asked import NOT_TAKEN, ComparisonOptions, StudyOptions
from exogym.study.compare.estimate import Estimate, estimated
from exogym.study.compare.folder import Folder, begun, check_same, is_empty, locked
from exogym.study.compare.live import is_shown, left_text
from exogym.study.compare.run import asked_of, decisive_of, said_of, session_of, task_of
from exogym.study.compare.session import Session
from exogym.study.compare.summary import MEASURES, TIMED, Summary, summary_of, target_of_best
from exogym.study.sweep.axes import STRATEGY, Axes, arguments_of, axes_of, check_few, grid, label_of
from exogym.study.sweep.result import Swept, best_of, write
from exogym.study.sweep.search import BATCH, propose
from exogym.study.tasks import Task

SWEEP = "sweep.json"
MOST_TRIALS = 8  # of an estimate
LEFT_OUT = ("quality", "reduction")  # measures of a comparison that mean nothing between cells
Cells = dict[str, dict[str, str]]


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted. The sweep's `folder` keeps the finished runs, and you can resume the sweep there."""

    def __init__(self, message: str, folder: Path | None) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True)
class Ended:
    """A finished run of a sweep: its cell, seed and final validation loss. It is the `count`-th of `total` runs."""

    cell: str
    seed: int
    count: int
    total: int
    val_loss: float | None


@dataclass(frozen=True)
class SweepOptions(StudyOptions):
    """Options of `sweep`.

    Args:
        axes: Dict from option to its values, or texts such as "H=5,10". These options belong to the run: `strategy`,
            `num_nodes`, `max_steps`, `batch_size`, `lr`, `partitioner`, `network`, `step_seconds` and the options of
            `fit` that text can express (`precision`, `compute`, ...). Any other option belongs to the strategy.
        strategy: The strategy as text, such as "diloco:outer_lr=0.5", if `axes` has no option `strategy`.
        processes: Number of runs that train at the same time. With "auto", one run per core, as far as memory allows.
        engine: With "ray", the runs are tasks of a Ray cluster (at RAY_ADDRESS, or started here), one per core.
        search: Train this number of cells that optuna proposes, instead of all combinations. Options in `axes` may then
            also have a range of numbers, such as "1e-4..1e-1".
        out: Folder for sweep.json, summary.csv, sweep.png and a folder for each run.
        resume: Resume an interrupted sweep with the same arguments in `out`. The table is the same as without the
            interruption. `search` may be larger than before.
        progress: Print a line for each finished run, with the remaining time. By default, only in a terminal or a
            notebook.
        watch: Function that receives an `Ended` after each run.
    """

    not_taken: ClassVar = NOT_TAKEN | {
        "strategies": "pass strategy, or sweep it: axes={'strategy': ['ddp', 'diloco']}",
    }

    axes: Mapping[str, Any] | Sequence[str]
    _: KW_ONLY
    strategy: str = "diloco"
    processes: int | str = "auto"
    engine: str | None = None
    search: int | None = None
    progress: bool | None = FitOptions.progress
    watch: Callable[[Ended], object] | None = None


# the same for all runs; the other options choose where to keep runs, or how to carry them out
SHARED = tuple(f.name for f in fields(StudyOptions) if f.name not in ("problem", "data", "out", "resume"))
PASSED_ON = tuple(field.name for field in fields(RunOptions))
DECISIVE = ("strategy", "data", *(name for name in SHARED if name not in ("loss_fn", "metrics", *PASSED_ON)))


@takes(SweepOptions)
def sweep(asked: SweepOptions) -> Swept:
    """Train a task with every combination of some options' values, with several seeds each.

    Runs whose loss is no longer finite are left out, with a line in `notes`.

    Raises:
        ArgumentError, DataError: a cell's options, the data or `out` are wrong. Raised before training.
        TrainingError: no run completed its training. WorkerError: a run's process was killed.
        SweepInterrupted: the user pressed Ctrl-C; the sweep can be resumed in the error's `folder`.

    >>> result = sweep("digits", {"H": [2, 5]}, max_steps=10, seeds=1, num_nodes=2, processes=1)
    >>> [(row["H"], row["seeds"]) for row in result.rows], result.best["cell"] in ("H=2", "H=5")
    ([('2', 1), ('5', 1)], True)
    """
    if asked.engine is not None:
        check_choice("engine", asked.engine, ("ray",))
    swept, out, search = axes_of(asked.axes), asked.out, asked.search
    if search is None:
        cells = {label_of(cell): cell for cell in grid(swept)}
    else:
        needs("optuna", "search")
        check_count("search", search)
        cells = {}
    check_few(search or len(cells))
    with contextlib.ExitStack() as cleanup:
        run = _Sweep(asked, task_of(asked.problem, asked.data), swept)
        if asked.resume and out is not None:
            run.measured_s = read_object(Path(out).expanduser() / SWEEP).get("measured_step_s")
        run.add(cells)
        decisive = {
            "task": run.task.name, "description": run.task.description,
            "axes": {name: values if isinstance(values, list) else str(values) for name, values in swept.items()},
            "given": json.loads(json.dumps({name: getattr(asked, name) for name in DECISIVE}, default=_as_json)),
            "is_search": search is not None, "cells_asked": run.asked if search is None else {},
        } | decisive_of(asked)  # fmt: skip
        if out is None:
            if asked.resume:
                raise ArgumentError("resume needs the folder of the sweep: pass it as out, such as out='runs/sweep'")
            run.path = cleanup.enter_context(temporary_folder("exogym-sweep-"))
        else:
            needs("matplotlib", "demo")
            check_file("sweep.json", decisive | {"cells": run.cells})  # reject values that could not be read again
            run.path = Path(out).expanduser()
            lock = locked(run.path, lambda: _check_folder(run.path, decisive, asked.resume))
            cleanup.callback(lock.release)
            run.beat = lock.beat
        problem = asked.problem if isinstance(asked.problem, str) else type(asked.problem).__name__
        run.description = decisive | begun() | {
            "arguments": decisive["given"] | {name: describe(value) for name, value in asked.changed().items()}
            | {"problem": problem, "axes": decisive["axes"], "search": search},
        }  # fmt: skip
        try:
            run.train()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                run.describe("interrupted")
                where = None if out is None else run.path
                way = "" if where is None else f"; sweep(..., out={os.fspath(where)!r}, resume=True) continues"
                raise SweepInterrupted(f"{len(run.outcomes)} of {run.total} runs have ended{way}", where) from error
            run.describe("failed")
            raise
        return run.result(is_kept=out is not None)


@takes(SweepOptions)
def estimate(asked: SweepOptions) -> Estimate:
    """Return the time and memory that a sweep would need, after training some of the cells for about half a second.

    Raises:
        ArgumentError, DataError: as in `sweep`, or the option `search` or `engine` is given, for which no estimate is
            possible.
        TrainingError: a trial's loss is not a number.
    """
    if asked.search is not None or asked.engine is not None:
        name = "engine" if asked.search is None else "search"
        raise ArgumentError(f"an estimate covers all cells on this machine: leave {name} out")
    swept = axes_of(asked.axes)
    cells = {label_of(cell): cell for cell in grid(swept)}
    few = list(cells)[:: math.ceil(len(cells) / MOST_TRIALS)]
    run = _Sweep(asked, task_of(asked.problem, asked.data), swept)
    run.add({label: cells[label] for label in few})
    runs = len(cells) * len(run.seeds)
    tried = [run.sessions[label].cell(label, run.seeds[0]) for label in few]
    return estimated(tried, runs, min(processes_that_pay(asked.processes, runs, tried[0].place), runs))


def _as_json(value: Any) -> Any:
    """Convert a value that JSON lacks: several seeds to a list, others to text."""
    return [*value] if isinstance(value, range) else str(value)


def _check_folder(path: Path, asked: dict[str, Any], resume: bool) -> None:
    """Check that the folder is empty or, with `resume`, that it holds a sweep with the same options."""
    before = read_object(path / SWEEP)
    if not resume:
        if not is_empty(path):
            hint = "resume it there (--resume), or " if before else ""
            raise ArgumentError(f"out={str(path)!r} already contains files: {hint}pass another folder")
        return
    if not before:
        raise ArgumentError(f"out={str(path)!r} contains no sweep to resume: pass a sweep's folder")
    given = in_full(before.get("given") or {})  # of a sweep from before an option was renamed
    check_same(path, "sweep", before | {"given": given}, asked)


class _Sweep:
    """A sweep's cells, a session for each, and the runs' outcomes."""

    def __init__(self, options: SweepOptions, task: Task, axes: Axes) -> None:
        self.options, self.task, self.axes = options, task, axes
        self.path, self.description = Path(), dict[str, Any]()
        self.beat: Callable[[], object] = lambda: None
        self.cells: Cells = {}
        self.sessions: dict[str, Session] = {}
        self.asked: dict[str, Any] = {}
        self.began_s, self.trained = time.perf_counter(), 0  # runs that ended since then
        self.measured_s: float | None = None  # seconds of a step that an earlier start measured

    @property
    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        return {key: found for session in self.sessions.values() for key, found in session.outcomes.items()}

    @property
    def seeds(self) -> tuple[int, ...]:
        return next(iter(self.sessions.values())).setting.seeds

    @property
    def total(self) -> int:
        seeds = self.options.seeds
        return (self.options.search or len(self.cells)) * (seeds if isinstance(seeds, int) else len(seeds))

    def add(self, cells: Cells) -> None:
        """Add `cells` to the sweep, with a session for each. Raise ArgumentError if a cell's options are impossible."""
        shared = {name: getattr(self.options, name) for name in SHARED}
        for label, cell in cells.items():
            text, own = arguments_of(cell, self.options.strategy)
            forecasts = [session.forecast for session in self.sessions.values() if session.forecast is not None]
            known_s = forecasts[0].measured_step_s if forecasts else self.measured_s
            try:
                session = session_of(ComparisonOptions(self.task, {label: text}, **placed(shared | own)), known_s)
            except ArgumentError as error:
                raise ArgumentError(f"cell {label}: {error}") from error
            self.cells[label], self.sessions[label] = cell, session
            self.asked[label] = asked_of(session)

    def train(self) -> None:
        search = self.options.search
        if search is None:
            self._train(list(self.cells))
            return
        tried: list[tuple[dict[str, str], float | None]] = []
        while len(tried) < search:
            # Always a whole batch, so that a search for more cells begins with the same cells.
            proposed = propose(self.axes, tried, BATCH)[: search - len(tried)]
            batch = {label_of(cell): cell for cell in proposed}
            self.add({label: cell for label, cell in batch.items() if label not in self.cells})
            self._train(list(batch))
            rows = {row["cell"]: row["val_loss"] for row in self._summary().rows}
            tried += [(cell, rows[label_of(cell)]) for cell in proposed]

    def _train(self, labels: Sequence[str]) -> None:
        """Train the runs of some cells, except runs that the folder already has."""
        folder, left = Folder(self.path, self.cells), list[Cell]()
        for session in map(self.sessions.__getitem__, labels):
            session.folder = folder
            for cell in session.cells():
                if (known := cell.outcome()) is None:
                    left.append(cell)
                else:
                    session.take(cell, known)
        self.path.mkdir(parents=True, exist_ok=True)
        self.describe("running")
        train(left, self.options.processes, engine=self.options.engine, ended=self._ended, beat=self.beat)

    def _ended(self, cell: Cell, outcome: Outcome) -> None:
        self.sessions[cell.label].take(cell, outcome)
        self.trained += 1
        loss = None if outcome.history is None else outcome.history.last["val_loss"]
        ended = Ended(cell.label, cell.seed, len(self.outcomes), self.total, loss)
        if is_shown(self.options.progress):
            left_s = (time.perf_counter() - self.began_s) / self.trained * (ended.total - ended.count)
            said = "failed" if loss is None else f"validation loss {loss:.4f}"
            notice(f"{ended.count} of {ended.total} runs: {cell}: {said}{left_text(left_s)}")
        if self.options.watch is not None:
            self.options.watch(ended)

    def describe(self, state: str, **more: Any) -> None:
        """Write the sweep's options, `state`, cells and finished runs into sweep.json."""
        if not self.path.is_dir():
            return
        runs = [
            {"cell": label, "seed": seed, "wall_s": found.wall_s, "error": found.error}
            for (label, seed), found in self.outcomes.items()
        ]
        self.description |= {"state": state, "cells": self.cells, "runs_wanted": self.total, "runs": runs, **more}
        self.description["measured_step_s"] = next(
            (s.forecast.measured_step_s for s in self.sessions.values() if s.forecast is not None), None
        )
        write_json(self.path / SWEEP, self.description)

    def _summary(self) -> Summary:
        """Return the finished runs' summary, with a row for each cell."""
        said = {label: (label, said_of(session)[label][1]) for label, session in self.sessions.items()}
        tracks = {key: track for session in self.sessions.values() for key, track in session.tracks.items()}
        forecast = next(iter(self.sessions.values())).forecast
        network = forecast.name if forecast is not None and "network" not in self.axes else ""
        target = target_of_best(tracks) if tracks else (math.nan, "")
        found, rows = summary_of(said, self.seeds, tracks, target, network), []
        measures = [m for m in (*MEASURES, *TIMED) if m not in LEFT_OUT]
        for row in found.rows:
            cell = self.cells[row["strategy"]]
            figures = {k: row[k] for m in measures if m in row for k in (m, f"{m}_std")}
            strategy = {} if STRATEGY in cell else {STRATEGY: self.options.strategy}
            figures |= {name: row[name] for name in ("target_loss", "target_runs")}
            rows.append(
                {"cell": row["strategy"], **strategy, **cell, "seeds": row["seeds"], **figures, "notes": row["notes"]}
            )
        return replace(found, rows=rows)

    def result(self, is_kept: bool) -> Swept:
        histories = {key: found.history for key, found in self.outcomes.items() if found.history is not None}
        if not histories:
            self.describe("failed")
            raise TrainingError(next(found.error for found in self.outcomes.values() if found.error))
        first = next(iter(self.sessions.values())).setting
        said = [f"{len(self.cells)} cells of {', '.join(self.axes)}"]
        counts = (
            ("num_nodes", first.nodes, "nodes"), ("max_steps", first.steps, "steps"),
            ("batch_size", first.batch_size, "examples a step"),
        )  # fmt: skip
        said += [f"{count} {unit}" for name, count, unit in counts if name not in self.axes]
        heading = f"{self.task.description}. {', '.join(said)}, seeds {', '.join(map(str, self.seeds))}"
        found = self._summary()
        best = best_of(found.rows)["cell"]
        self.describe("finished", heading=heading, finding=found.verdict, best=best, **found.to_json())
        result = Swept(
            heading, found.verdict, self.axes, found.rows, histories, self.description, target_loss=found.target_loss
        )
        if not is_kept:
            return result
        return replace(result, folder=self.path, paths=(self.path / SWEEP, *write(result, self.path)))
