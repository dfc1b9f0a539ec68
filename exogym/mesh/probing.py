"""Split a model over a node's processes, and compare its gradients for one batch with the whole model's gradients.

For some splits torch computes wrong gradients, and the loss does not show this. The errors are then as large as the
gradients themselves, far above rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.batches import batch_examples, take_examples
from exogym.core.base.modes import evaluation_mode
from exogym.core.compute.parts import unlike
from exogym.errors import ModelError
from exogym.mesh.split import Loss, Split, check_ways, other_ways

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


def squares(dense: Mapping[str, Tensor | None], split: Mapping[str, Tensor | None]) -> Tensor:
    """Return (len(dense), 2): |split - dense|^2 and |dense|^2 for each parameter's gradient, in the order of `dense`.

    `dense` and `split` are the whole and the split model's gradients by name, where None counts as 0. Each process of a
    node may pass only its own parts of the gradients, because the processes' results add up.
    """
    found = torch.zeros(len(dense), 2, dtype=torch.float64)
    for row, (name, whole) in zip(found, dense.items(), strict=True):
        part = split.get(name)
        known = [x.detach().double() for x in (whole, part) if x is not None]
        if known:
            off = known[0] - known[1] if len(known) == 2 else known[0]
            row[0], row[1] = off.square().sum(), torch.zeros(()) if whole is None else known[0].square().sum()
    return found


def refuse_others(names: list[str], sums: Tensor, what: object) -> None:
    """Raise ModelError, which names the worst parameter, if the split's gradients differ from the whole model's.

    A parameter passes if |split - dense| is at most 1 % of |dense|, or at most 1e-5 of the norm of all gradients
    together.

    Args:
        sums: (parameters, 2), the results of `squares`, summed over the processes of a node.
        what: a text or object that names the split, for the message.
    """
    if not bool((whole := sums[:, 1]).isfinite().all()):
        name = names[int((~whole.isfinite()).nonzero()[0])]
        raise ModelError(
            f"the gradient of {name!r} is not finite, even without the split: check the first batch and the loss"
        )
    if found := unlike(names, sums):
        raise ModelError(
            f"split by {what}, the model has wrong gradients: {found}. Choose another split for this model; "
            "NodeMesh(probe=False) skips this check"
        )
