"""Show a comparison's progress while it trains: a table in a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from exogym.network import readable_seconds
from exogym.progress import STDERR, notice, readable_bytes

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from exogym.study.cells import Standing

PAUSE_S = 0.2  # between drawings
SELDOM_S = 30.0  # between lines, as a run's own progress


class LiveTable:
    """A context manager that shows each strategy's progress on stderr.

    In a terminal it draws a table, at most five times a second. Otherwise it prints a line for each finished strategy,
    and a line every 30 seconds. Both show the remaining time. `labels` are the strategies as written, each with `seeds`
    runs.
    """

    def __init__(self, labels: Iterable[str], seeds: int) -> None:
        self.seeds = seeds
        self._lines: dict[str, Standing | None] = dict.fromkeys(labels)
        self._live: Live | None = None
        self._due = 0.0
        self._left_s: float | None = None

    def __enter__(self) -> LiveTable:
        self._due = 0.0 if STDERR.isatty() else time.perf_counter() + SELDOM_S
        if STDERR.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=STDERR), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, progress: Standing) -> None:
        """Show a strategy's new progress."""
        self._lines[progress.label] = progress
        self._left_s = progress.left_s
        if not progress.is_last and time.perf_counter() < self._due:
            return
        if self._live is None:
            notice(_line(progress))
        else:
            self._live.update(self._table(), refresh=True)
        self._due = time.perf_counter() + (SELDOM_S if self._live is None else PAUSE_S)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table("strategy", "seed", "step", "validation loss", "sent per node", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        table.caption, table.caption_justify = left_text(self._left_s).strip(" ;"), "left"
        for label, at in self._lines.items():
            table.add_row(label, *(_cells(at) if at is not None else [f"0/{self.seeds}", "", "", ""]))
        return table


def _cells(at: Standing) -> list[str]:
    return [f"{at.run}/{at.runs}", f"{at.step}/{at.steps}", f"{at.val_loss:.4f}", readable_bytes(at.tx_bytes)]


def _line(at: Standing) -> str:
    sent = readable_bytes(at.tx_bytes)
    if at.is_last:
        loss = f"validation loss {at.val_loss:.4f} (of the last seed)"
        return f"{at.label} has finished: {loss}, {sent} sent per node{left_text(at.left_s)}"
    where = f"seed {at.run} of {at.runs}, step {at.step} of {at.steps}"
    return f"{at.label}, {where}: validation loss {at.val_loss:.4f}, {sent} sent per node{left_text(at.left_s)}"


def is_shown(progress: bool | None) -> bool:
    """Return whether to show progress. If `progress` is None, show it only in a terminal or a notebook.

    >>> is_shown(True), is_shown(False)
    (True, False)
    """
    return STDERR.isatty() or "ipykernel" in sys.modules if progress is None else bool(progress)


def left_text(left_s: float | None) -> str:
    return f"; about {readable_seconds(left_s)} left" if left_s else ""
