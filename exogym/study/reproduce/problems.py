"""The claims' tasks: a character transformer, with data dealt at random or by speaker, and pictures in label shards."""

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
    """Shakespeare by characters, a GPT of 0.1M parameters; AdamW 3e-3, cosine schedule, 4 nodes, 1,000 steps."""
    return load_task("shakespeare", data), None


def by_speaker(data: Data) -> tuple[Task, Partitioner | None]:
    """The same text, each speaker's lines on one node."""
    source = shakespeare(data, block_size=BLOCK, stride=BLOCK // 2, val_windows=1)
    who = speakers(source.text)[:: BLOCK // 2][: len(source.train)]
    return load_task("shakespeare", data, block_size=BLOCK), ByKey(who)


def pictures(data: Data) -> tuple[Task, Partitioner | None]:
    """MNIST in shards with two labels per node, a small CNN of 0.05M parameters; AdamW 2e-3, 4 nodes, 600 steps."""
    return replace(load_task("mnist", data), max_steps=600, partitioner="shards:2"), None


PROBLEMS: dict[str, Callable[[Data], tuple[Task, Partitioner | None]]] = {
    "characters": characters, "by_speaker": by_speaker, "pictures": pictures,
}  # fmt: skip


def problem(name: str, data: Data = None) -> tuple[Task, Partitioner | None]:
    """Return a task by name, from here or from `exogym.tasks`, and its partitioner if that is not a text.

    Raises:
        ArgumentError, DataError: an unknown name, or data that were not found.
    """
    return _loaded(name, None if data is None else os.fspath(data))


@functools.lru_cache
def _loaded(name: str, data: str | None) -> tuple[Task, Partitioner | None]:
    return PROBLEMS[name](data) if name in PROBLEMS else (load_task(name, data), None)
