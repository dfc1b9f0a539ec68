"""The private parts of torch that this package uses, each behind its own name. No other file uses private parts, except
`exogym.mesh.torch_private`: the parts that a node of several devices needs.

Torch's rule for its API says which names are private: names with an underscore anywhere in their path, and names that
their module does not list in `__all__`. So `torch._foreach_mul_` and `nn.Module._buffers` are private. `torch.func` and
`torch.distributed.elastic.rendezvous` are public. `tests/core/base/test_torch_private.py` tries each part and fails if
another version of torch has changed it. `tests/laws/test_private_names.py` finds private names in other files.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

# All parts were tried with these versions of torch. The oldest is the floor in pyproject.toml.
TRIED_WITH = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")

# Tensors

Tensors = list[Tensor] | tuple[Tensor, ...]


def scale_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply each of `tensors` by `factor`, in place, in one call.

    >>> two = [torch.ones(1), torch.ones(2)]
    >>> scale_(two, 3.0)
    >>> two
    [tensor([3.]), tensor([3., 3.])]
    """
    torch._foreach_mul_(tensors, factor)


def copy_(targets: Tensors, sources: Tensors) -> None:
    """Copy each of `sources` into its partner in `targets`, in one call."""
    torch._foreach_copy_(targets, sources)


def add_(targets: Tensors, others: Tensors, alpha: float = 1.0) -> None:
    """Add `alpha` times each of `others` to its partner in `targets`, in place, in one call."""
    torch._foreach_add_(targets, others, alpha=alpha)


def differences(tensors: Tensors, others: Tensors) -> Tensors:
    """Return each of `tensors` minus its partner in `others`, in one call."""
    return torch._foreach_sub(tensors, others)


def norms(tensors: Tensors) -> Tensors:
    """Return the Euclidean norm of each of `tensors`, in one call."""
    return torch._foreach_norm(tensors)


def version(tensor: Tensor) -> int:
    """Return autograd's count of in-place writes to `tensor` and other views of its memory."""
    return tensor._version


def in_this_process(x: Tensor) -> Tensor:
    """Return this process's part of a tensor, which may be a DTensor."""
    return getattr(x, "_local_tensor", x)


# Modules


def strided_parts(x: Tensor) -> list[Tensor]:
    """Return the dense tensors that make up `x`; for a sparse tensor, its indices and its values.

    >>> [part.tolist() for part in strided_parts(torch.eye(2).to_sparse())]
    [[[0, 1], [0, 1]], [1.0, 1.0]]
    """
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x if x.layout == torch.strided else x.to_dense()]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of `module`'s own parameters, by attribute name.

    The module uses any parameter that a caller puts into this dict.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of `module`'s own buffers, by attribute name.

    The module uses any buffer that a caller puts into this dict.
    """
    return module._buffers


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or `model` itself if it has no wrapper."""
    return getattr(model, "_orig_mod", model)


# Optimizers


