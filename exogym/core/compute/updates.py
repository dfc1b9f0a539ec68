"""Optimizer steps that can be part of a graph: torch's SGD, Adam and AdamW as functions of tensors.

Learning rates and bias corrections change from step to step. ExoGym computes them outside the graph in Python's
doubles, like torch, and passes them to the graph as numbers. So one graph serves all steps, learning rates and runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import FusedSGD

State = list[Tensor]  # an optimizer's tensors for one parameter, in the order of `Update.keys`
_KERNELS = (
    "params",
    "lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)  # options that a graph need not fix: `Update.scalars` has the rate, and the others do not change a step's result


class Update(ABC):
    """Compute an optimizer's step for the parameters of one parameter group.

    Args:
        group: the parameter group, an entry of the optimizer's `param_groups`.

    Attributes:
        keys: torch's names of the state tensors that each parameter has.
        counts: whether the optimizer's state also counts the steps ("step").
    """

    keys: tuple[str, ...] = ()
    counts = False

    def __init__(self, group: dict[str, Any]):
        self.group = group

    @abstractmethod
    def scalars(self, lr: float, before: int) -> list[float]:
        """Return the numbers that a graph needs for a step with learning rate `lr`, after `before` earlier steps."""

    @abstractmethod
    def __call__(self, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]) -> tuple[Tensor, State]:
        """Return the parameter `p` and its state after a step.

        Args:
            g: the parameter's gradient.
            numbers: the step's numbers, from `scalars`.
        """

    def _gradient(self, p: Tensor, g: Tensor) -> Tensor:
        """Return the gradient `g`, negated under `maximize`, plus the weight decay if that is part of the gradient."""
        if self.group["maximize"]:
            g = -g
        decay = 0.0 if self.group.get("decoupled_weight_decay") else self.group["weight_decay"]
        return g + decay * p if decay else g


class SGD(Update):
    """Compute a step of torch's SGD: b <- mu b + (1 - d) g, then p <- p - lr b.

    Here p is the parameter, g its gradient plus weight decay, lr the learning rate, mu the momentum, d the dampening
    and b the momentum buffer. In the first step b = g. With Nesterov's momentum, p <- p - lr (g + mu b). Without
    momentum, p <- p - lr g.
    """

    def __init__(self, group: dict[str, Any]):
        super().__init__(group)
        self.keys = ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, lr: float, before: int) -> list[float]:
        first = not before
        return [lr, 0.0 if first else self.group["momentum"], 1.0 if first else 1.0 - self.group["dampening"]]

    def __call__(self, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]) -> tuple[Tensor, State]:
        lr, kept, new = numbers
        g = self._gradient(p, g)
        if not state:
            return p - lr * g, []
        b = kept * state[0] + new * g
        return p - lr * (g + self.group["momentum"] * b if self.group["nesterov"] else b), [b]


class Adam(Update):
    """Compute a step of torch's Adam or AdamW.

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        p <- (1 - lr w) p - lr m' / (sqrt(v') + eps)

    Here p is the parameter, g its gradient, lr the learning rate, and b1, b2 are the betas. In step t,
    m' = m / (1 - b1^t) and v' = v / (1 - b2^t). With amsgrad, v' comes from the largest v so far. w is AdamW's weight
    decay; in Adam w = 0, because Adam's weight decay is part of g.
    """

    counts = True

    def __init__(self, group: dict[str, Any]):
        super().__init__(group)
        self.keys = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def scalars(self, lr: float, before: int) -> list[float]:
        beta1, beta2 = (float(beta) for beta in self.group["betas"])
        decay = lr * self.group["weight_decay"] if self.group["decoupled_weight_decay"] else 0.0
        return [1.0 - decay, lr / (1 - beta1 ** (before + 1)), 1 / math.sqrt(1 - beta2 ** (before + 1))]

    def __call__(self, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]) -> tuple[Tensor, State]:
        shrink, rate, correction = numbers
        beta1, beta2 = (float(beta) for beta in self.group["betas"])
        g = self._gradient(p, g)
        m = beta1 * state[0] + (1 - beta1) * g
        v = beta2 * state[1] + (1 - beta2) * g * g
        new = [m, v]
        if self.group["amsgrad"]:
            new.append(torch.maximum(state[2], v))
        if self.group["decoupled_weight_decay"] and self.group["weight_decay"]:
            p = shrink * p
        return p - rate * (m / (new[-1].sqrt() * correction + self.group["eps"])), new


UPDATES: dict[type[Optimizer], type[Update]] = {
    torch.optim.SGD: SGD,
    FusedSGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}
SCALARS = 3  # length of every update's `scalars`


def steps_before(optimizer: Optimizer, parameters: Sequence[nn.Parameter], update: Update) -> int | None:
    """Return the number of steps that the optimizer has taken with each of `parameters`.

    If `update` does not count steps (SGD), return 1 if the parameters have a momentum buffer, otherwise 0. Return None
    if the parameters' numbers differ, or if a parameter's state has other entries than `update` uses.
    """
    wanted = set(update.keys) | ({"step"} if update.counts else set())
    found = set[int]()
    for p in parameters:
        state = optimizer.state.get(p) or {}
        held = {key for key, value in state.items() if value is not None}
        if held and held != wanted:
            return None
        found.add(int(state["step"]) if "step" in held else int(bool(held)))
    return found.pop() if len(found) == 1 else None


def settings(group: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the options of a parameter group that a graph fixes, as text.

    These are all options except learning rates and the choices between torch's kernels, such as `fused`.
    """
    return tuple(
        (name, repr(value)) for name, value in sorted(group.items()) if name not in _KERNELS and "_lr" not in name
    )
