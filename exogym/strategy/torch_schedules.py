"""torch's learning-rate schedulers as tables of rates, which keep a schedule a pure function of the step."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exogym.errors import ArgumentError


def is_torch_scheduler(scheduler: Any) -> bool:
    """Return whether `scheduler` is a torch scheduler class or a `functools.partial` of such a class."""
    cls = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    return inspect.isclass(cls) and issubclass(cls, LRScheduler)


def check_torchs(scheduler: Any, name: str) -> None:
    """Raise ArgumentError if the argument `name` is not callable, or is a torch class that cannot be a schedule."""
    cls = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    if inspect.isclass(cls) and issubclass(cls, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ArgumentError(
            f"{name}=ReduceLROnPlateau follows a metric, not the step: use 'cosine', 'linear' or a function of the step"
        )
    if not callable(scheduler):
        raise ArgumentError(f"{name}={scheduler!r} is not a name, a torch scheduler class or a function")
    if is_torch_scheduler(scheduler):
        rates_of(scheduler, 100, 0.1, 1)


def rates_of(scheduler: Any, steps: int, base_lr: float, count: int) -> list[float]:
    """Return the rates of the first `count` steps of a run of `steps` steps; later steps keep the last rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr, momentum=0.9)
    made = _build(scheduler, optimizer, steps)
    table = []
    for k in range(min(count, steps)):
        if k > 0:
            optimizer.step()
            made.step()
        table.append(float(optimizer.param_groups[0]["lr"]))
    return table + table[-1:] * (count - len(table))


def _build(scheduler: Any, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    cls = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    known = inspect.signature(cls).parameters
    bound = scheduler.keywords if isinstance(scheduler, functools.partial) else {}
    fill = {
        name: total_steps for name in ("T_max", "total_steps", "total_iters") if name in known and name not in bound
    }
    if "max_lr" in known and "max_lr" not in bound:
        fill["max_lr"] = optimizer.param_groups[0]["lr"]
    if bound.get("cycle_momentum"):
        raise ArgumentError(
            f"lr_scheduler={scheduler!r} asks for cycle_momentum, but only the learning rate follows a schedule here: "
            "leave cycle_momentum out"
        )
    try:
        return scheduler(optimizer, **fill)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"lr_scheduler={scheduler!r} cannot be built: {error}; pass its arguments by "
            "functools.partial, for example functools.partial(StepLR, step_size=30)"
        ) from error
