"""Callbacks: a function of the running training, called after evaluations or every so many steps.

A callback is any callable taking the `TrainingLoop`; it may read `loop.step`, `loop.epoch`, `loop.history`,
`loop.fleet`, call `loop.evaluate(node)`, and end the training by returning True. It is called after each
evaluation; wrapped in `Every(n, function)`, after each n-th step. One that takes very long, in a run of several
processes, calls `loop.beat()` now and then (see `hang_s` of `fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exogym.errors import check_count

if TYPE_CHECKING:
    from exogym.loop import TrainingLoop


class Every:
    """Call `function(loop)` after every step divisible by `steps`. Nodes meet there, so stretches end there.

    >>> Every(100, lambda loop: loop.step >= 500).steps
    100
    """

    def __init__(self, steps: int, function: Callable[[TrainingLoop], Any]):
        check_count("steps", steps)
        self.steps, self.function = steps, function

    def __call__(self, loop: TrainingLoop) -> Any:
        return self.function(loop)


class EvaluateNodes:
    """At each evaluation also evaluate every single node that is there, as rows of their own in the history."""

    def __call__(self, loop: TrainingLoop) -> None:
        for node in list(loop.fleet.comm.present):
            loop.history.add_evaluation(loop.step, loop.epoch, loop.evaluate(node), node=node)
