"""List, load, compare and export run folders.

The names are defined in `exogym.study.runs`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.study.runs import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
