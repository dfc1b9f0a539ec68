"""The claims' tasks: a character transformer with text dealt at random or by speaker, and pictures in label shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace

from exogym.data import shakespeare, speakers
from exogym.data.partition import ByKey, Partitioner
from exogym.errors import ArgumentError
from exogym.study.tasks import Data, Task, load_task
from research.reproduce.unseen import UNSEEN

BLOCK, WIDTH, CHANNELS = 64, 64, 8
SHRINKS = ("2", "4", "8")  # divisors of the models' widths


def characters(data: Data, shrink: int = 1) -> tuple[Task, Partitioner | None]:
    """Return the task `characters`: Shakespeare's text by characters, and a GPT of 0.1M parameters.

    The task has AdamW with learning rate 3e-3, a cosine schedule, 4 nodes and 1,000 steps. `shrink` divides the model's
    width.
    """
    return load_task("shakespeare", data, n_embd=WIDTH // shrink), None


def by_speaker(data: Data, shrink: int = 1) -> tuple[Task, Partitioner | None]:
    """Return the task `by_speaker`. It is like `characters`, but all lines of a speaker belong to one node."""
    source = shakespeare(data, block_size=BLOCK, stride=BLOCK // 2, val_windows=1)
    who = speakers(source.text)[:: BLOCK // 2][: len(source.train)]
    return load_task("shakespeare", data, block_size=BLOCK, n_embd=WIDTH // shrink), ByKey(who)


def pictures(data: Data, shrink: int = 1) -> tuple[Task, Partitioner | None]:
    """Return the task `pictures`: MNIST in shards with two labels per node, and a small CNN of 0.05M parameters.

    The task has AdamW with learning rate 2e-3, 4 nodes and 600 steps.
    """
    return replace(load_task("mnist", data, width=CHANNELS // shrink), max_steps=600, partitioner="shards:2"), None


PROBLEMS: dict[str, Callable[[Data, int], tuple[Task, Partitioner | None]]] = {
    "characters": characters, "by_speaker": by_speaker, "pictures": pictures,
    **UNSEEN,
}  # fmt: skip


def problem(name: str, data: Data = None) -> tuple[Task, Partitioner | None]:
    """Return the task `name` of this file or of `exogym.tasks`, and a partitioner object that divides its data.

    The partitioner is None if the task itself names a partitioner. "characters/2" is a task of this file whose model
    has half the width.

    Raises:
        ArgumentError, DataError: the name is unknown, or the data were not found.
    """
    return _loaded(name, None if data is None else os.fspath(data))


@functools.lru_cache
def _loaded(name: str, data: str | None) -> tuple[Task, Partitioner | None]:
    base, _, shrink = name.partition("/")
    if base not in PROBLEMS:
        return load_task(name, data), None
    if shrink not in ("", *SHRINKS):
        raise ArgumentError(f"task {name!r}: {base}/W divides the model's width by W, one of {', '.join(SHRINKS)}")
    return PROBLEMS[base](data, int(shrink or 1))
