"""`python -m research judge TABLE`: how good the advice is, on the trainings of a table."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.values import Debug
from exogym.core.progress import notice
from exogym.errors import ArgumentError
from research.atlas.page import commands
from research.atlas.table import Table
from research.commands.atlas import check_places
from research.judge.judging import cases_of
from research.judge.judging import judge as judged
from research.judge.page import summary, to_dict, write

TABLE = "a table of python -m research benchmark --trials"


def judge(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help=f"Trainings to judge on: {TABLE}.")],
    prior: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="A table of earlier runs. [default: TABLE's other tasks]")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page, FILE.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Judge all advisers on a table, print their scores, and write the page."""
    if page is not None and page.suffix != ".md":
        raise ArgumentError(f"--page={str(page)!r} should end in .md, as runs/advice.md")
    found = table_of(table, "TABLE")
    earlier = None if prior is None else table_of(prior, "--prior")
    cases = cases_of(found, earlier)
    alone = dict.fromkeys(case.place for case in cases if not case.question.earlier)
    if alone:
        notice(f"no earlier runs of other tasks for {', '.join(alone)}: beliefs there are the same for all methods")
    result = judged(cases)
    if page is not None:
        given = [word for name, value in (("--prior", prior), ("--page", page)) if value for word in (name, str(value))]
        words = ["python", "-m", "research", "judge", str(table), *given]
        train = "\n".join(commands(found, Path("runs") / f"{table.stem}.md"))
        write(result, page, shlex.join(words), f"the other tasks of `{prior or table}`", found.places, train)
    if as_json:
        print(json.dumps(to_dict(result), indent=1))
        return
    print(f"{len(result.cases)} cases of {len(result.tasks)} tasks; in {result.tied} the two best methods are tied\n")
    print(summary(result))
    print(f"best single method, in hindsight: {result.hindsight}")
    if page is not None:
        print(f"written: {page}")


def table_of(path: Path, option: str) -> Table:
    """Read the table of an option.

    Raises:
        ArgumentError: the file does not exist, or is no table of `python -m research benchmark --trials`.
    """
    if not path.exists():
        raise ArgumentError(f"{option}={str(path)!r} does not exist: give {TABLE}")
    table = Table(path)
    check_places(table, path)
    return table
