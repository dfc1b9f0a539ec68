"""The private parts of torch that a node of several devices uses (see `exogym.core.base.torch_private`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from exogym.errors import ModelError
from exogym.mesh.places import local_of

# Fully sharded modules

_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks"),
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class Plain:
    """Stores the state of a model's modules before `fully_shard` or `parallelize_module`, to restore it later."""

    def __init__(self, model: nn.Module):
        self._kept = [
            (m, type(m), set(vars(m)), dict(m._parameters), {name: vars(m)[name].copy() for name in _HOOKS})
            for m in model.modules()
        ]

    def restore(self) -> None:
        """Undo the changes that `fully_shard` or `parallelize_module` made.

        Modules get back their old parameter objects, with these objects' current values.
        """
        from torch.distributed._composable_state import _module_state_mapping

        for module, kind, names, parameters, hooks in self._kept:
            _module_state_mapping.pop(module, None)
            module.__class__ = kind
            for name in set(vars(module)) - names:
                if name.startswith(("_is_fsdp", "_fsdp", "_distribute_module")) or "composable" in name:
                    del vars(module)[name]
            module._parameters.clear()
            module._parameters.update(parameters)
            for name, those in hooks.items():
                vars(module)[name].clear()
                vars(module)[name].update(those)


def sharded_parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, attribute, handle) of each parameter that `fully_shard` sharded. Tied parameters come once."""
    from torch.distributed.fsdp import FSDPModule

    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found += [(p._module_info.module, p._module_info.param_name, p) for p in group.fsdp_params]
    return found


def hold_shard(handle: Any, shard: Tensor) -> None:
    """Use the tensor `shard` as a sharded parameter's shard, without a copy.

    `shard` is a contiguous part of a larger memory. A gather sends as many bytes for every shard as the largest shard
    has. For a smaller shard, the gather also sends the memory after the shard, and the receivers drop these bytes. If
    the memory ends too early for this, the parameter holds a padded copy of `shard`.
    """
    padded = handle.padded_sharded_param_size.numel()
    enough = shard.untyped_storage().nbytes() // shard.element_size() - shard.storage_offset()
    if enough >= padded:
        flat = shard.as_strided((padded,), (1,), shard.storage_offset())
    else:
        flat = shard.new_zeros(padded)
        flat[: shard.numel()] = shard.reshape(-1)
        shard = flat[: shard.numel()].view(shard.shape)
    handle._sharded_param_data = flat
    handle.sharded_param._local_tensor = shard


def hold_local(parameter: nn.Parameter, local: Tensor) -> None:
    """Use the tensor `local` as this process's part of a parameter, without a copy. The parameter may be a DTensor."""
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
    else:
        parameter.data = local


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this process's part of a parameter's gradient, and remove the gradient. The gradient may be a DTensor."""
    found, parameter.grad = parameter.grad, None
    return None if found is None else local_of(found)


def forget_groups(device: torch.device) -> None:
    """Clear torch's cache of DTensor operations, in this thread and in the thread that computes gradients on `device`.

    The cache keeps device meshes. Torch would use an equal mesh of an earlier run, whose process groups no longer
    exist.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    x = torch.zeros((), device=device, requires_grad=True)
    x.register_hook(lambda _: _clear_sharding_prop_cache())
    (x * 1).backward()


# Passes without values


class Hollow(TorchDispatchMode):
    """A context in which tensors computed from a model's parameters have shapes but no values (torch's meta device).

    A forward pass then takes almost no time, and raises ModelError if it reads a value of such a tensor or, with
    `watches=True`, uses after a call of `cut` a tensor from before this call.
    """

    def __init__(self, model: nn.Module, watches: bool = False):
        super().__init__()
        self._own = {id(p) for p in model.parameters()}
        self._watches, self._last = watches, ""
        self._made: dict[int, Tensor] = {}  # tensors since the last cut; next line: before it
        self._beyond: dict[int, Tensor] = {}

    def cut(self, out: Tensor, name: str) -> Tensor:
        """Cut the model after module `name`: return a substitute for `out`, the module's output.

        With `watches=True`, later code may use no other tensor that was computed before the cut.
        """
        self._beyond |= self._made
        self._made, self._last = {}, name
        return torch.empty(out.shape, dtype=out.dtype, device="meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, seen = (args, kwargs or {}), list[bool]()
        tree_map_only(Tensor, lambda x: seen.append(x.is_meta or id(x) in self._own), given)
        if any(seen):
            if func is torch.ops.aten._local_scalar_dense.default:
                raise ModelError(
                    "the forward pass reads values computed in an earlier stage, so it cannot run as stages in several "
                    "processes. Remove such reads (.item(), if x > 0), or train without stages"
                )
            tree_map_only(Tensor, self._refuse_beyond, given)
            given = tree_map_only(Tensor, _without_numbers, given)
        found = func(*given[0], **given[1])
        if self._watches:
            tree_map_only(Tensor, lambda x: self._made.__setitem__(id(x), x) if x.is_meta else None, found)
        return found

    def _refuse_beyond(self, x: Tensor) -> None:
        if id(x) in self._beyond:
            raise ModelError(
                f"the model is cut after {self._last!r}, but later code uses other tensors from before the cut. A "
                "stage gets only the previous stage's output: cut the model elsewhere"
            )


def _without_numbers(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if x.is_meta:
        return x
    if isinstance(x, DTensor):
        local = _without_numbers(x._local_tensor)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    if 0 in x.stride():  # another process's parameter: one number in place of all
        return torch.empty(x.size(), dtype=x.dtype, device="meta")
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
