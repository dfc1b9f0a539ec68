"""How many bytes of activations a pass over a batch makes, measured by a trial pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, map_tensors, slice_batch, tensors_in
from exogym.core.base.rng import preserved_state
from exogym.core.base.torch_private import strided_parts, uncompiled
from exogym.core.compute.first_step import trying
from exogym.core.compute.worker import Worker

MEASURED = 8  # examples


def activation_bytes(worker: Worker, batch: Any) -> int:
    """Return the bytes that autograd keeps between forward and backward on `batch`, without parameters and batch."""
    batch = worker.to_device(batch)
    own = {p.untyped_storage().data_ptr() for p in worker.model.parameters()}
    map_tensors(batch, lambda x: own.add(x.untyped_storage().data_ptr()))
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        for part in strided_parts(x):
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), worker.autocast():
        worker.loss(batch)
    return sum(seen.values())


def forward_bytes(worker: Worker, batch: Any) -> float:
    """Return the bytes of activations that a forward pass makes per example; 0 if the model cannot be asked.

    These are the larger of two numbers: what autograd keeps, and the outputs of the innermost modules, which count if
    a part of the model is frozen.
    """
    few = slice_batch(batch, 0, MEASURED)
    if uncompiled(worker.model) is not worker.model:  # each other size would be compiled
        return 0.0
    made = 0

    def note(module: nn.Module, given: Any, out: Any) -> None:
        nonlocal made
        made += 0 if next(module.children(), None) else sum(x.nbytes for x in tensors_in(out))

    with preserved_state(worker.device), trying(worker):
        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            kept = activation_bytes(worker, few)
        except Exception:  # a model may have no loss in evaluation mode; the evaluation says so
            return 0.0
        finally:
            handle.remove()
    return max(made, kept) / batch_examples(few)
