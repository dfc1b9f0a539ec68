"""A door: `exogym.clock` hands on the names of `exogym.core.clock`."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import door

if TYPE_CHECKING:
    from exogym.core.clock import *  # noqa: F403
else:
    __getattr__, __dir__ = door("exogym.core.clock")
