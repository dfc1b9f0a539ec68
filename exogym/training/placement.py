"""Who holds which rows: one process, several forked from this one, or the world that torchrun started."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from exogym.balance import Balance, speeds_of
from exogym.communicator import Wire
from exogym.compute.memory import check_rows
from exogym.engine.forks import can_fork, run_forked
from exogym.engine.hangs import watched
from exogym.engine.shared import SharedWire
from exogym.engine.wire import ProcessWire, place
from exogym.engine.world import join_world, world_size
from exogym.errors import ArgumentError, CheckpointError, DataError, ModelError, StrategyError
from exogym.progress import notice
from exogym.training.assembly import Subject, assemble, workplace
from exogym.training.options import FitOptions
from exogym.training.speeds import step_seconds

Result = TypeVar("Result")
NOT_CURED = (ArgumentError, CheckpointError, DataError, ModelError, StrategyError)  # by starting again
# What `processes="auto"` reckons with; measured, see benchmarks/RESULTS.md.
START_S, MEETING_S, SHARED_BYTES_PER_S = 0.1, 3e-4, 1.5e9
WORTH_IT = 0.8  # of the time of one process, or less
TRIAL_S = 0.3


def run_placed(
    subject: Subject, options: FitOptions, device: torch.device, body: Callable[[FitOptions, Wire], Result]
) -> Result:
    """Run `body` wherever `options` and the environment say, and give back what it gives here.

    Raises:
        ArgumentError: a layout that cannot be.
        WorkerError, or what a process raised: after `max_restarts` new starts from the last checkpoint.
    """
    processes, nodes, native = options.processes, options.num_nodes, options.reduction == "native"
    world = world_size()
    check_rows(subject.model, nodes, world, device)
    if world > 1:
        if processes not in (1, "auto", world):
            raise ArgumentError(f"processes={processes}, but this script runs as {world} processes: leave it out")
        place(nodes, world)  # refused before the processes meet, where there are too few nodes
        join_world(device)
        _say_who_restarts(options.max_restarts)
        measure = lambda: _process_seconds(ProcessWire([[k] for k in range(world)]), subject, options, device)  # noqa: E731
        with watched(options.hang_s, dist.get_rank()):
            placement, options = _dealt(options, world, measure)
            return body(options, ProcessWire(placement, native=native))
    if processes == "auto":
        processes = _choose(subject, options, device)
    if processes == 1:
        return _restarted(subject.model, options, lambda given: body(given, Wire(range(nodes), native)))
    place(nodes, int(processes))
    if device.type != "cpu" or not can_fork():
        raise ArgumentError(
            f"processes={processes} forks this process, which is safe on Linux and on the CPU only, not with device "
            f"{str(device)!r} here: leave it out, and start the script with python -m exogym.launch "
            f"--nproc_per_node {processes}"
        )
    alone = [[k] for k in range(int(processes))]
    placement, options = _dealt(
        options, len(alone),
        lambda: run_forked(alone, lambda wire: _process_seconds(wire, subject, options, device), hang_s=options.hang_s),
    )  # fmt: skip
    return _restarted(
        subject.model, options,
        lambda given: run_forked(placement, functools.partial(body, given), native, options.hang_s),
    )  # fmt: skip


def _say_who_restarts(max_restarts: int) -> None:
    """Say so where fewer new starts are made than are wanted: in a world its launcher makes them."""
    made = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if made < max_restarts and dist.get_rank() == 0:
        notice(
            f"max_restarts={max_restarts}, but here whoever started the processes starts them again, {made} times at "
            f"most: give --max_restarts {max_restarts} to it, and resume=True to fit"
        )


def _restarted(model: nn.Module, options: FitOptions, train: Callable[[FitOptions], Result]) -> Result:
    """Train; where a new start may cure what failed, again from the last checkpoint, `max_restarts` times at most."""
    for attempt, given in enumerate(_attempts(model, options)):
        try:
            return train(given)
        except NOT_CURED:
            raise
        except Exception as error:
            if attempt == options.max_restarts:
                raise
            notice(f"{error}; starting again from the last checkpoint ({attempt + 1} of {options.max_restarts})")
    raise AssertionError


def _dealt(
    options: FitOptions, processes: int, measure: Callable[[], list[float]]
) -> tuple[list[list[int]], FitOptions]:
    """Return the ids of each process, and the options with the processes' speeds where they decided.

    Args:
        measure: gives the seconds that a step takes in each process, the same in all of them.
    """
    balance, nodes = options.balance, options.num_nodes
    if balance is None or balance.kind != "nodes":
        return place(nodes, processes), options
    balance.check_speeds(processes, "processes")
    if balance.speeds is None and nodes > processes:
        balance = Balance("nodes", speeds_of(measure()))
    if balance.speeds is None:
        notice(f"balance='nodes' changes nothing: each of {processes} processes has one node")
        return place(nodes, processes), options
    placement = place(nodes, processes, balance.speeds)
    if int(os.environ.get("RANK", 0)) == 0:
        speeds, held = (", ".join(f"{x:g}" for x in row) for row in (balance.speeds, map(len, placement)))
        notice(f"balance='nodes': the processes' speeds are {speeds}; they hold {held} nodes")
    return placement, replace(options, balance=balance)


def _process_seconds(wire: Wire, subject: Subject, options: FitOptions, device: torch.device) -> list[float]:
    """Take a few training steps in each process, at the same time; return what one takes in each, everywhere."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run says it again
        (node,) = wire.ranks
        stream, worker, _ = workplace(subject, options, device, Wire([node]), undo)
        wire.barrier()
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
        raise ArgumentError(
            f"max_restarts={options.max_restarts}, but {lazy[0]!r} has no numbers yet to start again from: give the "
            "lazy modules of the model one batch before fit, or leave max_restarts out"
        )
    kept = {name: x.detach().clone() for name, x in tensors}
    yield options
    for _ in range(options.max_restarts):
        with torch.no_grad():
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if name in kept:
                    x.copy_(kept[name])
        yield replace(options, resume=True)


