"""Train one model under several strategies, and compare them.

The names are defined in `exogym.study.compare`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.study.compare import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
