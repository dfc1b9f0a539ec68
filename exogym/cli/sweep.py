"""`exogym sweep`: train a task with every combination of some options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.compare import asked_in, of_a_study, show
from exogym.cli.values import INTERRUPTED, Debug, check_dataset, processes_of
from exogym.options import placed
from exogym.progress import notice
from exogym.study.sweep import SweepInterrupted
from exogym.study.sweep import sweep as run_sweep
from exogym.study.sweep.run import estimate as estimate_of_sweep


@of_a_study
def sweep(
    context: typer.Context,
    axes: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="An option and its values. Repeatable. Options of the run are strategy, nodes, steps, batch_size, lr, "
            "partition, network, step_seconds, and others such as precision and compute. All other names are options "
            "of the strategy. With --search, also a range such as lr=1e-4..1e-1.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="New folder for the sweep or, with --resume, the sweep to resume.")
    ],
    strategy: Annotated[
        str, typer.Option(help="Strategy of all cells unless it is swept, such as 'diloco:outer_lr=0.5'.")
    ] = "diloco",
    seeds: Annotated[int, typer.Option(help="Number of runs per cell, each with other initial weights.")] = 3,
    processes: Annotated[
        str,
        typer.Option(
            metavar="P", help="Runs to train at the same time, or auto: one per core if memory allows, one on a GPU."
        ),
    ] = "auto",
    engine: Annotated[str | None, typer.Option(help="'ray' trains the runs as tasks on a Ray cluster.")] = None,
    search: Annotated[int | None, typer.Option(metavar="N", help="Train only N cells, which optuna proposes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted sweep in the --out folder.")] = False,
    debug: Debug = False,
) -> None:
    """Train a task with all combinations of the given option values, each with several seeds.

    Prints a table (mean ± standard deviation across seeds) and the best cell, and writes sweep.json, summary.csv,
    sweep.png and a folder for each run. To resume an interrupted sweep, add --resume to the same command.
    """
    own = {"axes": axes, "engine": engine, "processes": processes_of(processes)}
    given = placed(asked_in(context)) | own
    check_dataset(given["problem"])
    if context.params["estimate"]:
        print(estimate_of_sweep(**given))
        return
    try:
        result = run_sweep(**given, out=out, resume=resume, progress=True)
    except SweepInterrupted as stopped:
        notice(
            f"{stopped}".partition(";")[0]
            + f"; to continue: the same command with --resume --out {shlex.quote(str(out))}"
        )
        raise typer.Exit(INTERRUPTED) from stopped
    show(result)
