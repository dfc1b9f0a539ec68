"""Named tensors over a wire: what they are goes ahead as JSON, then their bytes. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.communicator.wire import Parcel, Wire

Described = list[tuple[str, str, list[int]]]  # name, dtype, shape


def described(tensors: Mapping[str, Tensor]) -> Described:
    """Return what `tensors` are, as JSON; `blank` makes tensors like them.

    >>> described({"a": torch.zeros(2, 3)})
    [('a', 'float32', [2, 3])]
    """
    return [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]


def blank(what: Sequence[Sequence[Any]], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return tensors, with no numbers yet, that are as `described` says.

    >>> blank([["a", "float32", [2, 3]]])["a"].shape
    torch.Size([2, 3])
    """
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in what}


def ship(
    wire: Wire, tensors: Mapping[str, Tensor], source: int, takers: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the named tensors of the process that holds node `source`, in every process or those of nodes `takers`.

    Every process makes this call; what it gives as `tensors` counts in the one of `source` only. Nothing is recorded.
    Each tensor travels by itself, so no copy of all of them is made.
    """
    sender = next(k for k, ids in enumerate(wire.placement) if source in ids)
    what = wire.tell(described(tensors), sender)
    is_here = wire.process == sender
    found = dict(tensors) if is_here else blank(what)
    for name, x in found.items():
        if not x.numel() or not wire.is_shared:
            continue
        if takers is None:
            rows = wire.rows(x.expand(len(wire.ranks), *x.shape), [source])
            found[name] = x if is_here else rows[0]
        for taker in takers or ():
            got = wire.hand_over({source: x}, [Parcel(source, taker, tuple(x.shape), x.dtype, False)])
            if taker in got and not is_here:
                found[name] = got[taker]
    return found if takers is None or is_here or set(takers) & set(wire.ranks) else {}
