"""Train the claims' cells. Each cell has a folder, named by the cell's options, with a folder for each run.

out/<strategy>-<digest>/           a cell's folder. run.json has all options that decide the results; the digest is the
                                   hash of the options that the cell gives. If a strategy's default has changed since,
                                   the cell has another folder, <strategy>-<digest>-2
    <strategy>-seed-0/             a run folder, as in a comparison (`exogym.study.compare.folder`)

So a finished run is never trained again, even if several claims have its cell. An unfinished run resumes from its
checkpoint. A cell with other options has another digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exogym.data.partition import Partitioner
from exogym.errors import ArgumentError, DataError, check_number
from exogym.study.cells import Outcome, Standing
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.comparison import plain_name
from exogym.study.compare.entries import setting_of
from exogym.study.compare.folder import ALL_ARGUMENTS, OUTCOME, RUN, Folder, saved_in, unlike_in
from exogym.study.compare.forecast import measured_step_s
from exogym.study.compare.run import asked_of, session_of
from exogym.study.compare.session import Session
from exogym.study.tasks import Data, Task
from research.reproduce.claim import SEEDS, Cell, Claim, Run, WithCells
from research.reproduce.problems import problem

LEAST_STEPS = 20  # of a short version
LEAST_SPENT_S = 5.0  # seconds of training before measured times correct the estimate
NETWORK, STEP_S = "1Gbps", 0.05  # for the clock of nodes with different speeds
CURVES = ("val_loss", "consensus_distance", "lr", "payload_bytes", "mean_val_loss", "node_val_loss")
LAST = ("val_loss", "val_accuracy", "payload_bytes", "tx_bytes", "time_s")


@dataclass(frozen=True)
class CellProgress:
    """Progress of training: the current cell, seed and run, and the runs and seconds that are left for all cells."""

    cell: Cell
    seed: int
    standing: Standing
    runs_left: int
    left_s: float

    @property
    def run_ended(self) -> bool:
        return self.standing.step == self.standing.steps


class Reproduction:
    """Trains the cells of claims and finds their finished runs.

    Args:
        out: folder of the run folders; created if needed.
        seeds: the seeds with which every cell is trained.
        share: share of each cell's steps to take (at least 20 steps). With a share under 1, runs are short versions in
            their own folders, which say nothing about the claim.
        data: file or folder of the data, if the data are not in the usual places; or a dict from task name to such a
            path.
        processes, device: as in `LocalTrainer.fit`.
        watch: function that receives a `CellProgress` after each evaluation.
        problem: function from a task's name and its data to the task and a partitioner, or None if the task names one.
    """

    def __init__(
        self,
        out: Path | str,
        *,
        seeds: Sequence[int] = SEEDS,
        share: float = 1.0,
        data: Data | Mapping[str, Data] = None,
        processes: int | str = 1,
        device: str = "auto",
        watch: Callable[[CellProgress], object] | None = None,
        problem: Callable[[str, Data], tuple[Task, Partitioner | None]] = problem,
    ) -> None:
        check_number("share", share, over=0, most=1)
        self.out, self.seeds, self.share, self.data = Path(out).expanduser(), tuple(seeds), share, data
        self.processes, self.device, self.watch, self.problem = processes, device, watch, problem
        self._sessions: dict[str, Session] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        self._step_s: dict[tuple[str, int], float] = {}
        self._cells: list[Cell] = []
        self._before = ("", -1, 0, 0.0)  # the last evaluation's cell, seed, step and time
        self._left: dict[str, int] = {}  # key of a cell to its unfinished runs when last checked
        self._took: dict[str, tuple[float, float]] = {}  # seconds of training, as measured and as estimated, by task

    # ---------------------------------------------------------------- what remains

    def check(self, claims: Iterable[Claim]) -> None:
        """Check that all cells of `claims` can be trained: strategies and options are known, and the data exist.

        Raises:
            ArgumentError, DataError: a cell cannot be trained; the message names the claim.
        """
        for claim in claims:
            for label, cell in claim.cells.items():
                try:
                    self.session(cell)
                except (ArgumentError, DataError) as error:
                    raise type(error)(f"claim {claim.name}, {label}: {error}") from error

    def seconds_left(self, cells: Iterable[Cell]) -> float:
        """Return about how many seconds the unfinished runs of `cells` will take in one process."""
        return sum(self._late(cell) * self.run_seconds(cell) * self._runs_left(cell) for cell in different(cells))

    def missing(self, cell: Cell) -> list[int]:
        """Return the seeds for which the run of `cell` has not finished."""
        session = self.session(cell)
        assert session.folder is not None
        (label,) = session.entries
        left = [seed for seed in self.seeds if not (session.folder.child(label, seed) / OUTCOME).exists()]
        self._left[cell.key] = len(left)
        return left

    def _runs_left(self, cell: Cell) -> int:
        if cell.key not in self._left:
            self.missing(cell)
        return self._left[cell.key]

    def _late(self, cell: Cell) -> float:
        """Return the measured seconds over the estimate, for the cells of this cell's task."""
        took_s, foreseen_s = self._took.get(cell.task, (0.0, 0.0))
        return took_s / foreseen_s if took_s > LEAST_SPENT_S else 1.0

    def run_seconds(self, cell: Cell) -> float:
        """Return the estimated seconds of a cell's run in one process."""
        session = self.session(cell)
        size = session.setting.batch_size
        if (cell.task, size) not in self._step_s:
            self._step_s[cell.task, size] = measured_step_s(session.task, size, self.device)
        (entry,) = session.entries.values()
        return session.setting.steps * (1 if entry.alone else session.setting.nodes) * self._step_s[cell.task, size]

    def session(self, cell: Cell) -> Session:
        """Return the session that trains a cell's runs, in a folder named by the options that decide their results."""
        if cell.key in self._sessions:
            return self._sessions[cell.key]
        data = self.data.get(cell.task) if isinstance(self.data, Mapping) else self.data
        task, split = self.problem(cell.task, data)
        steps = max(LEAST_STEPS, round((cell.steps or task.max_steps) * self.share)) if self.share < 1 else cell.steps
        task = replace(task, warmup_steps=round(task.warmup_steps * self.share))
        asked: dict[str, Any] = {
            "num_nodes": cell.nodes, "max_steps": steps, "batch_size": cell.batch_size, "seeds": self.seeds,
            "lr": cell.lr,
        }  # fmt: skip
        strategy = cell.strategy if isinstance(cell.strategy, str) else cell.strategy(setting_of(task, **asked))
        timing: dict[str, Any] = (
            {} if cell.speeds is None else {"network": NETWORK, "step_seconds": STEP_S, "speeds": cell.speeds}
        )
        session = session_of(ComparisonOptions(
            task, {cell.says: strategy}, **asked, partitioner=cell.partition or split, processes=self.processes,
            device=self.device, **timing,
        ))  # fmt: skip
        session.callbacks = (evaluate_replicas,) if cell.replicas else ()
        decided = json.loads(json.dumps(asked_of(session) | {"replicas": cell.replicas}))
        decided["setting"].pop("seeds")
        given = {key: value for key, value in decided.items() if key != ALL_ARGUMENTS}  # a new option changes no name
        text = json.dumps({**given, "device": session.place.type}, sort_keys=True)
        name = f"{plain_name(cell.says)[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        session.folder = Folder(self._folder(name, decided), session.entries)
        self._sessions[cell.key], self._asked[cell.key] = session, decided
        return session

    def _folder(self, name: str, decided: dict[str, Any]) -> Path:
        """Return the first of the folders `name`, `name`-2, ... that is new, or was made with the same defaults."""
        arguments = {ALL_ARGUMENTS: decided[ALL_ARGUMENTS]}
        for n in itertools.count(1):
            path = self.out / (name if n == 1 else f"{name}-{n}")
            saved = saved_in(path) if (path / RUN).exists() else {}
            if not unlike_in({key: saved[key] for key in saved.keys() & arguments.keys()}, arguments):
                return path
        raise AssertionError

    # ---------------------------------------------------------------- training

    def train(self, claims: Sequence[WithCells], of: Sequence[WithCells] = ()) -> None:
        """Train the missing runs of all cells, claim by claim. Finished runs are not trained again.

        Args:
            claims: the claims to train now.
            of: all claims that you will train, for the estimate of the remaining time. If `of` is empty, the estimate
                is for `claims`.
        """
        self._cells = different(cell for claim in of or claims for cell in claim.cells.values())
        for cell in different(cell for claim in claims for cell in claim.cells.values()):
            self.results(cell)

    def asked(self, cell: Cell) -> dict[str, Any]:
        """Return the options that decide a cell's results, for JSON."""
        self.session(cell)
        return self._asked[cell.key]

    def results(self, cell: Cell) -> list[Run]:
        """Return a cell's results, one for each seed. Missing runs are trained first.

        Raises:
            KeyboardInterrupt: SIGINT arrived. The unfinished run was saved, and another call resumes it.
        """
        session = self.session(cell)
        if self.missing(cell):
            self.prepare(cell)
        session.outcomes.clear()
        session.train_all(lambda at: self._tell(cell, at))
        self.missing(cell)
        return [_run(seed, outcome) for (_, seed), outcome in session.outcomes.items()]

    def prepare(self, cell: Cell) -> None:
        """Make a cell's folder, and write the cell's options into this folder."""
        folder = self.session(cell).folder
        assert folder is not None
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.describe(self.asked(cell))

    def _tell(self, cell: Cell, at: Standing) -> None:
        """Record a run's progress and report it."""
        seed, now = self.seeds[at.run - 1], time.perf_counter()
        if seed not in self.missing(cell):
            return  # it ended earlier
        *run, step, then = self._before
        foreseen_s = self.run_seconds(cell)
        if run == [cell.key, seed] and at.step > step:
            took_s, known_s = self._took.get(cell.task, (0.0, 0.0))
            share = (at.step - step) / at.steps
            self._took[cell.task] = took_s + now - then, known_s + share * foreseen_s
        self._before = cell.key, seed, at.step, now
        if self.watch is not None:
            cells = self._cells or [cell]
            runs = sum(map(self._runs_left, cells))
            left_s = self.seconds_left(cells) - at.step / at.steps * foreseen_s * self._late(cell)
            self.watch(CellProgress(cell, seed, at, runs - (at.step == at.steps), max(left_s, 0.0)))


