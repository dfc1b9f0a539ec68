"""Assemble a run: data, worker, fleet, strategy, evaluation, and the training loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exogym.core.combinations import check
from exogym.core.communicator import Wire, gather
from exogym.core.compute.finite import Watch
from exogym.core.compute.first_step import forward_bytes
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Shared
from exogym.core.progress import notice, warn
from exogym.core.record.history import History
from exogym.core.record.metrics import Evaluator
from exogym.core.record.observers import Observer, Observers, StepFile
from exogym.core.training.driver import Driver, Setting, algorithm_of
from exogym.core.training.loop import TrainingLoop
from exogym.core.training.options import FitOptions, Subject
from exogym.core.training.standing import Agenda
from exogym.core.training.workplace import workplace
from exogym.data.stream import Stream, is_factory
from exogym.errors import ModelError
from exogym.strategy.communicate_optimize import NEVER
from exogym.strategy.outer import few_rounds
from exogym.strategy.strategy import Run

if TYPE_CHECKING:
    from exogym.callbacks import Callback
    from exogym.core.training.timing import Timing

EVALUATION_BATCH = 256
EVALUATION_BYTES = 2**26  # of activations; more only for as many examples as training computes at once


def assemble(
    subject: Subject, options: FitOptions, device: torch.device, max_stretch: int | None, wire: Wire
) -> TrainingLoop:
    """Return a run's training loop, at the run's start or its newest good checkpoint; `wire` has this process's rows.

    From this call on, the model's parameters share the fleet's memory; the loop's `end` undoes that. An impossible
    argument, data set, model, strategy or checkpoint raises the error of its kind.
    """
    if options.save_dir is None:
        return _assemble(subject, options, device, max_stretch, wire, {})
    from exogym.core.training.resuming import Unfit

    refused: dict[str, str] = {}
    while True:
        try:
            return _assemble(subject, options, device, max_stretch, wire, refused)
        except Unfit as error:
            refused[error.name] = error.why


def _assemble(
    subject: Subject, options: FitOptions, device: torch.device, max_stretch: int | None, wire: Wire,
    refused: Mapping[str, str],
) -> TrainingLoop:  # fmt: skip
    """Assemble as `assemble` does. If the checkpoint does not fit the run, undo everything and raise Unfit.

    The order matters: the data determine the run's length, and so the description that a checkpoint must match. The
    checkpoint has the run's own choices, which decide a step's size for the clock, which the strategy needs.
    """
    _check(subject, options)
    with contextlib.ExitStack() as undo:
        stream, worker, first_batch = workplace(subject, options, device, wire, undo)
        fleet = worker.fleet
        fleet.comm.overlap = options.placement.overlap and options.faults is None
        total_steps = options.total_steps(_steps_per_epoch(options, stream))
        observers = _observers(options, total_steps) if wire.is_main else Observers()
        if (folder := os.environ.get("EXOGYM_STEPS")) is not None:  # this host is watched
            observers.all.append(StepFile(folder))

        description = _description(options, fleet, stream, total_steps, device)
        kept = None
        if options.save_dir is not None:
            from exogym.core.training.resuming import kept_in

            kept = kept_in(Path(options.save_dir), options, worker, description, refused, undo)
        is_fresh = kept is None or kept.snapshot is None
        if is_fresh:
            description["chosen"] = _chosen(options, worker, first_batch)
        chosen = description["chosen"]
        worker.micro_batch_size = chosen["micro_batch_size"]
        run, timing, step_shares = _run_and_clock(subject, options, worker, stream, first_batch, chosen, is_fresh)
        driver = make_driver(options, fleet, worker, stream, run, chosen["compute"], timing, step_shares)
        undo.callback(driver.close)
        if wire.is_main:
            _warn_of_few_rounds(driver, total_steps, options, is_fresh)
            _warn_of_few_examples(stream, len(driver.algorithm.nodes), options)
        ahead = None if stream.iterated is None else stream.iterated.most_steps
        stretches = [x for x in (max_stretch, ahead) if x is not None]
        agenda = _agenda(subject, options, stream, description, min(stretches, default=None))
        evaluator = _evaluator(subject, options, worker, first_batch)
        endings = [stream.close] if evaluator is None else [stream.close, evaluator.stream.close]
        loop = TrainingLoop(agenda, driver, fleet, worker, evaluator, History(), observers, timing, kept, endings)
        if worker.nodes is not None and wire.is_shared:
            _add_inside_bytes(loop)
        for callback in agenda.callbacks if is_fresh else ():
            callback.load_state({})
        if kept is not None:
            kept.put_back(loop.standing, options.strategy)
            if options.placement.overlap:
                kept.write_behind()
        worker.begin(first_batch)
        observers.start(description | ({} if is_fresh else {"resumed_step": loop.reports.logged}))
        if not is_fresh:
            loop.reports.restore(loop.history)
        undo.pop_all()
    return loop


def _description(
    options: FitOptions, fleet: Fleet, stream: Stream, total_steps: int, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides the run's result. Checkpoints and the run folder store it."""
    lengths = options.strategy.round_lengths(total_steps)  # of rounds, by module, if H is a function of the round
    rounds = {"rounds": lengths} if lengths else {}
    layouts = [block.layout.whole or block.layout for block in fleet.blocks]
    model = [[slot.name, list(slot.shape), str(layout.dtype)] for layout in layouts for slot in layout]
    shards = hashlib.sha256(np.ascontiguousarray(stream.examples).tobytes()).hexdigest()[:16] if stream.total else ""
    data = {"examples": stream.total, "shards": shards}
    data |= {} if stream.iterated is None else {"window": stream.iterated.window}
    data |= {"drop_last": True} if stream.drops_last else {}
    by_process = options.sharing is not None and options.sharing.kind == "nodes" and options.sharing.speeds
    dealt = {"speeds": by_process} if by_process else {}
    limits = {"num_epochs": options.num_epochs, "max_steps": options.max_steps, "total_steps": total_steps}
    return options.description() | rounds | {
        "device": device.type, "model": model, "data": data, "limits": limits,
        "placement": {"processes": len(fleet.comm.wire.placement), "nodes": fleet.comm.wire.placement} | dealt,
    }  # fmt: skip


