"""Check the arguments of `attach` before anything is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.combinations import check
from exogym.errors import ArgumentError, ModelError, check_count
from exogym.strategy.modules import Module
from exogym.strategy.muon import MuonAdamW
from exogym.strategy.optim import OptimSpec
from exogym.strategy.strategy import Inner, Strategy
from exogym.strategy.torch_schedules import is_torch_scheduler

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")


def check_model(model: nn.Module, is_sharded: bool = False) -> torch.device:
    """Return the model's device. If `is_sharded`, parameters may be divided over the processes of a node.

    Raises:
        ArgumentError: `model` is not a module, or another library splits it over processes or devices.
        ModelError: a parameter has no values, or the model has no trainable parameter.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module).__name__ in WRAPPERS:
            where = "the model" if not name else repr(name)
            raise ArgumentError(
                f"{where} is wrapped in {type(module).__name__}, which averages or splits the parameters itself: pass "
                "the unwrapped model to attach, and let the strategy communicate"
            )
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(x, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise ModelError(f"{name!r} has no shape yet: run the model on one batch before attach")
        if x.is_meta:
            raise ModelError(f"{name!r} is on the meta device and has no values: materialize the model before attach")
        if type(x.data) is not torch.Tensor and not is_sharded:
            raise ModelError(
                f"{name!r} is a {type(x.data).__name__}, a part of a tensor that several processes hold, but each "
                "process is a whole node: pass node= to attach, with the mesh or process group of this node's "
                "processes"
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError("the model has no trainable parameter: set requires_grad_(True) before attach")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ModelError(f"the model is on several devices ({', '.join(map(str, devices))}): move it to one device")
    return devices.pop()


def check_strategy(strategy: Any, total_steps: int | None, is_sharded: bool = False) -> None:
    """Raise ArgumentError if `strategy` can't be attached, or needs `total_steps` and doesn't have it."""
    if not isinstance(strategy, Strategy):
        raise ArgumentError(
            f"strategy={strategy!r} must be an instance of a strategy, such as exogym.strategy.DiLoCoStrategy(H=100)"
        )
    check(strategy.features() | {"attach": "exogym.attach"})
    if is_sharded:
        check(strategy.features() | strategy.features_in_parts() | {"node in several processes": "attach(node=...)"})
    if total_steps is not None:
        check_count("total_steps", total_steps)
    elif (needing := _needs_length(strategy)) is not None:
        raise ArgumentError(f"{needing} depends on the run's length: pass total_steps to attach")


def _needs_length(strategy: Strategy) -> str | None:
    """Return the setting of `strategy` that depends on the number of steps, or None."""
    given = vars(strategy).get("given_arguments", {})
    for name in ("lr_scheduler", "outer_lr_scheduler", "outer_momentum_scheduler"):
        schedule = given.get(name)
        if schedule is not None and schedule != "constant" and (
            isinstance(schedule, str) or is_torch_scheduler(schedule)
        ):  # fmt: skip
            return f"{name}={schedule!r}"
    if "tuner" in strategy.features():
        return "a ByteBudget"
    if any(module.needs_length for module in modules_of(strategy)):
        return f"{type(strategy).__name__}'s equation"
    if any(getattr(module, "rounds", None) is not None for module in modules_of(strategy)):
        return "H as a function of the round"
    return None


def modules_of(strategy: Any) -> list[Module]:
    """Return the strategy's modules; [] for a strategy written for one node."""
    return strategy.modules if strategy.driven_by == "rounds" else []


def check_optimizer(optimizer: Any, strategy: Strategy, model: nn.Module, is_sharded: bool = False) -> None:
    """Raise ArgumentError if the user's optimizer can't take the node's steps, or contradicts the strategy."""
    name = type(strategy).__name__
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            "optimizer must be a torch.optim.Optimizer, or None to let the strategy create one, not "
            f"{type(optimizer).__name__}"
        )
    spec = OptimSpec(type(optimizer))  # raises an error for an optimizer that needs more than gradients
    if is_sharded and spec.acts_on == "tensors":
        raise ArgumentError(
            f"{type(optimizer).__name__} needs whole tensors, but each process of a node has only a part of every "
            f"tensor: pass optimizer=None, and describe the optimizer in {name}"
        )
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.defaults.get("differentiable"):
        raise ArgumentError(
            "the optimizer has differentiable=True, but a node's step is not differentiable: leave it out"
        )
    _check_parameters(optimizer, model)
    why = ""
    if strategy.own_rule:
        why = "which brings its own update rule"
    elif strategy.driven_by != "rounds":
        why = "which steps its own optimizer (self.optim)"
    elif _reads_inner(strategy):
        why = "whose equation uses the inner optimizer's settings or state"
    if why:
        raise ArgumentError(
            f"attach got an optimizer and {name}, {why}: pass optimizer=None and describe the optimizer in {name}"
        )
    _check_description(optimizer, strategy)


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    named = {id(p): name for name, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strange := held - named.keys():
        raise ArgumentError(
            f"the optimizer holds {len(strange)} tensors that are not parameters of the model: create it from "
            "model.parameters(), after the last change to the model"
        )
    left = [named[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in held]
    if left:
        raise ArgumentError(
            f"the optimizer lacks {len(left)} trainable parameters, such as {left[0]!r}, but a node has one optimizer "
            "for all of them. Create one optimizer with parameter groups, or freeze these parameters before attach "
            "with requires_grad_(False)"
        )


def _reads_inner(strategy: Strategy) -> bool:
    """Return whether a module of the strategy uses the inner optimizer's description."""
    return any(isinstance(x, Inner) for module in modules_of(strategy) for x in vars(module).values())


def _check_description(optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise ArgumentError if the strategy describes an inner optimizer that differs from the user's."""
    given = vars(strategy).get("given_arguments", {})
    spec, kind = strategy.inner.spec, type(optimizer)
    described = "inner_optim" in given or spec.cls is MuonAdamW
    if described and (spec.is_function or not issubclass(kind, spec.cls)):
        raise ArgumentError(
            f"the optimizer is {kind.__name__}, but {strategy!r} describes {spec!r}: leave inner_optim out of the "
            "strategy, or pass optimizer=None"
        )
    for name, wanted in spec.kwargs.items() if described or "lr" in given else ():
        for group in optimizer.param_groups:
            has = group.get(f"initial_{name}", group.get(name, wanted))
            if has != wanted:
                raise ArgumentError(
                    f"the optimizer has {name}={has!r}, but {strategy!r} describes {name}={wanted!r}: leave {name} "
                    "out of the strategy, or pass optimizer=None"
                )
    if described and spec.groups:
        raise ArgumentError(
            f"{spec!r} describes parameter groups, but the optimizer has its own: leave inner_optim out of the "
            "strategy, or pass optimizer=None"
        )
