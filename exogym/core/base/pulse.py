"""A process's pulse: a counter that shows other processes its progress.

The training loop itself increments the counter (`beat`), because a separate thread would continue to count in a process
that hangs. The pulse also holds the process's activity, which determines how long the counter may stay the same.

A thread that works alongside the training loop has its own pulse (`of_thread`), which doesn't count for the loop. If
the loop waits for this thread, the process's pulse follows the thread's pulse (`wait_for`).

`exogym.core.engine.hangs` reads pulses, also in a process that doesn't import torch, so this file imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

WORKING, STARTING, BETWEEN, WAITING = range(4)
LOOK_S = 0.25  # seconds between two looks at a pulse
BYTES = 64  # room for a pulse; the first two words of 8 bytes are used


def words_in(memory: Any, start: int = 0) -> memoryview:
    """Return the pulse at byte `start` of `memory`, as two 8-byte words: the counter and the activity."""
    return memoryview(memory)[start : start + 16].cast("Q")


_words = words_in(bytearray(16))  # the process's pulse
_thread = threading.local()  # `words`: the pulse of a thread that has its own


def _own() -> memoryview:
    """Return the pulse for which this thread's progress counts."""
    return getattr(_thread, "words", _words)


def beat() -> None:
    """Add 1 to this process's counter, as a sign of progress."""
    _own()[0] += 1


def step_taken() -> None:
    """Count a training step or a part of one. The first call ends the first step's longer time limit."""
    words = _own()
    words[0] += 1
    if words[1] == STARTING:
        words[1] = WORKING


@contextlib.contextmanager
def at(what: int) -> Iterator[None]:
    """A context, or a decorator, in which this process's activity is `what`: WORKING, STARTING, BETWEEN or WAITING."""
    words = _own()
    before = words[1]
    words[0] += 1
    words[1] = what
    try:
        yield
    finally:
        words[0] += 1
        words[1] = before


@contextlib.contextmanager
def kept_in(memory: Any, start: int = 0) -> Iterator[None]:
    """A context in which this process writes its pulse to `memory`, from byte `start`.

    Other processes can read the pulse there.
    """
    global _words
    before, _words = _words, words_in(memory, start)
    _words[1] = BETWEEN
    try:
        yield
    finally:
        _words = before


@contextlib.contextmanager
def of_thread(words: memoryview) -> Iterator[None]:
    """A context in which this thread's progress counts for the pulse `words` instead of the process's pulse."""
    words[1] = BETWEEN
    _thread.words = words
    try:
        yield
    finally:
        del _thread.words


def wait_for(done: threading.Event, words: memoryview, most_s: float = math.inf) -> bool:
    """Wait at most `most_s` seconds until a thread with the pulse `words` sets `done`. Return whether it did.

    In the meantime, this process's pulse follows the thread's activity and progress.
    """
    until, seen = time.monotonic() + most_s, -1
    with at(BETWEEN):
        while not done.is_set() and (left_s := until - time.monotonic()) > 0:
            own = _own()
            own[1] = words[1]
            if words[0] != seen:
                seen = words[0]
                own[0] += 1
            done.wait(min(LOOK_S, left_s))
    return done.is_set()
