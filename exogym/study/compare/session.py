"""A comparison's checked runs: the settings that they share, a cell for each, and the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from exogym.data import IterableData, Partitioner
from exogym.data.reading import FirstShare
from exogym.data.reading import described as described_data
from exogym.options import RunOptions
from exogym.record import History
from exogym.study.cells import Cell, Outcome, Standing, train
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.entries import OF_SEVERAL_NODES, ComparisonSetting, Entry
from exogym.study.compare.folder import Folder
from exogym.study.compare.forecast import Forecast
from exogym.study.compare.summary import Track
from exogym.study.tasks import Task


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
        asked: the comparison's options.
        val: the validation examples of an evaluation.
        split: how the data are divided, or None if the data are an iterable.
        opening: checksum of an iterable's first examples, which the runs of a resumed comparison must find again.
        callbacks: callbacks of every run.
        outcomes: a dict from (label, seed) to the run's outcome, in the order of the runs.
    """

    asked: ComparisonOptions
    task: Task
    setting: ComparisonSetting
    entries: Mapping[str, Entry]
    split: Partitioner | None
    val: Any
    place: torch.device
    forecast: Forecast | None
    opening: int | None = None
    folder: Folder | None = None
    callbacks: tuple[Callable[[Any], object], ...] = ()
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)

    @property
    def val_interval(self) -> int:
        return self.asked.val_interval or self.setting.val_interval(len(self.val))

    def cells(self) -> list[Cell]:
        """Return a cell for each run, in order: each strategy with all seeds."""
        return [self.cell(label, seed) for label in self.entries for seed in self.setting.seeds]

    def cell(self, label: str, seed: int) -> Cell:
        """Return the cell of one run."""
        entry, task = self.entries[label], replace(self.task, val=self.val)
        if entry.alone and self.split is None:
            task = replace(task, train=FirstShare(task.train, self.setting.nodes))  # type: ignore[arg-type]
        options = self.fit_options(entry)
        return Cell(
            task, entry.strategy, seed, None if self.folder is None else self.folder.child(label, seed),
            options | {"callbacks": self.callbacks}, label, self.asked.loss_fn, self.asked.metrics,
        )  # fmt: skip

    def train_all(self, watch: Callable[[Standing], object] | None = None) -> None:
        """Train every run to its end, except runs whose outcome the folder already has."""
        beat: Callable[[], object] = (lambda: None) if self.folder is None else self.folder.beat
        train(self.cells(), ended=self.take, watch=watch, beat=beat)

    def take(self, cell: Cell, outcome: Outcome) -> None:
        self.outcomes[cell.label, cell.seed] = outcome

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
    def in_order(self) -> IterableData:
        """The iterable that all runs read, with its length and window."""
        return described_data(self.task.train)

    @property
    def dealing(self) -> str:
        """How the nodes get their examples, as text."""
        if self.split is not None:
            return repr(self.split)
        return f"read in order, window {self.in_order.window}" if self.asked.shuffle else "read in order"

    def fit_options(self, entry: Entry) -> dict[str, Any]:
        """Return the options with which `fit` trains a strategy, for all seeds."""
        nodes = self.setting.nodes
        given: dict[str, Any] = {field.name: getattr(self.asked, field.name) for field in fields(RunOptions)}
        given |= {
            "num_nodes": nodes, "max_steps": self.setting.steps, "batch_size": self.setting.batch_size,
            "val_interval": self.val_interval, "device": self.place, "partitioner": self.split,
            "processes": self.asked.processes, "progress": False,
        }  # fmt: skip
        if self.forecast is not None:
            given |= self.forecast.fit_options(entry.alone)
        if entry.alone:
            given |= {name: getattr(RunOptions, name) for name in OF_SEVERAL_NODES}
            given |= {"num_nodes": 1, "processes": 1}
            given |= {} if self.split is None else {"partitioner": FirstShard(self.split, nodes)}
            given |= {"node": given["node"][0]} if isinstance(given["node"], Sequence) else {}
        return given
