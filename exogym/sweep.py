"""Train every combination of some options.

The names are defined in `exogym.study.sweep`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.study.sweep import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
