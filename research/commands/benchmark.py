"""`python -m research benchmark`: measure all methods on this machine and write a page with the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.values import INTERRUPTED, Debug, numbers_of, processes_of
from exogym.core.progress import notice
from exogym.errors import ArgumentError, check_choice, needs
from exogym.network import readable_seconds
from exogym.study.compare.entries import split_strategies
from exogym.study.compare.summary import SINGLE
from exogym.study.tasks import Data
from research.benchmark import FULL, SHORT, Results, Scope, parts_of
from research.benchmark.page import write
from research.benchmark.speed import seconds_of_turns
from research.commands import atlas
from research.commands.reproduce import PAGE_HELP, SHORT_SHARE, Device, OnlyPage, Out, Processes, Short, Teller
from research.reproduce import Reproduction
from research.reproduce.claim import SEEDS
from research.reproduce.training import different

PAGE = "benchmark.md"
AtlasPage = Annotated[Path, typer.Option(metavar="FILE", help="The atlas's page; its results are beside it as .json.")]
Hours = Annotated[float | None, typer.Option(metavar="H", min=0, help="Stop after this time.")]
RunsAtOnce = Annotated[str, typer.Option("--processes", metavar="P", help="Runs at the same time, or auto.")]
app = typer.Typer(help="Measure bytes, quality and speed of every method.")


@app.callback(invoke_without_command=True)
def benchmark(
    ctx: typer.Context,
    trials: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Tune each method with K trials, and write the atlas: see docs/runs.md."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="All strategies, 2 to 64 nodes, also MNIST, and CIFAR-10 with --data. Takes hours."
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Tasks: {', '.join(FULL.tasks)}. [default: {','.join(SHORT.tasks)}]"),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="LIST", help="Numbers of nodes. [default: 2,4,8]")] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Strategies, as in exogym compare. Without --trials, single and ddp are always added.",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="The file cifar10.npz, or its folder.")] = None,
    out: Out = Path("runs/benchmark"),
    page: Annotated[Path | None, typer.Option(metavar="FILE", help=PAGE_HELP.format(PAGE))] = None,
    only_page: OnlyPage = False,
    steps: Annotated[
        int | None, typer.Option(metavar="S", min=1, help="Steps of each run; only with --trials.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(metavar="H", min=0, help="Stop after this time; only with --trials.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Measure examples per second again. Nothing else should run.")
    ] = False,
    short: Short = False,
    processes: Processes = "1",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Measure the bytes, quality and speed of each method for several numbers of nodes, and write a page.

    The command first prints how long it will take: without options, less than an hour on two idle cores. Each finished
    run is saved. After Ctrl-C the same command continues and trains no finished run again.

    With --trials, all methods are tuned alike. Then --tasks may name digits, digits-iid, characters, speakers,
    pictures and clients, or a task for judging advice: tumors, cars, roles, words, strokes, spoken. --processes is then
    the number of runs that train at the same time.
    """
    if ctx.invoked_subcommand is not None:
        return
    atlas.check_options(trials, full=full, short=short, data=data, throughput=throughput, steps=steps, hours=hours)
    if trials is not None:
        atlas.train(
            trials, tasks, nodes, strategies, steps, hours, out, page, only_page, processes_of(processes), device
        )
        return
    scope = _scope(full, tasks, nodes, strategies)
    command = _command(full, short, tasks=tasks, nodes=nodes, strategies=strategies, data=data)
    if page is None:
        page = out / ("short.md" if short else PAGE)
    elif short:
        raise ArgumentError(
            "--short proves nothing about a method, so it writes no --page: leave out --short or --page"
        )
    if page.suffix != ".md":
        raise ArgumentError(f"--page={str(page)!r} should end in .md, as docs/{PAGE}")
    needs("matplotlib", "demo")
    results = Results(page.with_suffix(".json"))
    if only_page:
        if not results.parts:
            raise ArgumentError(f"{results.path} does not exist: train first, without --only-page")
        write(results.found, page)
        print(f"written: {page}")
        return
    files: dict[str, Data] = {"cifar10": data}
    work = Reproduction(
        out, seeds=SEEDS[:1] if short else SEEDS, share=SHORT_SHARE if short else 1.0, data=files,
        processes=processes_of(processes), device=device, watch=Teller(),
    )  # fmt: skip
    parts = parts_of(scope, work, files, lambda why: notice(f"left out: {why}"))
    if not parts:
        raise ArgumentError(f"none of the tasks {', '.join(scope.tasks)} can be trained: see the lines above")
    for method in scope.methods if strategies is not None else ():
        if not any(method in part.cells for part in parts):
            raise ArgumentError(f"--strategies: none of the tasks can train {method!r}: see the lines above")
    cells = different(cell for part in parts for cell in part.cells.values())
    left = sum(len(work.missing(cell)) for cell in cells)
    if left:
        span = readable_seconds(work.seconds_left(cells))
        notice(f"{left} of {len(cells) * len(work.seeds)} runs left to train, about {span} in one process")
    try:
        for part in parts:
            work.train([part], of=parts)
            print(f"{part.name}: {results.add(part, work, command)}")
            write(results.found, page)
        untimed = [part for part in parts if throughput or not results.is_timed(part)]
        if untimed:
            span = readable_seconds(sum(seconds_of_turns(part, work) for part in untimed))
            notice(f"measuring examples per second for about {span}: nothing else should run here")
        for part in untimed:
            results.time(part, work, command)
            write(results.found, page)
    except KeyboardInterrupt:
        at = {"out": out, "page": page, "processes": processes, "device": device}
        defaults = {"page": out / ("short.md" if short else PAGE), "processes": "1", "device": "auto"}
        options = [f"--{name} {value}" for name, value in at.items() if value != defaults.get(name)]
        notice(f"to continue: {' '.join([command, *options])}")
        raise typer.Exit(INTERRUPTED) from None
    print(f"written: {page}")


