"""`exogym advise`: recommend a strategy for a model, its nodes and a network."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from exogym.cli.compare import NETWORK_HELP, with_library
from exogym.cli.live import drawn
from exogym.cli.values import DATASETS, Debug, check_dataset, count_of, numbers_of
from exogym.clock import DEVICES
from exogym.errors import ArgumentError
from exogym.machines.remote.measuring import MEASURED_FILE, measure_hosts
from exogym.network import Network
from exogym.remote import HostsConfig
from exogym.strategy.registry import STRATEGIES
from exogym.study.advise import Advice, Work
from exogym.study.advise import advise as predict
from exogym.study.advise.advice import beside_ddp, command
from exogym.study.advise.prediction import DEFAULT_STRATEGIES, STEPS
from exogym.study.compare import measured_step_s, split_strategies
from exogym.study.compare.forecast import MEASURED
from exogym.study.tasks import load_task, size_of, skew_of

DEFAULT_DEVICE = "h100"
WANTED = {
    "network": "the network (--network wifi)",
    "parameters": "the model's size (--parameters 124M) or a task (--dataset NAME)",
    "nodes": "the number of nodes (--nodes 4)",
    "step": "a step's time (--step-seconds 0.8) or operations (--flops 6e14)",
}  # required
TOKENS = 65_536  # of a node's step, if nothing says how long it takes
NEEDS = {
    "data": ("dataset", "own_task"), "device": ("flops", "parameters"), "skew": ("parameters",),
    "library": ("network",),
}  # at least one of them  # fmt: skip
_SIZE = "{} and {} both set the model's size"
APART = [  # options that exclude each other, and why
    ("dataset", "own_task", "{} and {} both name a task"), ("parameters", "dataset", _SIZE),
    ("parameters", "own_task", _SIZE), ("step_seconds", "flops", "{} and {} both set a step's time"),
    ("step_seconds", "device", "{} and {} both set a step's time"),
]  # fmt: skip


def advise(
    context: typer.Context,
    network: Annotated[str | None, typer.Option(metavar="TEXT", help=NETWORK_HELP)] = None,
    library: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Library whose collectives are predicted: gloo, nccl or any. [default: nccl if --device is NVIDIA's, "
            "otherwise gloo]",
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="P", help="Number of the model's trainable parameters, such as 124M or 1.3B.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Use this task's model, and time a step of it here. One of {', '.join(DATASETS)}."
        ),
    ] = None,
    own_task: Annotated[
        str | None,
        typer.Option("--task", metavar="MODULE:FUNCTION", help="Your own model, as a function that returns a Task."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hosts file whose hosts are measured first, into measured.json."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File or folder with the task's data. [default: the task's usual places]"),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes. [default: from --speeds, the network or the task]")
    ] = None,
    step_seconds: Annotated[
        str | None, typer.Option(metavar="S", help="Time of a node's step, such as 0.8 (seconds) or 80ms.")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            help="Operations of a node's step on --device, such as 6e14, instead of its time. [default: 6 per "
            f"parameter and token, for {TOKENS} tokens]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Device of each node: {', '.join(DEVICES)}. [default: {DEFAULT_DEVICE}]"),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Relative speeds of the nodes, such as 1,1,0.5 (0.5 takes twice as long)."),
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Strategies to rank, such as 'ddp,diloco:H=50,streaming_diloco:H=100:bits=4'. "
            f"Names: {', '.join(sorted(STRATEGIES))}.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Steps per node that your run would take with DDP. [default: the task's, or {STEPS}; without a step "
            "time or --flops, 20 tokens per parameter]"
        ),
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Label skew of the nodes' data: 0 if dealt at random, 0.8 if each node has two of ten labels, at most "
            "1. A task has its own.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Recommend a strategy for a network.

    Prints the command to run, its predicted time and the reason, then a table with each strategy's predicted time per
    step. Pass --parameters and --nodes to predict from formulas, which are more accurate with --step-seconds or
    --flops. With --dataset, ExoGym uses the task's model and measures a step.

    --network accepts a preset, a bandwidth and a latency, or a file from exogym doctor --measure or the self-test. With
    --hosts, ExoGym measures the hosts first. If the measurement contains the time of a step, ExoGym uses it.
    """
    _check_pairs(context)
    for name, number in (("--nodes", nodes), ("--steps", steps)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name}={number} must be a whole number of at least 1")
    if own_task is not None:
        if ":" not in own_task:
            raise ArgumentError(f"--task={own_task!r} must be module:function; --dataset accepts {', '.join(DATASETS)}")
        sys.path.insert(0, os.getcwd())  # so that the user's module is found
    elif dataset is not None:
        check_dataset(dataset)
    dataset = own_task if dataset is None else dataset
    speed = numbers_of("--speeds", speeds)
    config = None if hosts is None else HostsConfig.load(hosts)
    network = network and with_library(network, library)
    links = _links(network, config)
    step: Any = None if step_seconds == MEASURED else step_seconds
    if flops is not None:
        step = Work(count_of("--flops", flops), device or DEFAULT_DEVICE)
    elif step_seconds is None:
        step = _measured_steps(links, dataset)
    known = [
        nodes, None if speed is None else len(speed), None if links is None else links.num_nodes,
        None if config is None else config.slots,
    ]  # fmt: skip
    measured = hosts is not None or (links is not None and links.measurement is not None)
    assumed = flops is None and (device is not None or (step_seconds is None and dataset is None and not measured))
    given = {
        "network": network or hosts, "parameters": dataset if parameters is None else parameters,
        "nodes": next((n for n in known if n is not None), dataset),
        "step": True if assumed else dataset if step is None else step,
    }  # fmt: skip
    if missing := [WANTED[name] for name, value in given.items() if value is None]:
        raise ArgumentError("missing: " + "; ".join(missing))
    task = None if dataset is None else load_task(dataset, data)
    count = next(number for number in [*known, None if task is None else task.num_nodes] if number is not None)
    size = count_of("--parameters", str(parameters)) if task is None else size_of(task)
    if assumed:
        step = Work(6 * size * TOKENS, device or DEFAULT_DEVICE)
        steps = steps or max(STEPS, math.ceil(20 * size / (count * TOKENS)))
    predicted: dict[str, Any] = {
        "parameters": size, "num_nodes": count, "speeds": speed, "strategies": list(split_strategies(strategies)),
        "algorithm": "cheapest" if task is None else "recorded",
        "steps": steps or (STEPS if task is None else task.max_steps),
        "skew": skew if task is None else skew_of(task, count),
    }  # fmt: skip
    if links is None:
        assert config is not None
        if count != config.slots:
            raise ArgumentError(
                f"expected {count} nodes, but --hosts has {config.slots}: use the same number of nodes for both"
            )
        predict(network="lan-1g", step_seconds=step or 1.0, **predicted)  # raises now: measuring takes a minute
        links = measure_hosts(config, MEASURED_FILE, task=dataset)
        step = _measured_steps(links, dataset) if step_seconds is None and flops is None and not assumed else step
    step = measured_step_s(task, None) if task is not None and step is None else step
    advice = predict(network=links, step_seconds=step, **predicted)
    if assumed:
        guess = (
            f"a node's step is {TOKENS} tokens (--flops, --step-seconds), DDP's run 20 tokens per parameter (--steps)"
        )
        advice = replace(advice, assumptions=[guess, *advice.assumptions])
    best = advice.recommended
    if dataset is not None and best is not None:
        line = os.fspath(network or MEASURED_FILE)
        shared = {"data": data, "steps": best.steps}
        if hosts is not None and own_task is None:
            words = command("wizard", task=dataset, hosts=hosts, strategy=best.strategy, measured=line, **shared)
        else:
            timed = _steps_of(step if step_seconds is None else step_seconds, speed)
            words = command(
                "compare", dataset=dataset, strategies=beside_ddp(best.strategy), nodes=count, network=line, **timed,
                **shared,
            )  # fmt: skip
        advice = replace(advice, command=words)
    if as_json:
        print(json.dumps(advice.to_dict(), indent=1))
    else:
        print_advice(advice, sys.stdout)


