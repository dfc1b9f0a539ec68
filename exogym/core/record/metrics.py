"""Measurements of a fleet: validation loss and accuracy, consensus distance, correlation, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.batches import batch_examples, micro_batches
from exogym.core.base.devices import Device, widest
from exogym.core.communicator import Columns
from exogym.core.communicator.wire import chunk_elements
from exogym.core.compute.outputs import accuracy
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.data.stream import Stream
from exogym.errors import TrainingError

Metric = Callable[[Tensor, Tensor], Any]
Value = tuple[str, Tensor | float, float | dict[str, float]]  # name, value, weight (or weights, by what a batch counts)


class Evaluator:
    """Evaluates a model's parameters on the validation set.

    Args:
        worker: the object that computes the model's outputs.
        stream: the validation set's examples, in order.
        metrics: functions by name. Each takes a batch's predictions and targets, and returns a mean over the batch.
        limit: evaluate on at most this many examples from the start. None means all.
    """

    def __init__(self, worker: Worker, stream: Stream, metrics: dict[str, Metric], limit: int | None = None):
        self.worker, self.stream, self.metrics, self.limit = worker, stream, metrics, limit

    def __call__(self, vectors: list[Tensor], buffers: dict[str, Tensor], node: int | None = None) -> dict[str, float]:
        """Return val_loss, val_accuracy if predictions are known, and val_<name> for each metric.

        The loss, the accuracy and the metrics that the model returns are means over all targets that the loss counts
        (`Worker.evaluated`), regardless of batches. The values of `metrics` are means over examples. `vectors` holds
        (P,) per block. If `node` is given, the examples are its own validation set, otherwise all nodes' validation
        sets.
        """
        found: list[Value] = []
        worker = self.worker
        with worker.evaluating(vectors, buffers):
            for batch in self._batches(node):
                pulse.beat()
                part, totals, examples = worker.evaluated(worker.to_device(batch))
                worker.reseed(-1, 0)
                found += self._part(part, totals, examples)
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        waiting = [x.reshape(()) for _, x, _ in found if isinstance(x, Tensor)]
        arrived = iter(torch.stack([widest(x) for x in waiting]).tolist() if waiting else [])  # one wait for the device
        for name, x, by_kind in found:
            value = next(arrived) if isinstance(x, Tensor) else x
            weight = by_kind[worker.weights.kind] if isinstance(by_kind, dict) else by_kind
            sums[name] = sums.get(name, 0.0) + (value * weight if weight else 0.0)
            weights[name] = weights.get(name, 0.0) + weight
        return _means(sums, weights, worker.fleet.comm.wire.devices)

    def _part(self, part: Any, totals: float | dict[str, float], examples: int) -> Iterator[Value]:
        """Yield the values of a batch, or of this process's part of it, each with its weight in the mean."""
        worker = self.worker
        output = worker.loss.of(worker.model, part)
        yield "val_loss", output.loss.detach(), totals
        right = accuracy(output, worker.loss.counting)
        if right is not None:
            yield "val_accuracy", right[0] / max(1, right[1]), right[1] if examples else 0
        for name, value in output.metrics.items():
            yield f"val_{name}", float(value), totals
        for name, function in self.metrics.items():
            if output.predictions is None or output.targets is None:
                raise TrainingError(
                    f"metric {name!r} needs predictions and targets, but the model's output has only a loss: return a "
                    "mapping with 'logits' and 'loss', or use loss_fn="
                )
            yield f"val_{name}", float(function(output.predictions, output.targets)), examples

    def _batches(self, only: int | None) -> Iterator[Any]:
        left = self.limit
        for node in range(self.stream.num_nodes) if only is None else [only]:
            for batch in self.stream.epoch(node):
                if left is None:
                    yield batch
                    continue
                if left <= 0:
                    return
                part, _ = next(micro_batches(batch, left))
                left -= batch_examples(part)
                yield part


def _means(sums: dict[str, float], weights: dict[str, float], columns: Columns) -> dict[str, float]:
    """Return the weighted means over all processes of the node, without values of weight 0."""
    if columns.parts > 1:
        both = torch.tensor([list(sums.values()), list(weights.values())], dtype=torch.float64)
        totals, shares = columns.sum(both).tolist()
        sums, weights = dict(zip(sums, totals, strict=True)), dict(zip(sums, shares, strict=True))
    return {name: total / weights[name] for name, total in sums.items() if weights[name]}


def spread(fleet: Fleet) -> dict[str, float]:
    """Return the present nodes' consensus_distance and correlation.

    x_i is the parameter vector of node i, and N the number of present nodes.
    consensus_distance = sqrt((1/N) sum_i |x_i - mean|^2). correlation is the mean, over all pairs of nodes, of the
    Pearson correlation of their parameters: (|sum_i z_i|^2 - N) / (N (N-1)), where z_i is x_i minus the mean of its
    elements, scaled to length 1. The columns are processed in chunks that fit a CPU's cache; sums over chunks are in
    float64.
    """
    n = len(fleet.there)
    if n == 1:
        return {"consensus_distance": 0.0}
    columns, width = fleet.comm.wire.columns, sum(block.layout.total for block in fleet.blocks)
    zero = fleet.blocks[0].params.new_zeros(())
    distance, sums, squares, total = (widest(zero).repeat(k) for k in (1, n, n, 1))
    for x in _column_chunks(fleet):
        apart = x - x.mean(0)
        distance += torch.dot(apart.flatten(), apart.flatten())
        sums += x.sum(1)
        squares += widest(torch.linalg.vector_norm(x, dim=1)).square()
    found = torch.cat([distance, sums, squares]).cpu().double()  # the one wait for the device
    distance, sums, squares = columns.sum(found).split([1, n, n])
    means = sums / width
    lengths = (squares - width * means.square()).clamp(min=1e-300).sqrt()
    shift = float((means / lengths).sum())
    for x in _column_chunks(fleet):
        z = (1 / lengths).to(x) @ x - shift
        total += torch.dot(z, z)
    correlation = (float(columns.sum(total.cpu().double())) - n) / (n * (n - 1))
    return {"consensus_distance": (float(distance) / n) ** 0.5, "correlation": min(1.0, correlation)}


def _column_chunks(fleet: Fleet) -> Iterator[Tensor]:
    """Yield (n, columns) pieces of the n present nodes' rows."""
    everyone = fleet.there
    for block in fleet.blocks:
        step = max(1, chunk_elements(block.params) // len(everyone))
        for start in range(0, block.layout.numel, step):
            piece = fleet.comm.wire.rows(block.params[:, start : start + step], everyone)
            yield piece if piece.dtype in (torch.float32, torch.float64) else piece.float()


def usage(device: torch.device, cpu_s: float, wall_s: float) -> dict[str, float]:
    """Return memory_bytes (the GPU's or this process's peak) and device_use (CPU seconds per second of wall time)."""
    peak = Device(device).peak_bytes()
    memory = peak_memory_bytes() if peak is None else peak
    return {"memory_bytes": float(memory), "device_use": cpu_s / wall_s if wall_s > 0 else 0.0}


def peak_memory_bytes() -> int:
    """Return this process's peak resident memory: on Linux VmHWM, as `ru_maxrss` survives an exec."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
