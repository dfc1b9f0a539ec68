"""A run's progress bar, one-line notices above the bar, and warnings. All these texts go to stderr."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from exogym.core.base.streams import STDERR, printable

# What tools use, as `exogym.progress`.
__all__ = ["GOING_ON", "STDERR", "notice", "printable", "readable_bytes", "without_notices"]


LONGEST_SHARE = 0.01  # largest share of the time for drawing
LEAST_PAUSE_S = 0.1
GOING_ON = "going on"  # subject of notices about resuming a stopped run
LINE_PAUSE_S = 10.0  # seconds between lines if progress=True and stderr is not a terminal
SELDOM_S = 30.0  # seconds between lines if progress=None and stderr is not a terminal
LABELS = {"loss": "loss", "val_loss": "val", "val_accuracy": "acc"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (_PACKAGE + os.sep, contextlib.__file__, functools.__file__)
_entered: list[Progress] = []  # inside a visible bar, others stay quiet
_silent: list[str | None] = []
_printed: set[str] = set()


@contextlib.contextmanager
def without_notices(about: str | None = None) -> Iterator[None]:
    """A context that suppresses notices: all notices, or only notices with the subject `about`.

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

    ExoGym reports its own choices in this way, for example a micro-batch that fits the memory. With `once`, a process
    prints the text only once, for example for all seeds of a comparison.
    """
    if None in _silent or about in _silent or (once and text in _printed):
        return
    if once:
        _printed.add(text)
    line = f"exogym: {text}"
    for progress in _entered:
        if progress._bar is not None:
            progress._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
    print(line, file=STDERR, flush=True)


def warn(text: str) -> None:
    """Issue the warning `text` at the user's own line: the first frame outside ExoGym.

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


def _text(fields: dict[str, Any]) -> str:
    parts = [f"{label} {fields[name]:.4g}" for name, label in LABELS.items() if fields.get(name) is not None]
    if fields.get("tx_bytes") is not None:
        parts.append(f"sent {readable_bytes(fields['tx_bytes'])}/node")
    return "  ".join(parts)


class Progress:
    """A context that shows steps, losses, bytes sent per node and the time left.

    Args:
        total_steps: the run's last step; None if unknown.
        progress: False shows nothing. True and None show a bar if stderr is a terminal. If stderr is no terminal, True
            prints a plain line every 10 seconds, and None every 30 seconds, so that a short run prints nothing.

    An `update` takes about a microsecond. The bar is drawn at most ten times a second, which takes at most 1 % of the
    time.

    >>> with Progress(100, progress=False) as bar:
    ...     bar.update(1, loss=2.5, val_loss=2.4, tx_bytes=1e6)
    """

    def __init__(self, total_steps: int | None = None, progress: bool | None = None) -> None:
        self.total_steps, self.wanted = total_steps, progress
        self._on = False
        self._bar: Any = None  # rich's bar, on a terminal
        self._is_seldom = False  # lines are 30 seconds apart, and none has been printed yet
        self._step: int | None = None
        self._is_new = False  # some values have not been drawn yet
        self._fields: dict[str, Any] = {}
        self._due = 0.0  # when to draw next, in seconds of time.perf_counter()

    def __enter__(self) -> Progress:
        terminal = STDERR.isatty()
        self._on = (self.wanted is None or bool(self.wanted)) and not any(bar._on for bar in _entered)
        self._step, self._is_new, self._fields, self._due = None, False, {}, 0.0
        self._is_seldom = self.wanted is None and not terminal
        if self._is_seldom:
            self._due = time.perf_counter() + SELDOM_S
        _entered.append(self)
        if self._on and terminal:
            self._bar = _rich_bar()
            self._task = self._bar.add_task("", total=self.total_steps, text="")
            self._bar.start()
        return self

    def update(self, step: int, **fields: Any) -> None:
        """Report that `step` steps are done, with any of `loss`, `val_loss`, `val_accuracy`, `tx_bytes` (per node).

        A missing field keeps its last value.
        """
        if not self._on:
            return
        self._step, self._is_new = step, True
        self._fields.update(fields)
        if time.perf_counter() >= self._due:
            self._draw()

    def _draw(self) -> None:
        start, self._is_new = time.perf_counter(), False
        if self._bar is None:
            end = "" if self.total_steps is None else f"/{self.total_steps}"
            notice(f"step {self._step}{end}  {_text(self._fields)}".rstrip())
            self._due = start + (SELDOM_S if self.wanted is None else LINE_PAUSE_S)
            self._is_seldom = False
            return
        self._bar.update(self._task, completed=self._step, text=_text(self._fields), refresh=True)
        end_s = time.perf_counter()
        self._due = end_s + max(LEAST_PAUSE_S, (end_s - start) / LONGEST_SHARE)

    def __exit__(self, *error: object) -> None:
        if self._on and self._is_new and not self._is_seldom:
            self._draw()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._on = False
        _entered.remove(self)


def _rich_bar() -> Any:
    from rich.console import Console, ConsoleDimensions
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    class Narrower(Console):
        """A console that leaves its last columns empty.

        Otherwise the "^C" that a terminal prints would wrap to a new line and leave a copy of the bar.
        """

        @property  # type: ignore[misc]
        def size(self) -> ConsoleDimensions:
            width, height = super().size
            return ConsoleDimensions(max(width - 4, 1), height)

    whole = [Column(no_wrap=True) for _ in range(2)]  # if there is little room, only the bar itself shrinks
    columns = (
        BarColumn(bar_width=20), MofNCompleteColumn(table_column=whole[0]), TimeRemainingColumn(table_column=whole[1]),
        TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    # No refreshing thread: it would disturb forks, and take time from training.
    # The user's stdout passes through the bar only if both are the same terminal.
    return Bar(*columns, console=Narrower(file=STDERR), auto_refresh=False, redirect_stdout=sys.stdout.isatty())
