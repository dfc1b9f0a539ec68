"""Tasks: a model, its data and default options, by name.

The names are defined in `exogym.study.tasks` and `exogym.home.tasks`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.home.tasks import *  # noqa: F403
    from exogym.study.tasks import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
