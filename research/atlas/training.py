"""Train the atlas: trials on validation data, then the chosen settings and the defaults on test data."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exogym.data.partition import label_skew
from exogym.errors import ArgumentError, DataError, check_count, needs
from exogym.study.cells import Cell as SeededCell
from exogym.study.cells import Outcome, processes_that_pay, train
from exogym.study.compare.folder import ALL_ARGUMENTS
from exogym.study.compare.run import heading_of
from exogym.study.sweep.axes import Axes
from exogym.study.tasks import Data, size_of
from research.atlas.halves import HALVES, halved
from research.atlas.table import FRESH, RATES, SEEDS, SEEDS_OF, TRIAL_SEEDS, Row, Table, run_of
from research.atlas.tuning import Options, axes_of_method, best_of, next_trials, takes, with_options, without
from research.benchmark.results import short
from research.reproduce import Reproduction
from research.reproduce.claim import Cell, Run

REPLICAS = ("mean_val_loss", "node_val_loss")  # of a cell with `replicas`
START_S = 0.3  # about what a run takes beside its steps


class TimeIsUp(Exception):
    """The given hours are over. The unfinished runs were saved."""


@dataclass(frozen=True)
class Study:
    """A method at a place: its trials, and the runs with the chosen settings.

    Attributes:
        cell: the method's options that stay, and the place's.
        rates: inner rates to measure instead of the best trial's: a low one, or a low and a high one. () takes the best
            trial's.
    """

    place: str
    method: str
    cell: Cell
    rates: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}, {self.method}"


@dataclass(frozen=True)
class Ended:
    """A run that ended: its study and settings, the runs left, and about how many seconds they will take."""

    study: Study
    options: Options
    seed: int
    runs_left: int
    left_s: float


class Atlas:
    """Trains methods at places, each with the same number of trials.

    Args:
        out: folder of the runs; created if needed. Finished runs are never trained again.
        studies: the methods at places; see `research.atlas.places.studies_of`.
        trials: K, the number of trials of each method. The first trial has the method's defaults.
        processes: runs that train at the same time, or "auto".
        device: as in `LocalTrainer.fit`.
        data: dict from a task's name to the file or folder of its data, if they are not in the usual places.
        defaults: whether to measure each method's defaults on test data, beside the chosen settings.
        hours: stop after this time. Another call with the same folder continues.
        watch: function that receives an `Ended` after each run.

    Attributes:
        studies: the studies that can be trained.
        left_out: dict from the other studies, as text, to the reasons.

    Raises:
        ArgumentError: a method declares no ranges for tuning, or no method can be trained.
        ExoGymError: optuna is not installed.
    """

    def __init__(
        self,
        out: Path | str,
        studies: Sequence[Study],
        *,
        trials: int,
        processes: int | str = 1,
        device: str = "auto",
        data: Mapping[str, Data] | None = None,
        defaults: bool = True,
        hours: float | None = None,
        watch: Callable[[Ended], object] | None = None,
    ) -> None:
        check_count("trials", trials)
        needs("optuna", "search")
        self.trials, self.defaults, self.watch = trials, defaults, watch
        self.until = None if hours is None else time.monotonic() + 3600 * hours
        parts = {"validation": ("validation", TRIAL_SEEDS), "test": ("test", SEEDS), "fresh": ("test", FRESH)}
        self.work = {
            name: Reproduction(
                Path(out) / name, seeds=seeds, device=device, data=data or {},
                problem=functools.partial(halved, half),
            )
            for name, (half, seeds) in parts.items()
        }  # fmt: skip
        self.studies: list[Study] = []
        self.left_out: dict[str, str] = {}
        self._axes: dict[Study, Axes] = {}
        self._found: dict[tuple[str, str], list[Run]] = {}  # of all seeds, by half and cell
        self._tried: dict[Study, list[Options]] = {}  # trials that a table has
        for study in studies:
            self._add(study)
        if not self.studies:
            raise ArgumentError(f"no method can be trained: {'; '.join(sorted(set(self.left_out.values())))}")
        session = self.work["validation"].session(self.cell(self.studies[0], {}))
        self.processes = processes_that_pay(processes, self.runs_left(), session.place)
        self._wall_s = self._foreseen_s = 0.0  # of this process's runs, as they took and as estimated

    def _add(self, study: Study) -> None:
        try:
            session = self.work["validation"].session(self.cell(study, {}))
        except (ArgumentError, DataError) as error:
            self.left_out[str(study)] = str(error)
            return
        self._axes[study] = axes_of_method(study.cell.says, session.setting.inner_optim)
        self.studies.append(study)

    def know(self, table: Table) -> None:
        """Take the runs in `table` as finished, and leave out the studies that are whole: others have trained them.

        Runs of a cell count if the table has all its seeds. The table's trials count in their order, also if this
        version of optuna would propose others.

        Raises:
            ArgumentError: the table has a study whose defaults differ from this version's.
        """
        rows: dict[tuple[str, str], list[Row]] = {}
        for row in table.rows:
            rows.setdefault((row["place"], row["method"]), []).append(row)
        for study in self.studies:
            self._know(study, rows.get((study.place, study.method), []), table)
        self.studies = [study for study in self.studies if self._left(study)]

    def _know(self, study: Study, rows: Sequence[Row], table: Table) -> None:
        for row in rows:
            first = row["kind"] == "trial" and not row["options"]
            if (first or "arguments" in row) and (changed := self._changed(study, row)):
                raise ArgumentError(
                    f"{table.path} has {study} with other defaults ({', '.join(changed)}): its rows cannot be compared "
                    "with new ones. Give another --page, or remove these rows"
                )
        trials = {row["number"]: row["options"] for row in rows if row["kind"] == "trial"}
        self._tried[study] = [trials[k] for k in itertools.takewhile(trials.__contains__, itertools.count())]
        found: dict[tuple[str, str], dict[int, Run]] = {}
        for row in rows:
            half = {SEEDS: "test", TRIAL_SEEDS: "validation", FRESH: "fresh"}[SEEDS_OF[row["kind"]]]
            found.setdefault((half, self.cell(study, row["options"]).key), {})[row["seed"]] = run_of(row)
        for (half, cell), runs in found.items():
            if runs.keys() == {*self.work[half].seeds}:
                self._found[half, cell] = [runs[seed] for seed in self.work[half].seeds]

    def _changed(self, study: Study, row: Row) -> list[str]:
        """Return the names of a study's defaults that differ from those in a row. A new argument has its default."""
        now = short(self._described(self.cell(study, {}), "validation") | {"arguments": self._arguments(study)})
        old, new = row.get("arguments", {}), now.pop("arguments")
        changed = [] if row["options"] else [name for name, value in now.items() if row[name] != value]
        return changed + [name for name in old.keys() & new.keys() if old[name] != new[name]]

    def _missing(self, half: str, cell: Cell) -> list[int]:
        return [] if (half, cell.key) in self._found else self.work[half].missing(cell)

    def cell(self, study: Study, options: Options) -> Cell:
        """Return the cell that trains a method with some settings."""
        lr = float(options["lr"]) if "lr" in options else study.cell.lr
        return replace(study.cell, strategy=with_options(study.cell.says, options), lr=lr)

    # ---------------------------------------------------------------- what remains

    def trials_of(self, study: Study) -> list[tuple[Options, Run]]:
        """Return a study's finished trials in order. This reads them from the folder, and trains nothing."""
        done: list[tuple[Options, Run]] = []
        while options := self._next(study, done):
            cells = [self.cell(study, each) for each in options]
            if any(self._missing("validation", cell) for cell in cells):
                break
            done += [(each, self._runs("validation", cell)[0]) for each, cell in zip(options, cells, strict=True)]
        return done

    def finals_of(self, study: Study) -> dict[str, Options]:
        """Return the settings to measure, a dict from a row's kind to options, or {} while trials are missing."""
        done = self.trials_of(study)
        if len(done) < self.trials_possible(study):
            return {}
        best = best_of(_losses(done)) if done else {}
        if study.rates:
            return {kind: {"lr": rate, **without(best, {"lr"})} for kind, rate in zip(RATES, study.rates, strict=False)}
        return {"tuned": best, "default": {}} if self.defaults else {"tuned": best}

    def trials_possible(self, study: Study) -> int:
        """Return the number of trials: one if a method has nothing to tune, and none if only given rates count."""
        if study.rates and self._axes[study].keys() <= {"lr"}:
            return 0
        return self.trials if self._axes[study] else 1

    def runs_left(self) -> int:
        """Return how many runs are left to train, about: the best trial may be the defaults."""
        return sum(self._left(study) for study in self.studies)

    def seconds_left(self) -> float:
        """Return about how many seconds the runs will take, corrected by the runs of this process."""
        return self._late * self._foreseen_left_s()

    def _foreseen_left_s(self) -> float:
        return sum(self._left(study) * self._run_s(study) for study in self.studies)

    def _left(self, study: Study) -> int:
        finals = self.finals_of(study)
        if not finals:
            kinds = len(study.rates) or 1 + self.defaults
            return self.trials_possible(study) - len(self.trials_of(study)) + kinds * len(SEEDS)
        cells = {cell.key: cell for cell in (self.cell(study, options) for options in finals.values())}
        return sum(len(self._missing("test", cell)) for cell in cells.values())

    def _run_s(self, study: Study) -> float:
        return START_S + self.work["validation"].run_seconds(self.cell(study, {}))

    def _next(self, study: Study, done: Sequence[tuple[Options, Run]]) -> Sequence[Options]:
        trials = self.trials_possible(study)
        tried = self._tried.get(study, [])[len(done) : trials]
        return tried or next_trials(self._axes[study], _losses(done), trials)

    # ---------------------------------------------------------------- training

    def train(self, ended: Callable[[Study], object] = lambda study: None) -> None:
        """Train all missing runs.

        Args:
            ended: function that is called with each study whose runs are complete.

        Raises:
            TimeIsUp: `hours` are over. KeyboardInterrupt: the user pressed Ctrl-C. Unfinished runs were saved.
        """
        left = list(self.studies)
        while left:
            batch: list[tuple[Study, str, Options, Cell]] = []
            for study in left[: self.processes]:  # one study after the other: after a stop, whole studies are left
                finals = self.finals_of(study)
                half = HALVES[bool(finals)]
                asked = list(finals.values()) if finals else self._next(study, self.trials_of(study))
                batch += [(study, half, options, self.cell(study, options)) for options in asked]
            self._train(batch, self.runs_left(), self._foreseen_left_s())
            for study in [study for study in left if self.finals_of(study) and not self._left(study)]:
                left.remove(study)
                ended(study)

    def train_again(self, asked: Sequence[tuple[Study, str, Options]]) -> list[dict[str, Any]]:
        """Train settings with the seeds `FRESH`, and return a row for each run, for `Table`.

        Args:
            asked: studies, each with the kind of its settings ("tuned" or "default") and the settings.

        Raises:
            TimeIsUp, KeyboardInterrupt: as in `train`.
        """
        batch = [(study, "fresh", options, self.cell(study, options)) for study, _, options in asked]
        left = [(study, self._missing("fresh", cell)) for study, _, _, cell in batch]
        self._train(batch, sum(len(seeds) for _, seeds in left), sum(len(s) * self._run_s(each) for each, s in left))
        return [
            self._row(study, f"{kind} again", 0, options, run)
            for study, kind, options in asked
            for run in self._runs("fresh", self.cell(study, options))
        ]

    def _train(self, batch: Sequence[tuple[Study, str, Options, Cell]], runs_left: int, left_s: float) -> None:
        owners: dict[SeededCell, tuple[Study, Options]] = {}
        for study, half, options, cell in {(half, cell.key): (s, half, o, cell) for s, half, o, cell in batch}.values():
            work = self.work[half]
            session, missing = work.session(cell), self._missing(half, cell)
            if missing:
                work.prepare(cell)
            (label,) = session.entries
            owners |= {session.cell(label, seed): (study, options) for seed in missing}
        mark = time.perf_counter()

        def ended(run: SeededCell, outcome: Outcome) -> None:
            nonlocal runs_left, left_s, mark
            study, options = owners[run]
            now, foreseen_s = time.perf_counter(), self._run_s(study)
            self._wall_s += now - mark
            self._foreseen_s += foreseen_s
            runs_left, mark = runs_left - 1, now
            left_s = max(left_s - foreseen_s, 0.0) if runs_left else 0.0  # not a rounding error
            if self.watch is not None:
                self.watch(Ended(study, options, run.seed, runs_left, left_s * self._late))
            if self.until is not None and time.monotonic() > self.until:
                raise TimeIsUp

        train(owners, self.processes, ended=ended)

    @property
    def _late(self) -> float:
        """This process's seconds per estimated second of a run; several runs at a time make it small."""
        return self._wall_s / self._foreseen_s if self._foreseen_s else 1 / self.processes

    def _runs(self, half: str, cell: Cell) -> list[Run]:
        if (half, cell.key) not in self._found:
            self._found[half, cell.key] = self.work[half].results(cell)
        return self._found[half, cell.key]

    # ---------------------------------------------------------------- results

    def rows(self, study: Study) -> list[dict[str, Any]]:
        """Return a row for each run of a study whose runs are complete, for `Table`."""
        rows = [
            self._row(study, "trial", number, options, run)
            for number, (options, run) in enumerate(self.trials_of(study))
        ]
        for kind, options in self.finals_of(study).items():
            rows += [self._row(study, kind, 0, options, run) for run in self._runs("test", self.cell(study, options))]
        return rows

    def _row(self, study: Study, kind: str, number: int, options: Options, run: Run) -> dict[str, Any]:
        cell = self.cell(study, options)
        row: dict[str, Any] = {
            "place": study.place, "method": study.method, "kind": kind, "number": number, "seed": run.seed,
            "options": dict(options), "loss": run.last["val_loss"],
            "accuracy": run.last.get("val_accuracy"), "tx_bytes": run.last.get("tx_bytes"),
            "payload_bytes": run.last.get("payload_bytes"), "wall_s": run.last["wall_s"],
        } | self._described(cell, "test")  # fmt: skip
        if (kind == "trial" and not options) or (kind == RATES[0] and not self.trials_possible(study)):
            row["arguments"] = self._arguments(study)
        if kind != "trial":
            row |= {"steps": run.curves["step"], "losses": run.curves.get("val_loss", [])}
        if kind != "trial" and cell.replicas:
            row["curves"] = {name: run.curves.get(name, []) for name in REPLICAS}
        return row if run.error is None else row | {"error": run.error}

    def _described(self, cell: Cell, half: str) -> dict[str, Any]:
        """Return the strategy's text with its H, and the inner rate."""
        text, setting = cell.says, self.work[half].session(cell).setting
        if takes(text, "H") and ":H=" not in text:
            text += f":H={setting.H}"
        return {"strategy": text, "lr": setting.lr}

    def _arguments(self, study: Study) -> dict[str, Any]:
        """Return all arguments of the study's strategy with its defaults."""
        (arguments,) = self.work["validation"].asked(self.cell(study, {}))[ALL_ARGUMENTS].values()
        return dict(arguments)

    def place_of(self, study: Study) -> dict[str, Any]:
        """Return what the page says about a study's place."""
        work, cell = self.work["test"], self.cell(study, {})
        session = work.session(cell)
        setting = session.setting
        held_out: Any = session.task.val
        size, step_s = size_of(session.task), work.run_seconds(cell) / (setting.steps * setting.nodes)
        return {
            "task": cell.task, "nodes": setting.nodes, "steps": setting.steps, "batch_size": setting.batch_size,
            "trials": self.trials, "tested": len(held_out), "parameters": int(size),
            "step_s": step_s, "shapes": [list(shape) for shape in size.shapes or ()], "heading": heading_of(session),
            "skew": None if session.split is None else label_skew(session.split, session.task.train, setting.nodes),
        }  # fmt: skip


def _losses(done: Sequence[tuple[Options, Run]]) -> list[tuple[Options, float]]:
    """Return trials' losses, rounded as in a table: so a table gives the same choice."""
    return [(options, float(f"{run.last['val_loss']:.6g}")) for options, run in done]
