"""Engines: they start a run's processes, on this machine, on hosts or on Ray.

The names are defined in `exogym.core.engine`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.clusters.ray import *  # noqa: F403
    from exogym.core.engine import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
