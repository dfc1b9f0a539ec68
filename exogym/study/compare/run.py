"""Run a comparison, from its arguments to its tables. `exogym.study.cells` trains the runs and stores their results."""

from __future__ import annotations

import contextlib
import inspect
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from exogym.core.base.devices import Device
from exogym.data import IID, IterableData, Stream
from exogym.data.partition import partitioner_of
from exogym.data.reading import COMPARED, Reader, sum_of
from exogym.data.reading import described as described_data
from exogym.data.stream import check_dataset, is_factory, is_iterable
from exogym.errors import ArgumentError, TrainingError, check_count, needs
from exogym.options import FitOptions, RunOptions, checked_options, describe, takes
from exogym.progress import notice
from exogym.record import check_file
from exogym.strategy.averaging import spread
from exogym.study.compare.asked import IN_A_FOLDER, OF_A_STEP, OF_NO_RESULT, ComparisonOptions
from exogym.study.compare.comparison import Comparison, ComparisonInterrupted, write
from exogym.study.compare.entries import OF_SEVERAL_NODES, entries_of, setting_of
from exogym.study.compare.folder import ALL_ARGUMENTS, Folder, begun, resume_command, saved_in
from exogym.study.compare.forecast import check_timed, forecast_of, measured_step_s
from exogym.study.compare.live import LiveTable, is_shown
from exogym.study.compare.session import Session
from exogym.study.compare.summary import summary_of, target_of
from exogym.study.tasks import Task, load_task

NOT_SAVED = (
    *("out", "resume", "watch", "progress"),
    *("engine", "cpus_per_process", "keep_checkpoints"),  # of a placement; the command line does not have them
)
VAL_EXAMPLES = 500  # the default for the most validation examples


@takes(ComparisonOptions)
def compare(asked: ComparisonOptions) -> Comparison:
    """Train the same model from the same weights on the same data with several strategies, and compare them.

    Every node keeps one shard of the data for the whole run. An iterable has no shards: each run reads it from the
    start, and example k goes to node k mod N. The strategy `single` trains node 0 alone, with the same weights, shard,
    batches and order, and with DDP's inner optimizer; it sends nothing and ignores `faults` and `balance`. All
    strategies use the same inner optimizer and learning rate, unless the table's `notes` say otherwise (DeMo has its
    own).

    A run has 10 to 30 evaluations on at most 500 validation examples, spread evenly over the set (of an iterable: the
    first 500). A run whose loss becomes NaN or infinite is left out of the table, with a line in its `notes`.

    Raises:
        ArgumentError, DataError: an argument or the data are wrong, or `out` can't be written. Raised before training.
        TrainingError: no run completed its training.
        ComparisonInterrupted: a KeyboardInterrupt stopped the comparison. The error's `result` holds the finished runs,
            `folder` their folder.

    >>> result = compare("digits", "single,ddp", max_steps=10, seeds=1)
    >>> [row["strategy"] for row in result.rows], result.rows[1]["quality"], result.rows[0]["tx_bytes"]
    (['single', 'ddp'], 1.0, 0.0)
    """
    if asked.out is not None:
        needs("matplotlib", "demo")
    elif asked.resume:
        raise ArgumentError(
            "resume=True needs the interrupted comparison's folder: pass it as out, such as "
            "out='runs/digits-20261122-120000'"
        )
    elif given := [name for name in IN_A_FOLDER if name in asked.changed()]:
        raise ArgumentError(f"{given[0]} needs a folder: pass it as out, such as out='runs'")
    saved = saved_in(asked.out) if asked.resume and asked.out is not None else {}
    session = session_of(asked, (saved.get("timing") or {}).get("measured_step_s"))
    decisive = asked_of(session)
    description = {
        **decisive, "titles": {label: entry.title for label, entry in session.entries.items()},
        "data": session.task.origin, "arguments": _arguments(asked),
    } | begun()  # fmt: skip
    description["started"] = saved.get("started", description["started"])
    if asked.out is None:
        return _carried_out(session, description)
    check_file("run.json", description)  # reject values that could not be read again
    if asked.resume:
        session.folder = Folder.of_asked(asked.out, decisive, session.entries)
    else:
        session.folder = Folder.new(asked.out, session.task.name, session.entries)
    try:
        session.folder.describe(description | {"state": "running", "runs": []})
        return _carried_out(session, description)
    finally:
        session.folder.release()


