"""Pack nested values, such as an optimizer's whole state, into named tensors and one line of JSON.

Values can be tensors, numbers, strings, numpy arrays, optimizers, schedulers and generators, and lists, tuples, deques
and dicts of such values. Functions and classes are not saved.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exogym.core.base.devices import CPU
from exogym.core.base.torch_private import is_of_every_optimizer, is_torchs
from exogym.core.fleet.cuts import Cut, parameter_cut
from exogym.core.fleet.layout import Layout, Slot
from exogym.errors import StrategyError

SKELETON = "skeleton"
KEEP = object()
_CONSTANT = (type, nn.Module, torch.dtype, torch.device)
_KERNELS = ("fused", "foreach")  # each step or run chooses these again


def pack(
    value: Any, path: str, tensors: dict[str, Tensor], own: dict[int, int], constant: tuple[type, ...] = ()
) -> Any:
    """Return a description of `value` for JSON, and add its tensors to `tensors`.

    Args:
        path: the value's name, such as "state.0", with which the names of its tensors begin.
        tensors: the dict that receives the tensors.
        own: the numbers of parameters that are saved elsewhere, by the parameter's id.
        constant: further types whose values need not be saved.

    Raises:
        StrategyError: a value has a type that cannot be saved.
    """

    def inside(item: Any, name: Any) -> Any:
        return pack(item, f"{path}.{name}", tensors, own, constant)

    if id(value) in own:
        return {"parameter": own[id(value)]}
    if isinstance(value, nn.Module) and not any(id(p) in own for p in value.parameters()):
        for name, tensor in value.state_dict().items():
            tensors[f"{path}.{name}"] = tensor.detach()
        return {"module": path, "keys": list(value.state_dict())}
    if isinstance(value, _CONSTANT + constant) or (callable(value) and not isinstance(value, Tensor)):
        return {"keep": True}
    if isinstance(value, Tensor | np.ndarray):
        tensors[path] = torch.as_tensor(value).detach()
        return {"numpy" if isinstance(value, np.ndarray) else "tensor": path}
    if isinstance(value, bool | int | float | str) or value is None:
        return {"value": value}
    if isinstance(value, np.generic):
        return {"value": value.item()}
    if isinstance(value, list | tuple | deque):
        kind = next(kind.__name__ for kind in (list, tuple, deque) if isinstance(value, kind))
        return {kind: [inside(item, k) for k, item in enumerate(value)]}
    if isinstance(value, dict):
        if any(not isinstance(key, str | int | float) and id(key) not in own for key in value):
            raise StrategyError(
                f"attribute {path!r} is a dict with keys other than text, numbers and the model's parameters, so it "
                "cannot be saved: use only such keys"
            )
        return {
            "dict": [
                [{"parameter": own[id(key)]} if id(key) in own else key, inside(item, k)]
                for k, (key, item) in enumerate(value.items())
            ]
        }
    if isinstance(value, Optimizer):
        state = optimizer_state(value)
        tensors |= {f"{path}.{key}": tensor for key, tensor in state.items()}
        return {"optimizer": path, "keys": list(state)}
    if isinstance(value, LRScheduler):
        numbers = {k: v for k, v in value.state_dict().items() if isinstance(v, bool | int | float | list)}
        return {"scheduler": numbers}
    if isinstance(value, torch.Generator):
        tensors[path] = value.get_state()
        return {"generator": path}
    raise StrategyError(
        f"attribute {path!r} is a {type(value).__name__}, which cannot be saved in a checkpoint: keep tensors and "
        "numbers in attributes, or define state_dict() and load_state_dict(state)"
    )


def unpack(packed: dict[str, Any], existing: Any, tensors: dict[str, Tensor], own: list[nn.Parameter]) -> Any:
    """Return the value that `pack` described, changing the object `existing` in place where possible.

    Return `KEEP` if the value was not saved and `existing` is missing.

    Raises:
        StrategyError: the checkpoint contains the state of an object that the new run lacks.
    """
    kind = next(iter(packed))
    content = packed[kind]
    if kind == "keep":
        return KEEP if existing is None else existing
    if kind == "parameter":
        return own[content]
    if kind == "value":
        return content
    if kind in ("tensor", "numpy"):
        if kind == "numpy":
            return tensors[content].numpy().copy()
        if isinstance(existing, Tensor) and existing.shape == tensors[content].shape:
            with torch.no_grad():
                return existing.copy_(tensors[content])
        return tensors[content].clone()
    if kind in ("list", "tuple", "deque"):
        alike = isinstance(existing, list | tuple | deque) and len(existing) == len(content)
        items = [
            unpack(item, was, tensors, own)
            for item, was in zip(content, existing if alike else [None] * len(content), strict=True)
        ]
        if hasattr(existing, "_fields"):  # a namedtuple
            return type(existing)(*items)
        if kind == "deque":
            return deque(items, getattr(existing, "maxlen", None))
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        before = existing if isinstance(existing, dict) else {}
        keys = [own[key["parameter"]] if isinstance(key, dict) else key for key, _ in content]
        after = {key: unpack(item, before.get(key), tensors, own) for key, (_, item) in zip(keys, content, strict=True)}
        before.clear()  # filled again in place: a defaultdict stays a defaultdict
        before.update(after)
        return before
    if existing is None:
        raise StrategyError(
            f"the strategy's {kind} at {content!r} is in the checkpoint but not in the new run: create it in _init_node"
        )
    if kind == "module":
        existing.load_state_dict({key: tensors[f"{content}.{key}"] for key in packed["keys"]})
    elif kind == "optimizer":
        load_optimizer_state(existing, {key: tensors[f"{content}.{key}"] for key in packed["keys"]})
    elif kind == "scheduler":
        existing.load_state_dict(content)
    else:
        existing.set_state(tensors[content].cpu())
    return existing


# Optimizers


def as_text(skeleton: Any) -> Tensor:
    """Return a value's JSON as a tensor of bytes."""
    return torch.tensor(list(json.dumps(skeleton).encode()), dtype=torch.uint8)


