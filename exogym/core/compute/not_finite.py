"""Report which number is not finite, and what to do. This code runs only after such a number was found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import TrainingError

REMEDY = (
    "lower the learning rate, clip gradients (max_norm=1.0), or check the node's data; with on_nonfinite='skip' the "
    "run continues without the node until the node has copied the other nodes' parameters"
)

Where = tuple[str, float]  # a parameter's name, and its first number that is not finite


def first_in(fleet: Fleet, vectors: Sequence[Tensor]) -> Where:
    """Return the first parameter in `vectors`, (P,) per block, that is not finite."""
    for block, vector in zip(fleet.blocks, vectors, strict=True):
        for slot in block.layout:
            if not bool(torch.isfinite(slot.of(vector)).all()):
                return slot.name, worst(slot.of(vector))
    return "a parameter in another process of the node", math.nan


def worst(x: Tensor) -> float:
    return float(x[~torch.isfinite(x)][0])


def of_loss(rank: int, loss: float, step: int) -> TrainingError:
    return TrainingError(f"the loss of node {rank} became {loss} at its step {step}: {REMEDY}")


def of_gradient(rank: int, where: Where, step: int) -> TrainingError:
    return TrainingError(
        f"the gradient of node {rank} was not finite at its step {step}: {where[0]!r} has {where[1]}; {REMEDY}"
    )


def of_update(rank: int, where: Where, step: int) -> TrainingError:
    """Return the error about the parameters of node `rank` after its step `step`; 0 means before its first step."""
    if step == 0:
        return TrainingError(
            f"{where[0]!r} contains {where[1]} before the first step of node {rank}: initialize it with finite numbers"
        )
    return TrainingError(
        f"the update of node {rank} was not finite at its step {step}: {where[0]!r} contains {where[1]}; {REMEDY}"
    )


def of_shared(what: str, where: Where, step: int) -> TrainingError:
    return TrainingError(
        f"{what} held {where[1]} in {where[0]!r} after step {step}, though each node's own numbers were finite: lower "
        "the learning rate, and outer_lr if the strategy has one"
    )
