"""The inner steps that can be part of a graph: torch's SGD, Adam and AdamW as functions of tensors.

What changes from step to step (rates, bias corrections) is reckoned outside in Python's doubles, as torch does, and
goes into the graph as numbers, so that one graph serves all steps, rates and runs.
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

State = list[Tensor]  # what an update keeps of a parameter, in the order of its keys
_KERNELS = (
    "params",
    "lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)  # change no number of a step, or a scalar


class Update(ABC):
    """The step of the parameters of one group.

    Args:
        group: a parameter group of the optimizer.

    Attributes:
        keys: of the tensors kept for each parameter, as torch names them.
        counts: whether the steps taken are kept beside them.
    """

    keys: tuple[str, ...] = ()
    counts = False

    def __init__(self, group: dict[str, Any]):
        self.group = group

    @abstractmethod
    def scalars(self, lr: float, before: int) -> list[float]:
        """Return the numbers of a step at rate `lr`, `before` steps having been taken."""

    @abstractmethod
    def __call__(self, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]) -> tuple[Tensor, State]:
        """Return the parameter and its state after a step with gradient `g`; `numbers` are its `scalars`."""

    def _gradient(self, p: Tensor, g: Tensor) -> Tensor:
        """Return `g`, turned round where the loss is to grow, with the decay that is a part of it."""
        if self.group["maximize"]:
            g = -g
        decay = 0.0 if self.group.get("decoupled_weight_decay") else self.group["weight_decay"]
        return g + decay * p if decay else g


class SGD(Update):
    """b <- mu b + (1 - d) g;  p <- p - lr b, or p - lr (g + mu b) with Nesterov's momentum; b = g at the first step."""

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
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- (1 - lr w) p - lr m' / (sqrt(v') + eps), with m', v'
    corrected for their start at 0; w is AdamW's decay, Adam's is a part of g."""

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
SCALARS = 3  # of every update


def steps_before(optimizer: Optimizer, parameters: Sequence[nn.Parameter], update: Update) -> int | None:
    """Return how many steps the optimizer has taken with `parameters`, or 0 and 1 of those that do not count them.

    None where they are not alike, or one keeps what `update` does not.
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
    """Return what a graph holds fixed of a parameter group: all but rates, and which kernel torch would take."""
    return tuple(
        (name, repr(value)) for name, value in sorted(group.items()) if name not in _KERNELS and "_lr" not in name
    )