class FusedSGD(torch.optim.SGD):
    """torch's fused SGD, which also works if some parameters get their first gradient at a later step.

    torch's fused kernel fails while only some parameters have a momentum. Such a step updates the tensors one by one.
    """

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        sparse = super()._init_group(group, params, grads, momentum_buffer_list)
        started = sum(buffer is not None for buffer in momentum_buffer_list)
        group["fused"] = started in (0, len(momentum_buffer_list))
        return sparse

    def plain_step(self) -> None:
        """Take a step with the kernel that `step` uses, without torch's Python code around it (20 us a step).

        Parameters must be on one device and of one dtype. With momentum or a gradient scale, `step` itself runs.
        """
        for group in self.param_groups:
            if group["momentum"] or getattr(self, "grad_scale", None) is not None:
                return type(self).step.__wrapped__.__wrapped__(self)  # type: ignore[attr-defined]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                torch._fused_sgd_(
                    params, [p.grad for p in params], [], weight_decay=group["weight_decay"], momentum=0.0,
                    lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"],
                    maximize=group["maximize"], is_first_step=False,
                )  # fmt: skip


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Return whether torch's fused kernels are correct for `parameters` and the optimizers in `FUSED`.

    On the CPU they are correct only in fp32 and fp64: in half precision, torch 2.13's fused SGD doesn't update elements
    that fill a whole SIMD vector.
    """
    wide = (torch.float32, torch.float64)
    return all(
        p.is_contiguous() and (p.dtype in wide if p.is_cpu else p.device.type in _get_fused_kernels_supported_devices())
        for p in parameters
    )


def is_torchs(cls: type[Optimizer]) -> bool:
    """Return whether torch or ExoGym defines `cls`. Such optimizers have no state except `state` and `param_groups`."""
    return cls.__module__.partition(".")[0] in ("torch", "exogym")


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's step function, without torch's wrappers if the optimizer is torch's or ExoGym's.

    The wrappers stay if this optimizer or the class `Optimizer` has hooks, or if a scheduler counts steps. The outer
    wrapper calls hooks and the profiler (11 us a call). The inner wrapper disables gradients, as the returned step
    does, and imports torch's compiler only to disable it, which takes a second when a process starts.
    """
    if not is_torchs(type(optimizer)):
        return optimizer.step
    step = type(optimizer).step
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks = any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    if (
        hooks or not getattr(step, "hooked", False) or "step" in vars(optimizer)
    ):  # a scheduler's step, which counts calls
        return optimizer.step
    inside = step.__wrapped__  # type: ignore[attr-defined]
    if inside.__code__ is not _NO_GRAPH:
        return functools.partial(inside, optimizer)
    bare = inside.__wrapped__
    if type(optimizer) is FusedSGD:
        kinds = {(p.dtype, p.device, p.layout) for group in optimizer.param_groups for p in group["params"]}
        bare = FusedSGD.plain_step if len(kinds) == 1 else bare
    return functools.partial(_without_graph, bare, optimizer)


def _without_graph(step: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        return step(optimizer)
    finally:
        torch.set_grad_enabled(enabled)


_NO_GRAPH = _use_grad_for_differentiable(lambda optimizer: None).__code__  # the inner wrapper's


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which making an optimizer does not import torch's compiler.

    Importing the compiler takes as long as importing torch.

    Torch imports the compiler only to exclude `add_param_group` from compilation. Without the import, torch compiles
    nothing anyway.
    """
    method: Any = inspect.unwrap(Optimizer.add_param_group)
    if "torch._dynamo" in sys.modules or hasattr(method, "__dynamo_disable"):
        yield
        return
    method.__dynamo_disable = method
    try:
        yield
    finally:
        del method.__dynamo_disable


def is_of_every_optimizer(attribute: str) -> bool:
    """Return whether torch itself sets `attribute` on every optimizer, so that it is not one optimizer's own state."""
    return attribute in _OF_OPTIMIZERS or attribute.startswith("_optimizer_")


_OF_OPTIMIZERS = {
    *("defaults", "state", "param_groups", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    *(
        "_opt_called",
        "_step_supports_amp_scaling",
        "_need_device_dtype_check_for_fused",
    ),  # set by schedulers and by fused optimizers
}

# Loading data


def end_workers(batches: Any) -> None:
    """End the worker processes of `batches`, a DataLoader's iterator, at once.

    This works even while an error's traceback keeps the iterator alive, or a worker hangs in the data set.
    """
    batches._shutdown_workers()
    for worker in batches._workers:
        if worker.is_alive():
            worker.kill()


# The elastic agent

AGENT_LOGGERS = "torch.distributed.elastic"  # the prefix of their names
FAILURE_LOGGER = "torch.distributed.elastic.multiprocessing.api"


def failure_of(record: logging.LogRecord) -> tuple[int, int, int] | None:
    """Return (local rank, process id, exit code) if torch's agent reports a failed process in `record`, or None."""
    if not str(record.msg).startswith("failed (exitcode") or not isinstance(record.args, tuple):
        return None
    exitcode, local_rank, pid = record.args[:3]
    return int(str(local_rank)), int(str(pid)), int(str(exitcode))
