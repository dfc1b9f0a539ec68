"""Tables in the terminal: the progress of a comparison, and its result."""

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
    """Shows on stderr how far each strategy is, while the context is open.

    A terminal gets a table, redrawn at most five times a second. Other outputs get a line for each finished strategy,
    and a line every 30 seconds. Both show the time left.

    Args:
        labels: the strategies as written, in order.
        seeds: runs of each strategy.
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
        """Show a strategy's new progress."""
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
    """Print the verdict and table of a comparison or sweep. A terminal gets a drawn table, a file Markdown.

    In a terminal, columns that do not fit follow in tables below. Each table starts with the strategies.
    """
    console = Console(file=file)
    if not console.is_terminal:
        print(result.to_markdown(), file=file)
        return
    tables = drawn(*result.table(), console.width)
    said = [result.heading, "", result.finding, ""]
    console.print(*said, *tables[:-1], sep="\n", markup=False, highlight=False)


def drawn(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, bold: Sequence[bool] | None = None
) -> list[Table | str]:
    """Return tables that fit in `width`, an empty line after each. `bold` marks the rows to print in bold."""
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
    """Divide columns among tables that fit in `width`. Each table starts with column 0. Return column numbers.

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
