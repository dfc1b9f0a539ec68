"""Learning-rate schedules: pure functions of a node's own step, without state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exogym.errors import ArgumentError, check_count, nearest
from exogym.strategy.torch_schedules import check_torchs, is_torch_scheduler, rates_of

Scheduler = str | type[LRScheduler] | Callable[..., Any] | None

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "linear": lambda x: 1.0 - x,
}


class Schedule:
    """The learning rate at each step of a run.

    The learning rate at step t = 0, 1, ... is the base rate times a factor: (t + 1) / W in the W steps of warm-up (t <
    W), then shape((t - W) / (T - W)) for T steps in all, where the shape is the constant 1, the cosine (1 + cos(pi x))
    / 2, or the line 1 - x. A schedule can also give factors for another hyper-parameter, such as the outer momentum.

    Args:
        scheduler: "constant", "cosine" or "linear"; a `torch.optim.lr_scheduler` class, or a `functools.partial` of one
            with its arguments; or a function that maps the step to a learning-rate factor. None means constant. T_max,
            total_steps and total_iters of a torch class default to T - W. Only the learning rate follows the schedule,
            so OneCycleLR does not cycle the momentum.
        warmup_steps: W, steps of linear warm-up.
        total_steps: T, all steps of the run.
        spec_lr: the base rate.

    Attributes:
        is_constant: whether every step has the base rate.

    >>> [round(Schedule("linear", 2, 4, 1.0).lr(t), 2) for t in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    def __init__(self, scheduler: Scheduler, warmup_steps: int, total_steps: int, spec_lr: float):
        self.warmup_steps, self.total_steps, self.base_lr = warmup_steps, total_steps, spec_lr
        self._tables: dict[float, list[float]] | None = None
        self.is_constant = scheduler in (None, "constant") and not warmup_steps
        if scheduler is None or isinstance(scheduler, str):
            self._shape = _SHAPES[scheduler or "constant"]
        elif is_torch_scheduler(scheduler):
            self._tables = {}
            self._scheduler = scheduler
        else:
            self._shape = None  # type: ignore[assignment]
            self._factor = scheduler

    def lr(self, step: int, base_lr: float | None = None) -> float:
        """Return the learning rate at a node's step `step`, counted from 0.

        `base_lr` is a parameter group's base rate. None means the schedule's own.
        """
        base = self.base_lr if base_lr is None else base_lr
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        if self._tables is not None:
            at = step - self.warmup_steps
            table = self._tables.get(base, ())
            if len(table) <= at:
                steps = max(1, self.total_steps - self.warmup_steps)
                table = self._tables[base] = rates_of(self._scheduler, steps, base, 2 * at + 64)
            return table[at]
        if self._shape is None:
            return base * float(self._factor(step))
        span = max(1, self.total_steps - self.warmup_steps)
        return base * self._shape(min(1.0, (step - self.warmup_steps) / span))


BASE, GIVEN = "exogym_base_lr", "exogym_lr"  # in a parameter group: its base rate, and the last rate set here


def set_rates(optimizer: Optimizer, schedule: Any, step: int) -> None:
    """Set each parameter group's learning rate for a node's step `step` by scaling the group's base rate.

    A group's first rate is its base rate. If its rate differs from the rate set here last, the user, a torch scheduler
    or the optimizer has changed it, and it stays as it is.
    """
    for group in optimizer.param_groups:
        given = group.get(GIVEN)
        if given is None:
            if not isinstance(group.get("lr"), int | float | torch.Tensor):
                continue
            group[BASE] = group[GIVEN] = given = float(group["lr"])
        if group["lr"] != given:
            continue
        rate = schedule.lr(step, group[BASE])
        if rate != given:
            group[GIVEN] = rate
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
                group[GIVEN] = float(group["lr"])
            else:
                group["lr"] = rate


def forget_rates(optimizer: Optimizer) -> None:
    """Reset parameter groups that follow the schedule to their base rates.

    Rates in checkpoints then do not depend on the step.
    """
    for group in optimizer.param_groups:
        if GIVEN in group and group["lr"] == group[GIVEN]:
            base = group.pop(BASE)
            del group[GIVEN]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base)
            else:
                group["lr"] = base


def check_schedule(
    scheduler: Scheduler, warmup: int, names: tuple[str, str] = ("lr_scheduler", "warmup_steps")
) -> None:
    """Raise ArgumentError if a learning-rate schedule cannot be built.

    `ReduceLROnPlateau` is refused because it follows a metric, which nodes lack between evaluations.

    Args:
        scheduler: see `Schedule`.
        warmup: steps of linear warm-up.
        names: the names of the arguments for scheduler and warm-up, for messages.
    """
    check_count(names[1], warmup, least=0)
    if isinstance(scheduler, str) and scheduler not in _SHAPES:
        raise ArgumentError(f"{names[0]}={scheduler!r} is unknown: {nearest(scheduler, _SHAPES)}", choices=_SHAPES)
    if scheduler is not None and not isinstance(scheduler, str):
        check_torchs(scheduler, names[0])
