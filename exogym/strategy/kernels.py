"""Which of torch's kernels an optimizer steps with, and its step without torch's profiling wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
FULL = (torch.float32, torch.float64)


class FusedSGD(torch.optim.SGD):
    """torch's fused SGD for parameters that need not all have a gradient at the first step.

    The kernel fails where only some of them have a momentum yet; such a step goes tensor by tensor.
    """

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        sparse = super()._init_group(group, params, grads, momentum_buffer_list)
        started = sum(buffer is not None for buffer in momentum_buffer_list)
        group["fused"] = started in (0, len(momentum_buffer_list))
        return sparse


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Tell whether torch's fused kernels are right for `parameters`.

    On the CPU in fp32 and fp64 only: with half precision torch 2.13's SGD skips every whole vector of elements.
    """
    return all(
        p.is_contiguous() and (p.device.type in ("cuda", "mps") or (p.device.type == "cpu" and p.dtype in FULL))
        for p in parameters
    )


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the step of one of torch's optimizers without the profiling wrapper (11 us a call); others' as it is.

    The wrapper calls hooks, too: where there are some, of this optimizer or of all, it stays.
    """
    step = type(optimizer).step
    if not is_torchs(type(optimizer)) or not getattr(step, "hooked", False) or _has_hooks(optimizer):
        return optimizer.step
    return functools.partial(step.__wrapped__, optimizer)  # type: ignore[attr-defined]


def _has_hooks(optimizer: Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def is_torchs(cls: type[Optimizer]) -> bool:
    """Tell whether `cls` is of torch or of this package: what it keeps is in `state[p]` and `param_groups`."""
    return cls.__module__.partition(".")[0] in ("torch", "exogym")
