"""Measure throughput separately from training, because the machine's load changes over hours, but hardly in a minute.

Each method is measured once per seed, and methods take turns. So each method has a spread, and other programs slow all
methods alike.
"""

from __future__ import annotations

import time
from typing import Any

from exogym.callbacks import Every
from exogym.errors import TrainingError
from exogym.study.cells import Cell
from exogym.trainer import LocalTrainer
from research.benchmark.parts import Part
from research.reproduce import Reproduction

ROUND = 30  # steps: whole rounds of all default methods; a turn's first round warms the caches up
LEAST_S = 0.4  # seconds of a turn, which takes at least two rounds
START_S = 0.2  # seconds to start a turn, about: model, data set and nodes


def seconds_of_turns(part: Part, work: Reproduction) -> float:
    """Return the approximate number of seconds that `rates_of` takes."""
    once = (work.run_seconds(cell) / work.session(cell).setting.steps * 2 * ROUND for cell in part.cells.values())
    return len(work.seeds) * sum(START_S + max(LEAST_S, each) for each in once)


def rates_of(part: Part, work: Reproduction) -> dict[str, list[float]]:
    """Return each method's examples per second on this machine: one value per repetition, over all nodes.

    Methods that cannot be trained on the task are left out.
    """
    rates: dict[str, list[float]] = {label: [] for label in part.cells}
    for _ in work.seeds:
        for label in [*rates]:
            try:
                rates[label].append(_rate(work.session(part.cells[label]).cells()[0]))
            except TrainingError:
                del rates[label]
    return rates


def _rate(cell: Cell) -> float:
    """Return a method's examples per second, from the second round on."""
    marks: list[tuple[int, float]] = []

    def enough(loop: Any) -> bool:
        marks.append((loop.step, time.perf_counter()))
        return len(marks) > 1 and marks[-1][1] - marks[0][1] > LEAST_S

    trainer = LocalTrainer(cell.task.make_model(), cell.task.train, loss_fn=cell.loss_fn)
    options = cell.options | {"max_steps": 1000 * ROUND, "val_interval": None, "callbacks": [Every(ROUND, enough)]}
    trainer.fit(cell.strategy, **options)
    (first, start), (last, end) = marks[0], marks[-1]
    return (last - first) * cell.options["num_nodes"] * cell.options["batch_size"] / (end - start)
