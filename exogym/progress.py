"""A door: `exogym.progress` hands on the names of `exogym.core.progress`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import door

if TYPE_CHECKING:
    from exogym.core.progress import *  # noqa: F403
else:
    __getattr__, __dir__ = door("exogym.core.progress")
