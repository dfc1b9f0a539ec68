"""Collectives between nodes. The communicator counts their bytes.

The names are defined in `exogym.core.communicator`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.communicator import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
