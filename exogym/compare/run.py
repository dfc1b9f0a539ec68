"""The runs of a comparison: each strategy from each seed, on the same data."""

from __future__ import annotations

import contextlib
import importlib.metadata
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

from exogym.compare.entries import Entry, entries_of, setting_of
from exogym.compare.forecast import check_timed, forecast_of, measured_step_s
from exogym.comparison import SINGLE, Comparison, NewFolder, find, find_first, summarise, target_of, write
from exogym.data.partition import IID, Partitioner, parse_partitioner
from exogym.data.stream import check_dataset, is_factory
from exogym.devices import resolve_device
from exogym.engine.wire import place as place_rows
from exogym.errors import ArgumentError, TrainingError, check_count, checked
from exogym.history import History
from exogym.metrics import Metric
from exogym.network import Network
from exogym.options import describe
from exogym.plots import Strip, check_matplotlib
from exogym.strategy.strategy import Strategy
from exogym.tasks import Task
from exogym.trainer import LocalTrainer

DEFAULT_STRATEGIES = (SINGLE, "ddp", "diloco", "sparta", "fedavg", "demo")
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
    processes: int | str = 1,
    device: str = "auto",
    network: Network | str | None = None,
    step_seconds: Any = None,
    speeds: Sequence[float] | None = None,
    target_loss: float | None = None,
    timeline: bool = False,
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
        processes, device: as `LocalTrainer.fit`; `single` always has one process.
        network: predict the time on this network, a `Network` or text as "wifi" or "100Mbps,20ms": for each strategy
            seconds to the end, share of them waited, and seconds until the validation loss came to the target.
        step_seconds: of a node's step there: a number, text as "80ms", one per node, or a `StepTime`; "measured" or
            None: what `measured_step_s` finds here, once, for all strategies alike.
        speeds: of the nodes, over 0; 0.5 takes twice the step_seconds. `single` is node 0, with its speed.
        target_loss: None: DDP's final validation loss / 0.95, which is 95 % of its quality; without DDP the highest
            final loss of any run.
        timeline: also draw what each node does when in the first rounds of each strategy, and write it as traces.
        out: folder in which to make the folder `<task>-<time>` with run.json, summary.csv, metrics.csv (each
            evaluation), loss_vs_steps.png and loss_vs_bytes.png, with a network also loss_vs_time.png, with `timeline`
            timeline.png and for each strategy a trace-<strategy>.json (for ui.perfetto.dev); None writes nothing.
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
    setting = setting_of(task, nodes, steps, batch_size, seeds, lr)
    entries = entries_of(strategies, setting)
    split = partition or task.partitioner or IID()
    split = parse_partitioner(split) if isinstance(split, str) else split
    place = resolve_device(device)
    train, val = check_dataset(task.train), _evenly(check_dataset(task.val), VAL_EXAMPLES)
    val_interval = setting.val_interval(len(val))
    for seed in setting.seeds:
        split.split(train, setting.nodes, seed)  # a cut that leaves a node without data is an error now
    if processes != "auto":
        check_count("processes", processes)
        place_rows(setting.nodes, int(processes))
    check_timed(network, step_seconds, speeds, target_loss, timeline)
    if out is not None:
        check_matplotlib()
    forecast = None
    if network is not None:
        like_ours = replace(task, lr=setting.lr)
        forecast = forecast_of(
            network, step_seconds, speeds, setting.nodes,
            lambda: measured_step_s(like_ours, setting.batch_size, place, loss_fn),
        )  # fmt: skip

    histories: dict[tuple[str, int], History] = {}
    runs: list[dict[str, Any]] = []
    failures: dict[str, TrainingError] = {}
    strips: dict[str, Strip] = {}

    def run(label: str, entry: Entry, number: int, seed: int) -> None:
        """Train one strategy from one seed."""

        def tell(loop: Any) -> None:
            row = next(loop.history.rows_after(loop.step - 1, None))
            at = Standing(label, number, len(setting.seeds), loop.step, setting.steps, row["val_loss"], row["tx_bytes"])
            if watch is not None:
                watch(at)

        trainer = LocalTrainer(task.make_model(seed), train, val, loss_fn=loss_fn, metrics=metrics)
        timing = {} if forecast is None else forecast.fit_options(entry.alone, timeline and number == 1)
        start = time.perf_counter()
        try:
            trainer.fit(
                entry.strategy, num_nodes=1 if entry.alone else setting.nodes, max_steps=setting.steps, seed=seed,
                batch_size=setting.batch_size, partitioner=FirstShard(split, setting.nodes) if entry.alone else split,
                val_interval=val_interval, device=place, progress=False, callbacks=[tell],
                processes=1 if entry.alone else processes, **timing,
            )  # fmt: skip
            _check_finite(trainer.history, seed)
            histories[label, seed] = trainer.history
            if timeline and number == 1 and trainer.clock is not None:
                strips[label] = Strip.of(entry.title, trainer.clock)
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
        target, why = (None, "") if forecast is None else target_of(histories, target_loss)
        rows = summarise(said, setting.seeds, histories, target)
        heading = (
            f"{task.description}. {setting.nodes} nodes, {setting.steps} steps of {setting.batch_size} examples, "
            f"{split!r}, {setting.inner_optim} with lr {setting.lr:g} ({setting.lr_scheduler}), seeds "
            f"{', '.join(map(str, setting.seeds))}"
        )
        finding, timed = find(rows), {}
        if forecast is not None and target is not None:
            heading += f". Time predicted on {forecast}"
            finding += " " + find_first(rows, target, why)
            timed = {"forecast": forecast.describe() | {"target_loss": target, "target": why}}
        description = {
            "task": task.name, "description": task.description, "data": task.origin, "train_examples": len(train),
            "val_examples": len(val), "strategies": {k: describe(entry.strategy) for k, entry in entries.items()},
            "setting": asdict(setting), "partition": repr(split), "val_interval": val_interval,
            "device": str(place), "versions": _versions(), "started": started, "heading": heading, "finding": finding,
            **timed, "runs": runs,
        }  # fmt: skip
        result = Comparison(heading, finding, rows, histories, description, target_loss=target, strips=strips)
        names = [] if made is None else write(result, made.path)
    if made is None:
        return result
    return replace(result, folder=made.path, paths=tuple(made.path / name for name in names))


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
