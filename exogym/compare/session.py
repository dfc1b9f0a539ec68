"""The runs of a comparison, one after another: trained, or found where an earlier start has left them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.compare.entries import Entry, Setting
from exogym.compare.folder import Folder, Outcome
from exogym.compare.forecast import Forecast
from exogym.compare.plots import Strip
from exogym.data.partition import Partitioner
from exogym.errors import TrainingError
from exogym.record.history import History
from exogym.record.metrics import Metric
from exogym.tasks import Task
from exogym.trainer import LocalTrainer

SAVE_S = 60.0  # a run that takes longer is saved so often, at an evaluation


@dataclass(frozen=True)
class Standing:
    """How far a comparison is: run number `run` of `runs` of strategy `label`, after `step` of `steps` steps.

    `left_s` is how many seconds the whole comparison will still take, None before anything is known of it.
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
    """Gives one node alone what node 0 of a fleet gets: its shard, in its order."""

    whole: Partitioner
    nodes: int

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        return self.whole.split(dataset, self.nodes, seed)[:1]


@dataclass
class Session:
    """What all runs share, and those that have ended.

    Attributes:
        callbacks: of every run, beside those that keep and tell.
        outcomes: (label, seed) to what came out, in the order of the runs.
    """

    task: Task
    setting: Setting
    entries: Mapping[str, Entry]
    split: Partitioner
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
    callbacks: tuple[Callable[[Any], object], ...] = ()
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    _node_steps: int = 0  # trained since the start, of all nodes
    _start: float = field(default_factory=time.perf_counter)

    def train_all(self) -> None:
        """Take every run to its end; what the folder already has is not trained again."""
        for label in self.entries:
            for number, seed in enumerate(self.setting.seeds, 1):
                known = self.known(label, seed)
                self.outcomes[label, seed] = known or self.settle(label, seed)
                if known is not None and known.history is not None:
                    self._tell(label, number, self.setting.steps, known.history)

    def known(self, label: str, seed: int) -> Outcome | None:
        """Return what the folder has of a run that has ended."""
        return None if self.folder is None else self.folder.outcome(label, seed)

    def settle(self, label: str, seed: int) -> Outcome:
        """Take one run to its end, and keep what came out where there is a folder."""
        outcome = self._train(label, self.entries[label], self.setting.seeds.index(seed) + 1, seed)
        if self.folder is not None:
            self.folder.keep(label, seed, outcome)
        return outcome

    def beat(self) -> None:
        """Say that this process still works in the folder, if there is one."""
        if self.folder is not None:
            self.folder.beat()

    @property
    def histories(self) -> dict[tuple[str, int], History]:
        """Of the runs that ended well."""
        return {key: found.history for key, found in self.outcomes.items() if found.history is not None}

    @property
    def strips(self) -> dict[str, Strip]:
        return {label: found.strip for (label, _), found in self.outcomes.items() if found.strip is not None}

    def _train(self, label: str, entry: Entry, number: int, seed: int) -> Outcome:
        """Train one strategy from one seed."""
        timed = self.timeline and number == 1
        trainer = LocalTrainer(
            self.task.make_model(seed), self.train, self.val, loss_fn=self.loss_fn, metrics=self.metrics
        )
        timing = {} if self.forecast is None else self.forecast.fit_options(entry.alone, timed)
        # A timeline is in no checkpoint, and a class of the user's may have a state that none can hold.
        saved = self.folder is not None and not timed and entry.strategy.registered
        saving = {} if self.folder is None else self.folder.run_options(label, seed, saved)
        start, error = time.perf_counter(), None
        try:
            trainer.fit(
                entry.strategy, num_nodes=1 if entry.alone else self.setting.nodes, max_steps=self.setting.steps,
                seed=seed, batch_size=self.setting.batch_size, val_interval=self.val_interval, device=self.place,
                partitioner=FirstShard(self.split, self.setting.nodes) if entry.alone else self.split,
                processes=1 if entry.alone else self.processes, progress=False,
                callbacks=[*self.callbacks, _At(self, label, entry, number, saved)], **timing, **saving,
            )  # fmt: skip
            _check_finite(trainer.history, seed)
        except TrainingError as failure:
            error = str(failure)
        wall_s = max(time.perf_counter() - start, *trainer.history.column("wall_s")[1][-1:], 0.0)
        strip = Strip.of(entry.title, trainer.clock) if timed and trainer.clock is not None and not error else None
        return Outcome(None if error else trainer.history, error, wall_s, trainer.description, strip)

    def _tell(self, label: str, number: int, step: int, history: History) -> None:
        if self.watch is None:
            return
        row = next(iter(history.rows_after(step - 1, None)))
        setting, left_s = self.setting, None
        if self._node_steps:
            left_s = (time.perf_counter() - self._start) / self._node_steps * self._node_steps_left(label, number, step)
        place = label, number, len(setting.seeds), step, setting.steps
        self.watch(Standing(*place, row["val_loss"], row["tx_bytes"], left_s))

    def _node_steps_left(self, label: str, number: int, step: int) -> int:
        """Return the steps of all nodes that are still to be trained, `step` being taken in a run of `label`."""
        left = 0
        for other, entry in self.entries.items():
            for k, seed in enumerate(self.setting.seeds, 1):
                if (other, seed) not in self.outcomes:
                    taken = step if (other, k) == (label, number) else 0
                    left += (self.setting.steps - taken) * self._nodes(entry)
        return left

    def _nodes(self, entry: Entry) -> int:
        return 1 if entry.alone else self.setting.nodes


class _At:
    """At each evaluation of a run: says how far it is, and saves a long one."""

    def __init__(self, session: Session, label: str, entry: Entry, number: int, saves: bool) -> None:
        self.session, self.label, self.number, self.saves = session, label, number, saves
        self.nodes, self.step, self.saved_at = session._nodes(entry), -1, time.perf_counter()

    def __call__(self, loop: Any) -> None:
        if self.step >= 0:
            self.session._node_steps += (loop.step - self.step) * self.nodes
        self.step = loop.step
        self.session.beat()
        self.session._tell(self.label, self.number, loop.step, loop.history)
        if self.saves and loop.step < self.session.setting.steps and time.perf_counter() - self.saved_at > SAVE_S:
            loop.save()
            self.saved_at = time.perf_counter()


def _check_finite(history: History, seed: int) -> None:
    steps, losses = history.column("val_loss")
    if not np.isfinite(losses[-1:]).all():
        raise TrainingError(f"the validation loss of seed {seed} is {losses[-1]} after step {steps[-1]}: lower lr")
