"""What the benchmark trains: methods on tasks with several numbers of nodes.

All nodes together take the same number of examples per step. With more nodes, each node's batch is smaller. So a
method's loss shows what dividing the work costs, and a run with 64 nodes computes as much as a run with two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exogym.errors import ArgumentError, DataError
from exogym.strategy.registry import STRATEGIES, is_ours
from exogym.study.compare.summary import SINGLE
from exogym.study.tasks import Data
from research.reproduce import Cell, Reproduction
from research.reproduce.problems import problem

METHODS = (SINGLE, "ddp", "diloco:H=10", "diloco:H=30:outer_lr=0.7", "sparta:p_sparta=0.005", "fedavg:H=10", "demo")


@dataclass(frozen=True)
class Scope:
    """The extent of a benchmark: the tasks, numbers of nodes and methods to train.

    Attributes:
        steps: dict from task to its number of steps. Other tasks take their own number of steps.
    """

    tasks: tuple[str, ...]
    nodes: tuple[int, ...]
    methods: tuple[str, ...]
    steps: Mapping[str, int] = field(default_factory=dict)


# for `python -m research benchmark`; research/results/benchmark.md shows it
SHORT = Scope(("digits", "shakespeare"), (2, 4, 8), METHODS, {"shakespeare": 500})


def _all_methods() -> tuple[str, ...]:
    named = {method.partition(":")[0] for method in METHODS}
    others = [name for name, kind in STRATEGIES.items() if is_ours(kind)]
    return (*METHODS, *sorted({*others} - named))


# for `python -m research benchmark --full`, which takes hours
FULL = Scope(("digits", "mnist", "shakespeare", "cifar10"), (2, 4, 8, 16, 32, 64), _all_methods())


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: a task with a number of nodes. `cells` is a dict from a method's text to its cell."""

    task: str
    nodes: int
    cells: Mapping[str, Cell]

    @property
    def name(self) -> str:
        return f"{self.task}-{self.nodes}"


def parts_of(
    scope: Scope, work: Reproduction, data: Mapping[str, Data], leave_out: Callable[[str], object]
) -> list[Part]:
    """Return the parts that can be trained here, task by task.

    Args:
        data: dict from task to the file or folder of its data.
        leave_out: function that is called with the reason if a task has no data, or if a method is impossible in a
            part.
    """
    parts = []
    for name in scope.tasks:
        try:
            task, _ = problem(name, data.get(name))
        except DataError as error:
            leave_out(str(error))
            continue
        together = task.num_nodes * task.batch_size
        for nodes in scope.nodes:
            shared = {"task": name, "nodes": nodes, "batch_size": max(1, together // nodes)}
            part = Part(name, nodes, _possible(scope, shared, work, leave_out))
            if len(part.cells) > 1:
                parts.append(part)
    return parts


def _possible(
    scope: Scope, shared: Mapping[str, Any], work: Reproduction, leave_out: Callable[[str], object]
) -> dict[str, Cell]:
    """Return the methods that can be trained. Methods without rounds have a clock with equal speeds for all nodes."""
    cells = {}
    for method in scope.methods:
        kind = STRATEGIES.get(method.partition(":")[0])
        by_clock = kind is not None and kind.driven_by == "clock"
        speeds = (1.0,) * shared["nodes"] if by_clock else None
        cell = Cell(method, steps=scope.steps.get(shared["task"]), speeds=speeds, **shared)
        try:
            work.session(cell)
        except ArgumentError as error:
            leave_out(f"{shared['task']}, {shared['nodes']} nodes, {method}: {error}")
            continue
        cells[method] = cell
    return cells
