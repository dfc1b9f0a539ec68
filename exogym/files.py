"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open a text file that takes the place of `path` when the block ends well, and leaves nothing when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)
