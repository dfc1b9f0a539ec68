"""Build a run's driver: the strategy's adapter, and around it a wrapper for each feature that the options need.

A run without such features gets no wrapper, and Python does not import the features' modules.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exogym.core.communicator import gather
from exogym.core.compute.finite import Watch
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Shared
from exogym.core.training.driver import Algorithm, Driver, Setting
from exogym.core.training.loop import TrainingLoop
from exogym.core.training.options import FitOptions
from exogym.data.single import check_single
from exogym.data.stream import Stream
from exogym.strategy.strategy import Run, Strategy

if TYPE_CHECKING:
    from exogym.core.fleet.seats import Seats
    from exogym.core.training.timing import Timing
    from exogym.faults import Attendance

ALGORITHMS = {  # by what a strategy says in `driven_by`: the module and class of its adapter, loaded when it is needed
    "rounds": ("exogym.core.training.compositions", "Compositions"),
    "programs": ("exogym.core.training.programs", "Programs"),
    "clock": ("exogym.core.training.by_clock", "ByClock"),
}


def make_driver(
    options: FitOptions, fleet: Fleet, worker: Worker, stream: Stream, run: Run, compute: str, timing: Timing | None,
    step_shares: Sequence[Fraction] = (),
) -> Driver:  # fmt: skip
    """Return the driver for a copy of the strategy, so that the run starts with the strategy's initial state.

    Args:
        compute: the chosen way of computing.
        step_shares: the share of the local steps that each node takes. If `step_shares` is empty, each node takes all
            local steps.
    """
    strategy = copy.deepcopy(options.strategy)
    watch = Watch(options.on_nonfinite, worker)
    attendance = _attendance(options, strategy, step_shares)
    if options.samples_clients:
        fleet.state.register("empty clients", Shared(stream.state, stream.load_state))
    if stream.iterated is not None:
        fleet.state.register("data", stream.iterated.begin(fleet))
    setting = Setting(fleet, worker, stream, run, compute, attendance, timing, watch)
    if timing is not None and timing.is_measured:
        from exogym.core.training.clocking import Measured

        setting.around = functools.partial(Measured, timing=timing)
    home, name = ALGORITHMS[strategy.driven_by]
    algorithm: Algorithm = getattr(importlib.import_module(home), name)(strategy, setting)
    # From the inside out. A server's round is over before the nodes left out of it take what it came to; absence says
    # how many steps each node takes; and the clock is charged with these before anybody meets.
    clock = None if algorithm.keeps_time else timing
    seats = None
    if clock is not None:
        from exogym.core.training.clocking import ServerRounds

        algorithm = ServerRounds(algorithm, clock)
    if fleet.comm.wire.total_rows < options.num_nodes:  # then none is absent: nodes that may be keep their rows
        from exogym.core.training.seating import Seating

        seats = _seats(options, worker, stream, run.total_steps)
        algorithm = Seating(algorithm, seats)
    if attendance is not None or watch.skips:
        from exogym.core.training.absence import Absence

        algorithm = Absence(algorithm, attendance, watch)
    if clock is not None:
        from exogym.core.training.clocking import Charged

        algorithm = Charged(algorithm, clock)
    driver = Driver(algorithm, setting, seats)
    own = {"personal", "two kinds of steps", "island_size"}  # clients keep parameters, or whole models
    driver.shares_model = options.samples_clients and strategy.features().keys().isdisjoint(own)
    return driver


def _attendance(options: FitOptions, strategy: Strategy, step_shares: Sequence[Fraction]) -> Attendance | None:
    """Return the nodes present at each step. None: all nodes, at every step."""
    faults = options.faults if options.may_be_away else None
    if faults is None and all(share == 1 for share in step_shares):
        return None
    from exogym.faults import Faults

    return (faults or Faults()).bind(options.num_nodes, strategy.needs_gradients, step_shares)


def _seats(options: FitOptions, worker: Worker, stream: Stream, steps: int) -> Seats:
    """Return the assignment of rows to nodes, if rows are fewer. Saved state must be registered before."""
    from exogym.core.fleet.seats import Seats, Store

    fleet, wire = worker.fleet, worker.fleet.comm.wire
    folder = None if options.save_dir is None else Path(options.save_dir) / f".clients-{wire.process}"

    def arrived(nodes: Sequence[int]) -> None:
        found = gather(wire, [[node, stream.length(node)] for node in nodes])
        stream.learn((node, examples) for told in found for node, examples in told)
        if worker.fails_alone:
            check_single(stream, [node for told in found for node, _ in told], steps, worker.micro_batch_size)

    return Seats(fleet, Store(options.placement.client_state_memory, folder), arrived)


def add_figures(loop: TrainingLoop) -> None:
    """Add the bytes between a node's devices, and the virtual clock's values, to each evaluation's record."""
    if loop.worker.nodes is not None and loop.fleet.comm.wire.is_shared:
        share = functools.partial(_share_inside_bytes, loop.fleet)
        loop.standing.before_saving.append(share)
        loop.figures.append(share)
    if loop.timing is not None:
        loop.figures.append(loop.timing.values)


def _share_inside_bytes(fleet: Fleet) -> dict[str, float]:
    """Tell every process each node's inside bytes, which only the node's own process counts. Return the mean."""
    ledger = fleet.comm.ledger
    ledger.inside_bytes[:] = np.max(gather(fleet.comm.wire, ledger.inside_bytes.tolist()), axis=0)
    return {"inside_bytes": float(ledger.inside_bytes.mean())}
