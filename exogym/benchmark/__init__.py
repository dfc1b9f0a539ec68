"""The benchmark: methods on tasks, with more and more nodes, and the page that is written from what came out.

A `Part` is a task with a number of nodes; `exogym.reproduce` trains its cells and keeps them, `exogym.compare` makes
rows of them. `Results` are what the page shows: rows, and what is predicted for them on networks and devices.
"""

from exogym.benchmark.parts import FULL, SHORT, Part, Scope, parts_of
from exogym.benchmark.results import Results

__all__ = ["FULL", "SHORT", "Part", "Results", "Scope", "parts_of"]
