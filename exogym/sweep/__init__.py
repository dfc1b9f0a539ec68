"""Sweeps: the same task trained with every combination of some options, and what differs between them.

`sweep` trains the cells and gives a `Swept` (`exogym.sweep.result`).
"""

from exogym.sweep.result import Swept
from exogym.sweep.run import SweepInterrupted, sweep

__all__ = ["SweepInterrupted", "Swept", "sweep"]
