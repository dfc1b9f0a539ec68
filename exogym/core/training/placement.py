"""A run on its engine: rows dealt to processes, and new starts from the last checkpoint."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from exogym.balance import Balance, speeds_of
from exogym.core.base.devices import resolve_device
from exogym.core.combinations import check, features_of
from exogym.core.communicator import Wire, barrier
from exogym.core.compute.memory import check_rows
from exogym.core.engine import Engine, EngineOptions, engine_for
from exogym.core.engine.protocol import Moved, place
from exogym.core.engine.world import world_size
from exogym.core.progress import notice
from exogym.core.training.options import FitOptions
from exogym.core.training.speeds import step_seconds
from exogym.core.training.splits import check_split
from exogym.core.training.subject import Subject
from exogym.core.training.trials import chosen_processes
from exogym.core.training.workplace import workplace
from exogym.errors import ArgumentError, CheckpointError, DataError, ModelError, StrategyError

Result = TypeVar("Result")
NOT_CURED = (ArgumentError, CheckpointError, DataError, ModelError, StrategyError)  # by starting again


def run_placed(
    subject: Subject, options: FitOptions, device: torch.device, body: Callable[[FitOptions, Wire], Result],
    engine: Engine | None = None,
) -> Result:  # fmt: skip
    """Run `body` on `engine`, or the first of `exogym.engine.ENGINES` that applies; give back what it gives here.

    Raises:
        ArgumentError: a layout that cannot be.
        WorkerError, or what a process raised: after `max_restarts` new starts from the last checkpoint.
    """
    asked = EngineOptions(
        options.num_nodes, options.processes, device, options.reduction == "native", options.hang_s,
        engine=options.engine if isinstance(options.engine, str) else None, wanted=options.device,
        cpus_per_process=options.cpus_per_process, may_move=options.save_dir is not None,
        meshes=check_split(options) if options.meshes and world_size() > 1 else (),
    )  # fmt: skip
    found = engine or engine_for(asked)
    if found is None or found.is_here:
        memories = 1 if found is None or found.shares_memory else found.processes(asked)
        check_rows(
            subject.model, options.strategy, device, num_nodes=options.num_nodes, processes=memories,
            rows=rows_of_run(options, memories, found), is_cut=bool(asked.meshes),
        )  # fmt: skip
    if found is None:  # processes="auto", and nobody else has started others
        asked = replace(asked, processes=chosen_processes(subject, options, asked, rows_of_run(options, 1)))
        found = engine_for(asked)
    assert found is not None
    dealt, weighed = _dealt(found, asked, options, subject)
    if not found.runs_again:
        _say_who_restarts(options.max_restarts)
    if not found.runs_again or (found.is_here and not options.max_restarts):
        return found.run(dealt, functools.partial(body, weighed))
    tries = itertools.count()

    def train(given: FitOptions) -> Result:
        nonlocal dealt
        if next(tries) and not found.is_here:  # there may be room for more processes than there was, or for fewer
            dealt, _ = _dealt(found, asked, given, subject)
        return found.run(dealt, functools.partial(body, given))

    return _restarted(subject.model, weighed, train)


def rows_of_run(options: FitOptions, processes: int, engine: Engine | None = None) -> int:
    """Return how many rows a run has: N, or fewer where few nodes act at a time and `engine` can seat others in them.

    Nodes that may be away, or are left out, or weigh what they have done, all keep their rows; and where one process
    would need more than half the rows. On how many processes there are it does not depend, as a checkpoint holds seats
    or all rows, and is of use to any number of processes; but each has a row.
    """
    nodes = options.num_nodes
    split = options.meshes and world_size() > 1  # its devices are processes
    keeps = split or (engine is not None and engine.keeps_rows) or options.may_be_away or (options.weighing is not None)
    most = None if keeps or options.on_nonfinite == "skip" else options.strategy.seats(nodes)
    if most is None or processes >= nodes:
        return nodes
    from exogym.core.fleet.seats import rows_for

    if 2 * rows_for(most, 1) > nodes:
        return nodes
    return min(processes * rows_for(most, processes), nodes - 1)  # with N rows nobody would need a seat


def _say_who_restarts(max_restarts: int) -> None:
    """Say so where fewer new starts are made than are wanted: in a world its launcher makes them."""
    made = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if made < max_restarts and int(os.environ.get("RANK", 0)) == 0:
        notice(
            f"max_restarts={max_restarts}, but here whoever started the processes starts them again, {made} times at "
            f"most: give --max_restarts {max_restarts} to it, and resume=True to fit"
        )


def _restarted(model: nn.Module, options: FitOptions, train: Callable[[FitOptions], Result]) -> Result:
    """Train; where a new start may cure what failed, again from the last checkpoint, `max_restarts` times at most."""
    for attempt, given in enumerate(_attempts(model, options)):
        try:
            return _followed(given, train)
        except NOT_CURED:
            raise
        except Exception as error:
            if attempt == options.max_restarts:
                raise
            notice(f"{error}; starting again from the last checkpoint ({attempt + 1} of {options.max_restarts})")
    raise AssertionError


def _followed(options: FitOptions, train: Callable[[FitOptions], Result]) -> Result:
    """Train, in other processes as often as the run moves."""
    while True:
        try:
            return train(options)
        except Moved as moved:
            notice(str(moved))
            options = replace(options, resume=options.resume or moved.begun)


def _dealt(
    engine: Engine, asked: EngineOptions, options: FitOptions, subject: Subject
) -> tuple[EngineOptions, FitOptions]:
    """Return what is asked with the ids of each process, and the options with their speeds where they decided."""
    balance, processes = options.shares, engine.processes(asked)
    nodes = rows_of_run(options, processes, engine)
    even = replace(asked, placement=place(nodes, processes))
    if balance is None or balance.kind != "nodes" or processes == 1:
        return even, options
    balance.check_speeds(processes, "processes")
    if balance.speeds is None and nodes > processes:
        each = replace(asked, placement=[[k] for k in range(processes)], native=False)
        device = asked.device if engine.is_here else None
        seconds = engine.run(each, lambda wire: _process_seconds(wire, subject, options, device))
        balance = Balance("nodes", speeds_of(seconds))
    if balance.speeds is None:
        notice(f"balance='nodes' changes nothing: each of {processes} processes has one node")
        return even, options
    placement = place(nodes, processes, balance.speeds)
    if int(os.environ.get("RANK", 0)) == 0:
        speeds, held = (", ".join(f"{x:g}" for x in row) for row in (balance.speeds, map(len, placement)))
        notice(f"balance='nodes': the processes' speeds are {speeds}; they hold {held} nodes")
    return replace(asked, placement=placement), replace(options, balance=balance)


def _process_seconds(wire: Wire, subject: Subject, options: FitOptions, device: torch.device | None) -> list[float]:
    """Take a few training steps in each process, at the same time; return what one takes in each, everywhere.

    `device` None: of another machine, where it is looked for.
    """
    device = device or resolve_device(options.device)
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run says it again
        (node,) = wire.ranks
        stream, worker, _ = workplace(subject, options, device, Wire([node]), undo)
        barrier(wire)
        found = torch.tensor([[step_seconds(worker, stream, node)]], dtype=torch.float64)
        return wire.rows(found, range(len(wire.placement)))[:, 0].tolist()


def _attempts(model: nn.Module, options: FitOptions) -> Iterator[FitOptions]:
    """Yield the options of the first try, and of each further one with the model as it was at first.

    Raises:
        ArgumentError: a new start from a model that is not there yet.
    """
    if not options.max_restarts:
        yield options
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, x in tensors if nn.parameter.is_lazy(x)]:
        check(features_of(max_restarts=options.max_restarts) | {"lazy modules": f"{lazy[0]!r}, which is lazy"})
    kept = {name: x.detach().clone() for name, x in tensors}
    yield options
    for _ in range(options.max_restarts):
        with torch.no_grad():
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if name in kept:
                    x.copy_(kept[name])
        yield replace(options, resume=True)
