"""Make the objects with which a process trains: the data's stream, and a worker bound to the process's rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, map_tensors, slice_batch
from exogym.core.base.devices import CPU, Device
from exogym.core.base.modes import evaluation_mode, normalizes, start_training
from exogym.core.base.rng import seed_torch, stream_seed
from exogym.core.base.torch_private import own_parameters
from exogym.core.combinations import check
from exogym.core.communicator import Wire, say
from exogym.core.compute.first_step import look
from exogym.core.compute.outputs import Loss
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.training.options import FitOptions, Subject
from exogym.data.stream import Stream, is_factory
from exogym.strategy.strategy import Strategy

PLENTY, PLENTY_OBJECTS = 32, 15_000  # rows' bytes, and bytes of objects per parameter: more than any strategy keeps
KEPT_DATA_SETS = 256  # of a factory, where few nodes act at a time: those last used


def workplace(
    subject: Subject, options: FitOptions, device: torch.device, wire: Wire, undo: contextlib.ExitStack
) -> tuple[Stream, Worker, Any]:
    """Return the data's stream, a worker bound to this process's rows (until `undo` closes), and the first batch."""
    rows = wire.total_rows
    asks_all = True
    if rows < options.num_nodes and is_factory(subject.train_dataset):
        asks_all = _asks_all(options, wire)
    stream = Stream(
        subject.train_dataset, options.num_nodes, batch_size=options.step_examples, seed=options.seed,
        shuffle=options.shuffle, partitioner=options.partitioner, dataloader_kwargs=options.dataloader_kwargs,
        kept=None if rows == options.num_nodes else max(KEPT_DATA_SETS, 2 * len(wire.ranks)), asks_all=asks_all,
        may_be_empty=options.samples_clients,
    )  # fmt: skip
    undo.callback(stream.close)
    if stream.iterates:
        check(options.features() | stream.features())
    model = subject.model
    loss = Loss(model, subject.loss_fn)
    worker = Worker(model, loss, device, options.precision, options.seed, options.micro_batch_size)
    # else a step is the mean over its batches, however their classes weigh
    worker.weighs_classes = options.gradient_accumulation == 1
    first_batch = next(iter(stream.batches(stream.first, 0, 1)))
    is_split = wire.devices.parts > 1
    # the trial of a node of several devices counts what a whole batch sends
    trial = functools.partial(_computed_at_once, None if is_split else options.micro_batch_size)
    _initialise_lazy(worker, trial(first_batch))
    for module in (model, subject.loss_fn):
        if isinstance(module, nn.Module):
            _move(module, device)
    if kept := start_training(model):
        few = ", ".join(repr(name or "the model itself") for name in kept[:3]) + ", ..." * (len(kept) > 3)
        say(wire, f"in evaluation mode during training, as given: {few}; call model.train() before fit to train all")
    if options.nodes is not None:
        worker.nodes = options.nodes
        worker.devices = options.nodes.devices(model, wire, device)
    with contextlib.nullcontext() if worker.devices is None else worker.devices.watching():
        second = lambda: trial(next(iter(stream.batches(stream.first, 1, 1))))  # noqa: E731
        look(worker, trial(first_batch), second, _alone(options, stream) if normalizes(model) else None)
    if buffers := sum(model.get_buffer(name).nbytes for name in worker.changing):
        forked = options.placement.engine is None and options.processes != 1  # which share the memory of the machine
        check_memory(
            model, options.strategy, device, num_nodes=options.num_nodes, buffer_bytes=buffers,
            rows=rows if forked else len(wire.ranks), processes=wire.devices.parts, is_cut=is_split,
            together=options.compute == "vmap",
        )  # fmt: skip
    parts = None if worker.devices is None else worker.devices.split.parts
    worker.bind(Fleet(model, wire.ranks, options.num_nodes, device, wire, parts))
    undo.callback(worker.go_home)
    return stream, worker, first_batch


def check_memory(
    model: nn.Module, strategy: Strategy, device: torch.device, *, num_nodes: int, rows: int, processes: int = 1,
    is_cut: bool = False, buffer_bytes: int = 0, together: bool = False,
) -> None:  # fmt: skip
    """Raise ArgumentError before any row is made if the run needs more than the free memory (see `check_rows`).

    If the run needs only a small part of the free memory, nothing is counted.
    """
    free, sizes = Device(device).free_bytes(), [p.nbytes for p in model.parameters() if not nn.parameter.is_lazy(p)]
    row_bytes = PLENTY * (sum(sizes) + buffer_bytes) + PLENTY_OBJECTS * (1 + len(sizes))
    if rows * row_bytes <= free:
        return
    from exogym.core.compute.memory import check_rows

    check_rows(
        model, strategy, free, num_nodes=num_nodes, rows=rows, processes=processes, is_cut=is_cut,
        buffer_bytes=buffer_bytes, together=together,
    )  # fmt: skip


def _computed_at_once(size: int | None, batch: Any) -> Any:
    """Return as many examples of a batch as training computes at once: trials take no more memory than training."""
    return batch if size is None or size >= batch_examples(batch) else slice_batch(batch, 0, size)


def _asks_all(options: FitOptions, wire: Wire) -> bool:
    """Return whether to make every node's data set, to know its length. A run without a set length is refused."""
    sampled = f"a data set factory for sampled clients of {options.num_nodes:,} nodes"
    check(options.features() | {"factory of sampled clients": sampled})
    if options.num_epochs is not None:
        say(wire, f"num_epochs={options.num_epochs}: making the data sets of all {options.num_nodes:,} nodes once")
    return options.num_epochs is not None or options.strategy.clients.asks_all_lengths


def _alone(options: FitOptions, stream: Stream) -> Callable[[], None] | None:
    """Return what to call if the model cannot train on a single example. None: no node needs to."""
    from exogym.data.single import check_single, single

    steps = options.total_steps(stream.steps_per_epoch or options.max_steps or 1)
    asked = (stream, range(options.num_nodes), steps, options.micro_batch_size)
    is_unknown = np.count_nonzero(stream.examples == 0) > len(stream.empty)
    return functools.partial(check_single, *asked) if is_unknown or single(*asked) is not None else None


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module. Tied parameters stay tied, also on devices for which torch makes new parameters."""
    given = [(own_parameters(part), name, p) for part in module.modules() for name, p in own_parameters(part).items()]
    module.to(device)
    moved: dict[int, nn.Parameter | None] = {}
    for own, name, p in given:
        own[name] = moved.setdefault(id(p), own[name])


def _initialise_lazy(worker: Worker, batch: Any) -> None:
    """Give lazy modules shapes and initial values, drawn from the seed on the CPU so that all devices get the same."""
    model, loss_fn = worker.model, worker.loss.loss_fn
    if any(map(nn.parameter.is_lazy, [*model.parameters(), *model.buffers()])):
        for module in (model, loss_fn):
            if isinstance(module, nn.Module):
                module.to(CPU)
        seed_torch(stream_seed(worker.seed, "lazy"), CPU)
        with evaluation_mode(model), torch.no_grad():
            worker.loss(map_tensors(batch, Tensor.cpu))
