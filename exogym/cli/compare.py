"""`exogym compare`: train one model under several strategies; a table, two pictures and the numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.live import LiveTable, print_table
from exogym.compare import DEFAULT_STRATEGIES, split_strategies
from exogym.compare import compare as run_comparison
from exogym.errors import ArgumentError, check_choice
from exogym.tasks import load_task

DATASETS = ("digits", "mnist", "shakespeare", "cifar10")


def compare(
    dataset: Annotated[str, typer.Option(help=f"What to train on: {', '.join(DATASETS)}.")] = "digits",
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="File or folder of the data, if not in the usual places.")
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Strategies with their options, as in 'single,ddp,diloco:H=20:outer_lr=0.5,sparta:p_sparta=0.01'. "
            "Names: single (one node alone), ddp, diloco, sparta, sparta_diloco, fedavg, demo.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
    nodes: Annotated[int | None, typer.Option(help="Nodes of the fleet. [default: the task's]")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each node. [default: the task's]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a node in a step. [default: the task's]")] = None,
    seeds: Annotated[int, typer.Option(help="How often to train, each time from other weights.")] = 3,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the inner optimizer. [default: the task's]")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="Who gets which data: iid, dirichlet:0.3, shards:2, quantity:1. [default: the task's]"
        ),
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes to train in; this version has one.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder in which the new folder NAME-TIME of results is made.")
    ] = Path("runs"),
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    """Train the same model from the same weights on the same data under several strategies, and compare.

    Prints a table and one sentence, and writes run.json, summary.csv, metrics.csv, loss_vs_steps.png and
    loss_vs_bytes.png into a new folder. Quality is DDP's validation loss over the strategy's; reduction is DDP's bytes
    over the strategy's; mean ± standard deviation over seeds.
    """
    check_choice("--dataset", dataset, DATASETS)
    if processes != 1:
        raise ArgumentError(f"--processes={processes}: this version trains in one process; leave it out")
    task = load_task(dataset, data)
    live = LiveTable(split_strategies(strategies), seeds)
    with live:
        result = run_comparison(
            task, strategies, nodes=nodes, steps=steps, batch_size=batch_size, seeds=seeds, lr=lr, partition=partition,
            device=device, out=out, watch=live.update,
        )  # fmt: skip
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")
