"""Tables in the terminal: the result of a comparison or sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from exogym.study.compare.comparison import Comparison
    from exogym.study.sweep import Swept


def print_table(result: Comparison | Swept, file: TextIO) -> None:
    """Print the verdict and table of a comparison or sweep. A terminal shows a drawn table, a file gets Markdown.

    If a terminal is too narrow for all columns, the other columns follow in tables below. Each table starts with the
    column of strategies.
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
    """Return tables that fit into `width` characters, each with an empty line after it.

    If not all columns fit, they are divided among several tables. `bold` marks the rows to print in bold.
    """
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
