"""Save a user strategy's attributes as tensors. The strategy needs no code for saving.

ExoGym saves all attributes that `exogym.strategy.packing` can pack, except the model and its parameters, which are
saved as rows. For other attributes the strategy must define `state_dict()` and `load_state_dict(state)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from exogym.strategy.optim import OptimSpec
from exogym.strategy.packing import KEEP, SKELETON, as_text, from_text, pack, unpack
from exogym.strategy.schedule import Schedule
from exogym.strategy.strategy import Inner

_CONSTANT = (OptimSpec, Schedule, Inner)


def object_state(strategy: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `strategy` as named tensors, without the model's tensors.

    Raises:
        StrategyError: ExoGym cannot save an attribute.
    """
    tensors: dict[str, Tensor] = {}
    own = {id(p): index for index, p in enumerate(model.parameters())}
    source = strategy.state_dict() if hasattr(strategy, "state_dict") else vars(strategy)
    tensors[SKELETON] = as_text(
        {key: pack(value, key, tensors, own, _CONSTANT) for key, value in source.items() if key != "given_arguments"}
    )
    return tensors


def load_object_state(strategy: Any, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the attributes of `strategy` from a result of `object_state`."""
    own = list(model.parameters())
    skeleton = from_text(tensors[SKELETON])
    if hasattr(strategy, "load_state_dict"):
        strategy.load_state_dict({k: unpack(v, None, tensors, own) for k, v in skeleton.items()})
        return
    for key, packed in skeleton.items():
        value = unpack(packed, vars(strategy).get(key), tensors, own)
        if value is not KEEP:
            setattr(strategy, key, value)
