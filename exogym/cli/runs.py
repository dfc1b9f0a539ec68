"""`exogym runs`: list, show, compare, export and remove run folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from exogym.cli.live import drawn
from exogym.cli.values import Debug
from exogym.errors import ArgumentError, check_choice
from exogym.network import readable_seconds
from exogym.progress import notice, printable, readable_bytes
from exogym.study import runs
from exogym.study.notes import Notes, read_notes, write_notes

app = typer.Typer(help="List, show, note, compare, export and remove run folders.")
Where = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that contains the runs.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name as exogym runs list shows it: NAME or PARENT/CHILD.")]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Names as exogym runs list shows them: NAME or PARENT/CHILD.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
STATES = ("running", "done", "stopped", "failed", "lost", runs.UNREADABLE)
RUNS = Path("runs")
LONGEST_LINE = 40  # of a note, in the list


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_runs()


@app.command("list")
def list_runs(
    where: Where = RUNS,
    state: Annotated[
        str | None, typer.Option(metavar="S", help=f"List only runs in this state: {', '.join(STATES)}.")
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="List only runs with this tag.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs, comparisons and sweeps, newest first. The runs of a comparison or sweep are named PARENT/CHILD.

    The columns are loss (the newest validation loss of a run, or the lowest of a comparison or sweep), sent/node (bytes
    that each node has sent), time (wall time of training) and age (time since the last heartbeat). A killed run is
    "lost". A folder with damaged files is "unreadable", and its note gives the reason.
    """
    if state is not None:
        check_choice("--state", state, STATES)
    none_yet = where == RUNS and not where.exists()
    found = [run for run in ([] if none_yet else runs.list(where)) if state in (None, run.state)]
    found = [run for run in found if tag is None or tag in run.tags]
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=1))
        return
    if not found:
        notice(f"no {'runs' if state is None and tag is None else 'such runs'} in {where}")
        return
    headers = ["run", "state", "strategy", "task", "step", "loss", "sent/node", "time", "age"]
    noted = any(run.tags or run.note or run.reason for run in found)
    _print(headers + ["tags", "note"] * noted, [
        [run.name, run.state, run.strategy or "", run.task or "", _steps(run), _number(run.loss), _bytes(run.tx_bytes),
         _seconds(run.wall_s), _seconds(runs.age_s(run))] + [",".join(run.tags), _remark(run)] * noted
        for run in found
    ])  # fmt: skip


@app.command()
def show(name: Name, where: Where = RUNS, as_json: Json = False, debug: Debug = False) -> None:
    """Show the options, progress and results of one run. --json prints its full description."""
    run = _load(where, name)
    if as_json:
        about = {"name": name, "state": run.state, "status": run.status, "summary": run.summary}
        print(json.dumps(about | {"description": run.description, "about": run.about}, indent=1, default=str))
        return
    headers, rows = runs.to_table([(name, run)])
    facts = dict(zip(headers, _texts(rows[0]), strict=True))
    notes = read_notes(run.path)
    facts |= {"tags": ", ".join(notes.tags), "note": notes.note.replace("\n", " / ")}
    facts |= {"records": str(len(run.records)), "command": " ".join(map(str, run.about.get("command") or []))}
    for key, value in run.description.items():
        if key != "model" and value is not None:
            facts[key] = json.dumps(value) if isinstance(value, dict) else str(value)
    if isinstance(strategy := run.description.get("strategy"), dict):
        options = {name: x for name, x in strategy.items() if name != "name"}
        facts["strategy"] = f"{runs.short_name(strategy)} {json.dumps(options)}"
    wide = max(map(len, facts))
    for key, value in facts.items():
        if value:
            print(printable(f"{key:<{wide}}  {value}"))


