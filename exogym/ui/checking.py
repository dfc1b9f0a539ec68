"""Check a form's options while somebody types, with the errors that Python gives. Nothing is trained or written.

The data of small tasks are loaded once. The data of other tasks are checked only when the runs start.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from exogym.core.base.processes import lines_from_parent
from exogym.data import Dirichlet, parse_partitioner
from exogym.errors import ArgumentError, ExoGymError
from exogym.logger import in_json
from exogym.network import Network
from exogym.options import placed
from exogym.strategy.registry import parse_strategy
from exogym.study.compare import DEFAULT_STRATEGIES
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.entries import split_strategies
from exogym.study.compare.run import session_of
from exogym.study.compare.session import Session
from exogym.study.compare.summary import SINGLE
from exogym.study.sweep.axes import Axes, arguments_of, axes_of, check_few, grid, label_of
from exogym.study.tasks import Task, load_task

QUICK = ("digits", "mnist", "shakespeare", "cifar10")  # tasks that load in less than a second
MOST_NODES = 10_000  # among more nodes it takes long to divide the data
MOST_CELLS, MOST_SEEDS = 16, 2  # checked
PARAMETERS = 1e6  # any number
TEXTS = ("network", "step_seconds", "partitioner", "device")  # options that stay text, even "8"
NOT_OF_RUNS = ("dataset", "data", "strategies", "strategy", "axes", "search", "engine")


def check(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first `error` in the options of compare or sweep, or a `plan`: the runs that it would start.

    >>> check("compare", {"strategies": "ddp,diloco:H=0"})["error"]
    "strategy 'diloco:H=0': H=0 must be a whole number of at least 1"
    >>> check("compare", {"strategies": "ddp", "max_steps": "20"})["plan"].partition(". ")[0]
    '3 runs: DDP, 3 seeds each'
    """
    try:
        return {"error": "", "plan": _plan(command, {name: _value(name, value) for name, value in given.items()})}
    except ExoGymError as error:
        return {"error": str(error), "plan": ""}
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": f"a value is of the wrong kind ({error})", "plan": ""}


def answer_parent() -> None:
    """Check what the parent asks for (`exogym.ui.apart`), until it ends. Questions and answers are lines of JSON."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a check prints is no answer
        lines = lines_from_parent()
        print(file=answers, flush=True)  # torch is loaded
        while True:
            try:
                found = check(*json.loads(lines.get()))
            except Exception as error:
                found = {"error": f"the check failed: {type(error).__name__}: {error}", "plan": ""}
            print(json.dumps(in_json(found)), file=answers, flush=True)


def _value(name: str, given: Any) -> Any:
    """Return an option as Python takes it. Text that is not a number stays text, and Python's check refuses it."""
    if name == "speeds" and isinstance(given, str):
        return [_value("speed", part) for part in given.split(",")]
    if not isinstance(given, str) or name in (*TEXTS, *NOT_OF_RUNS):
        return given
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(given)
    return given


@functools.lru_cache(maxsize=len(QUICK))
def _loaded(name: str) -> Task:
    return load_task(name)


def _plan(command: str, options: Mapping[str, Any]) -> str:
    """Return the number of runs, and what they train; "" if the task's data do not load quickly."""
    options = _with_library(options)
    axes = _axes_of(options)
    if command == "sweep":
        texts = [str(options.get("strategy", "diloco"))]
    else:
        texts = list(split_strategies(str(options.get("strategies", ",".join(DEFAULT_STRATEGIES)))))
    name, nodes = str(options.get("dataset", "digits")), options.get("num_nodes")
    is_large = isinstance(nodes, int) and nodes > MOST_NODES
    if is_large or ":" in name or name in ("whisper", "language") or options.get("data") is not None:
        _check_without_data(texts, options)
        return ""
    task, of_runs = _loaded(name), {key: value for key, value in options.items() if key not in NOT_OF_RUNS}
    if command != "sweep":
        session = _session(task, texts, of_runs)
    elif not axes or "search" in options:
        return ""
    else:
        session = _cells(task, texts[0], axes, of_runs)
    _check_nodes(session)
    seeds, count = options.get("seeds", 3), len(grid(axes)) if axes else len(session.entries)
    what = _many(count, "cell", "cells") if axes else ", ".join(map(_named, session.entries.values()))
    runs, setting = _many(count * seeds, "run", "runs"), session.setting
    alpha = f" with alpha {session.split.alpha:g}" if isinstance(session.split, Dirichlet) else ""
    dealt = session.dealing if session.split is None else f"{type(session.split).__name__}{alpha}"
    where = f", on the network {options['network']}" if "network" in options else ""
    return (
        f"{runs}: {what}, {_many(seeds, 'seed', 'seeds')} each. {session.task.description}, {setting.nodes} nodes, "
        f"{setting.steps} steps of {setting.batch_size} examples, {dealt}, {setting.inner_optim} with lr "
        f"{setting.lr:g}{where}"
    )


def _with_library(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the library in the network's text, as the command puts it there."""
    others = {name: value for name, value in options.items() if name != "library"}
    if "library" not in options:
        return others
    if "network" not in others:
        raise ArgumentError("library needs network, for example network='wifi'")
    return others | {"network": f"{others['network']},library={options['library']}"}


def _axes_of(options: Mapping[str, Any]) -> Axes:
    axes = axes_of([str(text) for text in options.get("axes", ())])
    check_few(math.prod(len(values) for values in axes.values() if isinstance(values, list)))
    return axes


def _check_without_data(texts: Sequence[str], options: Mapping[str, Any]) -> None:
    for text in texts:
        name, colon, rest = text.partition(":")
        parse_strategy(f"{'ddp' if name == SINGLE else name}{colon}{rest}")
    for option, read in (("network", Network.of), ("partitioner", parse_partitioner)):
        if option in options:
            read(options[option])


def _session(task: Task, strategies: Any, options: Mapping[str, Any]) -> Session:
    """Return a comparison's checked runs, with few seeds. It measures no time."""
    seeds = options.get("seeds", 3)
    few = min(seeds, MOST_SEEDS) if type(seeds) is int else seeds
    return session_of(ComparisonOptions(task, strategies, **placed({**options, "seeds": few})), known_step_s=1.0)


def _check_nodes(session: Session) -> None:
    """Raise ArgumentError if a strategy cannot work among so few nodes. Its formulas of traffic know."""
    for entry in session.entries.values():
        if not entry.alone and entry.strategy.driven_by != "programs":  # these have no formulas
            entry.strategy.plan(PARAMETERS, session.setting.nodes, 4.0)


def _cells(task: Task, strategy: str, axes: Axes, options: Mapping[str, Any]) -> Session:
    """Check a sweep's first cells; return the first cell's session."""
    sessions = []
    for cell in itertools.islice(grid(axes), MOST_CELLS):
        text, own = arguments_of(cell, strategy)
        try:
            sessions.append(_session(task, {label_of(cell): text}, {**options, **own}))
        except ArgumentError as error:
            raise ArgumentError(f"cell {label_of(cell)}: {error}") from error
    return sessions[0]


def _named(entry: Any) -> str:
    """Return a strategy's title, with the interval that it has by default."""
    H = next((note for note in entry.notes.split(", ") if note.startswith("H=")), "")
    return f"{entry.title} ({H})" if H and "(" not in entry.title else entry.title


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
