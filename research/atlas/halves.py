"""Tasks whose held-out examples are halved into validation and test data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import Subset

from exogym.data.partition import Partitioner
from exogym.study.tasks import Data, Task
from research.reproduce.problems import problem

HALVES = ("validation", "test")


def halved(half: str, name: str, data: Data = None) -> tuple[Task, Partitioner | None]:
    """Return a task that is evaluated on one half of its held-out examples: every second one, from the first or second.

    Runs that select settings get the half "validation". Only runs that measure get the half "test".
    """
    task, split = problem(name, data)
    held_out: Any = task.val
    part = Subset(held_out, range(HALVES.index(half), len(held_out), len(HALVES)))
    return replace(task, val=part, evaluates=f"the {half} half of the held-out examples"), split
