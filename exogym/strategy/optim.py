"""Describe optimizers by name or class and build them: torch's own, and any other that needs only gradients.

`optimizer_state` returns an optimizer's state, and `load_optimizer_state` loads it into another optimizer of the same
kind:

>>> layer = torch.nn.Linear(2, 1)
>>> first, second = (torch.optim.Adam(layer.parameters()) for _ in range(2))
>>> layer(torch.ones(1, 2)).sum().backward()
>>> first.step()
>>> load_optimizer_state(second, optimizer_state(first))
>>> sorted(optimizer_state(second))[:3]
['0.exp_avg', '0.exp_avg_sq', '0.step']
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import FUSED, FusedSGD, can_fuse, is_torchs, without_compiler
from exogym.errors import ArgumentError, StrategyError, nearest
from exogym.strategy.muon import HiddenAdamW, MuonAdamW
from exogym.strategy.optim_groups import Pattern, check_groups, grouped, name_of
from exogym.strategy.optim_trials import acts_on, draws_random, unsaved
from exogym.strategy.packing import load_optimizer_state, optimizer_state, packed_beside

__all__ = ["OptimSpec", "load_optimizer_state", "optimizer_state"]

_NAMES = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
} | {"muon": MuonAdamW}


class OptimSpec:
    """An optimizer class and its arguments, from which each node builds its own optimizer.

    Args:
        cls: a `torch.optim.Optimizer` class; its name in any case ("adamw"; "muon" is `MuonAdamW`); or a function that
            receives the list of a node's parameters (with `groups`, of parameter groups) and returns an optimizer of
            exactly these parameters. To find the learning rate, the function is also called with two small matrices.
        groups: (pattern, options) pairs for parameter groups. A parameter takes the options of the first pattern that
            matches it, and the optimizer's own arguments otherwise. A pattern is a function of a parameter's name and
            the parameter, or a text that must match the whole name, as for file names ("*.bias", "layers.[01].*", where
            "*" stands for any text). An "lr" is the group's base rate, which schedules scale.
        **kwargs: the optimizer's own arguments, by the names that `cls` has.

    Attributes:
        make: the class or the function.
        cls: the class of the optimizers.

    Raises:
        ArgumentError: the optimizer or an argument is unknown, the optimizer needs more than gradients, or a function
            returns anything but an optimizer of its parameters. When a node builds the optimizer: a pattern matches no
            parameter, or the optimizer lacks an option of `groups`.

    >>> OptimSpec("sgd", lr=0.1, momentum=0.9)
    OptimSpec(SGD, lr=0.1, momentum=0.9)
    >>> spec = OptimSpec("adamw", groups=[(lambda name, p: p.ndim < 2, {"weight_decay": 0.0})], lr=1e-3)
    >>> [group["weight_decay"] for group in spec.build(dict(nn.Linear(3, 2).named_parameters())).param_groups]
    [0.01, 0.0]
    >>> OptimSpec(lambda params: torch.optim.SGD(params, lr=0.2)).base_lr()
    0.2
    """

    def __init__(
        self, cls: str | Callable[..., Optimizer], groups: Sequence[tuple[Pattern, dict[str, Any]]] = (), **kwargs: Any
    ):
        if isinstance(cls, str):
            if cls.lower() not in _NAMES:
                raise ArgumentError(f"unknown optimizer {cls!r}: {nearest(cls.lower(), _NAMES)}", choices=_NAMES)
            cls = _NAMES[cls.lower()]
        if not (issubclass(cls, Optimizer) if isinstance(cls, type) else callable(cls)):
            seen = f"an existing {type(cls).__name__}" if isinstance(cls, Optimizer) else repr(cls)
            raise ArgumentError(
                f"an optimizer is a name, a torch.optim class, a function of the parameters or an OptimSpec, not {seen}"
            )
        known = [*inspect.signature(cls).parameters]
        known = [name for name in known if name != "params"] if isinstance(cls, type) else known[1:]
        for name in kwargs:
            if name not in known:
                raise ArgumentError(f"{name_of(cls)} has no argument {name!r}: {nearest(name, known)}")
        if groups:
            check_groups(groups)
        self.make, self.kwargs = cls, kwargs
        self.groups = [(pattern, dict(options)) for pattern, options in groups]
        small = [*_small().values()]
        self.cls: type[Optimizer] = cls if isinstance(cls, type) else type(self._made(cls, small, kwargs, small))
        if (need := _need(self.cls)) is not None:
            raise ArgumentError(f"{self.cls.__name__} cannot be used here: {need}; use AdamW or SGD")

    def __repr__(self) -> str:
        pairs = (f"({name_of(pattern)}, {options!r})" for pattern, options in self.groups)
        groups = f", groups=[{', '.join(pairs)}]" if self.groups else ""
        arguments = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        made = self.make.__qualname__ if isinstance(self.make, type) else name_of(self.make)
        return f"OptimSpec({made}{groups}{arguments})"

    @property
    def is_function(self) -> bool:
        """Whether a function builds the optimizers."""
        return not isinstance(self.make, type)

    def _made(
        self, make: Callable[..., Any], params: Any, kwargs: dict[str, Any], parameters: Collection[nn.Parameter]
    ) -> Optimizer:
        """Return the optimizer that `make` builds from `params`: the `parameters`, or groups of them.

        Raises:
            ArgumentError: `make` fails, or returns anything but an optimizer of exactly the `parameters`.
        """
        try:
            with without_compiler():
                made: Any = make(params, **kwargs)
        except ArgumentError:
            raise
        except Exception as error:
            raise ArgumentError(f"{self!r} cannot be built: {error}") from error
        if isinstance(make, type):
            return made
        if not isinstance(made, Optimizer):
            raise ArgumentError(
                f"{self!r} returned {made!r}: expected a torch.optim.Optimizer of the parameters that it received"
            )
        held = {id(p) for group in made.param_groups for p in group["params"]}
        if held != {id(p) for p in parameters}:
            raise ArgumentError(
                f"{self!r} returned an optimizer of {len(held)} parameters instead of the {len(parameters)} that it "
                "received: build it from all of them, and freeze the parameters that must not change"
            )
        return made

    @staticmethod
    def of(given: str | Callable[..., Optimizer] | OptimSpec, **overrides: Any) -> OptimSpec:
        """Return an `OptimSpec` for an optimizer, with further arguments.

        Args:
            given: the optimizer's name, its class, a function that builds it, or an `OptimSpec`.
            **overrides: arguments to add; None values are ignored.

        Raises:
            ArgumentError: an override differs from the same argument of `given`.
        """
        spec = given if isinstance(given, OptimSpec) else OptimSpec(given)
        kwargs = dict(spec.kwargs)
        for name, value in overrides.items():
            if value is None:
                continue
            if name in kwargs and kwargs[name] != value:
                raise ArgumentError(
                    f"{name} is given twice: {kwargs[name]!r} in {spec!r} and {value!r} as an argument; drop one"
                )
            kwargs[name] = value
        return OptimSpec(spec.make, spec.groups, **kwargs)

    def base_lr(self) -> float:
        """Return the optimizer's learning rate, for parameters whose group sets no rate.

        Raises:
            ArgumentError: the optimizer cannot be built, or has no learning rate.
        """
        group = OptimSpec(self.make, **self.kwargs).build(_small(), hidden={"hidden"}).param_groups[0]
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            raise ArgumentError(
                f"{self!r} has no learning rate (its 'lr' is {group.get('lr')!r}), but schedules and records need one: "
                "write a Strategy whose step() calls this optimizer"
            )
        return float(group["lr"])

    def build(
        self,
        parameters: Mapping[str, nn.Parameter] | Iterable[nn.Parameter],
        may_fuse: bool = True,
        hidden: Collection[str] = (),
    ) -> Optimizer:
        """Build the optimizer for `parameters`.

        The optimizer uses torch's fused kernel if the parameters allow it and no argument chooses another.

        Args:
            parameters: parameters by name, or in order (then their numbers are their names).
            may_fuse: whether the optimizer may use torch's fused kernel.
            hidden: names of the hidden matrices, which "muon" updates with Muon.
        """
        named = parameters if isinstance(parameters, Mapping) else {str(k): p for k, p in enumerate(parameters)}
        kwargs = dict(self.kwargs)
        chosen = any(kwargs.get(name) is not None for name in ("fused", "foreach", "differentiable"))
        if self.make in FUSED and may_fuse and not chosen and can_fuse(named.values()):
            kwargs["fused"] = True
        make = FusedSGD if self.make is torch.optim.SGD and kwargs.get("fused") else self.make
        params: Any = list(named.values())
        flag = self.cls.flag if issubclass(self.cls, HiddenAdamW) and not self.is_function else ""
        if self.groups or flag:
            params = grouped(self.groups, named, flag, hidden)
        optimizer = self._made(make, params, kwargs, named.values())
        for _, options in self.groups:
            for name in options:
                if name not in optimizer.defaults:
                    raise ArgumentError(
                        f"groups: {name!r} is not an option of {self.cls.__name__}'s groups: "
                        f"{nearest(name, optimizer.defaults)}"
                    )
        kind = type(optimizer)
        if not is_torchs(kind) and callable(getattr(optimizer, "train", None)):  # schedule-free ones need the call
            optimizer.train()  # type: ignore[attr-defined]
        try:
            return remember_as_built(optimizer)
        except StrategyError as error:
            raise unsaved(self.cls, error) from error

    @property
    def acts_on(self) -> str:
        """Return "elements" if splitting a tensor does not change the optimizer's steps, otherwise "tensors"."""
        return acts_on(OptimSpec(self.make, **self.kwargs))

    def try_out(self, named: Mapping[str, nn.Parameter], hidden: Collection[str] = ()) -> bool:
        """Take trial steps on copies of the parameters unless the optimizer is torch's own.

        Return whether a step draws random numbers (False for torch's own optimizers).

        Raises:
            ArgumentError: a step needs more than gradients, replaces the parameters' tensors, or keeps state that
                cannot be saved.
        """
        return not is_torchs(self.cls) and draws_random(self, named, hidden)


