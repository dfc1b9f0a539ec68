"""Random streams: each is named by a seed, a purpose and whole numbers, and is the same in every process."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["generator", "numpy_generator"]

if TYPE_CHECKING:
    from exogym.core.base.rng import generator, numpy_generator
else:
    __getattr__, __dir__ = lazily(__name__)