def _check(subject: Subject, options: FitOptions) -> None:
    """Raise ArgumentError or ModelError if the options do not fit the model or the data."""
    if subject.val_dataset is None:
        check(options.features() | {"no val_dataset": "no val_dataset"})
    for name, x in [*subject.model.named_parameters(), *subject.model.named_buffers()]:
        if x.is_meta:
            raise ModelError(f"{name!r} is on the meta device and has no values: materialize the model first")


def _chosen(options: FitOptions, worker: Worker, batch: Any) -> dict[str, Any]:
    """Return the run's own choices. A run records them, and a resumed run takes the recorded ones."""
    micro = options.micro_batch_size
    if options.max_memory_usage is not None and options.minibatch_size is None:
        from exogym.core.saving.keepers import on_main
        from exogym.core.training.choices import fitting_micro_batch

        micro = on_main(worker.fleet.comm.wire, lambda: fitting_micro_batch(options, worker, batch))
    return {"compute": options.compute, "micro_batch_size": micro}


def _observers(options: FitOptions, total_steps: int) -> Observers:
    """Return the main process's observers."""
    found: list[Observer] = []
    if options.logger is not None:
        from exogym.logger import combine

        found.append(combine(options.logger))
    if options.run_dir is not None:
        from exogym.core.record.run_folder import RunFolder

        save_dir = None if options.save_dir is None else os.path.abspath(options.save_dir)
        found.append(RunFolder(options.run_dir, total_steps, options.resume, {"save_dir": save_dir}))
    if options.progress or options.progress is None:  # last, so that no bar comes before a folder that is refused
        from exogym.core.record.bar import Bar

        found.append(Bar(total_steps, options.progress))
    return Observers(found)


