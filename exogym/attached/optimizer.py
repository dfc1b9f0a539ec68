"""The user's own optimizer, which replaces the inner optimizers that a run builds for its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from exogym.core.compute.inner import correct_gradients
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Stateful
from exogym.errors import ArgumentError
from exogym.strategy.capabilities import Corrects
from exogym.strategy.one_node import clip_rows
from exogym.strategy.schedule import GIVEN, set_rates
from exogym.strategy.strategy import Inner

LATE = (
    "optimizer.step() was called, but nodes.step() takes the step: call nodes.step() instead. If another trainer "
    "calls optimizer.step(), call nodes.follow_optimizer() once before training. To train without ExoGym, call "
    "nodes.finish() first"
)
SCALER = (
    "a GradScaler skips a step if a gradient of this process overflows, but the other nodes would not skip it: train "
    "in bf16, which needs no GradScaler"
)
MARK = "_step_supports_amp_scaling"


class UsersOptimizer(Stateful):
    """Step the user's optimizer with the strategy's gradient corrections, clipping and schedule.

    The user saves the optimizer's state. If other code steps the optimizer, that is an error or, after `follow`, the
    node's step.

    Args:
        is_scheduled: whether the strategy describes a learning-rate schedule. Otherwise the user sets the rates.

    Attributes:
        optimizers: row 0's optimizer, {0: the user's optimizer}. Strategies that average moments read this dict.
        corrections: modules that change the gradients in place before they are clipped.
        node: the `Node` that steps this optimizer.
    """

    def __init__(self, optimizer: Optimizer, inner: Inner, worker: Worker, total_steps: int, is_scheduled: bool):
        self.optimizer, self.optimizers = optimizer, {0: optimizer}
        self.parameters, self.max_norm = worker.parameters, inner.max_norm
        self._shards = worker.devices
        self._columns = worker.fleet.comm.wire.columns
        self.schedule = inner.schedule(total_steps) if is_scheduled else None
        self.corrections: list[Corrects] = []
        self._before: Callable[[], None] | None = None
        self._after: Callable[[], None] | None = None
        self._is_ours = self._is_making_ready = False
        self._hooks: list[Any] = []
        self.node: Any = None
        self._watch()

    # For ways of computing

    def enter(self, row: int) -> None:
        """Do nothing: the process has a single row."""

    def set_rates(self, at: int) -> None:
        """Set the learning rates for step `at`, if the strategy describes a schedule.

        Raises:
            ArgumentError: other code, such as a torch scheduler, changed a rate that this method had set.
        """
        if self.schedule is None:
            return
        for group in self.optimizer.param_groups:
            if GIVEN in group and group["lr"] != group[GIVEN]:
                raise ArgumentError(
                    f"the optimizer's learning rate is {float(group['lr'])}, but the strategy's schedule set it to "
                    f"{group[GIVEN]}: use either the strategy's lr_scheduler and warmup_steps, or a torch scheduler"
                )
        set_rates(self.optimizer, self.schedule, at)

    def prepare(self, row: int, clip: bool = True) -> None:
        """Correct the gradients and clip them."""
        correct_gradients(self.corrections, row, self.parameters)
        if clip and self.max_norm is not None:
            clip_rows([p.grad for p in self.parameters if p.grad is not None], self.max_norm, False, self._columns)
        if self._shards is not None:
            self._shards.give_gradients()

    def step(self, row: int, at: int, clip: bool = True, skip: bool = False) -> None:
        """Take the optimizer's step with the gradients in `.grad`, then set `.grad` to None."""
        self.set_rates(at)
        if not skip:
            self.prepare(row, clip)
            self._is_ours = True
            try:
                self.optimizer.step()
            finally:
                self._is_ours = False
        self.clear()

    def clear(self) -> None:
        """Set `.grad` of all parameters to None."""
        for p in self.parameters:
            p.grad = None
        if self._shards is not None:
            self._shards.clear_gradients()

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients are clipped or corrected before the step."""
        return self.max_norm is not None or bool(self.corrections)

    def lr(self, step: int) -> float:
        """Return the learning rate of the first parameter group now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def reset(self, row: int) -> None:
        """Forget the optimizer's state."""
        self.optimizer.state.clear()

    # Steps from elsewhere

    @property
    def follows(self) -> bool:
        """Whether `follow` was called."""
        return self._before is not None

    def follow(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """From now on, call `before` and `after` around each step that other code takes."""
        self._before, self._after = before, after

    def release(self) -> None:
        """Remove the hooks and the mark from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        vars(self.optimizer).pop(MARK, None)
        vars(self.optimizer).update(self._mark)

    def _watch(self) -> None:
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._begins),
            self.optimizer.register_step_post_hook(self._ended),
        ]
        own = vars(self.optimizer)
        self._mark = {MARK: own[MARK]} if MARK in own else {}
        # Given this attribute, a GradScaler calls step() even if a gradient overflowed, and reports the overflow in
        # `found_inf`.
        own[MARK] = True

    def _begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if getattr(optimizer, "found_inf", None) is not None:
            raise ArgumentError(SCALER)
        if self._is_ours or self._makes_ready(kwargs):
            return None
        if self._before is None:
            raise ArgumentError(LATE)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before()
            return None
        with torch.enable_grad():
            loss = closure()  # the gradients exist now; the optimizer must not compute them again
        self._before()
        return args[:1], {**kwargs, "closure": lambda: loss}

    def _makes_ready(self, kwargs: dict[str, Any]) -> bool:
        """Return whether torch.distributed.checkpoint takes this step only to create optimizer state before loading.

        It steps an optimizer that has no state, with zero gradients and learning rates, which changes no parameter.
        """
        rates = [float(group.get("lr", 1.0)) for group in self.optimizer.param_groups]
        self._is_making_ready = kwargs == {"closure": None} and not self.optimizer.state and not any(rates)
        return self._is_making_ready

    def _ended(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if not self._is_ours and not self._is_making_ready and self._after is not None:
            self._after()
