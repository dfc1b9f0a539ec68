"""`exogym advise`: recommend a strategy for a model, its nodes and a network."""

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
from exogym.cli.live import drawn
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
from exogym.study.compare.live import LiveTable
from exogym.study.tasks import load_task

DEFAULT_DEVICE = "h100"
WANTED = {
    "network": "the network (--network wifi)",
    "parameters": "the model's size (--parameters 124M) or a task (--dataset NAME)",
    "nodes": "the number of nodes (--nodes 4)",
    "step": "a step's time (--step-seconds 0.8) or operations (--flops 6e14)",
}  # required


def advise(
    network: Annotated[str | None, typer.Option(metavar="TEXT", help=NETWORK_HELP)] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="P", help="The model's trainable parameters, as 124M or 1.3B.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"A task with its model; ExoGym measures a step here. {', '.join(DATASETS)}."
        ),
    ] = None,
    own_task: Annotated[
        str | None,
        typer.Option("--task", metavar="MODULE:FUNCTION", help="Your own model: a function that returns a Task."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="First measure these hosts into measured.json; see docs/real_machines.md."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="The task's data: a file or folder. [default: the usual places]")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes. [default: from --speeds, the network or the task]")
    ] = None,
    step_seconds: Annotated[
        str | None, typer.Option(metavar="S", help="Time of a node's step, as 0.8 or 80ms.")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(metavar="F", help="Operations of a node's step on --device, as 6e14, instead of its time."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Device for --flops: {', '.join(DEVICES)}. [default: {DEFAULT_DEVICE}]"),
    ] = None,
    device_utilisation: Annotated[
        float | None,
        typer.Option(
            metavar="U", help=f"Share of the device's peak that a step reaches. [default: {DEFAULT_UTILISATION}]"
        ),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="The nodes' speeds, as 1,1,0.5. A node with 0.5 takes twice as long."),
    ] = None,
    bytes_per_element: Annotated[
        float | None, typer.Option(metavar="B", help="Bytes sent for each number: 4 for fp32, 2 for bf16. [default: 4]")
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Strategies to rank, as 'ddp,diloco:H=50,streaming_diloco:H=100:bits=4'. "
            f"Names: {', '.join(sorted(STRATEGIES))}.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
    target_utilisation: Annotated[
        float, typer.Option(metavar="U", help="The slowest node must compute for at least this share of the time.")
    ] = 0.9,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Algorithm of collectives: cheapest on this network, or recorded (ExoGym's own). [default: cheapest]"
        ),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Also train each strategy for some steps. Needs --dataset.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="With --simulate: steps of each node. [default: a quarter of the task's]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="With --simulate: number of seeds. [default: 1]")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With --dataset: examples per node and batch. [default: the task's]")
    ] = None,
    target_loss: Annotated[
        float | None, typer.Option(metavar="L", help="With --simulate: loss to reach. [default: 95 % of DDP's quality]")
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="P", help="With --simulate: processes that share the nodes, or auto. [default: 1]"),
    ] = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            metavar="A", help="Accelerators of all nodes together, as 1M. Predicts the goodput despite failures."
        ),
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="T", help="Mean time between failures of one accelerator, as 8760h.")
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="Time from a failure until its node computes something new. [with --spot: 5min]"
        ),
    ] = None,
    spot: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="How often per hour the provider takes a node's spot machine away. Predicts time and money.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="P", help="With --spot: price of a machine per hour.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="T", help="With --spot: time between two checkpoints. [default: 10min]")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Nodes of several devices, as 'shard=8,network=nvlink'; see docs/islands.md."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model. Required if --node has tensor= or stages=.")
    ] = None,
    activation_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="B", help="Bytes from one layer to the next for a node's batch, as 100M. Required like --layers."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Recommend a strategy for a network.

    Ranks strategies by predicted time per step. Formulas need --parameters, --nodes and --step-seconds or --flops. With
    --dataset, ExoGym takes the model from the task and measures a step. With --simulate, ExoGym also trains each
    strategy for some steps and ranks by predicted time to a validation loss.

    --network takes a preset, a bandwidth and a latency, or a file from exogym doctor --measure or the self-test. With
    --hosts, ExoGym measures the hosts first. If the file or this measurement has the time of a step, ExoGym uses it.
    """
    if dataset is not None and own_task is not None:
        raise ArgumentError("--dataset and --task both name a task: give only one")
    if own_task is not None and ":" not in own_task:
        raise ArgumentError(f"--task={own_task!r} should be module:function; --dataset takes {', '.join(DATASETS)}")
    if dataset is not None:
        check_dataset(dataset)
    dataset = own_task if dataset is None else dataset
    if parameters is not None and dataset is not None:
        raise ArgumentError("--parameters and a task both give the model's size: give only one")
    if flops is not None and step_seconds is not None:
        raise ArgumentError("--step-seconds and --flops both give a step's time: give only one")
    _needs("--dataset", dataset, {"--data": data, "--batch-size": batch_size, "--simulate": simulated or None})
    of_simulations = {"--steps": steps, "--seeds": seeds, "--target-loss": target_loss, "--processes": processes}
    _needs("--simulate", simulated or None, of_simulations)
    _needs("--flops", flops, {"--device": device, "--device-utilisation": device_utilisation})
    if (spot is None) != (price is None):
        raise ArgumentError(
            "--spot (machines lost per hour) and --price (per machine and hour) need each other: give both"
        )
    _needs("--node", node, {"--layers": layers, "--activation-bytes": activation_bytes})
    _needs("--spot", spot, {"--checkpoint": checkpoint})
    machines = None if spot is None else Spot(spot, price or 0.0, restart or "5min", checkpoint or "10min")
    failing = {"--accelerators": accelerators, "--mtbf": mtbf} | ({} if spot is not None else {"--restart": restart})
    lacking = [option for option, given in failing.items() if given is None]
    if 0 < len(lacking) < len(failing):
        raise ArgumentError(f"{', '.join(failing)} belong together: also give {' and '.join(lacking)}")
    failures = None
    if accelerators is not None:
        failures = Failures(count_of("--accelerators", accelerators), mtbf, restart or "5min")
    speed = numbers_of("--speeds", speeds)
    if own_task is not None:
        sys.path.insert(0, os.getcwd())  # so that the user's module is found
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
        raise ArgumentError("missing: " + "; ".join(missing))
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
                raise ArgumentError(f"{option} is only for formulas: leave out {option} or --simulate")
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
    """Return the named network, or measure the hosts. With both, the named measurement must belong to the hosts."""
    if hosts is None:
        return None if network is None else Network.of(network)
    config = HostsConfig.load(hosts)
    if network is None:
        return measure_hosts(config, MEASURED_FILE, task=task)
    links = Network.of(network)
    if links.measurement is None:
        raise ArgumentError(f"--network {network} is not a measurement of --hosts: leave out --network or --hosts")
    links.measurement.check_hosts(config.addresses)
    return links


def _measured_steps(links: Network | None, task: str | None) -> list[float] | None:
    """Return the measured seconds of each node's step, if they are this task's. Without a task, any task's count."""
    if links is None or links.measurement is None or links.measurement.step_s is None:
        return None
    return links.measurement.step_s if task in (None, links.measurement.task) else None


def _needs(option: str, given: object, others: Mapping[str, object]) -> None:
    """Raise ArgumentError if one of `others` is given without `option`."""
    for other, value in others.items():
        if value is not None and given is None:
            raise ArgumentError(f"{other} needs {option}: give {option} too, or leave {other} out")


def print_advice(advice: Advice, file: TextIO) -> None:
    """Print the recommendation, the ranked table and the assumptions: drawn in a terminal, as plain text in a file."""
    console = Console(file=file)
    if not console.is_terminal:
        print(advice, file=file)
        return
    bold = [row is advice.recommended for row in advice.rows]
    tables = drawn(*advice.table(), console.width, bold)
    console.print(*advice.verdict(), "", *tables, *advice.notes(), sep="\n", markup=False, highlight=False)