def _run_and_clock(
    subject: Subject, options: FitOptions, worker: Worker, stream: Stream, batch: Any, chosen: dict[str, Any],
    is_fresh: bool,
) -> tuple[Run, Timing | None, Sequence[Fraction]]:  # fmt: skip
    """Return the `Run` for strategies, the clock, and each node's share of the local steps ([]: all take all).

    The clock needs a step's size, so this comes first.
    """
    work, step_shares, timing, step_s = None, list[Fraction](), None, None
    sizes: int | np.ndarray = options.step_examples
    if options.weighing is not None:
        from exogym.core.training.balancing import share_out

        work, step_shares = share_out(options.weighing, chosen, worker, stream, is_fresh)
        sizes = sizes if work is None else stream.batch_sizes
    if worker.micro_batch_size is not None or options.nodes is not None:
        from exogym.core.training.choices import check_computed_in_parts

        check_computed_in_parts(subject, options, worker, stream, batch, int(np.max(sizes)))
    if options.step_seconds is not None:
        from exogym.core.training.timing import mean_seconds

        step_s = mean_seconds(options.step_seconds, options.num_nodes)
    if options.network is not None:
        from exogym.core.training.timing import Timing

        given = (options.network, options.step_seconds, options.timeline)
        timing = Timing(worker.fleet, *given, work, options.placement.overlap)
    availability = None if options.faults is None else options.faults.trace
    steps = options.total_steps(_steps_per_epoch(options, stream))
    run = Run(
        options.num_nodes, options.seed, steps, stream.examples, sizes, step_s, availability, stream.empty,
        options.final_sync, stream.drops_last,
    )  # fmt: skip
    return run, timing, step_shares


def make_driver(
    options: FitOptions, fleet: Fleet, worker: Worker, stream: Stream, run: Run, compute: str, timing: Timing | None,
    step_shares: Sequence[Fraction] = (),
) -> Driver:  # fmt: skip
    """Return the driver for a copy of the strategy, so that the run starts with the strategy's initial state.

    The driver runs the strategy's adapter inside one wrapper per feature that the options need; modules of other
    features are not imported. `compute` is the chosen way of computing, and `step_shares` each node's share of the
    local steps, or empty if each node takes all.
    """
    strategy = copy.deepcopy(options.strategy)
    watch = Watch(options.on_nonfinite, worker)
    attendance, faults = None, options.faults if options.may_be_away else None
    if faults is not None or any(share != 1 for share in step_shares):
        from exogym.faults import Faults

        attendance = (faults or Faults()).bind(options.num_nodes, strategy.needs_gradients, step_shares)
    if options.samples_clients:
        fleet.state.register("empty clients", Shared(stream.state, stream.load_state))
    if stream.iterated is not None:
        fleet.state.register("data", stream.iterated.begin(fleet))
    setting = Setting(fleet, worker, stream, run, compute, attendance, timing, watch)
    if timing is not None and timing.is_measured:
        from exogym.core.training.clocking import Measured

        setting.around = functools.partial(Measured, timing=timing)
    algorithm = algorithm_of(strategy, setting)
    # From the inside out: a server's round ends before the nodes left out of it receive its result, absence determines
    # how many steps each node takes, and the clock advances by them before nodes synchronize.
    clock = None if algorithm.keeps_time else timing
    seats = None
    if clock is not None:
        from exogym.core.training.clocking import ServerRounds

        algorithm = ServerRounds(algorithm, clock)
    if fleet.comm.wire.total_rows < options.num_nodes:  # then none is absent: nodes that may be keep their rows
        from exogym.core.training.seating import Seating, seats_of

        seats = seats_of(options, worker, stream, run.total_steps)
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


def _add_inside_bytes(loop: TrainingLoop) -> None:
    """Add the bytes between a node's devices to each evaluation's record."""
    share = functools.partial(_share_inside_bytes, loop.fleet)
    loop.figures.insert(0, share)
    if loop.standing.kept is not None:
        loop.standing.kept.before_saving.append(share)


