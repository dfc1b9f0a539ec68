"""A base class for wrappers of an `Algorithm`. Features that change which nodes act, or when, derive from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym.core.training.driver import Algorithm

if TYPE_CHECKING:
    Wrapped = Algorithm  # a wrapper has all methods of the interface
else:
    Wrapped = object  # but inherits none: what it does not define itself is the wrapped algorithm's


class Around(Wrapped):
    """Pass every call on to a wrapped algorithm, `within`. Subclasses define the methods that a feature changes."""

    def __init__(self, within: Algorithm):
        self.within = within

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)
