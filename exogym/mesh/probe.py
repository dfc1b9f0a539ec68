"""Before training, compare a split model's gradients with the whole model's gradients, on one batch.

For some splits torch computes wrong gradients, and the loss does not show this. The errors are then as large as the
gradients themselves, far above rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exogym.core.compute.parts import unlike
from exogym.errors import ModelError


def squares(dense: Mapping[str, Tensor | None], split: Mapping[str, Tensor | None]) -> Tensor:
    """Return a tensor (len(dense), 2): for each parameter's gradient, |split - dense|^2 and |dense|^2.

    The parameters are in the order of `dense`.

    `dense` has the whole model's gradients by name, `split` has the split model's gradients. Each process of a node may
    pass only its own parts of the gradients; the results of all processes then add up. A gradient that is None counts
    as 0.

    Raises:
        ModelError: `split` has a parameter that `dense` lacks, or a gradient with another shape than in `dense`.
    """
    if strange := split.keys() - dense.keys():
        raise ModelError(f"the split model has a parameter {min(strange)!r} that the whole model lacks")
    found = torch.zeros(len(dense), 2, dtype=torch.float64)
    for row, (name, whole) in zip(found, dense.items(), strict=True):
        part = split.get(name)
        if whole is not None and part is not None and whole.shape != part.shape:
            raise ModelError(
                f"the split model has a gradient of shape {tuple(part.shape)} for {name!r}, wanted {tuple(whole.shape)}"
            )
        known = [x.detach().double() for x in (whole, part) if x is not None]
        if known:
            off = known[0] - known[1] if len(known) == 2 else known[0]
            row[0], row[1] = off.square().sum(), torch.zeros(()) if whole is None else known[0].square().sum()
    return found


def refuse_others(names: list[str], sums: Tensor, what: object) -> float:
    """Refuse a split whose gradients differ from the whole model's, and return the largest relative difference.

    A parameter's gradient passes if |split - dense| is at most 1 % of |dense|, or at most 1e-5 of the norm of all
    gradients together.

    Args:
        sums: (parameters, 2), the results of `squares`, summed over the processes of a node.
        what: a text or object that names the split, for the message.

    Raises:
        ModelError: the gradients differ. The message names the worst parameter.
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
    off, norms = sums.sqrt().unbind(1)
    return float((off / norms.clamp(min=1e-300))[norms > 0].max()) if bool((norms > 0).any()) else 0.0
