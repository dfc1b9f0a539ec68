"""Recommend a strategy for a model and a network.

The names are defined in `exogym.study.advise`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.study.advise import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
