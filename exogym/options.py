"""The options of `fit`: names, types, defaults and descriptions, for a tool that takes them too."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["LONG", "FitOptions", "RunOptions", "args_of", "describe", "in_full", "takes", "written_as"]

if TYPE_CHECKING:
    from exogym.core.training.options import LONG, FitOptions, RunOptions, args_of, describe, in_full, takes, written_as
else:
    __getattr__, __dir__ = lazily(__name__)
