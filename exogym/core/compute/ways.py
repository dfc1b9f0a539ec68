"""The ways of computing local steps, by the names that `fit(compute=)` takes; a further one is an entry here.

Each is loaded when a run asks for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exogym.core.compute.loop import Loop

WAYS = {"loop": "Loop", "vmap": "Vmap", "compiled": "Compiled", "graphs": "Graphs"}  # module of this folder: its class


def way_of(name: str) -> type[Loop]:
    """Return the class of a way of computing.

    >>> way_of("loop").__name__
    'Loop'
    """
    return getattr(importlib.import_module(f"exogym.core.compute.{name}"), WAYS[name])
