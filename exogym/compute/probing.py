"""A split model against the whole one: their gradients of one batch, before anything is trained.

Some splits that torch carries out give other gradients, and the loss does not show it. They do not differ by rounding,
but by as much as the gradients themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.communicator import Inside
from exogym.compute.outputs import Loss
from exogym.compute.sharded import Sharded
from exogym.errors import ModelError

TOLERANCE = 0.01  # of a parameter's gradient, relative to its norm
ROUNDING = 1e-5  # relative to the norm of all: what a gradient that is 0 may be


def check_gradients(split: Sharded, loss: Loss, batch: Any, parts: Sequence[tuple[Any, float]], inside: Inside) -> None:
    """Split the model of `split`, and compare its gradients of `batch` with those that it had whole.

    It is in evaluation mode meanwhile, so that nothing is drawn and no statistic is taken. Every process of the node
    calls it.

    Args:
        parts: what of the batch is computed here, and the share of the whole that each part's loss has.

    Raises:
        ModelError: they are others; the model is whole again.
    """
    named = {name: p for name, p in split.model.named_parameters() if p.requires_grad}
    slots = [slot for layout in split.parts[split.part] for slot in layout]
    mode = split.model.training
    split.model.eval()
    try:
        loss(batch).backward()
        grads = [(slot, named[slot.name].grad) for slot in slots]
        wanted = [None if grad is None else slot.cut(grad).clone() for slot, grad in grads]
        for p in named.values():
            p.grad = None
        held = [slot.cut(named[slot.name].detach()).clone() for slot in slots]
        split.split()
        split.point(held)
        for k, (part, share) in enumerate(parts):
            split.collect(last=k == len(parts) - 1)
            (loss(part) * (share * split.shards)).backward()
        found = split.gradients()
    finally:
        split.model.train(mode)
    sums = torch.tensor([_squares(*pair) for pair in zip(wanted, found, strict=True)], dtype=torch.float64)
    off, norms = inside.sum(sums).sqrt().unbind(1)
    limit = (TOLERANCE * norms).clamp(min=ROUNDING * float(norms.square().sum().sqrt()))
    if bool((off > limit).any()):
        worst = int((off / norms.clamp(min=1e-30)).argmax())
        split.plain()
        raise ModelError(
            f"split over {split.size} devices the model has other gradients: that of {slots[worst].name!r} is off by "
            f"{float(off[worst]):.2g} of {float(norms[worst]):.2g}, and by less than {TOLERANCE:g} of it wanted: the "
            "split is wrong for this model (see NodeMesh; probe=False trusts it)"
        )


def check_on(model: nn.Module, loss: Loss, batch: Any, parts: Sequence[tuple[Any, float]], like: Sharded) -> None:
    """Do as `check_gradients` with a copy of `model`, a smaller one of the same kind."""
    other = copy.deepcopy(model).to(like.device)
    split = Sharded(other, like.inside, like.device)
    check_gradients(split, Loss(other, loss.loss_fn), batch, parts, like.inside)
    split.plain()


def _squares(wanted: Tensor | None, found: Tensor | None) -> tuple[float, float]:
    """Return the squared norms of the difference and of what is wanted."""
    one = torch.zeros(1) if wanted is None else wanted.double()
    other = torch.zeros_like(one) if found is None else found.double()
    return float((one - other).square().sum()), float(one.square().sum())
