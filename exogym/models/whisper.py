"""The names of `exogym.home.whisper`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.home.whisper import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