def _share_inside_bytes(fleet: Fleet) -> dict[str, float]:
    """Tell every process each node's inside bytes, which only the node's own process counts. Return the mean."""
    ledger = fleet.comm.ledger
    ledger.inside_bytes[:] = np.max(gather(fleet.comm.wire, ledger.inside_bytes.tolist()), axis=0)
    return {"inside_bytes": float(ledger.inside_bytes.mean())}


def _agenda(
    subject: Subject, options: FitOptions, stream: Stream, description: dict[str, Any], max_stretch: int | None
) -> Agenda:  # fmt: skip
    per_epoch = _steps_per_epoch(options, stream)
    callbacks: list[Callback] = []
    if options.callbacks:
        from exogym.callbacks import Callback

        callbacks = [Callback.of(given) for given in options.callbacks]
    return Agenda(
        options.total_steps(per_epoch), per_epoch, val_interval=options.val_interval,
        log_interval=options.log_interval,
        checkpoint_interval=None if options.save_dir is None else options.checkpoint_interval,
        final_sync=options.final_sync, max_stretch=max_stretch, description=description,
        examples_of=lambda nodes: stream.examples_of(nodes),
        evaluates=subject.val_dataset is not None, callbacks=callbacks,
    )  # fmt: skip


def _steps_per_epoch(options: FitOptions, stream: Stream) -> int:
    """Return an epoch's steps. If the data's size is unknown, the whole run is one epoch."""
    return stream.steps_per_epoch or options.max_steps or 1


def _evaluator(subject: Subject, options: FitOptions, worker: Worker, batch: Any) -> Evaluator | None:
    if subject.val_dataset is None:
        return None
    nodes = options.num_nodes if is_factory(subject.val_dataset) else 1
    size = options.val_batch_size or _evaluated_at_once(options, worker, batch)
    stream = Stream(
        subject.val_dataset, nodes, batch_size=size, seed=options.seed, shuffle=False, is_train=False,
        dataloader_kwargs=options.dataloader_kwargs, may_be_empty=True,
    )  # fmt: skip
    if stream.endless:
        check(options.features() | {"validation iterable without a length": "a val_dataset without a length"})
    return Evaluator(worker, stream, subject.metrics or {}, options.val_size)


def _evaluated_at_once(options: FitOptions, worker: Worker, batch: Any) -> int:
    """Return how many examples an evaluation computes at once."""
    if worker.micro_batch_size is not None or options.step_examples >= EVALUATION_BATCH:
        return worker.micro_batch_size or options.step_examples
    if getattr(worker.model, "evaluates_in_parts", False):
        return EVALUATION_BATCH
    fit = int(EVALUATION_BYTES // max(1.0, forward_bytes(worker, batch)))
    return max(options.step_examples, min(EVALUATION_BATCH, fit))


def _warn_of_few_examples(stream: Stream, acting: int, options: FitOptions) -> None:
    if stream.is_shared and acting > stream.total and not stream.endless:
        warn(
            f"{acting:,} nodes share {stream.total:,} examples: some nodes train on the same examples at every step, "
            "and an epoch is one step. Lower num_nodes, or use more data"
        )
    elif 0 < stream.total < options.step_examples != FitOptions.batch_size:  # nobody chose the default
        of = "" if options.gradient_accumulation == 1 else f" x gradient_accumulation={options.gradient_accumulation}"
        warn(
            f"batch_size={options.batch_size:,}{of} is more than the {stream.total:,} examples of all nodes: every "
            f"step takes all examples of a node ({stream.examples.max():,} at most), and an epoch is one step. Lower "
            "batch_size, or use more data"
        )


def _warn_of_few_rounds(driver: Driver, total_steps: int, options: FitOptions, is_fresh: bool) -> None:
    if is_fresh and (text := few_rounds(options.strategy, total_steps)) is not None:
        notice(text, about="few outer rounds", once=True)
    if options.faults is not None:  # the next event may be an outage
        return
    first = driver.algorithm.next_event(0)
    if total_steps < first < NEVER:
        warn(
            f"{type(options.strategy).__name__} first communicates after step {first}, but the run has {total_steps} "
            "steps, so nodes meet only in the final synchronization. Lower H, or train longer"
        )
