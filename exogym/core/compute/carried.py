"""Find attributes of a model that carry state from one step to the next.

This code runs only if a training step changes an attribute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.batches import tensors_in
from exogym.errors import ModelError


def refuse_carried(
    before: Any, changed: Sequence[str], trial: Callable[[Any], Tensor], batch: Any, another: Callable[[], Any],
    tolerance: float,
) -> None:  # fmt: skip
    """Raise ModelError, with a remedy, if a training step changes an attribute that later steps use.

    The test takes a step on `batch` twice: with the attribute's first value, and after a step on another batch with
    other parameters. If both steps on `batch` give the same loss and leave the same attribute, the attribute is
    harmless: the model writes it before reading it, or makes a value that never changes.

    Args:
        before: a copy of the attributes (`first_step.Attributes`) from before the first step.
        changed: the paths of the attributes that the first step changed.
        trial: takes a training step on a batch, undoes everything except changes of attributes, and returns the loss.
        another: returns another batch. If its tensors have other shapes, the test uses `batch` again.
        tolerance: relative tolerance for floats; 0 if computing twice gives the same bits.
    """
    before.put_back(changed)
    loss, after = trial(batch), before.now()
    before.put_back(changed)
    other = another()
    with _other_parameters(before.model):
        trial(other if _shapes(other) == _shapes(batch) else batch)
    again = trial(batch)
    unlike = after.differing(before.now(), tolerance)
    same = torch.allclose(loss, again, rtol=tolerance, atol=tolerance, equal_nan=True)
    carried = [path for path in changed if path in unlike] or ([] if same else changed)
    if carried:
        before.put_back(changed)
        name, _, key = carried[0].rpartition(".")
        raise ModelError(
            f"a training step changes the attribute {carried[0]!r} of the model, and later steps use it. All nodes "
            "would share this attribute, because it is neither a parameter nor a buffer. Make it a buffer of its "
            f"final shape with self.register_buffer({key!r}, torch.zeros(...)), so that every node has its own and "
            "nodes average it with the model. If it belongs to the node's examples, like a hidden state, also add "
            f"own_buffers = ({key!r},) to class {type(before.modules[name]).__name__}, so that nodes do not average "
            f"it. If training does not depend on the attribute, allow it there: shared_attributes = ({key!r},)"
        )


@contextlib.contextmanager
def _other_parameters(model: nn.Module) -> Iterator[None]:
    """Change the trainable parameters within this context."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in trainable]
    try:
        with torch.no_grad():
            for p in trainable:
                p.mul_(1.02).add_(1e-3)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(trainable, kept, strict=True):
                p.copy_(value)


def _shapes(batch: Any) -> list[torch.Size]:
    return [x.shape for x in tensors_in(batch)]
