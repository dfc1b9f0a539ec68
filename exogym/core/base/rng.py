"""Random streams: every random choice is a function of (seed, purpose, ids), never of earlier choices.

A stream is identified by the run's seed, the purpose ("shuffle", "dropout", "sparta", ...) and whole numbers such as
step and node. Processes that use the same stream get the same numbers, so nodes can make the same random choice without
sending bytes, and neither placement nor resuming changes a random number.

Commands that don't load torch use this file, so only the functions that need torch import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


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


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a CPU generator at the start of the stream (seed, purpose, *ids).

    >>> generator(0, "clips", 3).initial_seed() == stream_seed(0, "clips", 3)
    True
    """
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, purpose, *ids))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of `device`. This takes 2 us (`torch.manual_seed` takes 87 us)."""
    from exogym.core.base.devices import Device

    Device(device).seed(seed)


def seed_python(seed: int) -> None:
    """Seed Python's and numpy's global generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserved_state(device: torch.device) -> Iterator[None]:
    """A context that restores the random state of Python, numpy and torch at its end, also after an error."""
    from exogym.core.base.devices import Device

    python_state, numpy_state = random.getstate(), np.random.get_state()
    with Device(device).forked_random():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
