"""State of a user's strategy as tensors: what its attributes hold, with no code in the strategy.

Tensors, numbers, strings, numpy arrays, lists, tuples and dicts of these, optimizers, schedulers and
generators are kept. The model and its parameters are not (rows are saved apart), nor are functions and
classes. For anything else the strategy defines `state_dict()` and `load_state_dict(state)`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exogym.errors import StrategyError
from exogym.strategy.optim import OptimSpec, load_optimizer_state, optimizer_state
from exogym.strategy.schedule import Schedule
from exogym.strategy.strategy import Inner

SKELETON = "skeleton"
_CONSTANT = (OptimSpec, Schedule, Inner, type, nn.Module)


def object_state(strategy: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `strategy` as named tensors, none of which is the model's.

    Raises:
        StrategyError: an attribute is of a kind that cannot be kept.
    """
    tensors: dict[str, Tensor] = {}
    own = {id(p): index for index, p in enumerate(model.parameters())}
    source = strategy.state_dict() if hasattr(strategy, "state_dict") else vars(strategy)
    skeleton = {key: _pack(value, key, tensors, own) for key, value in source.items() if key != "given_arguments"}
    tensors[SKELETON] = torch.tensor(list(json.dumps(skeleton).encode()), dtype=torch.uint8)
    return tensors


def load_object_state(strategy: Any, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the state that `object_state` returned back into `strategy`."""
    own = list(model.parameters())
    skeleton = json.loads(bytes(tensors[SKELETON].tolist()))
    if hasattr(strategy, "load_state_dict"):
        strategy.load_state_dict({k: _unpack(v, None, tensors, own) for k, v in skeleton.items()})
        return
    for key, packed in skeleton.items():
        value = _unpack(packed, vars(strategy).get(key), tensors, own)
        if value is not _KEEP:
            setattr(strategy, key, value)


class _Keep:
    pass


_KEEP = _Keep()


def _pack(value: Any, path: str, tensors: dict[str, Tensor], own: dict[int, int]) -> Any:
    if id(value) in own:
        return {"parameter": own[id(value)]}
    if isinstance(value, nn.Module) and not any(id(p) in own for p in value.parameters()):
        for name, tensor in value.state_dict().items():
            tensors[f"{path}.{name}"] = tensor.detach()
        return {"module": path, "keys": list(value.state_dict())}
    if isinstance(value, _CONSTANT) or (callable(value) and not isinstance(value, Tensor)):
        return {"keep": True}
    if isinstance(value, Tensor | np.ndarray):
        tensors[path] = torch.as_tensor(value).detach()
        return {"numpy" if isinstance(value, np.ndarray) else "tensor": path}
    if isinstance(value, bool | int | float | str) or value is None:
        return {"value": value}
    if isinstance(value, np.generic):
        return {"value": value.item()}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{path}.{k}", tensors, own) for k, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict):
        if any(not isinstance(key, str | int) and id(key) not in own for key in value):
            raise StrategyError(
                f"strategy attribute {path!r} is a dict with keys other than text, whole numbers and the model's "
                "parameters; it cannot be saved"
            )
        pairs = [(own.get(id(key)), key, item) for key, item in value.items()]
        return {
            "dict": [
                [key if index is None else {"parameter": index}, _pack(item, f"{path}.{k}", tensors, own)]
                for k, (index, key, item) in enumerate(pairs)
            ]
        }
    if isinstance(value, Optimizer):
        for key, tensor in optimizer_state(value).items():
            tensors[f"{path}.{key}"] = tensor
        groups = [{k: v for k, v in g.items() if isinstance(v, bool | int | float)} for g in value.param_groups]
        return {"optimizer": path, "keys": list(optimizer_state(value)), "groups": groups}
    if isinstance(value, LRScheduler):
        state = {k: v for k, v in value.state_dict().items() if isinstance(v, bool | int | float | list)}
        return {"scheduler": state}
    if isinstance(value, torch.Generator):
        tensors[path] = value.get_state()
        return {"generator": path}
    raise StrategyError(
        f"strategy attribute {path!r} is a {type(value).__name__}, which cannot be saved in a checkpoint: keep "
        "tensors and numbers in attributes, or define state_dict() and load_state_dict(state)"
    )


def _unpack(packed: dict[str, Any], existing: Any, tensors: dict[str, Tensor], own: list[nn.Parameter]) -> Any:
    kind = next(iter(packed))
    content = packed[kind]
    if kind == "keep":
        return _KEEP if existing is None else existing
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
    if kind in ("list", "tuple"):
        old = (
            existing if isinstance(existing, list | tuple) and len(existing) == len(content) else [None] * len(content)
        )
        items = [_unpack(item, was, tensors, own) for item, was in zip(content, old, strict=True)]
        if hasattr(existing, "_fields"):  # a namedtuple
            return type(existing)(*items)
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        before = existing if isinstance(existing, dict) else {}
        keys = [own[key["parameter"]] if isinstance(key, dict) else key for key, _ in content]
        after = {
            key: _unpack(item, before.get(key), tensors, own) for key, (_, item) in zip(keys, content, strict=True)
        }
        before.clear()  # filled again in place: a defaultdict stays one
        before.update(after)
        return before
    if existing is None:
        raise StrategyError(
            f"the strategy's {kind} at {content!r} is in the checkpoint but not in the new run: make it in _init_node"
        )
    if kind == "module":
        existing.load_state_dict({key: tensors[f"{content}.{key}"] for key in packed["keys"]})
    elif kind == "optimizer":
        load_optimizer_state(existing, {key: tensors[f"{content}.{key}"] for key in packed["keys"]})
        for group, values in zip(existing.param_groups, packed["groups"], strict=True):
            group.update(values)
    elif kind == "scheduler":
        existing.load_state_dict(content)
    else:
        existing.set_state(tensors[content])
    return existing
