"""One-line notices and warnings during a run, printed to stderr above the progress bar, if there is one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator

from exogym.core.base.streams import STDERR, printable

# What tools use, as `exogym.progress`.
__all__ = ["GOING_ON", "STDERR", "notice", "printable", "readable_bytes", "without_notices"]

GOING_ON = "going on"  # subject of notices about resuming a stopped run
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (_PACKAGE + os.sep, contextlib.__file__, functools.__file__)
above_bars: list[Callable[[str], None]] = []  # each prints a line above a bar that is on the terminal
_silent: list[str | None] = []
_printed: set[str] = set()


@contextlib.contextmanager
def without_notices(about: str | None = None) -> Iterator[None]:
    """A context that suppresses all notices, or only those with the subject `about`.

    >>> with without_notices():
    ...     notice("going on from step 1")
    """
    _silent.append(about)
    try:
        yield
    finally:
        _silent.pop()


def notice(text: str, about: str | None = None, *, once: bool = False) -> None:
    """Print the line `exogym: text` on stderr, above the progress bar if there is one.

    ExoGym reports its own choices in this way, for example the size of a micro-batch. If `once`, a process prints the
    text only once, for example for all seeds of a comparison.
    """
    if None in _silent or about in _silent or (once and text in _printed):
        return
    if once:
        _printed.add(text)
    line = f"exogym: {text}"
    if above_bars:
        above_bars[0](line)
    else:
        print(line, file=STDERR, flush=True)


def warn(text: str) -> None:
    """Issue the warning `text` at the user's line, the first frame outside ExoGym.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("H=100 exceeds the run")
    >>> caught[0].filename == __file__
    False
    """
    frame = inspect.currentframe()
    assert frame is not None, "CPython has frames"
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    about, where = frame.f_globals, (frame.f_code.co_filename, frame.f_lineno)
    registry = about.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, *where, module=about.get("__name__"), registry=registry)


def readable_bytes(count: float) -> str:
    """Return a number of bytes as text, in a suitable unit.

    >>> readable_bytes(512), readable_bytes(3_200_000)
    ('512 B', '3.2 MB')
    """
    unit = 0 if count < 1000 else min(int(math.log10(count) // 3), 5)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[unit]}"