@app.command()
def note(
    name: Name,
    where: Where = RUNS,
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="New text of the note; '' removes the note.")
    ] = None,
    tag: Annotated[list[str], typer.Option("--tag", metavar="TAG", help="Add a tag. Repeatable.")] = [],  # noqa: B006
    untag: Annotated[list[str], typer.Option("--untag", metavar="TAG", help="Remove a tag. Repeatable.")] = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Set the note and tags of a run, comparison or sweep, and print them."""
    known = {run.name: run for run in runs.list(where)}
    if name not in known:
        raise ArgumentError(f"run {name!r} not found: list the runs with exogym runs list --runs {where}")
    before = read_notes(known[name].path)
    if missing := [word for word in untag if word not in before.tags]:
        raise ArgumentError(
            f"--untag={missing[0]!r} is not a tag of {name}; existing tags: {', '.join(before.tags) or 'none'}"
        )
    tags = [word for word in (*before.tags, *tag) if word not in untag]
    now = Notes(tags, before.note if text is None else text, before.title)
    if now != before:
        write_notes(known[name].path, now)
    print(printable(f"tags  {', '.join(now.tags) or 'none'}"))
    for line in now.note.split("\n") if now.note else []:
        print(printable(f"note  {line}"))


@app.command()
def compare(
    names: Names,
    where: Where = RUNS,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the plots.")] = Path("compared"),
    debug: Debug = False,
) -> None:
    """Plot the validation losses of runs, and print their results.

    Plots the losses against steps, bytes and predicted time. The name of a comparison or sweep stands for all of its
    runs.
    """
    wanted = _with_children(where, names)
    loaded = [(name, _load(where, name)) for name in wanted]
    paths = runs.draw([run for _, run in loaded], out, wanted)
    headers, rows = runs.to_table(loaded)
    _print(headers, [_texts(row) for row in rows])
    print(f"\nwritten to {out}/: {', '.join(path.name for path in paths)}")


@app.command()
def export(
    name: Name,
    to: Annotated[Path, typer.Option(metavar="FILE", help="CSV file to write.")],
    where: Where = RUNS,
    debug: Debug = False,
) -> None:
    """Write a run's records to a CSV file.

    If NAME is a comparison or sweep, writes the records of all its runs, with each row's run in the first column, run.
    """
    if to.suffix != ".csv":
        raise ArgumentError(f"--to {to} must end in .csv; for other files write exogym.runs.load(...).to_pandas()")
    names = _with_children(where, [name]) if where.is_dir() else [name]
    if not names:
        raise ArgumentError(f"{name} has no run yet: wait until its first run has started")
    run = _load(where, names[0])
    if names != [name]:
        of_all = [{"run": one.removeprefix(f"{name}/")} | row for one in names for row in _load(where, one).records]
        run = dataclasses.replace(run, path=where / name, records=of_all)
    run.to_csv(to)
    of = "" if names == [name] else f" of {len(names)} runs"
    print(f"{len(run.records)} records{of} written to {to}")


@app.command()
def remove(
    names: Names,
    where: Where = RUNS,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the folders without asking.")] = False,
    debug: Debug = False,
) -> None:
    """Delete the folders of runs, comparisons or sweeps. If one of them is running, nothing is deleted."""
    known = {run.name: run for run in runs.list(where)}
    for name in names:
        if name not in known:
            raise ArgumentError(f"run {name!r} not found: list the runs with exogym runs list --runs {where}")
        if known[name].state == "running":
            raise ArgumentError(f"{name} is running: stop it first")
    if not yes:
        if not sys.stdin.isatty():
            raise ArgumentError(f"removing {', '.join(names)} cannot be undone: pass --yes to confirm")
        typer.confirm(f"Remove {', '.join(names)}?", abort=True)
    for name in names:
        shutil.rmtree(known[name].path, ignore_errors=name.partition("/")[0] in names)
        print(f"removed {known[name].path}")


def _load(where: Path, name: str) -> runs.Run:
    return runs.load_run(where / name)


def _with_children(where: Path, names: Sequence[str]) -> list[str]:
    """Return the names. Replace each comparison and sweep by its runs."""
    known = runs.list(where)
    parents = {run.name for run in known if run.kind != "run"}
    wanted: list[str] = []
    for name in names:
        if name in parents:
            wanted += [run.name for run in known if run.name.startswith(f"{name}/")]
        else:
            wanted.append(name)
    return list(dict.fromkeys(wanted))


def _texts(row: Sequence[Any]) -> list[str]:
    name, strategy, state, step, loss, accuracy, sent, predicted, spent = row
    share = "" if accuracy is None else f"{accuracy:.1%}"
    step = "" if step is None else str(step)
    return [name, strategy or "", state, step, _number(loss), share, _bytes(sent), _seconds(predicted), _seconds(spent)]


def _remark(run: runs.Listed) -> str:
    """Return the whole reason why a run is unreadable, or the first line of its note."""
    if run.reason is not None:
        return run.reason
    first = run.note.partition("\n")[0]
    return first if len(first) <= LONGEST_LINE else f"{first[: LONGEST_LINE - 3]}..."


def _steps(run: runs.Listed) -> str:
    return "" if run.step is None else f"{run.step}/{run.total_steps}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else readable_bytes(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else readable_seconds(value)


def _print(headers: list[str], rows: list[list[str]]) -> None:
    console = Console()
    rows = [[printable(cell) for cell in cells] for cells in rows]
    if console.is_terminal:
        console.print(*drawn(headers, rows, console.width), sep="\n", markup=False, highlight=False)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for cells in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
