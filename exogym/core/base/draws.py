"""Random streams: every random choice is a function of (seed, purpose, ids), never of earlier choices.

A stream is named by the run's seed, the purpose ("shuffle", "dropout", "sparta", ...) and whole numbers such as step
and node. Two processes that ask for the same stream get the same numbers. So nodes can make the same random choice
without sending bytes, and neither placement nor resuming changes a random number.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream_seed(seed: int, purpose: str, *ids: int) -> int:
    """Return the 63-bit seed of the stream (seed, purpose, *ids): a BLAKE2b hash of these values, written as text.

    >>> stream_seed(0, "shuffle", 3) == stream_seed(0, "shuffle", 3) != stream_seed(0, "shuffle", 4)
    True
    """
    text = f"{seed}/{purpose}/{'/'.join(map(str, ids))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a numpy generator at the start of the stream (seed, purpose, *ids).

    >>> numpy_generator(0, "clips", 3).random() == numpy_generator(0, "clips", 3).random()
    True
    """
    return np.random.default_rng(stream_seed(seed, purpose, *ids))
