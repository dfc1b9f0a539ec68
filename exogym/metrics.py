"""What is measured of a fleet: validation loss and accuracy, consensus distance, correlation, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from exogym.communicator import CHUNK_ELEMENTS
from exogym.data.stream import Stream
from exogym.errors import TrainingError
from exogym.fleet import Fleet
from exogym.outputs import accuracy, batch_examples, split_batch
from exogym.worker import Worker

Metric = Callable[[Tensor, Tensor], Any]


class Evaluator:
    """Evaluates parameters on the whole validation set.

    Args:
        worker: computes; `stream`: the validation set in order.
        metrics: name to function of (predictions, targets) giving a mean over the batch.
        limit: evaluate on at most so many examples, the first ones.
    """

    def __init__(self, worker: Worker, stream: Stream, metrics: dict[str, Metric], limit: int | None = None):
        self.worker, self.stream, self.metrics, self.limit = worker, stream, metrics, limit

    def __call__(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """Return val_loss, val_accuracy where predictions are known, and val_<name> of each metric.

        Every value is the mean over examples. `vectors` is (P,) per block.
        """
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}

        def add(name: str, value: Any, weight: float) -> None:
            sums[name] = sums.get(name, 0.0) + float(value) * weight
            weights[name] = weights.get(name, 0.0) + weight

        worker = self.worker
        with worker.evaluating(vectors, buffers):
            for batch in self._batches():
                worker.reseed(-1, 0)
                output = worker.loss.of(worker.model, worker.to_device(batch))
                size = batch_examples(batch)
                add("val_loss", output.loss, size)
                right = accuracy(output)
                if right is not None and right[1]:
                    add("val_accuracy", right[0] / right[1], right[1])
                for name, value in output.metrics.items():
                    add(f"val_{name}", value, size)
                for name, function in self.metrics.items():
                    if output.predictions is None or output.targets is None:
                        raise TrainingError(
                            f"metric {name!r} needs predictions and targets, but the model's output has none: "
                            "return a "
                            "mapping with 'logits' beside 'loss', or use loss_fn="
                        )
                    add(f"val_{name}", function(output.predictions, output.targets), size)
        return {name: total / weights[name] for name, total in sums.items()}

    def _batches(self) -> Iterator[Any]:
        left = self.limit
        for node in range(self.stream.num_nodes):
            count = -(-int(self.stream.examples[node]) // self.stream.batch_size)
            for batch in self.stream.batches(node, 0, count):
                if left is None:
                    yield batch
                    continue
                if left <= 0:
                    return
                part, _ = next(split_batch(batch, left))
                left -= batch_examples(part)
                yield part


def spread(fleet: Fleet) -> dict[str, float]:
    """Return how far the nodes are apart.

    consensus_distance = sqrt((1/N) sum_i |x_i - mean|^2), and correlation = the mean over pairs of nodes of the
    Pearson correlation of their parameters, (|sum_i z_i|^2 - N) / (N (N-1)) with z_i centred and scaled to length 1.
    """
    n = fleet.num_nodes
    if n == 1:
        return {"consensus_distance": 0.0}
    squares = 0.0
    sums, norms, width = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), 0
    everyone = list(range(n))
    for block in fleet.blocks:
        width += block.layout.numel
        sums += fleet.comm.wire.rows(block.params, everyone).sum(1, dtype=torch.float64).cpu()
    means = (sums / width).to(fleet.blocks[0].params.device)
    for x in _column_chunks(fleet):
        centred = x.double() - x.double().mean(0)
        squares += float(centred.square().sum())
        norms += (x.double() - means[:, None]).square().sum(1).cpu()
    total = 0.0
    scale = (1 / norms.sqrt().clamp(min=1e-300)).to(means.device)
    for x in _column_chunks(fleet):
        total += float(((x.double() - means[:, None]) * scale[:, None]).sum(0).square().sum())
    return {"consensus_distance": (squares / n) ** 0.5, "correlation": (total - n) / (n * (n - 1))}


def _column_chunks(fleet: Fleet) -> Any:
    everyone = list(range(fleet.num_nodes))
    step = max(1, CHUNK_ELEMENTS // fleet.num_nodes)
    for block in fleet.blocks:
        for start in range(0, block.layout.numel, step):
            yield fleet.comm.wire.rows(block.params[:, start : start + step], everyone)


def usage(device: torch.device, cpu_s: float, wall_s: float) -> dict[str, float]:
    """Return memory_bytes (the peak, of the GPU or of this process) and device_use (CPU seconds per second)."""
    if device.type == "cuda":
        memory = float(torch.cuda.max_memory_allocated(device))
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory = float(peak if sys.platform == "darwin" else peak * 1024)
    return {"memory_bytes": memory, "device_use": cpu_s / wall_s if wall_s > 0 else 0.0}
