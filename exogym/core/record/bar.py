"""A run's progress bar: an observer that draws on a terminal, and prints occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from exogym.core.base.streams import STDERR
from exogym.core.progress import above_bars, notice, readable_bytes
from exogym.core.record.observers import Fields, Observer

LONGEST_SHARE = 0.01  # largest share of the time for drawing
LEAST_PAUSE_S = 0.1
LINE_PAUSE_S = 10.0  # seconds between lines if progress=True and stderr is not a terminal
SELDOM_S = 30.0  # seconds between lines if progress=None and stderr is not a terminal
LABELS = {"loss": "loss", "val_loss": "val", "val_accuracy": "acc"}
_shown: list[Bar] = []  # inside a visible bar, others stay quiet


def _text(fields: dict[str, Any]) -> str:
    parts = [f"{label} {fields[name]:.4g}" for name, label in LABELS.items() if fields.get(name) is not None]
    if fields.get("tx_bytes") is not None:
        parts.append(f"sent {readable_bytes(fields['tx_bytes'])}/node")
    return "  ".join(parts)


class Bar(Observer):
    """Shows steps, losses, bytes sent per node and the time left.

    Args:
        total_steps: the run's last step.
        wanted: the option `progress`. True and None show a bar if stderr is a terminal. Otherwise True prints a plain
            line every 10 seconds, and None every 30 seconds, so that a short run prints nothing.

    A `beat` takes about a microsecond. The bar is drawn at most ten times a second, which takes at most 1 % of the
    time.

    >>> bar = Bar(100, None)
    >>> bar.start({})
    >>> bar.beat(1, {"loss": 2.5, "val_loss": 2.4, "tx_bytes": 1e6})
    >>> bar.finish({})
    """

    def __init__(self, total_steps: int, wanted: bool | None):
        self.total_steps, self.wanted = total_steps, wanted
        self._bar: Any = None  # rich's bar, on a terminal
        self._is_seldom = False  # lines are 30 seconds apart, and none has been printed yet
        self._step: int | None = None
        self._is_new = False  # some values have not been drawn yet
        self._fields: dict[str, Any] = {}
        self._due = 0.0  # when to draw next, in seconds of time.perf_counter()

    def start(self, run: Fields) -> None:
        if _shown:
            return
        _shown.append(self)
        terminal = STDERR.isatty()
        self._is_seldom = self.wanted is None and not terminal
        if self._is_seldom:
            self._due = time.perf_counter() + SELDOM_S
        if terminal:
            self._bar = _rich_bar()
            self._task = self._bar.add_task("", total=self.total_steps, text="")
            self._bar.start()
            above_bars.append(self._print)

    def _print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def beat(self, step: int, figures: Fields) -> None:
        """Report that `step` steps are done. A missing figure keeps its last value."""
        if self not in _shown:
            return
        self._step, self._is_new = step, True
        self._fields.update(figures)
        if time.perf_counter() >= self._due:
            self._draw()

    def _draw(self) -> None:
        start, self._is_new = time.perf_counter(), False
        if self._bar is None:
            notice(f"step {self._step}/{self.total_steps}  {_text(self._fields)}".rstrip())
            self._due = start + (SELDOM_S if self.wanted is None else LINE_PAUSE_S)
            self._is_seldom = False
            return
        self._bar.update(self._task, completed=self._step, text=_text(self._fields), refresh=True)
        end_s = time.perf_counter()
        self._due = end_s + max(LEAST_PAUSE_S, (end_s - start) / LONGEST_SHARE)

    def finish(self, summary: Fields) -> None:
        if self not in _shown:
            return
        if self._is_new and not self._is_seldom:
            self._draw()
        if self._bar is not None:
            self._bar.stop()
            above_bars.remove(self._print)
        _shown.remove(self)


def _rich_bar() -> Any:
    from rich.console import Console, ConsoleDimensions
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
    return Progress(*columns, console=Narrower(file=STDERR), auto_refresh=False, redirect_stdout=sys.stdout.isatty())
