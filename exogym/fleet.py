"""The fleet, a run's rows of all nodes: blocks, layout and saved state.

The names are defined in `exogym.core.fleet`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.fleet import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