def _choose(subject: Subject, options: FitOptions, device: torch.device) -> int:
    """Return how many processes pay, after a short trial; say which and why."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cores, options.num_nodes)
    if most == 1 or device.type != "cpu" or not can_fork():
        notice("processes='auto' chose 1: there is one core or one node, or this system cannot fork safely")
        return 1
    trial = functools.partial(_trial, subject=subject, options=options, device=device)
    step_s, meetings, moved_bytes, steps = run_forked([[0], [1]], trial, hang_s=options.hang_s)
    nodes = options.num_nodes
    alone_s = steps * nodes * step_s
    shared_s = START_S + steps * -(-nodes // most) * step_s
    shared_s += meetings * MEETING_S + moved_bytes / SHARED_BYTES_PER_S
    chosen = most if shared_s < WORTH_IT * alone_s else 1
    notice(
        f"processes='auto' chose {chosen} (a step of a node takes {1e3 * step_s:.2f} ms: about {alone_s:.1f} s in one "
        f"process, {shared_s:.1f} s in {most})"
    )
    return chosen


def _trial(wire: SharedWire, subject: Subject, options: FitOptions, device: torch.device) -> list[float]:
    """In the other process train a few steps; return seconds per node-step, meetings, bytes moved there, steps.

    What the run has to say, it says when it is run.
    """
    found = torch.zeros(1, 4, dtype=torch.float64)
    if wire.is_hidden:
        warnings.simplefilter("ignore")
        sys.stdout = sys.stderr = io.StringIO()
        quiet = replace(
            options, processes=1, logger=None, progress=False, callbacks=(), save_dir=None, checkpoint_interval=None,
            resume=False, max_restarts=0, run_dir=None,
        )  # fmt: skip
        loop = assemble(subject, quiet, device, None, Wire(range(options.num_nodes)))
        total, first_event = loop.agenda.total_steps, min(loop.driver.next_event(0), loop.agenda.total_steps)
        seconds, start = [], time.perf_counter()
        for step in range(min(total, 20)):
            before = time.perf_counter()
            loop.driver.advance(step, step + 1)
            seconds.append(time.perf_counter() - before)
            if time.perf_counter() - start > TRIAL_S:
                break
        meetings = total / first_event
        moved = meetings * 2.0 * options.num_nodes * loop.fleet.parameter_bytes
        found[0] = torch.tensor([min(seconds) / options.num_nodes, meetings, moved, total])
    return wire.rows(found, [1])[0].tolist()
