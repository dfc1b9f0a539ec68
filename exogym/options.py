"""The options of `fit`: names, types, defaults and descriptions, for a tool that takes them too.

The names are defined in `exogym.core.training`: `options`, `written` and `checking`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.training.checking import *  # noqa: F403
    from exogym.core.training.options import *  # noqa: F403
    from exogym.core.training.written import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
