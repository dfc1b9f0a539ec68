"""Try optimizers that torch does not define: whether they can step rows, draw random numbers, and can be saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.base.devices import Device
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy.packing import optimizer_state

TRIAL_STEPS = 2


def acts_on(spec: Any) -> str:
    """Return "elements" if splitting a tensor does not change the steps of an `OptimSpec`, otherwise "tensors"."""
    start, grads = (torch.linspace(-1, 1, 24).reshape(6, 4) ** power for power in (1, 3))
    ends = []
    for cuts in ([6], [3, 3]):
        parts = {f"layer.{k}": nn.Parameter(x.clone()) for k, x in enumerate(start.split(cuts))}
        optimizer = spec.build(parts, hidden=frozenset(parts))
        for step in range(3):
            for p, grad in zip(parts.values(), (grads + 0.1 * step).split(cuts), strict=True):
                p.grad = grad.clone()
            optimizer.step()
        ends.append(torch.cat([p.detach() for p in parts.values()]))
    return "elements" if torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-7) else "tensors"


def draws_random(spec: Any, named: Mapping[str, nn.Parameter], hidden: Collection[str]) -> bool:
    """Take trial steps of an `OptimSpec` on copies of the parameters. Return whether a step draws random numbers.

    Raises:
        ArgumentError: a step needs more than gradients, replaces the parameters' tensors, or keeps state that cannot be
            saved.
    """
    copies = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in named.items()}
    places = [p.data_ptr() for p in copies.values()]
    device = Device(next(iter(copies.values())).device)
    try:
        with device.forked_random():
            optimizer = spec.build(copies, hidden=hidden)
            before = device.random_states()
            for _ in range(TRIAL_STEPS):
                for p in copies.values():
                    p.grad = torch.full_like(p, 0.01)
                optimizer.step()
            after = device.random_states()
        optimizer_state(optimizer)
    except ArgumentError:
        raise
    except StrategyError as error:
        raise unsaved(spec.cls, error) from error
    except Exception as error:
        raise ArgumentError(
            f"{spec.cls.__name__} cannot be used here: a step on given gradients, without a closure or a graph, "
            f"fails ({type(error).__name__}: {error}); use an optimizer whose step() needs only .grad"
        ) from error
    if places != [p.data_ptr() for p in copies.values()]:
        raise ArgumentError(
            f"{spec.cls.__name__} cannot be used here: its step replaces parameters by new tensors "
            "(p.data = ...), but parameters here are views of a row; use an optimizer that changes parameters in "
            "place"
        )
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def unsaved(cls: type[Optimizer], error: StrategyError) -> ArgumentError:
    """Return the error about an optimizer whose state cannot be saved, given the error of packing it."""
    what = str(error).partition(":")[0]
    return ArgumentError(
        f"{cls.__name__} cannot be used here: its {what}; use an optimizer that keeps tensors and numbers"
    )
