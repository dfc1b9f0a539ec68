"""Predict a run's time: virtual clocks of nodes on a network.

The names are defined in `exogym.core.clock`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.clock import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
