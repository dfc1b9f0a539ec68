"""Puts a run together: data, worker, fleet, strategy in training, evaluation, and the loop around them."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.balance import Balance
from exogym.callbacks import Callback
from exogym.core.base.devices import total_memory_bytes
from exogym.core.base.draws import stream_seed
from exogym.core.base.rng import seed_torch
from exogym.core.clock import StepTime
from exogym.core.combinations import check, features_of
from exogym.core.communicator import Wire
from exogym.core.compute.finite import Watch
from exogym.core.compute.memory import check_rows, fitting_micro_batch
from exogym.core.compute.outputs import Loss
from exogym.core.compute.weights import counting
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.seats import Seats
from exogym.core.fleet.state import Shared
from exogym.core.fleet.store import Store
from exogym.core.progress import Progress, notice, warn
from exogym.core.record.history import History
from exogym.core.record.metrics import Evaluator
from exogym.core.record.observers import Logging, Observer, Observers, Showing
from exogym.core.record.run_folder import RunFolder
from exogym.core.record.steps import steps_here
from exogym.core.saving.checkpoint_files import Snapshot
from exogym.core.saving.keepers import on_main
from exogym.core.saving.snapshots import restore
from exogym.core.training.absence import Absence
from exogym.core.training.agenda import Agenda
from exogym.core.training.algorithm import Algorithm, Setting
from exogym.core.training.clocking import Charged, Measured, ServerRounds
from exogym.core.training.driver import Driver
from exogym.core.training.loop import TrainingLoop
from exogym.core.training.options import FitOptions
from exogym.core.training.resuming import Refused, agree, matching_snapshot, open_folder
from exogym.core.training.seating import Seating
from exogym.core.training.speeds import node_speeds
from exogym.core.training.subject import Subject
from exogym.core.training.timing import Timing
from exogym.data.stream import Stream, is_factory
from exogym.errors import ModelError
from exogym.faults import Faults
from exogym.logger import combine
from exogym.strategy.communicate_optimize import NEVER
from exogym.strategy.strategy import Run

KEPT_DATA_SETS = 256  # of a factory, where few nodes act at a time: those last used
EVALUATION_BATCH = 256
ALGORITHMS = {  # by what a strategy says in `driven_by`: the module and class of its adapter, loaded when it is needed
    "rounds": ("exogym.core.training.compositions", "Compositions"),
    "programs": ("exogym.core.training.programs", "Programs"),
    "clock": ("exogym.core.training.by_clock", "ByClock"),
}


def assemble(
    subject: Subject, options: FitOptions, device: torch.device, max_stretch: int | None, wire: Wire
) -> TrainingLoop:
    """Return the loop of a run, at its start or where its newest good checkpoint stands; nothing is trained yet.

    `wire` says which rows are here. The model's parameters point at the fleet from here on; the loop's `end` gives it
    its own memory back.

    Raises:
        ArgumentError, DataError, ModelError, StrategyError, CheckpointError: what the run cannot do.
    """
    refused: dict[str, str] = {}
    while True:
        try:
            return _assemble(subject, options, device, max_stretch, wire, refused)
        except Refused as error:
            refused[error.name] = error.why


def _assemble(
    subject: Subject, options: FitOptions, device: torch.device, max_stretch: int | None, wire: Wire,
    refused: Mapping[str, str],
) -> TrainingLoop:  # fmt: skip
    """Do what `assemble` says; Refused, with all undone, where the checkpoint is not what the run would save."""
    bar = Progress(None, options.progress if wire.is_main else False)
    if subject.val_dataset is None:
        of_validation = features_of(val_size=options.val_size, val_interval=options.val_interval)
        check({"no val_dataset": "no val_dataset"} | of_validation)
    for name, x in [*subject.model.named_parameters(), *subject.model.named_buffers()]:
        if x.is_meta:
            raise ModelError(f"{name!r} is on the meta device and has no numbers: materialise the model first")
    with contextlib.ExitStack() as undo:
        stream, worker, first_batch = workplace(subject, options, device, wire, undo)
        model, fleet = worker.model, worker.fleet
        steps_per_epoch = stream.steps_per_epoch or options.max_steps or 1  # of unknown data all steps are one epoch
        total_steps = bar.total_steps = options.total_steps(steps_per_epoch)

        observers = _observers(options, bar, total_steps) if wire.is_main else Observers()
        observers.all += steps_here()

        snapshot: Snapshot | None = None
        complaints: list[str] = []
        description = _description(options, fleet, stream, total_steps, device)
        folder, keepers = None if options.save_dir is None else Path(options.save_dir), None
        if folder is not None:
            keepers = open_folder(folder, options.resume, wire, undo)
            description["shared"] = _sum_of_shared(model, fleet)
            if options.resume:
                snapshot, complaints = matching_snapshot(folder, description, options, wire, keepers, refused)
        if snapshot is None:
            description["chosen"] = on_main(wire, lambda: _choose(options, worker, stream, first_batch))
        chosen = description["chosen"]
        worker.micro_batch_size = chosen["micro_batch_size"]
        weighing = options.weighing
        if weighing is not None and snapshot is None:
            chosen["speeds"] = node_speeds(weighing, wire, worker, stream)
        balance = None if weighing is None else Balance(weighing.kind, chosen["speeds"])
        work = None if balance is None else _share_out(balance, stream, fleet)
        sizes = options.step_examples if work is None else stream.batch_sizes
        spread = None
        if worker.insides is not None:
            worker.insides.count(fleet.comm.ledger, worker.micro_batch_size)
            spread = worker.insides.spread(np.broadcast_to(sizes, options.num_nodes).tolist())
        if (asked := _parts_asked(options, worker, int(np.max(sizes)))) is not None:
            from exogym.core.compute.parts import check_parts

            looks = _looks(subject, stream, first_batch)
            on_main(wire, lambda: check_parts(worker, looks, *asked))
        step_s = None if options.step_seconds is None else _step_seconds(options, spread)
        availability = None if options.faults is None else options.faults.trace
        run = Run(
            options.num_nodes, options.seed, total_steps, stream.examples, sizes, step_s, availability, stream.empty,
            options.final_sync,
        )  # fmt: skip
        timing = None
        if options.network is not None:
            timing = Timing(fleet, options.network, options.step_seconds, options.timeline, work, spread)
        shares = balance.shares() if balance is not None and balance.kind == "steps" else []
        driver = make_driver(options, fleet, worker, stream, run, chosen["compute"], timing, shares)
        undo.callback(driver.close)
        if wire.is_main and options.faults is None:
            _warn_if_never(driver, total_steps, options)
        if wire.is_main:
            _warn_of_few_examples(stream, len(driver.seated), options)
        agenda = Agenda(
            total_steps, steps_per_epoch, val_interval=options.val_interval, log_interval=options.log_interval,
            checkpoint_interval=options.checkpoint_interval, save_dir=folder,
            keep_checkpoints=options.keep_checkpoints, final_sync=options.final_sync, max_stretch=max_stretch,
            description=description, examples_of=lambda nodes: stream.examples_of(nodes),
            keepers=keepers, evaluates=subject.val_dataset is not None, callbacks=list(options.callbacks),
        )  # fmt: skip
        evaluator = _evaluator(subject, options, worker)
        endings = [stream.close] if evaluator is None else [stream.close, evaluator.stream.close]
        loop = TrainingLoop(agenda, driver, fleet, worker, evaluator, History(), observers, bar, timing, endings)
        if worker.insides is not None:
            share = functools.partial(_share_insides, fleet)
            loop.standing.before_saving.append(share)
            loop.figures.append(share)
        if timing is not None:
            loop.figures.append(timing.values)
        for callback in options.callbacks:
            if snapshot is None and isinstance(callback, Callback):
                callback.load_state({})
        if snapshot is not None:
            agree(wire, snapshot, lambda: restore(loop.standing, snapshot))
            for complaint in complaints:
                wire.say(f"{complaint}; using the one before")
            wire.say(f"going on from step {loop.step} ({snapshot.path})")
        if folder is not None:  # what cannot be saved is to be known now
            fleet.state.row(0)
            fleet.state.shared()
        worker.begin(first_batch)
        observers.start(description | ({} if snapshot is None else {"resumed_step": loop.reports.logged}))
        if snapshot is not None:
            loop.reports.restore(loop.history)
        undo.pop_all()
    return loop


def _observers(options: FitOptions, bar: Progress, total_steps: int) -> Observers:
    """Return who looks on, in the main process."""
    found: list[Observer] = [Logging(combine(options.logger))]
    if bar.wanted is not False:
        found.append(Showing(bar))
    if options.run_dir is not None:
        found.append(RunFolder(options.run_dir, total_steps, options.resume))
    return Observers(found)


def workplace(
    subject: Subject, options: FitOptions, device: torch.device, wire: Wire, undo: contextlib.ExitStack
) -> tuple[Stream, Worker, Any]:
    """Return the data's stream, a worker bound to the fleet of the rows here, and the first batch; `undo` unbinds."""
    rows = wire.total_rows
    asks_all = True
    if rows < options.num_nodes and is_factory(subject.train_dataset):
        asks_all = _asks_all(options, wire)
    stream = Stream(
        subject.train_dataset, options.num_nodes, batch_size=options.step_examples, seed=options.seed,
        shuffle=options.shuffle, partitioner=options.partitioner, dataloader_kwargs=options.dataloader_kwargs,
        kept=None if rows == options.num_nodes else max(KEPT_DATA_SETS, 2 * len(wire.ranks)), asks_all=asks_all,
        may_be_empty=options.strategy.asks_clients,
    )  # fmt: skip
    undo.callback(stream.close)
    model = subject.model.to(device)
    loss = Loss(model, subject.loss_fn)
    kind: Any = Worker
    if wire.devices.parts > 1:
        from exogym.core.compute.split_worker import SplitWorker as kind
    worker = kind(model, loss, device, options.precision, options.seed, options.micro_batch_size)
    if options.gradient_accumulation == 1:  # else a step is the mean over its batches, however their classes weigh
        worker.weights.counting = counting(subject.loss_fn)
    if options.meshes:
        from exogym.core.compute.insides import Insides

        worker.insides = Insides(model, options.meshes)
    first_batch = next(iter(stream.batches(0, 0, 1)))
    _initialise_lazy(worker, first_batch)
    with contextlib.nullcontext() if worker.insides is None else worker.insides.watching():
        worker.probe(first_batch, lambda: next(iter(stream.batches(0, 1, 1))))
    if buffers := sum(model.get_buffer(name).nbytes for name in worker.changing):
        forked = options.engine is None and options.processes != 1  # which share the memory of the machine
        check_rows(
            model, options.strategy, device, num_nodes=options.num_nodes, buffer_bytes=buffers,
            rows=rows if forked else len(wire.ranks), processes=wire.devices.parts, is_cut=wire.devices.parts > 1,
        )  # fmt: skip
    parts = worker.divide(options.meshes, wire) if wire.devices.parts > 1 else None
    worker.bind(Fleet(model, wire.ranks, options.num_nodes, device, wire, parts))
    undo.callback(worker.go_home)
    return stream, worker, first_batch


