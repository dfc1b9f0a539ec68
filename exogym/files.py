"""Files of a tool: written whole or not at all, and read only if they are regular files.

The names are defined in `exogym.core.base.files`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.base.files import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
