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

from exogym.cli.compare import NETWORK_HELP
from exogym.cli.live import drawn
from exogym.cli.values import DATASETS, Debug, check_dataset, count_of, numbers_of, processes_of
from exogym.core.clock import DEVICES
from exogym.core.clock.devices import DEFAULT_UTILISATION
from exogym.core.mesh import NodeMesh
from exogym.core.progress import notice
from exogym.errors import ArgumentError, check_number
from exogym.machines.remote import HostsConfig
from exogym.machines.remote.measuring import MEASURED_FILE, measure_hosts
from exogym.network import Network, parse_seconds
from exogym.network.units import parse_bytes
from exogym.strategy.registry import STRATEGIES
from exogym.study.advise import Advice, Failures, Piloted, Run, Spot, Work, pilot, simulate
from exogym.study.advise import advise as predict
from exogym.study.advise.answer import beside_ddp, command
from exogym.study.advise.prediction import DEFAULT_STRATEGIES
from exogym.study.advise.simulation import size_of, skew_of
from exogym.study.atlas.steps import steps_of
from exogym.study.compare import measured_step_s, split_strategies
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.forecast import MEASURED
from exogym.study.compare.live import LiveTable
from exogym.study.compare.run import session_of
from exogym.study.tasks import load_task

DEFAULT_DEVICE = "h100"
WANTED = {
    "network": "the network (--network wifi)",
    "parameters": "the model's size (--parameters 124M) or a task (--dataset NAME)",
    "nodes": "the number of nodes (--nodes 4)",
    "step": "a step's time (--step-seconds 0.8) or operations (--flops 6e14)",
}  # required
NEEDS = {  # an option -> the options that it needs, at least one of them
    **dict.fromkeys(("data", "batch_size", "simulated", "pilot_share"), ("dataset", "own_task")),
    **dict.fromkeys(("target_loss", "processes"), ("simulated", "pilot_share")),
    "seeds": ("simulated",), "out": ("pilot_share",),
    **dict.fromkeys(("device", "device_utilisation"), ("flops",)),
    "skew": ("parameters",),
    **dict.fromkeys(("layers", "activation_bytes"), ("node",)), "page": ("judge",), "prior": ("judge", "pilot_share"),
    "mtbf": ("accelerators",), "accelerators": ("mtbf",), "checkpoint": ("spot",), "restart": ("accelerators", "spot"),
}  # fmt: skip
_SIZE, _STEP = "{} and {} both give the model's size", "{} and {} both give a step's time"
APART = [  # options that exclude each other, and why
    ("dataset", "own_task", "{} and {} both name a task"),
    ("parameters", "dataset", _SIZE), ("parameters", "own_task", _SIZE), ("step_seconds", "flops", _STEP),
    *((name, other, "{} is only for formulas, not for {}") for other in ("simulated", "pilot_share") for name in (
        "node", "algorithm", "bytes_per_element", "accelerators",
    )),
    *((name, "pilot_share", "{} does not limit {}") for name in ("price", "within", "spot")),
    *(("target_utilisation", other, "{} chooses by formula, not for {}") for other in ("simulated", "pilot_share")),
    ("simulated", "pilot_share", "{} and {} both train"),
]  # fmt: skip


