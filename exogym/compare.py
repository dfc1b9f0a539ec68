"""A door: `exogym.compare` hands on the names of `exogym.study.compare`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import door

if TYPE_CHECKING:
    from exogym.study.compare import *  # noqa: F403
else:
    __getattr__, __dir__ = door("exogym.study.compare")
