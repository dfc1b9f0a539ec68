"""Start a run on its engine: decide how many rows the run has, and which process holds which rows."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine.engines import Engine, EngineOptions, engine_for, place, world_size
from exogym.core.progress import notice
from exogym.core.training.options import FitOptions, Subject
from exogym.core.training.workplace import check_memory

if TYPE_CHECKING:
    from exogym.core.engine.nodes import Nodes

Result = TypeVar("Result")


def run_placed(
    subject: Subject, options: FitOptions, device: torch.device, body: Callable[[FitOptions, Wire], Result],
    engine: Engine | None = None,
) -> Result:  # fmt: skip
    """Run `body` on `engine`, by default the first suitable one in `ENGINES`, and return the result."""
    asked = options.placement
    engine_options = EngineOptions(
        options.num_nodes, options.processes, device, asked.reduction == "native", asked.hang_s,
        engine=asked.engine if isinstance(asked.engine, str) else None, wanted=options.device,
        cpus_per_process=asked.cpus_per_process, may_move=options.save_dir is not None,
        nodes=_in_processes(options),
    )  # fmt: skip
    found = engine or engine_for(engine_options)
    if found.is_here:
        memories = 1 if found.shares_memory else found.processes(engine_options)
        check_memory(
            subject.model, options.strategy, device, num_nodes=options.num_nodes, processes=memories,
            rows=rows_of_run(options, memories, found), is_cut=engine_options.nodes is not None,
            together=options.compute == "vmap",
        )  # fmt: skip
    dealt, weighed = _dealt(found, engine_options, options, subject)
    if not found.runs_again:
        _say_who_restarts(asked.max_restarts)
    if not found.runs_again or (found.is_here and not asked.max_restarts):
        return found.run(dealt, functools.partial(body, weighed))
    tries = itertools.count()

    def train(given: FitOptions) -> Result:
        nonlocal dealt
        if next(tries) and not found.is_here:  # there may be room for more processes than there was, or for fewer
            dealt, _ = _dealt(found, engine_options, given, subject)
        return found.run(dealt, functools.partial(body, given))

    from exogym.core.training.restarts import restarted

    return restarted(subject.model, weighed, train)


def _in_processes(options: FitOptions) -> Nodes | None:
    """Return the nodes' devices if these are processes, otherwise None. Raise ArgumentError for unsupported options."""
    if options.nodes is None or world_size() == 1:
        return None
    in_parts = options.strategy.features_in_parts()
    check(options.features() | in_parts | {"node in several processes": "node= in several processes"})
    return options.nodes if max(options.nodes.sizes) > 1 else None


def rows_of_run(options: FitOptions, processes: int, engine: Engine | None = None) -> int:
    """Return how many rows a run has: N, or fewer (seats) if only a few sampled clients train at a time.

    The run has N rows if nodes may be absent, if `on_nonfinite="skip"` may leave nodes out, if `balance` sets nodes'
    weights, if the engine needs all rows, or if the seats of one process would need more than half of the N rows. The
    choice is the same for all numbers of processes below N, so a checkpoint fits all of them.
    """
    nodes = options.num_nodes
    split = options.nodes is not None and world_size() > 1  # its devices are processes
    keeps = split or (engine is not None and engine.keeps_rows) or options.may_be_away or (options.weighing is not None)
    most = None if keeps or options.on_nonfinite == "skip" else options.strategy.clients.seats(nodes)
    if most is None or processes >= nodes:
        return nodes
    from exogym.core.fleet.seats import rows_for

    if 2 * rows_for(most, 1) > nodes:
        return nodes
    return min(processes * rows_for(most, processes), nodes - 1)  # with N rows nobody would need a seat


def _say_who_restarts(max_restarts: int) -> None:
    """Print a notice if the launcher that started these processes will restart them fewer times than `max_restarts`."""
    made = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if made < max_restarts and int(os.environ.get("RANK", 0)) == 0:
        notice(
            f"max_restarts={max_restarts}, but a launcher started these processes and restarts them at most {made} "
            f"times: start it with --max_restarts {max_restarts}, and pass resume=True to fit"
        )


def _dealt(
    engine: Engine, engine_options: EngineOptions, options: FitOptions, subject: Subject
) -> tuple[EngineOptions, FitOptions]:
    """Return the engine's options with each process's nodes, and `options` with the speeds if they matter."""
    processes = engine.processes(engine_options)
    even = replace(engine_options, placement=place(rows_of_run(options, processes, engine), processes))
    if options.sharing is None or options.sharing.kind != "nodes" or processes == 1:
        return even, options
    from exogym.core.training.balancing import deal_by_speed

    return deal_by_speed(options.sharing, engine, even, options, subject)
