"""`exogym advise --judge TABLE`: how good the advice is, on the trainings of a table."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import typer

from exogym.cli.atlas import check_places
from exogym.core.progress import notice
from exogym.errors import ArgumentError
from exogym.study.advise.judge_page import summary, to_dict, write
from exogym.study.advise.judging import cases_of, judge
from exogym.study.atlas.page import commands
from exogym.study.atlas.table import Table

OWN = ("judge", "prior", "page", "as_json", "debug")


def judged(context: typer.Context, table: Path, prior: Path | None, page: Path | None, as_json: bool) -> None:
    """Judge all advisers on a table, print their scores, and write the page.

    Raises:
        ArgumentError: an option for one network is given, or a file is missing or no table.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in OWN and source is not None and source.name == "COMMANDLINE":
            raise ArgumentError(f"{option.opts[0]} is for advice on one network: leave out {option.opts[0]} or --judge")
    if page is not None and page.suffix != ".md":
        raise ArgumentError(f"--page={str(page)!r} should end in .md, as runs/advice.md")
    found = table_of(table, "--judge")
    earlier = None if prior is None else table_of(prior, "--prior")
    cases = cases_of(found, earlier)
    alone = dict.fromkeys(case.place for case in cases if not case.question.earlier)
    if alone:
        notice(f"no earlier runs of other tasks for {', '.join(alone)}: beliefs there are the same for all methods")
    result = judge(cases)
    if page is not None:
        given = [("--judge", table), ("--prior", prior), ("--page", page)]
        words = [
            "exogym",
            "advise",
            *(str(word) for name, value in given if value is not None for word in (name, value)),
        ]
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
        ArgumentError: the file does not exist, or is no table of `exogym benchmark --trials`.
    """
    if not path.exists():
        raise ArgumentError(f"{option}={str(path)!r} does not exist: give a table of exogym benchmark --trials")
    table = Table(path)
    check_places(table, path)
    return table
