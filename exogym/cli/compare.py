"""`exogym compare`: train one model under several strategies; a table, pictures and the numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.live import LiveTable, print_table
from exogym.cli.values import numbers_of, processes_of
from exogym.compare import DEFAULT_STRATEGIES, split_strategies
from exogym.compare import compare as run_comparison
from exogym.errors import ArgumentError, check_choice
from exogym.network import PRESETS
from exogym.tasks import load_task

DATASETS = ("digits", "mnist", "shakespeare", "cifar10")
NETWORK_HELP = f"Preset ({', '.join(PRESETS)}), a bandwidth and a latency as '100Mbps,20ms', or a .json file."


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
            "Names: single (one node alone), ddp, diloco, sparta, sparta_diloco, fedavg, demo, async_diloco.",
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
    processes: Annotated[str, typer.Option(metavar="P", help="Processes that share the nodes, or auto.")] = "1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    network: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"Predict the time on this network. {NETWORK_HELP}")
    ] = None,
    step_seconds: Annotated[
        str | None,
        typer.Option(metavar="S", help="Of a node's step there, as 0.08 or 80ms. [default: measured, on this machine]"),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of the nodes there, as 1,1,0.5: half as fast takes twice as long."),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(metavar="L", help="Loss whose time of arrival is predicted. [default: 95 % of DDP's quality]"),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw who computes, sends and waits in the first rounds; write traces.")
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder in which the new folder NAME-TIME of results is made.")
    ] = Path("runs"),
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    """Train the same model from the same weights on the same data under several strategies, and compare.

    Prints a table and one sentence, and writes run.json, summary.csv, metrics.csv, loss_vs_steps.png and
    loss_vs_bytes.png into a new folder. Quality is DDP's validation loss over the strategy's; reduction is DDP's bytes
    over the strategy's; mean ± standard deviation over seeds.

    With --network the table also has predicted time to the end, share of it waited, and time to the target loss; and
    loss_vs_time.png is drawn.
    """
    check_choice("--dataset", dataset, DATASETS)
    timed = {"step_seconds": step_seconds, "speeds": speeds, "target_loss": target_loss, "timeline": timeline or None}
    for name, given in timed.items():
        if given is not None and network is None:
            raise ArgumentError(f"--{name.replace('_', '-')} needs --network, for example --network wifi")
    task = load_task(dataset, data)
    live = LiveTable(split_strategies(strategies), seeds)
    with live:
        result = run_comparison(
            task, strategies, nodes=nodes, steps=steps, batch_size=batch_size, seeds=seeds, lr=lr, partition=partition,
            processes=processes_of(processes), device=device, network=network, step_seconds=step_seconds,
            speeds=numbers_of("--speeds", speeds), target_loss=target_loss, timeline=timeline, out=out,
            watch=live.update,
        )  # fmt: skip
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")
