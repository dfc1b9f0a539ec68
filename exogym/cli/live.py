"""Tables in the terminal: one that grows while a comparison trains, and the final one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from exogym.core.base.streams import STDERR
from exogym.core.progress import SELDOM_S, notice, readable_bytes
from exogym.network import readable_seconds

if TYPE_CHECKING:
    from exogym.study.compare import Standing
    from exogym.study.compare.comparison import Comparison
    from exogym.study.sweep import Swept

PAUSE_S = 0.2  # between drawings


class LiveTable:
    """Shows, while it is entered, how far each strategy is; on stderr.

    Where stderr is a terminal it is a table that is drawn anew, at most five times a second; elsewhere one plain line
    for each strategy that has finished, and one every 30 seconds. Both say how long all of it will still take.

    Args:
        labels: the strategies as written, in order.
        seeds: how many runs each will have.
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
            self._live = Live(console=Console(file=STDERR), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, progress: Standing) -> None:
        """Take notice of how far a strategy is."""
        self._lines[progress.label] = progress
        self._left_s = progress.left_s
        if self._live is None:
            if progress.is_last or time.perf_counter() >= self._due:
                notice(_line(progress))
                self._due = time.perf_counter() + SELDOM_S
        elif progress.is_last or time.perf_counter() >= self._due:
            self._live.update(self._table(), refresh=True)
            self._due = time.perf_counter() + PAUSE_S

    def _table(self) -> Table:
        table = Table("strategy", "seed", "step", "validation loss", "sent per node", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        table.caption, table.caption_justify = _left(self._left_s).strip(" ;"), "left"
        for label, at in self._lines.items():
            table.add_row(label, *(_cells(at) if at is not None else [f"0/{self.seeds}", "", "", ""]))
        return table


def _cells(at: Standing) -> list[str]:
    return [f"{at.run}/{at.runs}", f"{at.step}/{at.steps}", f"{at.val_loss:.4f}", readable_bytes(at.tx_bytes)]


def _left(left_s: float | None) -> str:
    return f"; about {readable_seconds(left_s)} left" if left_s else ""


def _line(at: Standing) -> str:
    sent = readable_bytes(at.tx_bytes)
    if at.is_last:
        loss = f"validation loss {at.val_loss:.4f} (of the last seed)"
        return f"{at.label} has finished: {loss}, {sent} sent per node{_left(at.left_s)}"
    where = f"seed {at.run} of {at.runs}, step {at.step} of {at.steps}"
    return f"{at.label}, {where}: validation loss {at.val_loss:.4f}, {sent} sent per node{_left(at.left_s)}"


def print_table(result: Comparison | Swept, file: TextIO) -> None:
    """Print the table of a comparison or sweep and its finding: drawn where `file` is a terminal, else as Markdown.

    Columns that a line has no room for come in tables below, each with the strategies first.
    """
    console = Console(file=file)
    if not console.is_terminal:
        print(result.to_markdown(), file=file)
        return
    tables = drawn(*result.table(), console.width)
    console.print(result.heading, "", *tables, result.finding, sep="\n", markup=False, highlight=False)


def drawn(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, bold: Sequence[bool] | None = None
) -> list[Table | str]:
    """Return tables whose lines fit in `width`, an empty line after each; the rows that are `bold` are."""
    tables: list[Table | str] = []
    for columns in _side_by_side(headers, rows, width):
        table = Table(*(headers[c] for c in columns), box=None, pad_edge=False)
        for column, c in zip(table.columns, columns, strict=True):
            column.justify = "left" if c in (0, len(headers) - 1) else "right"
            column.overflow = "fold"
        for row, is_bold in zip(rows, bold or [False] * len(rows), strict=True):
            table.add_row(*(row[c] for c in columns), style="bold" if is_bold else None)
        tables += [table, ""]
    return tables


def _side_by_side(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return the numbers of the columns of each table, the first of all in front, so that each has room in a line.

    >>> _side_by_side(["a", "bbbb", "cc"], [["1", "2", "3"]], width=9)
    [[0, 1], [0, 2]]
    """
    wide = [max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)]
    tables = [[0]]
    for column in range(1, len(wide)):
        if len(tables[-1]) > 1 and sum(wide[c] for c in [*tables[-1], column]) - 2 > width:
            tables.append([0])
        tables[-1].append(column)
    return tables