def _share_insides(fleet: Fleet) -> dict[str, float]:
    """Let every process know what each node's devices sent each other, which that node counts; return the mean."""
    ledger, wire = fleet.comm.ledger, fleet.comm.wire
    if wire.is_shared:
        ledger.inside_bytes[:] = np.max(wire.gather(ledger.inside_bytes.tolist()), axis=0)
    return {"inside_bytes": float(ledger.inside_bytes.mean())}


def _step_seconds(options: FitOptions, spread: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Return the (N,) seconds of a step that were given, or that it takes a node of several devices."""
    given = options.step_seconds
    time = given if isinstance(given, StepTime) else StepTime(given)
    return (time if spread is None else time.for_work(*spread)).mean_s(options.num_nodes)


def _asks_all(options: FitOptions, wire: Wire) -> bool:
    """Say whether a factory is to make each node's data set for its length, though few nodes act at a time.

    Raises:
        ArgumentError: it would have to, and nobody has asked for that.
    """
    if options.num_epochs is None and options.max_steps is None:
        sampled = f"a data set factory for sampled clients of {options.num_nodes:,} nodes"
        unsaid = {"no num_epochs or max_steps": "no num_epochs or max_steps"}
        check({"factory of sampled clients": sampled} | unsaid)
    if options.num_epochs is not None:
        wire.say(f"num_epochs={options.num_epochs}: making the data sets of all {options.num_nodes:,} nodes once")
    return options.num_epochs is not None or options.strategy.asks_all_lengths


def _share_out(balance: Balance, stream: Stream, fleet: Fleet) -> np.ndarray | None:
    """Let nodes work and weigh as `balance` says; return (N,) examples of their steps, in even ones; None: all even."""
    shares = [float(share) for share in balance.shares()]
    sizes = balance.counts(stream.num_nodes * stream.batch_size)
    what, weights = "batches of " + ", ".join(map(str, sizes)), None
    if balance.kind == "steps":
        what = "each takes that share of the local steps"
        weights = torch.tensor(shares, dtype=torch.float64)
    elif len(set(sizes)) > 1:
        stream.share_out(sizes)
        weights = torch.from_numpy(np.minimum(stream.batch_sizes, stream.examples).astype(np.float64))
    spelt = ", ".join(f"{x:.3g}" for x in shares)
    fleet.comm.wire.say(f"balance={balance.kind!r}: speeds of the nodes {spelt}; {what}")
    if min(shares) < 1:  # else the bits of a run without
        fleet.comm.weights = weights
    return stream.batch_sizes / stream.batch_size if balance.kind == "batch" else None


def make_driver(
    options: FitOptions, fleet: Fleet, worker: Worker, stream: Stream, run: Run, compute: str, timing: Timing | None,
    shares: Sequence[Fraction] = (),
) -> Driver:  # fmt: skip
    """Return what takes the strategy, copied so that it starts fresh, through training."""
    strategy = copy.deepcopy(options.strategy)
    uneven = [share for share in shares if share < 1]
    faults = options.faults if options.may_be_away else (Faults() if uneven else None)
    attendance = None if faults is None else faults.bind(options.num_nodes, strategy.needs_gradients, shares)
    watch = Watch(options.on_nonfinite, worker)
    if strategy.asks_clients:
        fleet.state.register("empty clients", Shared(stream.state, stream.load_state))
    setting = Setting(fleet, worker, stream, run, compute, attendance, timing, watch)
    if timing is not None and timing.is_measured:
        setting.around = functools.partial(Measured, timing=timing)
    home, name = ALGORITHMS[strategy.driven_by]
    algorithm: Algorithm = getattr(importlib.import_module(home), name)(strategy, setting)
    # From the inside out. A server's round is over before the nodes left out of it take what it came to; absence says
    # how many steps each node takes; and the clock is charged with these before anybody meets.
    clock = None if algorithm.keeps_time else timing
    seats = None
    if clock is not None:
        algorithm = ServerRounds(algorithm, clock)
    if fleet.comm.wire.total_rows < options.num_nodes:
        seats = _seats(options, fleet, stream)
        algorithm = Seating(algorithm, seats)
    if attendance is not None or watch.skips:
        algorithm = Absence(algorithm, attendance, watch)
    if clock is not None:
        algorithm = Charged(algorithm, clock)
    return Driver(algorithm, setting, seats)


def _seats(options: FitOptions, fleet: Fleet, stream: Stream) -> Seats:
    """Return who sits in the rows, where there are fewer than nodes; all that is kept is registered by then."""
    wire = fleet.comm.wire
    folder = None if options.save_dir is None else Path(options.save_dir) / f".clients-{wire.process}"

    def arrived(nodes: Sequence[int]) -> None:
        found = wire.gather([[node, stream.length(node)] for node in nodes])
        stream.learn((node, examples) for told in found for node, examples in told)

    return Seats(fleet, Store(options.client_state_memory, folder), arrived)


def constants(model: nn.Module, fleet: Fleet) -> dict[str, Tensor]:
    """Return what all nodes share and no row holds, by name: frozen parameters, and buffers that training leaves."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | {name: x for name, x in model.named_buffers() if name not in fleet.buffers}


def _sum_of_shared(model: nn.Module, fleet: Fleet) -> str:
    """Return a checksum of what all nodes share, frozen parameters and constant buffers: checkpoints do not hold it."""
    digest = hashlib.sha256()
    for name, x in constants(model, fleet).items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if not x.is_meta and x.layout == torch.strided:
            digest.update(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def _description(
    options: FitOptions, fleet: Fleet, stream: Stream, total_steps: int, device: torch.device
) -> dict[str, Any]:
    rounds = _rounds(options, total_steps)
    layouts = [block.layout.whole or block.layout for block in fleet.blocks]
    model = [[slot.name, list(slot.shape), str(layout.dtype)] for layout in layouts for slot in layout]
    shards = hashlib.sha256(np.ascontiguousarray(stream.examples).tobytes()).hexdigest()[:16] if stream.total else ""
    by_process = options.shares is not None and options.shares.kind == "nodes" and options.shares.speeds
    dealt = {"speeds": by_process} if by_process else {}
    limits = {"num_epochs": options.num_epochs, "max_steps": options.max_steps, "total_steps": total_steps}
    return options.description() | rounds | {
        "device": device.type, "model": model, "data": {"examples": stream.total, "shards": shards}, "limits": limits,
        "placement": {"processes": len(fleet.comm.wire.placement), "nodes": fleet.comm.wire.placement} | dealt,
    }  # fmt: skip


def _rounds(options: FitOptions, total_steps: int) -> dict[str, Any]:
    """Return, by module, the steps of the rounds of `total_steps` steps, where H is a function of the round."""
    lengths = options.strategy.round_lengths(total_steps)
    return {"rounds": lengths} if lengths else {}


def _initialise_lazy(worker: Worker, batch: Any) -> None:
    """Give lazy modules their shapes and first numbers, which follow from the seed; statistics stay as they start."""
    tensors = [*worker.model.parameters(), *worker.model.buffers()]
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    if any(isinstance(x, lazy) for x in tensors):
        seed_torch(stream_seed(worker.seed, "lazy"), worker.device)
        worker.model.eval()
        with torch.no_grad():
            worker.loss(worker.to_device(batch))


def _choose(options: FitOptions, worker: Worker, stream: Stream, batch: Any) -> dict[str, Any]:
    """Make the choices that are left to the library: recorded, and taken over on resume."""
    micro = options.micro_batch_size
    if options.max_memory_usage is not None and options.minibatch_size is None:
        row = sum(p.numel() * p.element_size() for p in worker.parameters)
        limit = options.max_memory_usage * total_memory_bytes(worker.device)
        found = fitting_micro_batch(worker, batch, limit, resident_bytes=4.0 * len(worker.fleet) * row)
        micro = found if micro is None else min(found, micro)
        notice(f"max_memory_usage={options.max_memory_usage}: micro-batches of {micro} examples fit")
    compute = options.compute
    if compute == "auto":
        from exogym.core.compute.choosing import choose

        compute = choose(worker, stream, options.strategy, options.total_steps(stream.steps_per_epoch))
    return {"compute": compute, "micro_batch_size": micro}


def _parts_asked(options: FitOptions, worker: Worker, examples: int) -> tuple[int, str] | None:
    """Return how many of a step's `examples` are computed at once, and the option that asks for it, where it may change
    results; None where a step is computed whole, or in the batches that `gradient_accumulation` takes the mean of.

    In several processes of a node its split is compared with the whole model, micro-batches included.
    """
    wire = worker.fleet.comm.wire
    if options.meshes and wire.agree(wire.devices.parts > 1):  # nodes may differ, and all must go the same way
        return None
    size = worker.micro_batch_size or examples
    asked = "max_memory_usage" if options.minibatch_size is None else "minibatch_size"
    option = f"{asked}={getattr(options, asked)}"
    option += f" (micro-batches of {size})" if asked == "max_memory_usage" else ""
    for mesh in dict.fromkeys(options.meshes):
        if mesh.probe is not False and (at_once := mesh.at_once(min(examples, size))) < size:
            size, option = at_once, f"node={mesh}"
    wanted = options.batch_size if options.gradient_accumulation > 1 else examples
    return None if size == wanted or size >= examples == wanted else (size, option)


def _looks(subject: Subject, stream: Stream, first_batch: Any) -> Iterator[Any]:
    """Yield the first batch, and a few of other steps and nodes; a factory's other data sets are left alone."""
    yield first_batch
    steps = stream.steps_per_epoch
    for step in (steps // 2, steps - 1):
        if step > 0:
            yield next(iter(stream.batches(0, step, 1)))
    if not is_factory(subject.train_dataset):
        for node in (stream.num_nodes // 3, 2 * stream.num_nodes // 3, stream.num_nodes - 1):
            yield next(iter(stream.batches(node, 0, 1)))


def _evaluator(subject: Subject, options: FitOptions, worker: Worker) -> Evaluator | None:
    if subject.val_dataset is None:
        return None
    size = max(EVALUATION_BATCH, options.step_examples)  # the worker computes it in its micro-batches
    nodes = options.num_nodes if is_factory(subject.val_dataset) else 1
    stream = Stream(
        subject.val_dataset, nodes, batch_size=size, seed=options.seed, shuffle=False, is_train=False,
        dataloader_kwargs=options.dataloader_kwargs,
    )  # fmt: skip
    return Evaluator(worker, stream, subject.metrics or {}, options.val_size)


def _warn_of_few_examples(stream: Stream, acting: int, options: FitOptions) -> None:
    if stream.is_shared and acting > stream.total:
        warn(
            f"{acting:,} nodes share {stream.total:,} examples: some train on the same ones at every "
            "step, and an epoch is one step; lower num_nodes, or bring more data"
        )
    elif 0 < stream.total < options.step_examples != FitOptions.batch_size:  # nobody chose the default
        of = "" if options.gradient_accumulation == 1 else f" x gradient_accumulation={options.gradient_accumulation}"
        warn(
            f"batch_size={options.batch_size:,}{of} is more than the {stream.total:,} examples of all nodes: every "
            f"step takes all examples of a node ({stream.examples.max():,} at most), and an epoch is one step; lower "
            "batch_size, or bring more data"
        )


def _warn_if_never(driver: Driver, total_steps: int, options: FitOptions) -> None:
    first = driver.next_event(0)
    if total_steps < first < NEVER:
        warn(
            f"{type(options.strategy).__name__} first communicates after step {first}, but the run has {total_steps} "
            "steps: nodes meet only in the final synchronisation; lower H or train longer"
        )