def session_of(asked: ComparisonOptions, known_step_s: float | None = None) -> Session:
    """Check the arguments and prepare a comparison's runs, without training or creating a folder.

    Args:
        known_step_s: the seconds of a step that an interrupted comparison measured; None to measure if necessary.
    """
    task = task_of(asked.problem, asked.data)
    setting = setting_of(task, asked.num_nodes, asked.max_steps, asked.batch_size, asked.seeds, asked.lr)
    entries = entries_of(asked.strategies, setting, own_lr=asked.lr is not None)
    _check_models(task, setting.seeds[0])
    place = Device.named(asked.device).place
    for name in ("val_size", "val_interval"):
        if getattr(asked, name) is not None:
            check_count(name, getattr(asked, name))
    most, val, split, stream, opening = asked.val_size or VAL_EXAMPLES, task.val, None, None, None
    val = check_dataset(first_examples(val, most)) if is_iterable(val) else _evenly(check_dataset(val), most)
    wanted = task.partitioner if asked.partitioner is None else asked.partitioner
    if is_iterable(task.train):
        stream = Stream(
            task.train, setting.nodes, batch_size=setting.batch_size, dataloader_kwargs=asked.dataloader_kwargs,
            partitioner=wanted,
        )  # fmt: skip
        opening = opening_of(task.train)
    else:
        check_dataset(task.train)
        split = IID() if wanted is None else partitioner_of(wanted)
        for seed in setting.seeds:
            split.split(task.train, setting.nodes, seed)  # raises now if a node gets no data
    _check_processes(asked.processes, setting.nodes)
    check_timed(asked.network, asked.step_seconds, asked.speeds, asked.target_loss)
    forecast = None
    if asked.network is not None:
        like_ours, of_a_step = replace(task, lr=setting.lr), {name: getattr(asked, name) for name in OF_A_STEP}
        forecast = forecast_of(
            asked.network, asked.step_seconds, asked.speeds, setting.nodes,
            lambda: known_step_s or measured_step_s(like_ours, setting.batch_size, place, asked.loss_fn, of_a_step),
        )  # fmt: skip
    session = Session(asked, task, setting, entries, split, val, place, forecast, opening)
    for label, entry in entries.items():
        try:
            options = FitOptions(entry.strategy, **session.fit_options(entry), save_dir=".")
            checked_options(options)
            if stream is not None:
                check_entry(options, stream)
        except ArgumentError as error:
            raise ArgumentError(f"{label}: {error}" if len(entries) > 1 else f"{error}") from error
    return session


def _check_processes(processes: Any, nodes: int) -> None:
    if processes == "auto":  # in folders of before
        raise ArgumentError("processes='auto': it is retired: pass a number, such as processes=4 on four cores")
    check_count("processes", processes)
    if processes > nodes:
        raise ArgumentError(f"{processes=} for num_nodes={nodes}: every process needs a node, so pass at most {nodes}")


def asked_of(session: Session) -> dict[str, Any]:
    """Return the options that decide the results, as JSON values. A resumed comparison must have the same options.

    Options of runs with default values are left out, so that ExoGym can add options and still resume old comparisons.
    All of a strategy's arguments are included, so that a changed default is noticed.
    """
    task, forecast, timing, target_loss = session.task, session.forecast, None, session.asked.target_loss
    data: Any = task.train
    if forecast is not None:  # older folders have a timeline too, which is retired
        timing = forecast.describe() | {"wanted_loss": target_loss, "timeline": False}
    wanted = {} if forecast is not None or target_loss is None else {"wanted_loss": target_loss}
    if session.split is None:
        examples = {"train_examples": session.in_order.length, "opening": session.opening}
    else:
        examples = {"train_examples": len(data)}
    return {
        "task": task.name, "description": task.description, **examples,
        "val_examples": len(session.val), "strategies": {k: describe(e.strategy) for k, e in session.entries.items()},
        ALL_ARGUMENTS: {
            k: {**all_arguments(e.strategy), "inner_rate": e.strategy.inner.base_lr} for k, e in session.entries.items()
        },
        "setting": session.setting.as_dict(), "partition": session.dealing, "val_interval": session.val_interval,
        "device": str(session.place), "timing": timing, **wanted,
    } | decisive_of(session.asked)  # fmt: skip


def all_arguments(value: Any) -> Any:
    """Return a value as JSON, like `describe`, but with all arguments of objects: also arguments with default values.

    >>> from exogym.strategy import OptimSpec, SlowMoStrategy
    >>> found = all_arguments(SlowMoStrategy(lr=0.1))
    >>> found["name"], found["lr"], found["slow_momentum"], "slow_momentum" in describe(SlowMoStrategy(lr=0.1))
    ('SlowMoStrategy', 0.1, 0.5, False)
    """
    if isinstance(value, list | tuple):
        return [all_arguments(item) for item in value]
    if isinstance(value, dict):
        return {str(key): all_arguments(item) for key, item in value.items()}
    given = getattr(value, "given_arguments", None)
    if given is None or isinstance(value, type):
        return describe(value)
    known = inspect.signature(type(value)).parameters.values()
    defaults = {known_one.name: known_one.default for known_one in known if known_one.default is not known_one.empty}
    every = spread(defaults | given)
    return {"name": type(value).__name__} | {key: all_arguments(item) for key, item in every.items()}