def different(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells without duplicates."""
    return [*{cell.key: cell for cell in cells}.values()]


def evaluate_replicas(loop: Any) -> None:
    """Record two more losses at an evaluation: the loss of the mean of all nodes, and the mean of the nodes' losses."""
    nodes = list(loop.fleet.comm.present)
    own = [loop.evaluate(node)["val_loss"] for node in nodes]
    _, buffers = loop.average()
    mean = loop.measure([rows.mean(0) for rows in loop.rows()], buffers)["val_loss"]
    loop.history.add_evaluation(
        loop.step, loop.epoch, {"mean_val_loss": mean, "node_val_loss": float(np.mean(own))}
    )  # fmt: skip


def _run(seed: int, outcome: Outcome) -> Run:
    """Return a run's measures at its evaluations and at the end."""
    if outcome.history is None:
        return Run(seed, {"val_loss": math.inf, "wall_s": outcome.wall_s}, {"step": []}, outcome.error)
    rows = [row for row in outcome.history.rows(None) if row["val_loss"] is not None]
    curves: dict[str, list[float]] = {"step": [row["step"] for row in rows]}
    for name in CURVES:
        line = [row.get(name) for row in rows]
        if any(x is not None for x in line):
            curves[name] = [math.nan if x is None else float(x) for x in line]
    last = {name: float(rows[-1][name]) for name in LAST if rows[-1].get(name) is not None}
    return Run(seed, last | {"wall_s": outcome.wall_s}, curves)