def remember_as_built(optimizer: Optimizer) -> Optimizer:
    """Record a new optimizer's values outside `optimizer.state`, so that checkpoints save only changes.

    Return the optimizer.

    Raises:
        StrategyError: a value has a type that cannot be saved.
    """
    built: Any
    if is_torchs(type(optimizer)):  # has nothing but its groups: a checkpoint packs them
        built = [{k: copy.deepcopy(x) for k, x in group.items() if k != "params"} for group in optimizer.param_groups]
    else:
        built = packed_beside(optimizer)
    optimizer.as_built = built  # type: ignore[attr-defined]
    return optimizer


def _small() -> dict[str, nn.Parameter]:
    """Return two small matrices by name, on which optimizers are tried."""
    return {name: nn.Parameter(torch.zeros(1, 1)) for name in ("rest", "hidden")}


def _need(cls: type[Optimizer]) -> str | None:
    """Return what the optimizer's class is known to need beyond a row's gradients, or None."""
    if issubclass(cls, torch.optim.LBFGS):
        return "it evaluates the loss several times per step through a closure"
    if issubclass(cls, torch.optim.SparseAdam):
        return "it needs sparse gradients, which a row of the fleet does not have"
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step() needs a closure that evaluates the loss, but here gradients exist before the step"
    return None
