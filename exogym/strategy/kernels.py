"""Choose the torch kernel with which an optimizer steps, and step without torch's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.core.base import torch_private

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FULL = (torch.float32, torch.float64)


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Tell whether torch's fused kernels are right for `parameters`.

    On the CPU only in fp32 and fp64: with half precision torch 2.13's SGD skips every whole vector of elements.
    """
    return all(
        p.is_contiguous() and (p.device.type in ("cuda", "mps") or (p.device.type == "cpu" and p.dtype in FULL))
        for p in parameters
    )


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return a torch optimizer's step without its wrappers (11 us a call); other optimizers' steps stay wrapped.

    The wrapper also calls hooks, so it stays if this optimizer or the Optimizer class has hooks.
    """
    bare = torch_private.bare_step(optimizer) if is_torchs(type(optimizer)) else None
    return optimizer.step if bare is None else bare


def is_torchs(cls: type[Optimizer]) -> bool:
    """Tell whether `cls` belongs to torch or this package, so that all state is in `state[p]` and `param_groups`."""
    return cls.__module__.partition(".")[0] in ("torch", "exogym")
