"""A run's schedule in fleet steps: when stretches end, and when evaluations, checkpoints and callbacks are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exogym.callbacks import Callback
    from exogym.core.saving.keepers import Keepers


@dataclass
class Agenda:
    """The training loop's schedule, and the folder for checkpoints.

    Attributes:
        val_interval: steps between evaluations, or None for an evaluation after each epoch.
        evaluates: whether the run has a validation set.
        description: all values that decide the run's result.
        examples_of: a function from node ids to the number of examples that each of these nodes uses per step.

    >>> agenda = Agenda(total_steps=100, steps_per_epoch=40, evaluates=True)
    >>> [agenda.stretch_end(step, next_event=step + 30) for step in (0, 30, 75)]
    [30, 40, 80]
    """

    total_steps: int
    steps_per_epoch: int
    val_interval: int | None = None
    log_interval: int = 1
    checkpoint_interval: int | None = None
    save_dir: Any = None
    keep_checkpoints: int = 2
    final_sync: bool = True
    max_stretch: int | None = None
    description: dict[str, Any] = field(default_factory=dict)
    examples_of: Callable[[Sequence[int]], Any] = lambda nodes: 1
    keepers: Keepers | None = None
    evaluates: bool = False
    callbacks: Sequence[Callback] = ()

    def stretch_end(self, step: int, next_event: int) -> int:
        """Return the last step at which a stretch that begins at `step` may end."""
        ends = [self.total_steps, next_event]
        intervals = [self._evaluation_interval, self.checkpoint_interval if self.save_dir else None]
        intervals += [callback.steps for callback in self.callbacks]
        ends += [(step // n + 1) * n for n in intervals if n]
        if self.max_stretch is not None:
            ends.append(step + self.max_stretch)
        return min(ends)

    @property
    def _evaluation_interval(self) -> int | None:
        return (self.val_interval or self.steps_per_epoch) if self.evaluates else None

    def evaluation_due(self, step: int) -> bool:
        return divides(self._evaluation_interval, step)

    def checkpoint_due(self, step: int) -> bool:
        return self.save_dir is not None and divides(self.checkpoint_interval, step)

    def may_be_evaluated(self, step: int) -> bool:
        """Return whether the run may evaluate after `step`: an evaluation is due, or a callback may end training."""
        if step == self.total_steps or self.evaluation_due(step):
            return True
        return any(callback.may_end and divides(callback.steps, step) for callback in self.callbacks)


def divides(interval: int | None, step: int) -> bool:
    return bool(interval) and step % interval == 0  # type: ignore[operator]