def decisive_of(options: RunOptions) -> dict[str, Any]:
    """Return {"options": ...} with the options that change results and are not at their defaults. {} if there are none.

    >>> decisive_of(RunOptions(precision="bf16", log_interval=5)), decisive_of(RunOptions())
    ({'options': {'precision': 'bf16'}}, {})
    """
    given = {name: describe(value) for name, value in options.changed().items() if name not in OF_NO_RESULT}
    return {"options": given} if given else {}


def _arguments(asked: ComparisonOptions) -> dict[str, Any]:
    """Return the arguments of `compare` for JSON, without the places for files and the watcher."""
    plain = {name: value for name, value in asked.values().items() if name not in NOT_SAVED}
    plain["seeds"] = asked.seeds if isinstance(asked.seeds, int) else list(asked.seeds)
    plain["problem"] = asked.problem if isinstance(asked.problem, str) else type(asked.problem).__name__
    return {name: os.fspath(x) if isinstance(x, os.PathLike) else describe(x) for name, x in plain.items()}


def _carried_out(session: Session, description: dict[str, Any]) -> Comparison:
    """Train and return the result. Finished runs are kept whatever happens."""
    folder, asked = session.folder, session.asked
    shown: Any = contextlib.nullcontext()
    watches = [asked.watch] if asked.watch is not None else []
    if is_shown(asked.progress):
        shown = LiveTable(session.entries, len(session.setting.seeds))
        watches.insert(0, shown.update)
    try:
        with shown:
            session.train_all(lambda standing: [watch(standing) for watch in watches])
    except BaseException as error:
        where = None if folder is None or folder.drop_if_empty() else folder.path
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        result = _result(session, description, "interrupted") if stopped and session.histories else None
        if stopped and result is None and folder is not None and where is not None:
            folder.describe(description | {"state": "interrupted", "runs": []})
        done = f"{len(session.outcomes)} of {len(session.entries) * len(session.setting.seeds)} runs have ended"
        way = "" if where is None else f"; compare(..., out={os.fspath(where)!r}, resume=True) continues"
        if isinstance(error, SystemExit) and where is not None:  # SIGTERM: nobody catches it to say how to continue
            notice(f"stopped: {done}{way}, and so does {resume_command(where, description['arguments'])}")
        if not isinstance(error, KeyboardInterrupt) or (where is None and result is None):
            raise
        raise ComparisonInterrupted(done + way, result, where) from error
    if not session.histories:
        if folder is not None:
            folder.drop_if_empty()
        raise TrainingError(next(found.error for found in session.outcomes.values() if found.error))
    return _result(session, description, "finished")


def _result(session: Session, description: dict[str, Any], state: str) -> Comparison:
    """Return the finished runs' result, and write it into the folder if there is one."""
    setting, forecast = session.setting, session.forecast
    network = "" if forecast is None else forecast.name
    target = target_of(session.tracks, session.asked.target_loss)
    summary = summary_of(said_of(session), setting.seeds, session.tracks, target, network)
    heading, finding, timed = heading_of(session), summary.verdict, {}
    if forecast is not None:
        heading += f". Time predicted on {forecast}"
        timed = {"forecast": forecast.describe() | {"target_loss": summary.target_loss, "target": summary.target}}
    runs = [
        {"strategy": label, "seed": seed, "wall_s": found.wall_s, "description": found.description}
        for (label, seed), found in session.outcomes.items()
    ]
    description = {**description, "state": state, "heading": heading, "finding": finding, **timed}
    description |= summary.to_json() | {"runs": runs}
    result = Comparison(heading, finding, summary.rows, session.histories, description, target_loss=summary.target_loss)
    if session.folder is None:
        return result
    path = session.folder.path
    names = write(result, path)
    session.folder.describe(description)
    return replace(result, folder=path, paths=tuple(path / name for name in names))


def heading_of(session: Session) -> str:
    """Return one line of text that describes the training, but not the strategies."""
    setting, further = session.setting, session.asked.changed()
    return (
        f"{session.task.description}. {setting.nodes} nodes, {setting.steps} steps of {setting.batch_size} examples, "
        f"{session.dealing}, {setting.inner_optim} with lr {setting.lr:g} ({setting.lr_scheduler}), "
        f"{''.join(f'{name}={value!r}, ' for name, value in further.items())}seeds "
        f"{', '.join(map(str, setting.seeds))}"
    )