def from_text(text: Tensor) -> Any:
    """Return the value that `as_text` wrote into the tensor `text`."""
    return json.loads(bytes(text.tolist()))


def packed_beside(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the optimizer's values outside `optimizer.state`, packed by path, and copies of their tensors."""
    tensors: dict[str, Tensor] = {}
    return _beside(optimizer, optimizer.param_groups, tensors), {k: x.clone() for k, x in tensors.items()}


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's whole state as named tensors.

    The tensors of `optimizer.state` are named "<parameter's number>.<entry>". The tensor "skeleton" holds the rest as
    bytes of JSON: the numbers in `optimizer.state`, and the entries of `param_groups` and attributes that have changed
    since the optimizer was built.

    Raises:
        StrategyError: a value has a type that cannot be saved.
    """
    own = _numbers(optimizer)
    tensors: dict[str, Tensor] = {}
    state: list[Any] = []
    for key, entries in optimizer.state.items():
        number = own.get(id(key))
        if number is None or not isinstance(entries, dict):
            state.append([key, pack(entries, f"state.{key}", tensors, own)])
            continue
        for name, value in entries.items() if any(x is not None for x in entries.values()) else ():
            if isinstance(value, Tensor) and isinstance(name, str) and id(value) not in own:
                tensors[f"{number}.{name}"] = value
            else:
                state.append([number, name, pack(value, f"state.{number}.{name}", tensors, own)])
    kept: dict[str, Tensor] = {}
    beside = _beside(optimizer, optimizer.param_groups, kept)
    built, built_tensors = _as_built(optimizer)
    rest = {path: packed for path, packed in beside.items() if not _same(packed, built.get(path), kept, built_tensors)}
    if not state and not rest:
        return tensors
    return tensors | kept | {SKELETON: as_text({"state": state, "beside": rest})}


def optimizer_cut(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], slots: Sequence[tuple[Layout, Slot]], name: str,
    shape: Sequence[int],
) -> Cut | None:  # fmt: skip
    """Return the slice of the tensor `name` of `optimizer_state` that this process holds, or None if it holds all.

    An entry with its parameter's shape is split between processes like the parameter; others are whole in each.

    Args:
        parameters: the optimizer's parameters.
        slots: layout and slot of each parameter.
        shape: the tensor's shape.
    """
    number = name.partition(".")[0]
    if not number.isdigit():
        return None
    held = [p for group in optimizer.param_groups for p in group["params"]][int(number)]
    found = parameter_cut(*slots[next(k for k, p in enumerate(parameters) if p is held)])
    return found if found.fits(shape) else None


def load_optimizer_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load copies of the tensors that `optimizer_state` returned into `optimizer`.

    As in torch, each copy is on its parameter's device, except that "step" is on the CPU unless the optimizer is fused
    or capturable.
    """
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    parameters = [p for _, p in places]
    optimizer.state.clear()
    skeleton = from_text(tensors[SKELETON]) if SKELETON in tensors else {"state": [], "beside": {}}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        if index.isdigit():
            group, p = places[int(index)]
            counted_on_cpu = name == "step" and not (group.get("fused") or group.get("capturable"))
            optimizer.state[p][name] = value.clone().to(CPU if counted_on_cpu else p.device)
    here = {k: x.to(parameters[0].device) for k, x in tensors.items() if not k.partition(".")[0].isdigit()}
    for *where, packed in skeleton["state"]:
        value = unpack(packed, None, here, parameters)
        if len(where) == 2:
            optimizer.state[parameters[where[0]]][where[1]] = value
        else:
            optimizer.state[where[0]] = value
    built, built_tensors = _as_built(optimizer)
    now = _beside(optimizer, optimizer.param_groups, {}) if built else {}
    for path in now.keys() - built.keys():  # made since then
        holder, name = _holder(optimizer, path)
        del holder[name]
    for source, values in ((built, built_tensors), (skeleton["beside"], here)):
        for path, packed in source.items():
            holder, name = _holder(optimizer, path)
            value = unpack(packed, holder.get(name), values, parameters)
            if value is not KEEP:
                holder[name] = value


def _as_built(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `optim.remember_as_built` recorded, packed by path, and its tensors."""
    built: Any = getattr(optimizer, "as_built", ({}, {}))
    if isinstance(built, tuple):
        return built
    tensors: dict[str, Tensor] = {}
    return _beside(optimizer, built, tensors), tensors


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): number for number, p in enumerate(parameters)}


def _holder(optimizer: Optimizer, path: str) -> tuple[dict[str, Any], str]:
    """Return the dict that holds "group.<number>.<name>" or "attribute.<name>", and the name."""
    kind, _, name = path.partition(".")
    if kind == "attribute":
        return optimizer.__dict__, name
    number, _, name = name.partition(".")
    return optimizer.param_groups[int(number)], name


def _beside(optimizer: Optimizer, groups: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the optimizer's values outside `state`, packed by path: the entries of `groups`, and own attributes."""
    values = {
        f"group.{number}.{name}": value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name != "params" and name not in _KERNELS
    }
    if not is_torchs(type(optimizer)):
        own = {n: x for n, x in vars(optimizer).items() if n != "as_built" and not is_of_every_optimizer(n)}
        values |= {f"attribute.{n}": x for n, x in own.items()}
    numbers = _numbers(optimizer)
    return {path: pack(value, path, tensors, numbers) for path, value in values.items()}


def _same(a: Any, b: Any, tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Return whether two packed values and their tensors are equal."""
    if a != b:
        return False
    if isinstance(a, dict):
        path = a.get("tensor", a.get("numpy", a.get("generator")))
        if isinstance(path, str):
            return torch.equal(tensors[path], others[path])
        keys = [f"{a[kind]}.{key}" for kind in ("optimizer", "module") if kind in a for key in a["keys"]]
        if any(not torch.equal(tensors[key], others[key]) for key in keys):
            return False
        return all(_same(x, b[k], tensors, others) for k, x in a.items())
    if isinstance(a, list):
        return all(_same(x, y, tensors, others) for x, y in zip(a, b, strict=True))
    return True
