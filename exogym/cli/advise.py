"""`exogym advise`: which strategy suits a model, a fleet and a network."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from exogym.cli.compare import NETWORK_HELP
from exogym.cli.live import LiveTable, drawn
from exogym.cli.values import DATASETS, Debug, check_dataset, count_of, numbers_of, processes_of
from exogym.core.clock import DEVICES, seconds_of
from exogym.core.clock.devices import DEFAULT_UTILISATION
from exogym.core.mesh import NodeMesh
from exogym.errors import ArgumentError
from exogym.machines.remote import HostsConfig
from exogym.machines.remote.measuring import MEASURED_FILE, measure_hosts
from exogym.network import Network
from exogym.strategy.registry import STRATEGIES
from exogym.study.advise import Advice, simulate
from exogym.study.advise import advise as predict
from exogym.study.advise.failures import Failures
from exogym.study.advise.prediction import DEFAULT_STRATEGIES
from exogym.study.advise.simulation import parameters_of
from exogym.study.advise.spot import Spot
from exogym.study.compare import measured_step_s, split_strategies
from exogym.study.compare.forecast import MEASURED
from exogym.study.tasks import load_task

DEFAULT_DEVICE = "h100"
WANTED = {
    "network": "which network, --network wifi",
    "parameters": "how large the model is, --parameters 124M, or which task it is, --dataset NAME",
    "nodes": "how many nodes there are, --nodes 4",
    "step": "how long a step takes, --step-seconds 0.8, or what it computes, --flops 6e14",
}  # what there is no answer without


def advise(
    network: Annotated[str | None, typer.Option(metavar="TEXT", help=NETWORK_HELP)] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="P", help="Trainable numbers of the model, as 124M or 1.3B.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"A task instead: its model, and a step measured here. {', '.join(DATASETS)}."
        ),
    ] = None,
    own_task: Annotated[
        str | None,
        typer.Option("--task", metavar="MODULE:FUNCTION", help="Your own model: a function that returns a Task."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure these hosts first, into measured.json; see docs/real_machines.md."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="File or folder of the data, if not in the usual places.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="[default: as --speeds or the network has, or the task's]")
    ] = None,
    step_seconds: Annotated[str | None, typer.Option(metavar="S", help="Of a node's step, as 0.8 or 80ms.")] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="F", help="Operations of a node's step instead, as 6e14; on --device.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(DEVICES)}. [default: {DEFAULT_DEVICE}]")
    ] = None,
    device_utilisation: Annotated[
        float | None, typer.Option(metavar="U", help=f"Share of the device's peak. [default: {DEFAULT_UTILISATION}]")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of the nodes, as 1,1,0.5: half as fast takes twice as long.")
    ] = None,
    bytes_per_element: Annotated[
        float | None, typer.Option(metavar="B", help="On the wire: 4 for fp32, 2 for bf16. [default: 4]")
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="To choose from, as in 'ddp,diloco:H=50,streaming_diloco:H=100:bits=4'. "
            f"Names: {', '.join(sorted(STRATEGIES))}.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
    target_utilisation: Annotated[
        float, typer.Option(metavar="U", help="Share of its time that the slowest node must compute.")
    ] = 0.9,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Collectives: cheapest for the network, or recorded, as exogym does them. [default: cheapest]"
        ),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Also train each strategy for a short while; needs --dataset.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Of the simulation. [default: a quarter of the task's]")] = None,
    seeds: Annotated[int | None, typer.Option(help="Of the simulation. [default: 1]")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of a node in a step, with --dataset. [default: the task's]")
    ] = None,
    target_loss: Annotated[
        float | None, typer.Option(metavar="L", help="Of the simulation. [default: 95 % of DDP's quality]")
    ] = None,
    processes: Annotated[str | None, typer.Option(metavar="P", help="Of the simulation, or auto. [default: 1]")] = None,
    accelerators: Annotated[
        str | None,
        typer.Option(metavar="A", help="Of the whole fleet, each node having its share, as 1M: gives the goodput."),
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="T", help="Mean time between failures of one accelerator, as 8760h.")
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(metavar="T", help="From a failure until its node computes something new. [with --spot: 5min]"),
    ] = None,
    spot: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Times an hour that a spot machine (of a node) is taken away: time and money."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="P", help="Of such a machine an hour.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="T", help="With --spot: from one to the next. [default: 10min]")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A node is several devices, as 'shard=8,network=nvlink'; see docs/islands.md."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of the model; with --node, for tensor= or stages= needed.")
    ] = None,
    activation_bytes: Annotated[
        str | None,
        typer.Option(metavar="B", help="That go from a layer to the next for a node's batch, as 100M; likewise."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say which strategy suits a network.

    --network takes a preset, a bandwidth and latency, or a file that exogym doctor --measure or the self-test wrote;
    with --hosts the hosts are measured now. What was measured there of a step is used, too.

    Strategies are ranked by predicted time per step: for a model of any size by formula, from --parameters, --nodes and
    --step-seconds (or --flops); for a task, --dataset, the model is its own and a step is measured. With --simulate
    each is also trained for a short while, and ranked by the predicted time to a validation loss.
    """
    if dataset is not None and own_task is not None:
        raise ArgumentError("--dataset and --task both name a task: give one of them")
    if own_task is not None and ":" not in own_task:
        raise ArgumentError(f"--task={own_task!r} should be module:function; --dataset takes {', '.join(DATASETS)}")
    if dataset is not None:
        check_dataset(dataset)
    dataset = own_task if dataset is None else dataset
    if parameters is not None and dataset is not None:
        raise ArgumentError(f"say either {WANTED['parameters']}: not both")
    if flops is not None and step_seconds is not None:
        raise ArgumentError("--step-seconds and --flops both say how long a step takes: give one of them")
    _needs("--dataset", dataset, {"--data": data, "--batch-size": batch_size, "--simulate": simulated or None})
    of_simulations = {"--steps": steps, "--seeds": seeds, "--target-loss": target_loss, "--processes": processes}
    _needs("--simulate", simulated or None, of_simulations)
    _needs("--flops", flops, {"--device": device, "--device-utilisation": device_utilisation})
    if (spot is None) != (price is None):
        raise ArgumentError("--spot and --price go together: how often a machine is taken away, what it costs an hour")
    _needs("--node", node, {"--layers": layers, "--activation-bytes": activation_bytes})
    _needs("--spot", spot, {"--checkpoint": checkpoint})
    machines = None if spot is None else Spot(spot, price or 0.0, restart or "5min", checkpoint or "10min")
    failing = {"--accelerators": accelerators, "--mtbf": mtbf} | ({} if spot is not None else {"--restart": restart})
    lacking = [option for option, given in failing.items() if given is None]
    if 0 < len(lacking) < len(failing):
        raise ArgumentError(f"failures are said by {', '.join(failing)} together: give {' and '.join(lacking)}, too")
    failures = None
    if accelerators is not None:
        failures = Failures(count_of("--accelerators", accelerators), mtbf, restart or "5min")
    speed = numbers_of("--speeds", speeds)
    if own_task is not None:
        sys.path.insert(0, os.getcwd())  # where a module of one's own is looked for
    links = _links(network, hosts, dataset)
    work = None if flops is None else count_of("--flops", flops)
    step_s: Any = None if step_seconds == MEASURED else step_seconds
    if step_seconds is None and flops is None:
        step_s = _measured_steps(links, dataset)
    known = [nodes, None if speed is None else len(speed), None if links is None else links.num_nodes]
    told = {
        "network": network, "parameters": dataset if parameters is None else parameters,
        "nodes": next((n for n in known if n is not None), dataset),
        "step": next((text for text in (step_s, flops) if text is not None), dataset),
    }  # fmt: skip
    missing = [WANTED[name] for name, value in told.items() if value is None]
    if links is None or missing:
        raise ArgumentError("say " + "; ".join(missing))
    task = None
    if dataset is not None:
        task = load_task(dataset, data)
    count = next(number for number in [*known, None if task is None else task.num_nodes] if number is not None)
    share = DEFAULT_UTILISATION if device_utilisation is None else device_utilisation
    if simulated and task is not None:
        by_formula = {
            "--node": node,
            "--algorithm": algorithm,
            "--bytes-per-element": bytes_per_element,
            "--mtbf": mtbf,
        }
        for option, given in by_formula.items():
            if given is not None:
                raise ArgumentError(f"{option} is for formulas; a simulation does as exogym does: leave it out")
        step = (step_s or step_seconds) if work is None else seconds_of(work, device or DEFAULT_DEVICE, share)
        live = LiveTable(split_strategies(strategies), 1 if seeds is None else seeds)
        with live:
            advice = simulate(
                task, network=links, step_seconds=step, speeds=speed, num_nodes=count, max_steps=steps,
                batch_size=batch_size, seeds=1 if seeds is None else seeds, strategies=strategies,
                target_loss=target_loss, target_utilisation=target_utilisation,
                processes=processes_of(processes or "1"), watch=live.update,
            )  # fmt: skip
    else:
        step = step_s
        if step is None and work is None and task is not None:
            step = measured_step_s(task, batch_size)
        size = parameters_of(task) if task is not None else count_of("--parameters", str(parameters))
        advice = predict(
            parameters=size, num_nodes=count, network=links, step_seconds=step, speeds=speed, flops=work,
            device=device or DEFAULT_DEVICE, device_utilisation=share, strategies=list(split_strategies(strategies)),
            bytes_per_element=4 if bytes_per_element is None else bytes_per_element,
            target_utilisation=target_utilisation, algorithm=algorithm or "cheapest",
            failures=failures, node=None if node is None else NodeMesh.parse(node), layers=layers,
            activation_bytes=None if activation_bytes is None else count_of("--activation-bytes", activation_bytes),
        )  # fmt: skip
    if as_json:
        found = advice.to_dict() | ({} if machines is None else {"spot": machines.to_dict(advice, count)})
        print(json.dumps(found, indent=1))
        return
    print_advice(advice, sys.stdout)
    if machines is not None:
        print()
        _print_spot(machines, advice, count)


