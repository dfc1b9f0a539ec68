"""Choose a micro-batch size that fits the memory, and a way of computing, before a run. Check both choices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Subset

from exogym.core.base.batches import batch_examples, micro_batches
from exogym.core.base.devices import Device
from exogym.core.compute.first_step import activation_bytes
from exogym.core.compute.parts import MOST_TRIED, Trials, check_parts
from exogym.core.compute.worker import Worker
from exogym.core.progress import notice
from exogym.core.saving.keepers import on_main
from exogym.core.training.options import FitOptions, Subject
from exogym.data.partition import stored_labels
from exogym.data.stream import Stream, is_factory
from exogym.errors import ArgumentError


def fitting_micro_batch(options: FitOptions, worker: Worker, batch: Any) -> int:
    """Return how many examples to compute at once, so that the run keeps to `max_memory_usage`."""
    assert options.max_memory_usage is not None
    row = sum(p.numel() * p.element_size() for p in worker.parameters)
    limit = options.max_memory_usage * Device(worker.device).total_bytes()
    found = _largest_that_fits(worker, batch, limit, resident_bytes=4.0 * len(worker.fleet) * row)
    micro = min(found, options.micro_batch_size or found)
    notice(f"max_memory_usage={options.max_memory_usage}: micro-batches of {micro} examples fit")
    return micro


def _largest_that_fits(worker: Worker, batch: Any, limit_bytes: float, resident_bytes: float) -> int:
    """Return the largest of n, n/2, ... examples that fit beside `resident_bytes`, or raise ArgumentError for none."""
    size = batch_examples(batch)
    while True:
        part, _ = next(iter(micro_batches(batch, size)))
        try:
            needed = resident_bytes + activation_bytes(worker, part)
        except Exception as error:
            if size == batch_examples(batch):
                raise
            raise ArgumentError(
                f"max_memory_usage allows {limit_bytes / 1e6:.1f} MB, too little for {2 * size} examples, and the "
                f"model cannot compute the loss of {size} examples ({error}). Raise max_memory_usage, train "
                "fewer nodes, or use a smaller model"
            ) from error
        if needed <= limit_bytes:
            return size
        if size == 1:
            raise ArgumentError(
                f"max_memory_usage allows {limit_bytes / 1e6:.1f} MB, but one example needs {needed / 1e6:.1f} MB "
                "beside the nodes' parameters. Raise max_memory_usage, train fewer nodes, or use a smaller model"
            )
        size = -(-size // 2)


def check_computed_in_parts(
    subject: Subject, options: FitOptions, worker: Worker, stream: Stream, batch: Any, examples: int
) -> None:
    """If ExoGym computes a step's `examples` in micro-batches, check that the result equals the whole step's result.

    A loss that is not one of torch's is also tested during training (`Worker.trials`). If a node is several processes,
    `check_split` compares its split with the whole model before training, micro-batches included. Raise ModelError if
    the micro-batches give another result, in every process.
    """
    asked = _parts_asked(options, worker, examples)
    if asked is None:
        return
    wire = worker.fleet.comm.wire
    is_split = options.nodes is not None and wire.agree(wire.devices.parts > 1)  # in some process: all do the same
    if not is_split:
        looks = _looks(subject, options, stream, batch)
        if not on_main(wire, lambda: check_parts(worker, looks, *asked)):
            return
    if worker.loss.counting is None or not worker.weighs_classes:
        worker.trials = Trials(worker, *asked)


def _parts_asked(options: FitOptions, worker: Worker, examples: int) -> tuple[int, str] | None:
    """Return how many of a step's `examples` are computed at once, and the option that asks for it.

    None: the step is computed whole, or in the batches that `gradient_accumulation` averages, so results cannot change.
    """
    size = worker.micro_batch_size or examples
    asked = "max_memory_usage" if options.minibatch_size is None else "minibatch_size"
    option = f"{asked}={getattr(options, asked)}"
    option += f" (micro-batches of {size})" if asked == "max_memory_usage" else ""
    if options.nodes is not None and (tried := options.nodes.tried(min(examples, size))) is not None:
        size, option = tried
    wanted = options.batch_size if options.gradient_accumulation > 1 else examples
    return None if size == wanted or size >= examples == wanted else (size, option)


def _looks(subject: Subject, options: FitOptions, stream: Stream, first_batch: Any) -> Iterator[Any]:
    """Yield batches to test, the most telling first: examples of the rarest and the most frequent classes, if the data
    set stores its labels; the first batch; a few of other steps and nodes. A factory's other data sets are not loaded.
    """
    dataset = subject.train_dataset
    labels = None
    if not (is_factory(dataset) or stream.iterates):
        with contextlib.suppress(TypeError, ValueError):  # labels of the user's own kind
            labels = stored_labels(dataset)
    if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) == len(dataset):
        classes, counts = np.unique(labels, return_counts=True)
        by_count = classes[np.argsort(counts, kind="stable")]
        turns = [
            by_count[k // 2] if k % 2 == 0 else by_count[-1 - k // 2] for k in range(min(len(classes), MOST_TRIED))
        ]
        if len(turns) > 1:
            each = [np.flatnonzero(labels == one)[:MOST_TRIED].tolist() for one in turns]
            chosen = [k for one in itertools.zip_longest(*each) for k in one if k is not None][:MOST_TRIED]
            few = Subset(dataset, chosen)
            collate = {k: v for k, v in (options.dataloader_kwargs or {}).items() if k == "collate_fn"}
            yield next(Stream(few, 1, batch_size=len(few), shuffle=False, dataloader_kwargs=collate or None).epoch(0))
    yield first_batch
    if stream.iterates:  # which are read in order
        return
    steps, nodes = stream.steps_per_epoch, stream.num_nodes
    places = [(stream.first, step) for step in (steps // 2, steps - 1) if step > 0]
    if not is_factory(dataset):
        places += [(node, 0) for node in (nodes // 3, 2 * nodes // 3, nodes - 1) if stream.length(node)]
    for node, step in places:
        yield next(iter(stream.batches(node, step, 1)))
