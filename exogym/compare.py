"""Comparisons: the same model, from the same weights, on the same data, under several strategies."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from exogym.comparison import FILES, SINGLE, Comparison, NewFolder, find, summarise, write
from exogym.data.partition import IID, Partitioner, parse_partitioner
from exogym.data.stream import check_dataset, is_factory
from exogym.devices import resolve_device
from exogym.errors import ArgumentError, TrainingError, check_count, checked, nearest
from exogym.history import History
from exogym.metrics import Metric
from exogym.options import describe
from exogym.plots import check_matplotlib
from exogym.strategy.demo import DeMoStrategy
from exogym.strategy.registry import DEFAULTS, STRATEGIES, TITLES, parse_strategy
from exogym.strategy.strategy import Inner, Strategy
from exogym.tasks import Task
from exogym.trainer import LocalTrainer

DEFAULT_STRATEGIES = (SINGLE, "ddp", "diloco", "sparta", "fedavg", "demo")
# Evaluations of a run: enough to draw a curve, few enough to take a tenth of the fleet's time. An example evaluated
# costs two thirds of one trained, and a step of a node no less than 16 trained.
MOST_EVALUATIONS, LEAST_EVALUATIONS, SHARE, COST, STEP_EXAMPLES = 30, 10, 0.1, 2 / 3, 16
VAL_EXAMPLES = 500  # at most
Problem = Task | tuple[Callable[[], nn.Module], Any, Any]


@dataclass(frozen=True)
class Standing:
    """How far a comparison is: run number `run` of `runs` of strategy `label`, after `step` of `steps` steps."""

    label: str
    run: int
    runs: int
    step: int
    steps: int
    val_loss: float
    tx_bytes: float

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


@dataclass(frozen=True)
class _Setting:
    """What all strategies share."""

    nodes: int
    steps: int
    batch_size: int
    seeds: tuple[int, ...]
    inner_optim: str
    lr: float
    lr_scheduler: str
    warmup_steps: int
    max_norm: float | None
    H: int
    outer_lr: float | None

    def val_interval(self, val_examples: int) -> int:
        """Return the steps between evaluations on `val_examples`."""
        trained = self.steps * self.nodes * max(self.batch_size, STEP_EXAMPLES)
        affordable = round(SHARE * trained / (COST * val_examples))
        return math.ceil(self.steps / min(max(affordable, LEAST_EVALUATIONS), MOST_EVALUATIONS))


@dataclass(frozen=True)
class _Entry:
    """A strategy to compare, with its name in sentences and what the table says of it."""

    strategy: Strategy
    title: str
    notes: str
    alone: bool


@checked
def compare(
    problem: Problem,
    strategies: str | Sequence[str] | Mapping[str, str | Strategy] = DEFAULT_STRATEGIES,
    *,
    nodes: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seeds: int | Sequence[int] = 3,
    lr: float | None = None,
    partition: str | Partitioner | None = None,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    metrics: dict[str, Metric] | None = None,
    watch: Callable[[Standing], object] | None = None,
) -> Comparison:
    """Train the same model from the same weights on the same data under several strategies, and compare.

    Every node keeps one shard of the data throughout. `single` is node 0 of that fleet alone: the same weights, its
    shard, its batches in their order, DDP's inner optimizer, and never a byte. All have the same inner optimizer and
    learning rate unless `notes` says otherwise; DeMo's rule has a learning rate of its own.

    Args:
        problem: a `Task`, or (make_model, train, val); `make_model()` draws from torch's generator, which is seeded.
        strategies: texts for `parse_strategy` or "single", in a sequence or with commas between; or name to text or
            `Strategy`.
        nodes, steps, batch_size, lr: N, steps of each node, examples of a node's step, inner learning rate; None: the
            task's (without one 4, 300, 32, 0.001).
        seeds: how many, from 0, or which. A seed fixes weights, shards, order and every other choice.
        partition: who gets what, as text or `Partitioner`; None: the task's, or "iid".
        device: as `LocalTrainer.fit`.
        out: folder in which to make the folder `<task>-<time>` with run.json, summary.csv, metrics.csv (each
            evaluation), loss_vs_steps.png and loss_vs_bytes.png; None writes nothing.
        loss_fn, metrics: as `LocalTrainer`.
        watch: called with a `Standing` after each evaluation.

    There are 10 to 30 evaluations a run, on 500 validation examples at most, evenly spread. A run whose loss ceases
    to be a number is left out, and `notes` says so.

    Raises:
        ArgumentError, DataError: before training; also where `out` cannot be written.
        TrainingError: no run at all came to its end.

    >>> from exogym.tasks import load_task
    >>> result = compare(load_task("digits"), "single,ddp", steps=10, seeds=1)
    >>> [row["strategy"] for row in result.rows], result.rows[1]["quality"], result.rows[0]["tx_bytes"]
    (['single', 'ddp'], 1.0, 0.0)
    """
    task = _as_task(problem)
    setting = _setting(task, nodes, steps, batch_size, seeds, lr)
    entries = _entries(strategies, setting)
    split = partition or task.partitioner or IID()
    split = parse_partitioner(split) if isinstance(split, str) else split
    place = resolve_device(device)
    train, val = check_dataset(task.train), _evenly(check_dataset(task.val), VAL_EXAMPLES)
    val_interval = setting.val_interval(len(val))
    for seed in setting.seeds:
        split.split(train, setting.nodes, seed)  # a cut that leaves a node without data is an error now
    if out is not None:
        check_matplotlib()

    histories: dict[tuple[str, int], History] = {}
    runs: list[dict[str, Any]] = []
    failures: dict[str, TrainingError] = {}

    def run(label: str, entry: _Entry, number: int, seed: int) -> None:
        """Train one strategy from one seed."""

        def tell(loop: Any) -> None:
            row = next(loop.history.rows_after(loop.step - 1, None))
            at = Standing(label, number, len(setting.seeds), loop.step, setting.steps, row["val_loss"], row["tx_bytes"])
            if watch is not None:
                watch(at)

        trainer = LocalTrainer(task.make_model(seed), train, val, loss_fn=loss_fn, metrics=metrics)
        start = time.perf_counter()
        try:
            trainer.fit(
                entry.strategy, num_nodes=1 if entry.alone else setting.nodes, max_steps=setting.steps, seed=seed,
                batch_size=setting.batch_size, partitioner=FirstShard(split, setting.nodes) if entry.alone else split,
                val_interval=val_interval, device=place, progress=False, callbacks=[tell],
            )  # fmt: skip
            _check_finite(trainer.history, seed)
            histories[label, seed] = trainer.history
        except TrainingError as error:
            failures[label] = error
        wall_s = time.perf_counter() - start
        runs.append({"strategy": label, "seed": seed, "wall_s": wall_s, "description": trainer.description})

    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    made = None if out is None else NewFolder(out, task.name)
    with made or contextlib.nullcontext():
        for label, entry in entries.items():
            for number, seed in enumerate(setting.seeds, 1):
                run(label, entry, number, seed)
        if not histories:
            raise next(iter(failures.values()))
        said = {}
        for label, entry in entries.items():
            failed = sum((label, seed) not in histories for seed in setting.seeds)
            trouble = f"{failed} of {len(setting.seeds)} runs failed: {failures[label]}" if failed else ""
            said[label] = entry.title, "; ".join(filter(None, (entry.notes, trouble)))
        rows = summarise(said, setting.seeds, histories)
        heading = (
            f"{task.description}. {setting.nodes} nodes, {setting.steps} steps of {setting.batch_size} examples, "
            f"{split!r}, {setting.inner_optim} with lr {setting.lr:g} ({setting.lr_scheduler}), seeds "
            f"{', '.join(map(str, setting.seeds))}"
        )
        finding = find(rows)
        description = {
            "task": task.name, "description": task.description, "data": task.origin, "train_examples": len(train),
            "val_examples": len(val), "strategies": {k: describe(entry.strategy) for k, entry in entries.items()},
            "setting": asdict(setting), "partition": repr(split), "val_interval": val_interval,
            "device": str(place), "versions": _versions(), "started": started, "heading": heading, "finding": finding,
            "runs": runs,
        }  # fmt: skip
        result = Comparison(heading, finding, rows, histories, description)
        if made is not None:
            write(result, made.path)
    if made is None:
        return result
    paths = tuple(made.path / name for name in FILES)
    return Comparison(heading, finding, rows, histories, description, made.path, paths)


def split_strategies(strategies: str | Sequence[str] | Mapping[str, str | Strategy]) -> dict[str, str | Strategy]:
    """Return label to text or strategy; the label of a text is the text.

    Raises:
        ArgumentError: none at all, or one twice.
    """
    if isinstance(strategies, Mapping):
        return dict(strategies)
    texts = strategies.split(",") if isinstance(strategies, str) else list(strategies)
    labels = [text.strip() for text in texts]
    for label in labels:
        if labels.count(label) > 1:
            raise ArgumentError(f"strategies={','.join(labels)!r} names {label!r} twice: name each once")
    if not any(labels):
        raise ArgumentError(f"strategies={strategies!r} names none: give for example 'ddp,diloco'")
    return {label: label for label in labels}


def _as_task(problem: Any) -> Task:
    if isinstance(problem, Task):
        task = problem
    elif isinstance(problem, tuple) and len(problem) == 3 and callable(problem[0]):
        build, train, val = problem
        task = Task(
            "custom", "own problem", "given", train, val, build, nodes=4, batch_size=32, steps=300, lr=1e-3, H=10
        )
    else:
        raise ArgumentError(f"problem={problem!r} is not a Task; or give (make_model, train, val)")
    if is_factory(task.train) or is_factory(task.val):
        raise ArgumentError(
            "compare() cuts one data set into the nodes' shards: give it instead of a factory, and partition="
        )
    return task


def _setting(task: Task, nodes: Any, steps: Any, batch_size: Any, seeds: Any, lr: Any) -> _Setting:
    chosen = {"nodes": nodes, "steps": steps, "batch_size": batch_size, "lr": lr}
    chosen = {name: getattr(task, name) if value is None else value for name, value in chosen.items()}
    for name in ("nodes", "steps", "batch_size"):
        check_count(name, chosen[name])
    if isinstance(seeds, int):
        check_count("seeds", seeds)
        seeds = range(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise ArgumentError(f"seeds={seeds!r}: give how many, or different whole numbers")
    shared = {name: getattr(task, name) for name in DEFAULTS if name != "lr"}
    return _Setting(**chosen, **shared, seeds=tuple(seeds))


def _entries(strategies: Any, setting: _Setting) -> dict[str, _Entry]:
    defaults = {name: getattr(setting, name) for name in DEFAULTS}
    common = Inner(setting.inner_optim, setting.lr, None, setting.max_norm, setting.lr_scheduler, setting.warmup_steps)
    entries = {}
    for label, given in split_strategies(strategies).items():
        notes = []
        if isinstance(given, Strategy):
            entry = _Entry(given, label, "", alone=False)
        elif isinstance(given, str):
            entry = _parse(given, defaults)
            notes = [f"1 of {setting.nodes} shards"] if entry.alone else []
        else:
            raise ArgumentError(f"strategies: {label!r} is {given!r}; wanted a text or a Strategy")
        inner = entry.strategy.inner
        if isinstance(entry.strategy, DeMoStrategy):
            notes.append(f"own rule, lr={inner.base_lr:g}")
        elif (inner.spec.cls, inner.base_lr) != (common.spec.cls, common.base_lr):
            notes.append(f"{inner.spec.cls.__name__}, lr={inner.base_lr:g}")
        notes += [note for note in _values(entry.strategy) if note not in label]
        entries[label] = replace(entry, notes=", ".join(notes))
    return entries


def _parse(text: str, defaults: dict[str, Any]) -> _Entry:
    name, colon, options = text.partition(":")
    name = name.strip().lower()
    if name not in (known := {SINGLE, *STRATEGIES}):
        raise ArgumentError(f"unknown strategy {name!r}: {nearest(name, known)}")
    alone = name == SINGLE
    title = "one node alone" if alone else TITLES[name]
    title += f" ({options.replace(':', ', ')})" if options else ""
    return _Entry(parse_strategy(f"{'ddp' if alone else name}{colon}{options}", **defaults), title, "", alone)


def _values(strategy: Strategy) -> list[str]:
    """Return what decides the bytes and the outer step of a strategy, as options are written."""
    known = inspect.signature(type(strategy)).parameters
    given = getattr(strategy, "given_arguments", {})
    values = {name: given.get(name, known[name].default) for name in ("H", "outer_lr", "p_sparta") if name in known}
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def _evenly(dataset: Any, most: int) -> Any:
    """Return `dataset`, or if it has more than `most` examples that many of it, evenly spread."""
    if len(dataset) <= most:
        return dataset
    return Subset(dataset, np.linspace(0, len(dataset) - 1, most).round().astype(int).tolist())


def _check_finite(history: History, seed: int) -> None:
    steps, losses = history.column("val_loss")
    if not np.isfinite(losses[-1:]).all():
        raise TrainingError(f"the validation loss of seed {seed} is {losses[-1]} after step {steps[-1]}: lower lr")


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("exogym")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    machine = f"{platform.system()} {platform.machine()}"
    return {
        "exogym": own, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "machine": machine,
    }  # fmt: skip
