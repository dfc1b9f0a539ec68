"""Sweeps: one task trained with every combination of some options, and a table of the results.

`sweep` trains the cells and returns a `Swept` (`exogym.study.sweep.result`).

>>> def stop(ended):
...     raise KeyboardInterrupt
>>> try:
...     result: Swept = sweep("digits", ["H=2,5"], max_steps=5, seeds=1, num_nodes=2, processes=1, watch=stop)
... except SweepInterrupted as stopped:
...     print(stopped.folder)
None
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["SweepInterrupted", "Swept", "sweep"]

if TYPE_CHECKING:
    from exogym.study.sweep.result import Swept
    from exogym.study.sweep.run import SweepInterrupted, sweep
else:
    __getattr__, __dir__ = lazily(__name__)
