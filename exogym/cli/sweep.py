"""`exogym sweep`: a task with every combination of some options."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.compare import (
    BatchOption,
    DeviceOption,
    NetworkOption,
    NodesOption,
    PartitionOption,
    StepSecondsOption,
    StepsOption,
    ValIntervalOption,
    ValSizeOption,
    also_of_runs,
    options_of_runs,
)
from exogym.cli.live import print_table
from exogym.cli.values import DATASETS, INTERRUPTED, Debug, check_dataset, processes_of
from exogym.core.progress import notice
from exogym.core.training.options import LONG, FitOptions
from exogym.study.sweep import SweepInterrupted
from exogym.study.sweep import sweep as run_sweep
from exogym.study.sweep.run import Ended


@also_of_runs
def sweep(
    context: typer.Context,
    axes: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="Values of an option; give it for several. strategy, nodes, steps, batch_size, lr, partition, network "
            "and step_seconds are the run's, as are precision, compute and other options that are passed on to runs; "
            "any other is the strategy's. With --search also a range, lr=1e-4..1e-1.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the sweep: a new one, or with --resume its own.")],
    dataset: Annotated[
        str, typer.Option(help=f"What to train on: {', '.join(DATASETS)}, or MODULE:FUNCTION of your own.")
    ] = "digits",
    data: Annotated[str | None, typer.Option(metavar="PATH", help="File or folder of the data.")] = None,
    strategy: Annotated[str, typer.Option(help="Where it is not swept, as 'diloco:outer_lr=0.5'.")] = "diloco",
    num_nodes: NodesOption = None,
    max_steps: StepsOption = None,
    batch_size: BatchOption = None,
    seeds: Annotated[int, typer.Option(help="How often to train each cell, each time from other weights.")] = 3,
    lr: Annotated[float | None, typer.Option(help="Inner learning rate. [default: the task's]")] = None,
    partitioner: PartitionOption = None,
    val_size: ValSizeOption = None,
    val_interval: ValIntervalOption = None,
    processes: Annotated[
        str, typer.Option(metavar="P", help="Runs at once; auto: one a core, as far as memory reaches.")
    ] = "auto",
    engine: Annotated[str | None, typer.Option(help="ray: the runs are tasks of a Ray cluster.")] = None,
    device: DeviceOption = str(FitOptions.device),
    network: NetworkOption = None,
    step_seconds: StepSecondsOption = None,
    search: Annotated[
        int | None, typer.Option(metavar="N", help="Train N cells that optuna proposes, not all combinations.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted sweep, as it was.")] = False,
    debug: Debug = False,
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
            dataset, _in_full(axes), strategy=strategy, data=data, num_nodes=num_nodes, max_steps=max_steps,
            batch_size=batch_size, seeds=seeds, lr=lr, partitioner=partitioner, val_size=val_size,
            val_interval=val_interval, processes=processes_of(processes), engine=engine, device=device, network=network,
            step_seconds=step_seconds, search=search, out=out, resume=resume, watch=tell, **options_of_runs(context),
        )  # fmt: skip
    except SweepInterrupted as stopped:
        notice(
            f"{stopped}".partition(";")[0] + f"; to go on: the same command with --resume --out {shlex.quote(str(out))}"
        )
        raise typer.Exit(INTERRUPTED) from stopped
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")


def _in_full(axes: list[str]) -> list[str]:
    """Return axes with their options' names in Python, which are longer: "nodes=2,4" is "num_nodes=2,4"."""
    named = [text.partition("=") for text in axes]
    return [LONG.get(name.strip(), name) + equals + values for name, equals, values in named]