def said_of(session: Session) -> dict[str, tuple[str, str]]:
    """Return each strategy's title and notes, by label. The notes also name runs that failed or have not ended."""
    said, seeds = {}, session.setting.seeds
    for label, entry in session.entries.items():
        found = [session.outcomes[label, seed] for seed in seeds if (label, seed) in session.outcomes]
        errors = [outcome.error for outcome in found if outcome.error]
        trouble = f"{len(errors)} of {len(seeds)} runs failed: {errors[-1]}" if errors else ""
        missing = f"{len(found)} of {len(seeds)} runs have ended" if len(found) < len(seeds) else ""
        without = [
            f"no {name}" for name in OF_SEVERAL_NODES if entry.alone and getattr(session.asked, name) is not None
        ]
        said[label] = entry.title, "; ".join(filter(None, (entry.notes, *without, missing, trouble)))
    return said


def task_of(problem: Any, data: Any) -> Task:
    """Return a `Task` for `problem`, in any form that `compare` accepts."""
    if isinstance(problem, str):
        task = load_task(problem, data)
    elif data is not None:
        raise ArgumentError(
            f"data={os.fspath(data)!r} needs a named task, such as 'digits': pass a named task, or leave data out"
        )
    elif isinstance(problem, Task):
        task = problem
    elif isinstance(problem, tuple) and len(problem) == 3 and isinstance(problem[0], nn.Module):
        raise ArgumentError(
            "problem: pass a function that returns a new model instead of a model, such as lambda: "
            f"copy.deepcopy({type(problem[0]).__name__.lower()}). All runs start from the same weights"
        )
    elif isinstance(problem, tuple) and len(problem) == 3 and callable(problem[0]):
        build, train, val = problem
        task = Task(
            "custom",
            "own problem",
            "given",
            train,
            val,
            build,
            num_nodes=4,
            batch_size=32,
            max_steps=300,
            lr=1e-3,
            H=10,
        )
    else:
        seen = f"a tuple of {len(problem)}" if isinstance(problem, tuple) else repr(problem)
        raise ArgumentError(
            "problem must be a Task, a task's name, or (make_model, train, val), a function and two data sets, not "
            f"{seen}"
        )
    if is_factory(task.train) or is_factory(task.val):
        raise ArgumentError(
            "compare() divides one data set among the nodes: pass a data set instead of a factory, and a partitioner="
        )
    return task


# ---------------------------------------------------------------- data that are read in order


def opening_of(train: Any) -> int:
    """Return the checksum of the iterable's first examples, after reading them twice.

    Raises:
        DataError: the iterable cannot be read, or begins with other examples when it is read again.

    >>> opening_of(range(3)) == opening_of([0, 1, 2]) != opening_of([0, 2, 1])
    True
    """
    first = Reader(described_data(train), 0, shuffle=False)
    first.read(COMPARED, in_epoch=True)
    again = Reader(described_data(train), 0, shuffle=False)
    again.opening = first.opening
    again.read(1)
    for reader in (first, again):
        reader.close()
    return sum_of(again.block[:COMPARED])


def check_entry(options: FitOptions, stream: Stream) -> None:
    """Raise ArgumentError if a strategy, or an option of its run, needs data with positions."""
    try:
        checked_options(options, stream.features())
    except ArgumentError as error:
        raise ArgumentError(
            f"{error}. Comparisons and sweeps accept no factory: leave out the strategy or option, or read the "
            "examples into a list, list(itertools.islice(dataset, count))"
        ) from error


def first_examples(val: Any, most: int) -> list[Any]:
    """Return the first `most` examples of the iterable `val`, or raise DataError if the iterable cannot be read."""
    data = described_data(val)
    reader = Reader(IterableData(data.source, length=data.length), 0, shuffle=False, whose="the validation data")
    try:
        return reader.read(most, in_epoch=True)
    finally:
        reader.close()


# ---------------------------------------------------------------- data sets and models


def _evenly(dataset: Any, most: int) -> Any:
    """Return `dataset`, or at most `most` of its examples, spread evenly."""
    if len(dataset) <= most:
        return dataset
    return Subset(dataset, np.linspace(0, len(dataset) - 1, most).round().astype(int).tolist())


def _check_models(task: Task, seed: int) -> None:
    """Check that `build` gives all strategies the same initial weights."""
    first, second = (list(task.make_model(seed).parameters()) for _ in range(2))
    if {id(p) for p in first} & {id(p) for p in second}:
        raise ArgumentError(
            "make_model() returned the same weights twice, so a run would start where the previous run ended: create "
            "a new model in each call, such as lambda: copy.deepcopy(model)"
        )
    plain = [(a, b) for a, b in zip(first, second, strict=False) if not (is_lazy(a) or a.is_meta)]
    alike = all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in plain)
    if len(first) != len(second) or not alike:
        raise ArgumentError(
            "make_model() returned different weights for the same seed, so strategies would start differently: draw "
            "weights from torch's generator, which is seeded before each call"
        )
