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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exogym.core.base.processes import lines_from_parent
from exogym.data import parse_partitioner
from exogym.errors import ArgumentError, ExoGymError
from exogym.logger import in_json
from exogym.network import Network
from exogym.options import placed
from exogym.strategy.registry import parse_strategy
from exogym.study.compare import DEFAULT_STRATEGIES
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.entries import split_strategies
from exogym.study.compare.run import heading_of, session_of
from exogym.study.compare.session import Session
from exogym.study.compare.summary import SINGLE
from exogym.study.sweep.axes import Axes, arguments_of, axes_of, check_few, grid, label_of
from exogym.study.tasks import Task, load_task

QUICK = ("digits", "mnist", "shakespeare", "cifar10")  # tasks that load in less than a second
MOST_NODES = 10_000  # among more nodes it takes long to divide the data
MOST_CELLS, MOST_SEEDS = 16, 2  # checked
FIRST = ("num_nodes", "network")  # other options are checked beside these
PARAMETERS = 1e6  # any number
TEXTS = ("network", "step_seconds", "partitioner", "device")  # options that stay text, even "8"
NOT_OF_RUNS = ("dataset", "data", "strategies", "strategy", "axes", "search", "engine")
Trouble = dict[str, str]  # an error, and the option or strategy that it is about


def check(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the errors in a command's options, and the runs that the command would start.

    Args:
        command: compare or sweep.
        given: the options that a form sends, as numbers, text, or lists of text.

    Returns:
        errors: dicts, each with the message as `error`. An error about an option also has the option's name as
            `option`; an error about a strategy has the strategy's text as `strategy`.
        plan: a description of the runs, or "" if there are errors or the task's data are not loaded.

    >>> check("compare", {"strategies": "ddp,diloco:H=0"})["errors"]
    [{'error': "strategy 'diloco:H=0': H=0 must be a whole number of at least 1", 'strategy': 'diloco:H=0'}]
    >>> check("compare", {"strategies": "ddp", "max_steps": "20"})["plan"].partition(". ")[0]
    '3 runs: 1 strategy, 3 seeds'
    """
    errors: list[Trouble] = []
    options = {name: _value(name, value) for name, value in given.items()}
    task, texts, axes = _task_of(options, errors), _texts_of(command, options, errors), _axes_of(options, errors)
    of_runs = {name: value for name, value in options.items() if name not in NOT_OF_RUNS}
    if task is None:
        _check_without_data(texts, of_runs, errors)
        return {"errors": errors, "plan": ""}
    swept = _first_of(task, axes, options)
    good = _check_options(task, of_runs, swept, errors)
    for text in texts:
        with _noted(errors, strategy=text):
            _check_nodes(_session(task, [text], {**good, **swept}))
    plan, session = "", None
    with _noted(errors, option="axes" if command == "sweep" else ""):
        if not errors:
            whole = command == "sweep"
            session = _cells(task, str(texts[0]), axes, good, options) if whole else _session(task, texts, good)
    if session is not None and not errors:
        plan = _plan(session, axes, options)
    return {"errors": errors, "plan": plan}


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
                found = {"errors": [{"error": f"the check failed: {type(error).__name__}: {error}"}], "plan": ""}
            print(json.dumps(in_json(found)), file=answers, flush=True)


@contextlib.contextmanager
def _noted(errors: list[Trouble], **about: str) -> Iterator[None]:
    """Add an error to `errors`, with the option or strategy that it is about."""
    about = {kind: name for kind, name in about.items() if name}
    try:
        yield
    except ExoGymError as error:
        errors.append({"error": str(error), **about})
    except (TypeError, ValueError, OverflowError) as error:
        errors.append({"error": f"{about.get('option', 'a value')} is of the wrong kind ({error})", **about})


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


def _task_of(options: Mapping[str, Any], errors: list[Trouble]) -> Task | None:
    """Return the task, if it loads quickly."""
    name, nodes = str(options.get("dataset", "digits")), options.get("num_nodes")
    if isinstance(nodes, int) and nodes > MOST_NODES:
        return None
    if ":" in name or name in ("whisper", "language") or options.get("data") is not None:
        return None
    with _noted(errors, option="dataset"):
        return _loaded(name)
    return None


def _texts_of(command: str, options: Mapping[str, Any], errors: list[Trouble]) -> Sequence[str]:
    if command == "sweep":
        return [str(options.get("strategy", "diloco"))]
    with _noted(errors, option="strategies"):
        return list(split_strategies(str(options.get("strategies", ",".join(DEFAULT_STRATEGIES)))))
    return []


def _axes_of(options: Mapping[str, Any], errors: list[Trouble]) -> Axes:
    with _noted(errors, option="axes"):
        axes = axes_of([str(text) for text in options.get("axes", ())])
        check_few(math.prod(len(values) for values in axes.values() if isinstance(values, list)))
        return axes
    return {}


def _check_without_data(texts: Sequence[str], options: Mapping[str, Any], errors: list[Trouble]) -> None:
    for text in texts:
        name, colon, rest = text.partition(":")
        with _noted(errors, strategy=text):
            parse_strategy(f"{'ddp' if name == SINGLE else name}{colon}{rest}")
    for option, read in (("network", Network.of), ("partitioner", parse_partitioner)):
        with _noted(errors, option=option):
            read(options[option]) if option in options else None


def _first_of(task: Task, axes: Axes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's options in a sweep's first cell; {} if they are wrong, as the check of the cells will say."""
    if not axes or "search" in options:
        return {}
    with contextlib.suppress(ExoGymError):
        _, own = arguments_of(grid(axes)[0], "ddp")
        _session(task, "ddp", own)
        return own
    return {}


def _check_options(
    task: Task, options: Mapping[str, Any], swept: Mapping[str, Any], errors: list[Trouble]
) -> dict[str, Any]:
    """Return the options that are not wrong by themselves, beside those that are swept."""
    good: dict[str, Any] = {}
    for name in sorted(options, key=lambda name: name not in FIRST):
        with _noted(errors, option=name):
            beside = {first: good[first] for first in FIRST if first in good}
            _session(task, "ddp", {**beside, **swept, name: options[name]})
            good[name] = options[name]
    return good


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


def _cells(
    task: Task, strategy: str, axes: Axes, good: Mapping[str, Any], options: Mapping[str, Any]
) -> Session | None:
    """Check a sweep's first cells; return the first cell's session."""
    if not axes or "search" in options:
        return None
    first = None
    for cell in itertools.islice(grid(axes), MOST_CELLS):
        text, own = arguments_of(cell, strategy)
        try:
            session = _session(task, {label_of(cell): text}, {**good, **own})
        except ArgumentError as error:
            raise ArgumentError(f"cell {label_of(cell)}: {error}") from error
        first = first or session
    return first


def _plan(session: Session, axes: Axes, options: Mapping[str, Any]) -> str:
    """Return the number of runs, and what they train."""
    seeds, count = options.get("seeds", 3), len(grid(axes)) if axes else len(session.entries)
    of = ("cell", "cells") if axes else ("strategy", "strategies")
    said = f"{_many(count * seeds, 'run', 'runs')}: {_many(count, *of)}, {_many(seeds, 'seed', 'seeds')}"
    return f"{said}. {heading_of(session).partition(', seeds ')[0]}"


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
