"""The ways of computing local steps, by the names that `fit(compute=)` takes; a further one is an entry here.

Each is loaded when a run asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from exogym.core.compute.spans import Compute

WAYS = {"loop": "Loop", "vmap": "way", "compiled": "way", "graphs": "way"}  # module of this folder: what makes it


def way_of(name: str) -> Callable[..., Compute]:
    """Return what makes a way of computing: `way(worker, stream, inner, watch, bucket_bytes=None) -> Compute`.

    >>> way_of("loop").__name__
    'Loop'
    """
    return getattr(importlib.import_module(f"exogym.core.compute.{name}"), WAYS[name])
