"""Finding the micro-batch that fits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exogym.base.devices import free_memory_bytes
from exogym.compute.outputs import batch_examples, map_tensors, split_batch
from exogym.compute.worker import Worker
from exogym.errors import ArgumentError


def check_rows(model: nn.Module, num_nodes: int, processes: int, device: torch.device) -> None:
    """Refuse rows that have no room in memory, before any are made.

    Args:
        processes: those that share the nodes and have memory of their own, as far as is known.

    Raises:
        ArgumentError: the parameters of the nodes here need more than is free.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    row_bytes = sum(p.numel() * p.element_size() for p in parameters)
    rows, free = -(-num_nodes // processes), free_memory_bytes(device)
    if rows * row_bytes <= free:
        return
    fit = free // row_bytes * processes
    most = f"at most {fit} nodes fit, fewer with gradients and optimizer" if fit else "not even one node fits"
    share = f" in each of {processes} processes" if processes > 1 else ""
    raise ArgumentError(
        f"num_nodes={num_nodes}: {rows} rows of {sum(p.numel() for p in parameters)} parameters{share} need "
        f"{rows * row_bytes / 1e9:.3g} GB for the parameters alone, and {free / 1e9:.3g} GB are free: {most}. "
        "Train fewer nodes or a smaller model, or share the nodes out to more machines"
    )


def activation_bytes(worker: Worker, batch: Any) -> int:
    """Return the bytes autograd keeps between forward and backward on `batch`, without parameters and batch."""
    batch = worker.to_device(batch)
    own = {p.untyped_storage().data_ptr() for p in worker.model.parameters()}
    map_tensors(batch, lambda x: own.add(x.untyped_storage().data_ptr()))
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), worker.autocast():
        worker.loss(batch)
    return sum(seen.values())


def fitting_micro_batch(worker: Worker, batch: Any, limit_bytes: float, resident_bytes: float) -> int:
    """Return the largest of n, n/2, n/4, ... examples whose activations fit beside `resident_bytes` in `limit_bytes`.

    Raises:
        ArgumentError: not even one example fits.
    """
    size = batch_examples(batch)
    while True:
        part, _ = next(iter(split_batch(batch, size)))
        try:
            needed = resident_bytes + activation_bytes(worker, part)
        except Exception as error:
            if size == batch_examples(batch):
                raise
            raise ArgumentError(
                f"max_memory_usage allows {limit_bytes / 1e6:.1f} MB, too little for {2 * size} examples, and of "
                f"{size} the model cannot compute the loss ({error}): raise it, train fewer nodes, or shrink the model"
            ) from error
        if needed <= limit_bytes:
            return size
        if size == 1:
            raise ArgumentError(
                f"max_memory_usage allows {limit_bytes / 1e6:.1f} MB, but one example needs {needed / 1e6:.1f} MB "
                "with the fleet's rows: raise it, train fewer nodes, or use a smaller model"
            )
        size = -(-size // 2)
