"""Compressors: quantization, top-k, error feedback and the block DCT.

The names are defined in `exogym.core.compress`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.core.compress import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
