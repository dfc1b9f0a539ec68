"""Progress lines and notices on stderr.

The names are defined in `exogym.core.progress`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.progress import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
