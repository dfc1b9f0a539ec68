"""List, load, compare and export run folders.

The names are defined in `exogym.study.runs`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import door

if TYPE_CHECKING:
    from exogym.study.runs import *  # noqa: F403
else:
    __getattr__, __dir__ = door("exogym.study.runs")
