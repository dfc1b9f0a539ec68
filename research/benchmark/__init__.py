"""The benchmark: methods on tasks with growing numbers of nodes, and the page with its results.

A `Part` is a task with a number of nodes. `research.reproduce` trains a part's cells and stores the runs.
`exogym.compare` makes a table row of each cell. `Results` holds the page's data: rows, and predictions for networks and
devices.

>>> import tempfile
>>> from pathlib import Path
>>> from research.reproduce import Reproduction
>>> scope = Scope(tasks=("digits",), nodes=(2, 4), methods=("ddp", "diloco:H=10"), steps={"digits": 20})
>>> with tempfile.TemporaryDirectory() as folder:
...     parts: list[Part] = parts_of(scope, Reproduction(folder), {}, leave_out=print)
...     results = Results(Path(folder, "page.json"))  # empty so far
>>> [(part.task, part.nodes, list(part.cells)) for part in parts]
[('digits', 2, ['ddp', 'diloco:H=10']), ('digits', 4, ['ddp', 'diloco:H=10'])]
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["FULL", "SHORT", "Part", "Results", "Scope", "parts_of"]

if TYPE_CHECKING:
    from research.benchmark.parts import FULL, SHORT, Part, Scope, parts_of
    from research.benchmark.results import Results
else:
    __getattr__, __dir__ = lazily(__name__)
