"""Choose the torch kernel for an optimizer's step, and call the step without torch's wrappers."""

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
    """Return whether torch's fused optimizers compute right steps for `parameters`.

    On the CPU their steps are right only in fp32 and fp64: in half precision the fused SGD of torch 2.13 does not
    update elements that fill a whole SIMD vector.
    """
    return all(
        p.is_contiguous() and (p.device.type in ("cuda", "mps") or (p.device.type == "cpu" and p.dtype in FULL))
        for p in parameters
    )


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's step function, without torch's wrappers if the optimizer is torch's or ExoGym's.

    The wrappers take 11 us in each call. The wrappers also call hooks, so they stay if this optimizer or the class
    `Optimizer` has hooks.
    """
    bare = torch_private.bare_step(optimizer) if is_torchs(type(optimizer)) else None
    return optimizer.step if bare is None else bare


def is_torchs(cls: type[Optimizer]) -> bool:
    """Return whether torch or ExoGym defines `cls`. Such optimizers have no state except `state` and `param_groups`."""
    return cls.__module__.partition(".")[0] in ("torch", "exogym")