def advise(
    context: typer.Context,
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
        float | None,
        typer.Option(
            metavar="U",
            help="Recommend the strategy that communicates most while the slowest node computes for this share of the "
            "time, as 0.9. [default: what probably reaches DDP's loss first]",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Algorithm of collectives: cheapest on this network, or recorded (ExoGym's own). [default: cheapest; "
            "with a task recorded]"
        ),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Also train each strategy for some steps. Needs a task.")
    ] = False,
    pilot_share: Annotated[
        float | None,
        typer.Option(
            "--pilot",
            metavar="SHARE",
            help="Also train some strategies for a few steps: this share of the run's steps in all, as 0.1. Needs "
            "a task.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --pilot: keep its runs here. The same command continues them."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of each node: DDP's in your run, for the choice, its time, bytes and money; with --simulate, "
            "in the simulation. [default: the task's or 1000; with --simulate a quarter of the task's]"
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
    price: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="What a node's hour and a GB that a node sends cost, as 1.20USD/h,0.09USD/GB."
        ),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Limits of the run: a deadline, bytes on each node's line, money, as 12h,1TB/month,50USD.",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="With --simulate: number of seeds. [default: 1]")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With --dataset: examples per node and batch. [default: the task's]")
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            metavar="L",
            help="With --simulate, --pilot: loss to reach. [default: 95 % of DDP's quality; DDP's last loss]",
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="P", help="With --simulate, --pilot: processes that share the nodes. [default: 1]"),
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
            metavar="T", help="Time from a failure or loss until its node computes something new. [default: 5min]"
        ),
    ] = None,
    spot: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="How often the provider takes a node's spot machine away, as 0.05/h. Predicts the time.",
        ),
    ] = None,
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
            metavar="B", help="Bytes from one layer to the next for a node's batch, as 100MB. Required like --layers."
        ),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="Judge the advice on a table of runs instead: see docs/network.md."),
    ] = None,
    prior: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="With --judge, --pilot: a table of earlier runs. [default: with --judge the same table]",
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="With --judge: also write a page, FILE.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Recommend a strategy for a network.

    Prints the command to run, its predicted time and the reason, then a table. Ranks strategies by predicted time per
    step. Formulas need --parameters, --nodes and --step-seconds or --flops. With --dataset, ExoGym takes the model from
    the task and measures a step. With --simulate, ExoGym also trains each strategy for some steps and ranks by
    predicted time to a validation loss. With --pilot, ExoGym trains promising strategies for a few steps, and says how
    sure its choice is.

    --network takes a preset, a bandwidth and a latency, or a file from exogym doctor --measure or the self-test. With
    --hosts, ExoGym measures the hosts first. If the file or this measurement has the time of a step, ExoGym uses it.

    With --within, ExoGym recommends only strategies that keep all limits: the fastest if money is limited, the cheapest
    if time is limited and --price is given.
    """
    _check_pairs(context)
    if judge is not None:
        from exogym.cli.judge import judged

        judged(context, judge, prior, page, as_json)
        return
    if own_task is not None:
        if ":" not in own_task:
            raise ArgumentError(f"--task={own_task!r} should be module:function; --dataset takes {', '.join(DATASETS)}")
        sys.path.insert(0, os.getcwd())  # so that the user's module is found
    elif dataset is not None:
        check_dataset(dataset)
    dataset = own_task if dataset is None else dataset
    restart_s = parse_seconds(restart or "5min", "--restart")
    machines = None if spot is None else Spot(spot, restart_s, parse_seconds(checkpoint or "10min", "--checkpoint"))
    failures = None
    if accelerators is not None and mtbf is not None:
        failures = Failures(count_of("--accelerators", accelerators), parse_seconds(mtbf, "--mtbf"), restart_s)
    run = Run(None if simulated else steps, price, within, machines, skew)
    speed = numbers_of("--speeds", speeds)
    config = None if hosts is None else HostsConfig.load(hosts)
    links = _links(network, config)
    step: Any = None if step_seconds == MEASURED else step_seconds
    if flops is not None:
        share = DEFAULT_UTILISATION if device_utilisation is None else device_utilisation
        step = Work(count_of("--flops", flops), device or DEFAULT_DEVICE, share)
    elif step_seconds is None:
        step = _measured_steps(links, dataset)
    known = [
        nodes, None if speed is None else len(speed), None if links is None else links.num_nodes,
        None if config is None else config.slots,
    ]  # fmt: skip
    given = {
        "network": network or hosts, "parameters": dataset if parameters is None else parameters,
        "nodes": next((n for n in known if n is not None), dataset), "step": dataset if step is None else step,
    }  # fmt: skip
    if missing := [WANTED[name] for name, value in given.items() if value is None]:
        raise ArgumentError("missing: " + "; ".join(missing))
    task = None if dataset is None else load_task(dataset, data)
    count = next(number for number in [*known, None if task is None else task.num_nodes] if number is not None)
    names, trains = list(split_strategies(strategies)), task is not None and (simulated or pilot_share is not None)
    trained: dict[str, Any] = {
        "speeds": speed, "num_nodes": count, "max_steps": steps, "batch_size": batch_size,
        "processes": processes_of(processes or "1"), "target_loss": target_loss,
    }  # fmt: skip
    earlier = None
    if prior is not None:
        from exogym.cli.judge import table_of

        earlier = steps_of(table_of(prior, "--prior"))
    if task is not None and not simulated:
        run = replace(run, steps=steps or task.max_steps, skew=skew_of(task, count))
    predicted: dict[str, Any] = {} if trains else {
        "parameters": count_of("--parameters", str(parameters)) if task is None else size_of(task),
        "num_nodes": count, "speeds": speed, "strategies": names,
        "bytes_per_element": 4 if bytes_per_element is None else bytes_per_element,
        "target_utilisation": target_utilisation,
        "algorithm": algorithm or ("cheapest" if task is None else "recorded"), "run": run, "failures": failures,
        "node": None if node is None else NodeMesh.parse(node), "layers": layers,
        "activation_bytes": None if activation_bytes is None else parse_bytes(activation_bytes, "--activation-bytes"),
    }  # fmt: skip
    if links is None:
        assert config is not None
        if count != config.slots:
            raise ArgumentError(f"--hosts has {config.slots} nodes, wanted {count}: give the same number of nodes")
        trial: dict[str, Any] = {"network": "lan-1g", "step_seconds": step or 1.0}
        if task is not None and trains:  # raises now, before the measurement, which takes a minute
            check_number("--pilot", pilot_share or 0, least=0)
            session_of(ComparisonOptions(task, names, **trained, seeds=1 if seeds is None else seeds, **trial))
        else:
            predict(**predicted, **trial)
        links = measure_hosts(config, MEASURED_FILE, task=dataset)
        step = _measured_steps(links, dataset) if step_seconds is None and flops is None else step
    timed_step = step.seconds if isinstance(step, Work) else step or step_seconds
    piloted = None
    if pilot_share is not None and task is not None:
        piloted = pilot(
            task, network=links, share=pilot_share, step_seconds=timed_step, strategies=strategies, out=out,
            earlier=earlier, watch=_say if sys.stderr.isatty() else None, **trained,
        )  # fmt: skip
        advice = piloted.advice
    elif simulated and task is not None:
        live = LiveTable(split_strategies(strategies), 1 if seeds is None else seeds)
        with live:
            advice = simulate(
                task, network=links, step_seconds=timed_step, seeds=1 if seeds is None else seeds,
                strategies=strategies, run=run, watch=live.update, **trained,
            )  # fmt: skip
    else:
        step = measured_step_s(task, batch_size) if task is not None and step is None else step
        advice = predict(network=links, step_seconds=step, **predicted)
    best = advice.recommended
    if dataset is not None and best is not None:
        line = os.fspath(network or MEASURED_FILE)
        needed = steps if best.cost is None else math.ceil(best.cost.steps)
        shared = {"data": data, "batch_size": batch_size, "steps": best.simulated_steps or needed}
        if hosts is not None and own_task is None:
            shared["steps"] = shared["steps"] or run.steps
            words = command("wizard", task=dataset, hosts=hosts, strategy=best.strategy, measured=line, **shared)
        else:
            timed = (
                {} if node else {"network": line, **_steps_of(step if step_seconds is None else step_seconds, speed)}
            )
            words = command(
                "compare", dataset=dataset, strategies=beside_ddp(best.strategy), nodes=count, **timed, **shared,
                target_loss=target_loss,
            )  # fmt: skip
        advice = replace(advice, command=words)
    shown = advice if piloted is None else replace(piloted, advice=advice)
    if as_json:
        print(json.dumps(shown.to_dict(), indent=1))
    else:
        print_advice(shown, sys.stdout)


def _check_pairs(context: typer.Context) -> None:
    """Raise ArgumentError if an option lacks an option that it needs, or meets an option that excludes it."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = {name for name, value in context.params.items() if value is not None and value is not False}
    for name, others in NEEDS.items():
        if name in given and not given.intersection(others):
            wanted = " or ".join(names[other] for other in others)
            raise ArgumentError(f"{names[name]} needs {wanted}: give {wanted} too, or leave {names[name]} out")
    for one, other, why in APART:
        if {one, other} <= given:
            raise ArgumentError(why.format(names[one], names[other]) + ": give only one")


def _links(network: str | None, hosts: HostsConfig | None) -> Network | None:
    """Return the named network. If hosts are also given, the network must be their measurement."""
    links = None if network is None else Network.of(network)
    if links is not None and hosts is not None:
        if links.measurement is None:
            raise ArgumentError(f"--network {network} is not a measurement of --hosts: leave out --network or --hosts")
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


def _say(strategy: str, step: int, loss: float) -> None:
    notice(f"{strategy}, step {step}: validation loss {loss:.4f}")


def print_advice(advice: Advice | Piloted, file: TextIO) -> None:
    """Print the answer, the ranked table and the assumptions: drawn in a terminal, as plain text in a file."""
    console = Console(file=file)
    if not console.is_terminal:
        print(advice, file=file)
        return
    headers, rows = advice.table()
    tables = drawn(headers, rows, console.width, [cells[0].endswith(" *") for cells in rows])
    console.print(str(advice.answer), soft_wrap=True, markup=False, highlight=False)  # a broken line cannot be pasted
    console.print("", *tables, *advice.notes(), sep="\n", markup=False, highlight=False)
