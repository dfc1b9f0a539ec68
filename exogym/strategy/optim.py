"""Optimizers named, described and built: torch's own, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.errors import ArgumentError, nearest

_NAMES = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
}
_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step through a closure",
    "SparseAdam": "it needs sparse gradients, which a row of the fleet does not have",
}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class _FusedSGD(torch.optim.SGD):
    """torch's fused SGD for parameters that need not all have a gradient at the first step.

    The kernel fails where only some of them have a momentum yet; such a step goes tensor by tensor.
    """

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        sparse = super()._init_group(group, params, grads, momentum_buffer_list)
        started = sum(buffer is not None for buffer in momentum_buffer_list)
        group["fused"] = started in (0, len(momentum_buffer_list))
        return sparse


class OptimSpec:
    """An optimizer class and its arguments, to be built later for each node.

    Args:
        cls: a `torch.optim.Optimizer` class, or its name in any case ("adamw").
        **kwargs: the optimizer's own arguments; each is checked against its signature.

    Raises:
        ArgumentError: an unknown name or argument, or an optimizer that cannot work on a row.

    >>> OptimSpec("sgd", lr=0.1, momentum=0.9)
    OptimSpec(SGD, lr=0.1, momentum=0.9)
    """

    def __init__(self, cls: str | type[Optimizer], **kwargs: Any):
        if isinstance(cls, str):
            if cls.lower() not in _NAMES:
                raise ArgumentError(f"unknown optimizer {cls!r}: {nearest(cls.lower(), _NAMES)}")
            cls = _NAMES[cls.lower()]
        if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
            raise ArgumentError(f"an optimizer is a name, a torch.optim class or an OptimSpec, not {cls!r}")
        if cls.__name__ in _REFUSED:
            raise ArgumentError(f"{cls.__name__} cannot be used here: {_REFUSED[cls.__name__]}; take AdamW or SGD")
        known = [name for name in inspect.signature(cls).parameters if name != "params"]
        for name in kwargs:
            if name not in known:
                raise ArgumentError(f"{cls.__name__} has no argument {name!r}: {nearest(name, known)}")
        self.cls = cls
        self.kwargs = kwargs

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        return f"OptimSpec({self.cls.__name__}{arguments})"

    @staticmethod
    def of(given: str | type[Optimizer] | OptimSpec, **overrides: Any) -> OptimSpec:
        """Return the spec of a name, class or spec; `overrides` that are not None are added.

        Raises:
            ArgumentError: an override contradicts the spec's own argument.
        """
        spec = given if isinstance(given, OptimSpec) else OptimSpec(given)
        kwargs = dict(spec.kwargs)
        for name, value in overrides.items():
            if value is None:
                continue
            if name in kwargs and kwargs[name] != value:
                raise ArgumentError(
                    f"{name} is given twice: {kwargs[name]!r} in {spec!r} and {value!r} beside it; drop one"
                )
            kwargs[name] = value
        return OptimSpec(spec.cls, **kwargs)

    def build(self, parameters: Iterable[nn.Parameter], may_fuse: bool = True) -> Optimizer:
        """Return the optimizer over `parameters`; the fused kernel where torch has one and none is asked for."""
        kwargs = dict(self.kwargs)
        parameters = list(parameters)
        chosen = any(kwargs.get(name) is not None for name in ("fused", "foreach", "differentiable"))
        dense = all(p.device.type in ("cpu", "cuda", "mps") and p.is_contiguous() for p in parameters)
        if self.cls in _FUSED and may_fuse and not chosen and dense:
            kwargs["fused"] = True
        cls = _FusedSGD if self.cls is torch.optim.SGD and kwargs.get("fused") else self.cls
        try:
            return cls(parameters, **kwargs)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{self!r} cannot be built: {error}") from error


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors named "<parameter>.<entry>"; numbers become 0-d tensors."""
    tensors = {}
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in optimizer.state.get(p, {}).items():
            if value is not None:
                tensors[f"{index}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put `tensors` from `optimizer_state` back, cloned, each where torch keeps it: with its parameter, but "step"
    on the CPU unless the optimizer is fused or capturable.
    """
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        group, p = places[int(index)]
        counted_on_cpu = name == "step" and not (group.get("fused") or group.get("capturable"))
        optimizer.state[p][name] = value.clone().to("cpu" if counted_on_cpu else p.device)