def _check_pairs(context: typer.Context) -> None:
    """Raise ArgumentError if an option lacks an option that it needs, or meets an option that excludes it."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = {name for name, value in context.params.items() if value is not None and value is not False}
    for name, others in NEEDS.items():
        if name in given and not given.intersection(others):
            wanted = " or ".join(names[other] for other in others)
            raise ArgumentError(f"{names[name]} needs {wanted}: pass {wanted} as well, or omit {names[name]}")
    for one, other, why in APART:
        if {one, other} <= given:
            raise ArgumentError(why.format(names[one], names[other]) + ": give only one")


def _links(network: str | None, hosts: HostsConfig | None) -> Network | None:
    """Return the named network. If hosts are also given, the network must be their measurement."""
    links = None if network is None else Network.of(network)
    if links is not None and hosts is not None:
        if links.measurement is None:
            raise ArgumentError(
                f"--network {network} was not measured on the hosts of --hosts: omit --network or --hosts"
            )
        links.measurement.check_hosts(hosts.addresses)
    return links


def _measured_steps(links: Network | None, task: str | None) -> list[float] | None:
    """Return the measured seconds of each node's step, if they are this task's. Without a task, any task's count."""
    if links is None or links.measurement is None or links.measurement.step_s is None:
        return None
    return links.measurement.step_s if task in (None, links.measurement.task) else None


def _steps_of(step: Any, speeds: list[float] | None) -> dict[str, str | None]:
    """Return --step-seconds and --speeds of a command that trains with these times of a step."""
    if isinstance(step, list):  # measured on each host
        seconds = [s / v for s, v in zip(step, speeds or [1.0] * len(step), strict=True)]
        step, speeds = f"{min(seconds):.6g}", [min(seconds) / s for s in seconds]
    elif isinstance(step, Work | float):
        step = f"{step if isinstance(step, float) else step.seconds:.6g}"
    return {"step_seconds": step, "speeds": speeds and ",".join(f"{speed:.6g}" for speed in speeds)}


def print_advice(advice: Advice, file: TextIO) -> None:
    """Print the answer, the ranked table and the assumptions: drawn in a terminal, as plain text in a file."""
    console = Console(file=file)
    if not console.is_terminal:
        print(advice, file=file)
        return
    headers, rows = advice.table()
    tables = drawn(headers, rows, console.width, [cells[0].endswith(" *") for cells in rows])
    console.print(str(advice.answer), soft_wrap=True, markup=False, highlight=False)  # a broken line cannot be pasted
    console.print("", *tables, *advice.notes(), sep="\n", markup=False, highlight=False)