@app.command("add")
def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of other runs, as atlas.json.")],
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Page to write; the results go beside it as .json.")
    ] = Path("runs/atlas/atlas.md"),
    debug: Debug = False,
) -> None:
    """Merge results of python -m research benchmark --trials from other machines into a page."""
    atlas.add(files, page)


@app.command("confirm")
def confirm(
    page: AtlasPage = Path("runs/atlas/atlas.md"),
    out: Out = Path("runs/benchmark"),
    hours: Hours = None,
    processes: RunsAtOnce = "1",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train the findings of the atlas again with five fresh seeds, and write the page with the verdicts."""
    atlas.confirm(page, out, hours, processes_of(processes), device)


@app.command("rates")
def rates(
    page: AtlasPage = Path("runs/atlas/atlas.md"),
    out: Out = Path("runs/benchmark"),
    hours: Hours = None,
    processes: RunsAtOnce = "1",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train ten methods of the atlas again at two inner rates that all share, and write the page with their ranks."""
    atlas.rates(page, out, hours, processes_of(processes), device)


def _scope(full: bool, tasks: str | None, nodes: str | None, strategies: str | None) -> Scope:
    """Return the tasks, node counts and methods that the options name."""
    scope = FULL if full else SHORT
    if tasks is not None:
        names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",")))
        for name in names:
            check_choice("--tasks", name, FULL.tasks)
        scope = replace(scope, tasks=names)
    counts = numbers_of("--nodes", nodes)
    if counts is not None:
        if any(not n.is_integer() or n < 2 for n in counts):
            raise ArgumentError(f"--nodes={nodes!r} should be whole numbers from 2 on, as 2,4,8")
        scope = replace(scope, nodes=tuple(dict.fromkeys(map(int, counts))))
    if strategies is not None:
        named = {SINGLE: "", "ddp": "", **split_strategies(strategies)}
        scope = replace(scope, methods=tuple(named))
    return scope


def _command(full: bool, short: bool, **options: str | None) -> str:
    """Return the command with the options given."""
    words = ["python -m research benchmark", "--full" if full else "", "--short" if short else ""]
    words += [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(word for word in words if word)
