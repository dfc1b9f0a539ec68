"""Train the runs of a comparison, one after another, or load finished runs from the comparison's folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym import LocalTrainer
from exogym.core.record.metrics import Metric
from exogym.data import IterableData, Partitioner
from exogym.data.reading import FirstShare
from exogym.data.reading import described as described_data
from exogym.errors import TrainingError
from exogym.options import RunOptions
from exogym.progress import GOING_ON, without_notices
from exogym.record import History
from exogym.study.compare.entries import OF_SEVERAL_NODES, Entry, Setting
from exogym.study.compare.folder import Folder, Outcome
from exogym.study.compare.forecast import Forecast
from exogym.study.compare.pace import Pace
from exogym.study.compare.plots import Strip
from exogym.study.compare.summary import Track
from exogym.study.tasks import Task

SAVE_S = 60.0  # longer runs are saved at this interval, at an evaluation


@dataclass(frozen=True)
class Standing:
    """A comparison's progress: strategy `label` trains run number `run` of `runs`, at step `step` of `steps`.

    `left_s` is the remaining seconds of training for all runs, or None if unknown. The time to write tables and
    pictures is not included.
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


@dataclass(frozen=True)
class FirstShard(Partitioner):
    """A partitioner for the run `single`: its only node gets the shard of node 0 in the fleet, in the same order."""

    whole: Partitioner
    nodes: int

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        return self.whole.split(dataset, self.nodes, seed)[:1]


