"""Tables in the terminal: one that grows while a comparison trains, and the final one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from exogym.compare import Standing
from exogym.compare.comparison import Comparison
from exogym.progress import notice, readable_bytes

PAUSE_S = 0.2  # between drawings


class LiveTable:
    """Shows, while it is entered, how far each strategy is; on stderr.

    Where stderr is a terminal it is a table that is drawn anew, at most five times a second; elsewhere one plain line
    for each strategy that has finished.

    Args:
        labels: the strategies as written, in order.
        seeds: how many runs each will have.
    """

    def __init__(self, labels: Iterable[str], seeds: int) -> None:
        self.seeds = seeds
        self._lines: dict[str, Standing | None] = dict.fromkeys(labels)
        self._live: Live | None = None
        self._due = 0.0

    def __enter__(self) -> LiveTable:
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, progress: Standing) -> None:
        """Take notice of how far a strategy is."""
        self._lines[progress.label] = progress
        if self._live is None:
            if progress.is_last:
                notice(_line(progress))
        elif progress.is_last or time.perf_counter() >= self._due:
            self._live.update(self._table(), refresh=True)
            self._due = time.perf_counter() + PAUSE_S

    def _table(self) -> Table:
        table = Table("strategy", "seed", "step", "validation loss", "sent per node", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for label, at in self._lines.items():
            table.add_row(label, *(_cells(at) if at is not None else [f"0/{self.seeds}", "", "", ""]))
        return table


def _cells(at: Standing) -> list[str]:
    return [f"{at.run}/{at.runs}", f"{at.step}/{at.steps}", f"{at.val_loss:.4f}", readable_bytes(at.tx_bytes)]


def _line(at: Standing) -> str:
    sent = readable_bytes(at.tx_bytes)
    return f"{at.label} has finished: validation loss {at.val_loss:.4f} (of the last seed), {sent} sent per node"


def print_table(result: Comparison, file: TextIO) -> None:
    """Print the table of a comparison and its finding: drawn where `file` is a terminal, else as Markdown."""
    console = Console(file=file)
    if not console.is_terminal:
        print(result.to_markdown(), file=file)
        return
    headers, rows = result.table()
    table = Table(*headers, box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(result.heading, "", table, "", result.finding, sep="\n", markup=False, highlight=False)
