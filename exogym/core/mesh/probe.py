"""A split model against the whole one: their gradients of one batch, before anything is trained.

Some splits that torch carries out give other gradients, and the loss does not show it. They do not differ by rounding,
but by as much as the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exogym.errors import ModelError

TOLERANCE = 0.01  # of a parameter's gradient, relative to its norm; rounding makes 1e-6 of it, in bf16 1e-3
ROUNDING = 1e-5  # relative to the norm of all: what a gradient that is 0 may be


def squares(dense: Mapping[str, Tensor | None], split: Mapping[str, Tensor | None]) -> Tensor:
    """Return (len(dense), 2), in the order of `dense`: |split - dense|^2 and |dense|^2 of each gradient.

    Both may be parts of the gradients, the same ones: what the processes of a node find of disjoint parts adds up. None
    is a gradient of 0.

    Raises:
        ModelError: a parameter of `split` that `dense` does not have, or of another shape.
    """
    if strange := split.keys() - dense.keys():
        raise ModelError(f"the split model has a parameter {min(strange)!r} that the whole one does not have")
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


def check_gradients(dense: Mapping[str, Tensor | None], split: Mapping[str, Tensor | None], what: object) -> float:
    """Refuse a split whose gradients are not those of the whole model; return the largest relative difference.

    For each parameter |split - dense| may be 1 % of |dense|, or 1e-5 of the norm of all gradients together.

    Args:
        dense: gradients of the whole model by name, of the mean loss of one batch.
        split: those that the devices of a node have come to, put together.
        what: the split, for the message.

    Raises:
        ModelError: they are others; the worst parameter is named.

    >>> x = torch.ones(4)
    >>> round(check_gradients({"a.weight": x}, {"a.weight": 1.001 * x}, "shard=2"), 6)
    0.001
    """
    return refuse_others(list(dense), squares(dense, split), what)


def refuse_others(names: list[str], sums: Tensor, what: object) -> float:
    """Do as `check_gradients` with what `squares` found, (parameters, 2), summed over the processes of the node."""
    if found := unlike(names, sums):
        raise ModelError(
            f"split by {what} the model has other gradients: {found}. The split is wrong for this model; "
            "NodeMesh(probe=False) would trust it"
        )
    off, norms = sums.sqrt().unbind(1)
    return float((off / norms.clamp(min=1e-300))[norms > 0].max()) if bool((norms > 0).any()) else 0.0


def unlike(names: list[str], sums: Tensor, eps: float = 0.0) -> str:
    """Return in words which gradient is furthest over its limit; "" where all are within.

    Args:
        sums: (parameters, 2), as `squares` finds them.
        eps: relative rounding of one operation; 16 of it widen the 1 %, and 1 of it the 1e-5, where they are more.
    """
    off, norms = sums.sqrt().unbind(1)
    limits = (max(TOLERANCE, 16 * eps) * norms).clamp(min=max(ROUNDING, eps) * float(norms.square().sum().sqrt()))
    if bool((off <= limits).all()):
        return ""
    excess = off / limits.clamp(min=1e-300)
    worst = int(excess.nan_to_num(nan=float("inf")).argmax())
    return (
        f"that of {names[worst]!r} is off by {float(off[worst]):.2g} of {float(norms[worst]):.2g}, wanted under "
        f"{float(limits[worst]):.2g}"
    )
