"""`exogym sweep`: a task with every combination of some options."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.compare import NETWORK_HELP
from exogym.cli.live import print_table
from exogym.cli.values import DATASETS, INTERRUPTED, check_dataset, processes_of
from exogym.core.progress import notice
from exogym.study.sweep import SweepInterrupted
from exogym.study.sweep import sweep as run_sweep
from exogym.study.sweep.run import Ended


def sweep(
    axes: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="Values of an option; give it for several. strategy, nodes, steps, batch_size, lr, partition, network "
            "and step_seconds are the run's, any other is the strategy's. With --search also a range, lr=1e-4..1e-1.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the sweep: a new one, or with --resume its own.")],
    dataset: Annotated[
        str, typer.Option(help=f"What to train on: {', '.join(DATASETS)}, or MODULE:FUNCTION of your own.")
    ] = "digits",
    data: Annotated[str | None, typer.Option(metavar="PATH", help="File or folder of the data.")] = None,
    strategy: Annotated[str, typer.Option(help="Where it is not swept, as 'diloco:outer_lr=0.5'.")] = "diloco",
    nodes: Annotated[int | None, typer.Option(help="Nodes of the fleet. [default: the task's]")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each node. [default: the task's]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a node in a step. [default: the task's]")] = None,
    seeds: Annotated[int, typer.Option(help="How often to train each cell, each time from other weights.")] = 3,
    lr: Annotated[float | None, typer.Option(help="Inner learning rate. [default: the task's]")] = None,
    partition: Annotated[str | None, typer.Option(metavar="HOW", help="Who gets which data, as dirichlet:0.3.")] = None,
    processes: Annotated[
        str, typer.Option(metavar="P", help="Runs at once; auto: one a core, as far as memory reaches.")
    ] = "auto",
    engine: Annotated[str | None, typer.Option(help="ray: the runs are tasks of a Ray cluster.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    network: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"Predict the time on this network. {NETWORK_HELP}")
    ] = None,
    step_seconds: Annotated[str | None, typer.Option(metavar="S", help="Of a node's step there. [measured]")] = None,
    search: Annotated[
        int | None, typer.Option(metavar="N", help="Train N cells that optuna proposes, not all combinations.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted sweep, as it was.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    """Train a task with every combination of the values of some options, each from several seeds.

    Prints a table, mean ± standard deviation over seeds, and names the best cell; writes sweep.json, summary.csv and
    sweep.png, and the folder of each run. What is interrupted goes on with --resume and the same options.
    """
    check_dataset(dataset)

    def tell(run: Ended) -> None:
        loss = "failed" if run.val_loss is None else f"validation loss {run.val_loss:.4f}"
        notice(f"{run.count} of {run.total} runs: {run.cell}, seed {run.seed}: {loss}")

    try:
        result = run_sweep(
            dataset, axes, strategy=strategy, data=data, nodes=nodes, steps=steps, batch_size=batch_size, seeds=seeds,
            lr=lr, partition=partition, processes=processes_of(processes), engine=engine, device=device,
            network=network, step_seconds=step_seconds, search=search, out=out, resume=resume, watch=tell,
        )  # fmt: skip
    except SweepInterrupted as stopped:
        notice(
            f"{stopped}".partition(";")[0] + f"; to go on: the same command with --resume --out {shlex.quote(str(out))}"
        )
        raise typer.Exit(INTERRUPTED) from stopped
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")
