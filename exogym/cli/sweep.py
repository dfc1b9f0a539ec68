"""`exogym sweep`: train a task with every combination of some options."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.compare import (
    BatchOption,
    DeviceOption,
    EstimateOption,
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
from exogym.options import LONG, FitOptions, placed
from exogym.progress import notice
from exogym.study.sweep import SweepInterrupted
from exogym.study.sweep import sweep as run_sweep
from exogym.study.sweep.run import estimate as estimate_of_sweep


@also_of_runs
def sweep(
    context: typer.Context,
    axes: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="OPTION=A,B",
            help="Values of an option. Repeatable. The run's options: strategy, nodes, steps, batch_size, lr, "
            "partition, network, step_seconds, and options of runs such as precision and compute. Other names are "
            "the strategy's options. With --search also a range, as lr=1e-4..1e-1.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="New folder for the sweep, or with --resume the sweep's folder.")
    ],
    dataset: Annotated[str, typer.Option(help=f"Task: {', '.join(DATASETS)}, or your own MODULE:FUNCTION.")] = "digits",
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="The task's data: a file or folder. [default: the usual places]")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="Strategy of all cells, if not swept, as 'diloco:outer_lr=0.5'.")
    ] = "diloco",
    num_nodes: NodesOption = None,
    max_steps: StepsOption = None,
    batch_size: BatchOption = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds: runs per cell, each from other weights.")] = 3,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the inner optimizer. [default: the task's]")
    ] = None,
    partitioner: PartitionOption = None,
    val_size: ValSizeOption = None,
    val_interval: ValIntervalOption = None,
    processes: Annotated[
        str,
        typer.Option(metavar="P", help="Runs at the same time. auto: one per core, as memory allows; one on a GPU."),
    ] = "auto",
    engine: Annotated[str | None, typer.Option(help="ray trains the runs as tasks of a Ray cluster.")] = None,
    device: DeviceOption = str(FitOptions.device),
    network: NetworkOption = None,
    step_seconds: StepSecondsOption = None,
    search: Annotated[int | None, typer.Option(metavar="N", help="Train only N cells, proposed by optuna.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted sweep with its options.")] = False,
    estimate: EstimateOption = False,
    debug: Debug = False,
) -> None:
    """Train a task with every combination of some options' values, each with several seeds.

    Prints a table (mean ± standard deviation over seeds) and the best cell. Writes sweep.json, summary.csv, sweep.png
    and each run's folder. --resume with the same options continues an interrupted sweep.
    """
    check_dataset(dataset)
    given = dict(
        strategy=strategy, data=data, num_nodes=num_nodes, max_steps=max_steps, batch_size=batch_size, seeds=seeds,
        lr=lr, partitioner=partitioner, val_size=val_size, val_interval=val_interval,
        processes=processes_of(processes), engine=engine, device=device, network=network, step_seconds=step_seconds,
        search=search, **placed(options_of_runs(context)),
    )  # fmt: skip
    if estimate:
        print(estimate_of_sweep(dataset, _in_full(axes), **given))
        return
    try:
        result = run_sweep(dataset, _in_full(axes), out=out, resume=resume, progress=True, **given)
    except SweepInterrupted as stopped:
        notice(
            f"{stopped}".partition(";")[0]
            + f"; to continue: the same command with --resume --out {shlex.quote(str(out))}"
        )
        raise typer.Exit(INTERRUPTED) from stopped
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")


def _in_full(axes: list[str]) -> list[str]:
    """Return axes under the options' names in Python: "nodes=2,4" becomes "num_nodes=2,4"."""
    named = [text.partition("=") for text in axes]
    return [LONG.get(name.strip(), name) + equals + values for name, equals, values in named]