def _print_spot(machines: Spot, advice: Advice, num_nodes: int) -> None:
    headers, rows = machines.table(advice, num_nodes)
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for cells in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print(f"\nspot: {machines}")


def _links(network: str | None, hosts: Path | None, task: str | None) -> Network | None:
    """Return the network that is named, or that is measured on the hosts now; one that is named must be theirs."""
    if hosts is None:
        return None if network is None else Network.of(network)
    config = HostsConfig.load(hosts)
    if network is None:
        return measure_hosts(config, MEASURED_FILE, task=task)
    links = Network.of(network)
    if links.measurement is None:
        raise ArgumentError(f"--hosts measures, and --network {network} is no measurement: leave one of them out")
    links.measurement.check_hosts(config.addresses)
    return links


def _measured_steps(links: Network | None, task: str | None) -> list[float] | None:
    """Return the seconds of a step of each node, if they were measured of this task; no task: of any."""
    if links is None or links.measurement is None or links.measurement.step_s is None:
        return None
    return links.measurement.step_s if task in (None, links.measurement.task) else None


def _needs(option: str, given: object, others: Mapping[str, object]) -> None:
    """Raise ArgumentError where one of `others` is given without `option`."""
    for other, value in others.items():
        if value is not None and given is None:
            raise ArgumentError(f"{other} needs {option}: give it too, or leave {other} out")


def print_advice(advice: Advice, file: TextIO) -> None:
    """Print the ranked table, the recommendation and the assumptions: drawn where `file` is a terminal, else plain."""
    console = Console(file=file)
    if not console.is_terminal:
        print(advice, file=file)
        return
    bold = [row is advice.recommended for row in advice.rows]
    tables = drawn(*advice.table(), console.width, bold)
    console.print(*tables, *advice.notes(), sep="\n", markup=False, highlight=False)