@dataclass
class Session:
    """The runs of one comparison: the settings that they share, and the finished runs.

    Attributes:
        split: how the data are divided, or None if the data are an iterable.
        passed: options of `fit` for each run, unchanged.
        opening: checksum of an iterable's first examples, which the runs of a resumed comparison must find again.
        callbacks: callbacks of every run, beside the session's own.
        outcomes: a dict from (label, seed) to the run's outcome, in the order of the runs.
    """

    task: Task
    setting: Setting
    entries: Mapping[str, Entry]
    split: Partitioner | None
    train: Any
    val: Any
    val_interval: int
    place: torch.device
    processes: int | str
    forecast: Forecast | None
    timeline: bool
    loss_fn: Callable[..., Tensor] | None
    metrics: dict[str, Metric] | None
    watch: Callable[[Standing], object] | None
    folder: Folder | None
    passed: Mapping[str, Any]
    opening: int | None = None
    callbacks: tuple[Callable[[Any], object], ...] = ()
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    _pace: Pace = field(default_factory=lambda: Pace(unknown=max))  # expensive strategies mostly come last
    _ended_at: float | None = None  # time.perf_counter() at the end of this process's last run
    _starts_s: list[float] = field(default_factory=list)  # seconds from there to the next run's first evaluation

    def train_all(self) -> None:
        """Train every run to its end, except runs whose outcome the folder already has."""
        for label in self.entries:
            for number, seed in enumerate(self.setting.seeds, 1):
                known = self.known(label, seed)
                self.outcomes[label, seed] = known or self.settle(label, seed)
                if known is not None and known.history is not None:
                    self._tell(label, number, self.setting.steps, known.history)

    def known(self, label: str, seed: int) -> Outcome | None:
        """Return a finished run's outcome from the folder; None if the folder has no outcome of this run."""
        return None if self.folder is None else self.folder.outcome(label, seed)

    def settle(self, label: str, seed: int) -> Outcome:
        """Train one run to its end, and return the outcome. If there is a folder, write the outcome into the folder."""
        with without_notices(GOING_ON):  # the caller's message tells how to continue all runs
            outcome = self._train(label, self.entries[label], self.setting.seeds.index(seed) + 1, seed)
        if self.folder is not None:
            self.folder.keep(label, seed, outcome)
        return outcome

    def beat(self) -> None:
        """Write a heartbeat into the folder's lock, if the comparison has a folder."""
        if self.folder is not None:
            self.folder.beat()

    @property
    def histories(self) -> dict[tuple[str, int], History]:
        """The histories of all runs that completed their training, by (label, seed)."""
        return {key: found.history for key, found in self.outcomes.items() if found.history is not None}

    @property
    def tracks(self) -> dict[tuple[str, int], Track]:
        """The evaluations of all runs that completed their training, by (label, seed)."""
        found = {key: Track.of_history(history) for key, history in self.histories.items()}
        return {key: track for key, track in found.items() if track is not None}

    @property
    def strips(self) -> dict[str, Strip]:
        return {label: found.strip for (label, _), found in self.outcomes.items() if found.strip is not None}

    @property
    def in_order(self) -> IterableData:
        """The iterable that all runs read, with its length and window."""
        return described_data(self.train)

    @property
    def dealing(self) -> str:
        """How the nodes get their examples, as text."""
        if self.split is not None:
            return repr(self.split)
        return f"read in order, window {self.in_order.window}" if self.passed["shuffle"] else "read in order"

    def fit_options(self, entry: Entry, timed: bool = False) -> dict[str, Any]:
        """Return the options with which `fit` trains a strategy, for all seeds. If `timed`, runs record a timeline."""
        nodes = self.setting.nodes
        given: dict[str, Any] = {
            **self.passed, "num_nodes": nodes, "max_steps": self.setting.steps, "batch_size": self.setting.batch_size,
            "val_interval": self.val_interval, "device": self.place, "partitioner": self.split,
            "processes": self.processes, "progress": False,
        }  # fmt: skip
        if self.forecast is not None:
            given |= self.forecast.fit_options(entry.alone, timed)
        if entry.alone:
            given |= {name: getattr(RunOptions, name) for name in OF_SEVERAL_NODES}
            given |= {"num_nodes": 1, "processes": 1}
            given |= {} if self.split is None else {"partitioner": FirstShard(self.split, nodes)}
            given |= {"node": given["node"][0]} if isinstance(given["node"], Sequence) else {}
        return given

    def _train(self, label: str, entry: Entry, number: int, seed: int) -> Outcome:
        """Train one strategy with one seed."""
        timed = self.timeline and number == 1
        train = FirstShare(self.train, self.setting.nodes) if entry.alone and self.split is None else self.train
        trainer = LocalTrainer(self.task.make_model(seed), train, self.val, loss_fn=self.loss_fn, metrics=self.metrics)
        # No checkpoint holds a timeline, and a user's class may have state that no checkpoint can hold.
        saved = self.folder is not None and not timed and entry.strategy.registered
        saving = {} if self.folder is None else self.folder.run_options(label, seed, saved)
        start, error = time.perf_counter(), None
        try:
            trainer.fit(
                entry.strategy, seed=seed, callbacks=[*self.callbacks, _At(self, label, number, saved)],
                **self.fit_options(entry, timed), **saving,
            )  # fmt: skip
            _check_finite(trainer.history, seed)
        except TrainingError as failure:
            error = str(failure)
        self._ended_at = time.perf_counter()
        wall_s = max(self._ended_at - start, *trainer.history.column("wall_s")[1][-1:], 0.0)
        strip = Strip.of(entry.title, trainer.clock) if timed and trainer.clock is not None and not error else None
        return Outcome(None if error else trainer.history, error, wall_s, trainer.description, strip)

    def _tell(self, label: str, number: int, step: int, history: History) -> None:
        if self.watch is None:
            return
        row = next(iter(history.rows_after(step - 1, None)))
        place = label, number, len(self.setting.seeds), step, self.setting.steps
        left_s = self._left_s(label, number, step)
        self.watch(Standing(*place, row["val_loss"], row["tx_bytes"], left_s))

    def _left_s(self, label: str, number: int, step: int) -> float | None:
        """Return the seconds until all runs have ended, with `step` reached in a run of `label`; None if unknown.

        The first run's start does not count, because Python and torch load only once.
        """
        left_s = 0.0
        start_s = fmean(self._starts_s) if self._starts_s else 0.0
        for other, entry in self.entries.items():
            for k, seed in enumerate(self.setting.seeds, 1):
                if (other, seed) in self.outcomes:
                    continue
                here = (other, k) == (label, number)
                left_s += self._seconds(other, entry, self.setting.steps - (step if here else 0))
                left_s += 0.0 if here else start_s
        return None if math.isnan(left_s) else left_s

    def _seconds(self, label: str, entry: Entry, steps: int) -> float:
        """Return the seconds of a strategy's steps.

        A step of N nodes takes between one and N times as long as a step of one node. While only one of them is known,
        the factor sqrt(N) is wrong by at most sqrt(N).
        """
        if not steps:
            return 0.0
        found_s = self._pace.seconds(_group(entry), label, steps)
        if math.isnan(found_s):
            known_s = self._pace.seconds(_group(entry, other=True), label, steps)
            found_s = known_s * self.setting.nodes ** (-0.5 if entry.alone else 0.5)
        return found_s

    def took(self, label: str, steps: int, seconds: float) -> None:
        """Record that `steps` steps of a strategy took `seconds`, including evaluations."""
        self._pace.add(_group(self.entries[label]), label, steps, seconds)

    def began(self) -> None:
        """Record that a run has begun to train."""
        if self._ended_at is not None:
            self._starts_s.append(time.perf_counter() - self._ended_at)


def _group(entry: Entry, other: bool = False) -> str:
    """Return the group of runs with a similar cost per step."""
    return "alone" if entry.alone != other else "fleet"


class _At:
    """At each evaluation of a run: report the progress, and save a long run."""

    def __init__(self, session: Session, label: str, number: int, saves: bool) -> None:
        self.session, self.label, self.number, self.saves = session, label, number, saves
        self.step, self.then, self.saved_at = -1, 0.0, time.perf_counter()

    def __call__(self, loop: Any) -> None:
        now = time.perf_counter()
        if self.step < 0:
            self.session.began()
        elif loop.step > self.step:
            self.session.took(self.label, loop.step - self.step, now - self.then)
        self.step, self.then = loop.step, now
        self.session.beat()
        self.session._tell(self.label, self.number, loop.step, loop.history)
        if self.saves and loop.step < self.session.setting.steps and time.perf_counter() - self.saved_at > SAVE_S:
            loop.save()
            self.saved_at = time.perf_counter()


def _check_finite(history: History, seed: int) -> None:
    steps, losses = history.column("val_loss")
    if not np.isfinite(losses[-1:]).all():
        raise TrainingError(f"the validation loss of seed {seed} is {losses[-1]} after step {steps[-1]}: lower lr")
