"""Split a model over a node's processes, and compare its gradients for one batch with the whole model's gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, take_examples
from exogym.core.base.modes import evaluation_mode
from exogym.core.compute.outputs import Loss
from exogym.errors import ModelError
from exogym.mesh.probe import refuse_others, squares
from exogym.mesh.split import Split, check_ways, other_ways

FEW = 8  # examples, tried one at a time
Passes = Sequence[Sequence[tuple[Any, float]]]


def check_split(split: Split, loss: Loss, batch: Any, passes: Passes, what: object) -> None:
    """Split the model of `split`, and compare its gradients for `batch` with the whole model's gradients.

    The model is in evaluation mode during the test, so it draws no random numbers and updates no batch statistics. All
    processes of the node must call this function together.

    Args:
        split: a `Split` whose model is still whole.
        loss: computes the loss of a batch.
        passes: this process's parts of the batch, for each pass. A part has its share of the batch as its weight.
        what: the split's name in messages.

    Raises:
        ModelError: the gradients differ, or the split model fails. The model is then whole again.
    """
    named = {name: p for name, p in split.model.named_parameters() if p.requires_grad}
    slots = [slot for layout in split.parts[split.part] for slot in layout]
    with evaluation_mode(split.model):
        loss(batch).backward()
        grads = [(slot, named[slot.name].grad) for slot in slots]
        wanted = [None if grad is None else slot.cut(grad).clone() for slot, grad in grads]
        for p in named.values():
            p.grad = None
        _check_ways(split, loss, batch, passes)
        held = [slot.cut(named[slot.name].detach()).clone() for slot in slots]
        split.split()
        try:
            split.point(held)
            split.refresh()
            _check(split, loss, passes, dict(zip([slot.name for slot in slots], wanted, strict=True)), what)
        except BaseException:
            split.plain()
            raise


def _check_ways(split: Split, loss: Loss, batch: Any, passes: Passes) -> None:
    """Refuse a model whose path depends on the examples. Otherwise processes could wait for each other forever."""
    ways = set()
    for k in range(min(FEW, batch_examples(batch))):
        split.walk(loss, [(take_examples(batch, [k]), 1.0)])
        ways.add(split.way)
    if len(ways) > 1:
        raise other_ways(split.mesh)
    split.walk(loss, [part for parts in passes for part in parts])
    check_ways(split)


def _check(split: Split, loss: Loss, passes: Passes, wanted: dict[str, Tensor | None], what: object) -> None:
    try:
        for parts in passes:
            split.compute(loss, parts, 1.0, contextlib.nullcontext)
    except Exception as error:
        raise ModelError(
            f"split by {what}, the model fails in a training step that the whole model can take: "
            f"{type(error).__name__}: {error}"
        ) from error
    found = dict(zip(wanted, split.gradients(), strict=True))
    check_ways(split)
    refuse_others(list(wanted), split.inside.sum(squares(wanted, found)), what)


def check_on(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    passes: Passes,
    like: Split,
    what: object,
) -> None:
    """Run `check_split` on a copy of the small model `model`, split in the same way as `like`."""
    other = copy.deepcopy(model).to(like.device)
    split = type(like)(other, like.mesh, like.inside, like.device)
    check_split(split, Loss(other, loss.loss_fn), batch, passes, what)
    split.plain()
