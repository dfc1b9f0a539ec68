"""The claims' tasks: a character transformer with text dealt at random or by speaker, and pictures in label shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace

from exogym.data import shakespeare, speakers
from exogym.data.partition import ByKey, Partitioner
from exogym.study.tasks import Data, Task, load_task

BLOCK = 64


def characters(data: Data) -> tuple[Task, Partitioner | None]:
    """Return the task `characters`: Shakespeare's text by characters, and a GPT of 0.1M parameters.

    The task has AdamW with learning rate 3e-3, a cosine schedule, 4 nodes and 1,000 steps.
    """
    return load_task("shakespeare", data), None


def by_speaker(data: Data) -> tuple[Task, Partitioner | None]:
    """Return the task `by_speaker`. It is like `characters`, but all lines of a speaker belong to one node."""
    source = shakespeare(data, block_size=BLOCK, stride=BLOCK // 2, val_windows=1)
    who = speakers(source.text)[:: BLOCK // 2][: len(source.train)]
    return load_task("shakespeare", data, block_size=BLOCK), ByKey(who)


def pictures(data: Data) -> tuple[Task, Partitioner | None]:
    """Return the task `pictures`: MNIST in shards with two labels per node, and a small CNN of 0.05M parameters.

    The task has AdamW with learning rate 2e-3, 4 nodes and 600 steps.
    """
    return replace(load_task("mnist", data), max_steps=600, partitioner="shards:2"), None


PROBLEMS: dict[str, Callable[[Data], tuple[Task, Partitioner | None]]] = {
    "characters": characters, "by_speaker": by_speaker, "pictures": pictures,
}  # fmt: skip


def problem(name: str, data: Data = None) -> tuple[Task, Partitioner | None]:
    """Return the task `name` of this file or of `exogym.tasks`, and a partitioner object that divides its data.

    The partitioner is None if the task itself names a partitioner.

    Raises:
        ArgumentError, DataError: the name is unknown, or the data were not found.
    """
    return _loaded(name, None if data is None else os.fspath(data))


@functools.lru_cache
def _loaded(name: str, data: str | None) -> tuple[Task, Partitioner | None]:
    return PROBLEMS[name](data) if name in PROBLEMS else (load_task(name, data), None)
