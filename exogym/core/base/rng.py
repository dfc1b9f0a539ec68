"""Random streams: every random choice is a function of (seed, purpose, ids), never of history.

A stream is named by the run's seed, the purpose ("shuffle", "dropout", "sparta", ...) and whole
numbers such as step and node. Two processes that ask for the same stream get the same numbers, so
a choice that nodes share costs no bytes, and neither placement nor resuming changes a draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *ids: int) -> int:
    """Return the 63-bit seed of the stream (seed, purpose, *ids): BLAKE2b of their text.

    >>> stream_seed(0, "shuffle", 3) == stream_seed(0, "shuffle", 3) != stream_seed(0, "shuffle", 4)
    True
    """
    text = f"{seed}/{purpose}/{'/'.join(map(str, ids))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a CPU generator at the start of the stream (seed, purpose, *ids)."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *ids))


def numpy_generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a numpy generator at the start of the stream (seed, purpose, *ids)."""
    return np.random.default_rng(stream_seed(seed, purpose, *ids))


def seed_torch(seed: int, device: torch.device) -> None:
    """Put torch's default generators of the CPU and of `device` at `seed` (1 us; `torch.manual_seed` costs 87)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def seed_python(seed: int) -> None:
    """Put Python's and numpy's global generators at `seed`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserved_state(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state (Python, numpy, torch) as it was, whatever happens inside."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
