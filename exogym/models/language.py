"""The names of `exogym.home.language`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.home.language import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
