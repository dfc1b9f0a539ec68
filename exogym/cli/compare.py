"""`exogym compare`: train one model under several strategies, print a table, draw curves, and save the numbers."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from exogym.cli.live import print_table
from exogym.cli.values import DATASETS, INTERRUPTED, Debug, check_dataset, numbers_of
from exogym.errors import ArgumentError
from exogym.network import PRESETS
from exogym.options import FitOptions, Placement, RunOptions, descriptions, in_full, placed
from exogym.progress import notice
from exogym.strategy.registry import STRATEGIES
from exogym.study.compare import DEFAULT_STRATEGIES, ComparisonInterrupted
from exogym.study.compare import compare as run_comparison
from exogym.study.compare.asked import PASSED_AS_TEXT
from exogym.study.compare.comparison import Comparison
from exogym.study.compare.estimate import estimate as estimate_of_comparison
from exogym.study.compare.folder import OPTION, named_again, resume_command, saved_in
from exogym.study.sweep import Swept

NETWORK_HELP = (
    f"A preset ({', '.join(PRESETS)}), a bandwidth and a latency ('100Mbps,20ms'), a bandwidth per node and a latency "
    "('1Gbps,1Gbps,50Mbps:10ms'), or a .json file."
)

# Options of a command that are no arguments in Python; a sweep's engine is not that of a run's placement.
OF_THE_COMMAND = ("dataset", "axes", "engine", "out", "resume", "estimate", "library", "debug")
LISTS = ("seeds", "speeds", "step_seconds")  # arguments that may be lists of numbers in a folder


def with_library(network: str, library: str | None) -> str:
    """Return the text of a network with a library.

    Raises:
        ArgumentError: the network is a file.

    >>> with_library("wifi", "nccl"), with_library("wifi", None)
    ('wifi,library=nccl', 'wifi')
    """
    if library is not None and network.endswith(".json"):
        raise ArgumentError(f'--library {library} with --network {network}: write "library": "{library}" into the file')
    return network if library is None else f"{network},library={library}"


def words_of(name: str) -> str:
    """Return the first sentence of an option's description.

    >>> words_of("num_nodes")
    'Number of nodes, N.'
    """
    return {**descriptions(Placement), **descriptions(FitOptions)}[name].partition(". ")[0].rstrip(".") + "."


def _option(kind: Any, default: Any, text: str, *flags: str, metavar: str | None = None) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*flags, metavar=metavar, help=text)], default


# The options that compare and sweep share, named as in `fit`: each with its type and its default.
SHARED = {
    "dataset": _option(str, "digits", f"Task to train: {', '.join(DATASETS)}, or your own MODULE:FUNCTION."),
    "data": _option(
        str | None, None, "File or folder with the task's data. [default: the task's usual places]", metavar="PATH"
    ),
    "num_nodes": _option(int | None, None, f"{words_of('num_nodes')} [default: the task's]", "--nodes"),
    "max_steps": _option(int | None, None, "Steps per node. [default: the task's]", "--steps"),
    "batch_size": _option(int | None, None, "Examples per node and batch. [default: the task's]"),
    "lr": _option(float | None, None, "Learning rate of the inner optimizer. [default: the task's]"),
    "partitioner": _option(
        str | None, None,
        f"{words_of('partitioner')} One of iid, dirichlet:0.3, shards:2, quantity:1. [default: the task's]",
        "--partition", metavar="HOW",
    ),
    "val_size": _option(int | None, None, f"{words_of('val_size')} [default: 500]"),
    "val_interval": _option(int | None, None, "Steps between evaluations. [default: chosen for 10 to 30 evaluations]"),
    "device": _option(str, str(FitOptions.device), words_of("device")),
    "network": _option(str | None, None, f"{words_of('network')} {NETWORK_HELP}", metavar="TEXT"),
    "step_seconds": _option(
        str | None, None,
        "Time of a node's step for predictions, such as 0.08 (seconds) or 80ms. [default: measured on this machine]",
        metavar="S",
    ),
    "estimate": _option(
        bool, False, "Train each strategy for about a second, and only print the time and memory needed.", "--estimate"
    ),
}  # fmt: skip


def of_a_study(command: Callable[..., None]) -> Callable[..., None]:
    """Add to a command the options that compare and sweep share, and the options of runs that text can express.

    The command reads the added options in its context.
    """
    own, plain = inspect.signature(command, eval_str=True).parameters, RunOptions().values()
    of_runs = {
        name: _option(kind if kind is bool else kind | None, plain[name], words_of(name))
        for name, kind in PASSED_AS_TEXT.items()
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in (SHARED | of_runs).items()
    ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(**{name: given[name] for name in own})

    everything = [*(one.replace(kind=keyword) for one in own.values()), *added]
    call.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    return call


def asked_in(context: typer.Context) -> dict[str, Any]:
    """Return a study's options on a command line, under their names in Python. Options of the command are left out."""
    given = {name: value for name, value in context.params.items() if name not in OF_THE_COMMAND}
    return given | {"problem": context.params["dataset"]}


@of_a_study
def compare(
    context: typer.Context,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Strategies with their options, such as 'single,ddp,diloco:H=20:outer_lr=0.5,sparta:p_sparta=0.01'. "
            f"Names: single (one node alone), {', '.join(sorted(STRATEGIES))}.",
        ),
    ] = ",".join(DEFAULT_STRATEGIES),
    seeds: Annotated[int, typer.Option(help="Number of runs per strategy, each with other initial weights.")] = 3,
    processes: Annotated[int, typer.Option(metavar="P", help=words_of("processes"))] = FitOptions.processes,
    speeds: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="With --network: relative speeds of the nodes, such as 1,1,0.5 (0.5 takes twice as long).",
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --network: library whose collectives are predicted: gloo, nccl or any."
        ),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(metavar="L", help="Loss to which bytes and time are reported. [default: DDP's final loss / 0.95]"),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder in which the results get a new folder NAME-TIME.")
    ] = Path("runs"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the interrupted comparison in the --out folder, with its original options."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train one model under several strategies, from the same weights and on the same data, and compare the results.

    Prints a verdict and a table, and writes run.json, summary.csv, metrics.csv and the plots loss_vs_steps and
    loss_vs_bytes (.png, .svg) to a new folder. Quality is DDP's validation loss divided by the strategy's, and
    reduction is DDP's bytes divided by the strategy's. All numbers are mean ± standard deviation across seeds.

    With --network, the table also shows the predicted total time, the share of this time spent waiting, and the
    predicted time to the target loss. The command then plots loss_vs_time, too.

    Every finished run is saved in its own folder, so Ctrl-C or a crash loses only the current run, and --resume trains
    the others. --dataset MODULE:FUNCTION names your function that returns an exogym.tasks.Task; the module may be in
    the current folder.
    """
    given = asked_in(context) | {"speeds": numbers_of("--speeds", speeds)}
    if library is not None and given["network"] is None:
        raise ArgumentError("--library needs --network, for example --network wifi")
    given["network"] = given["network"] and with_library(given["network"], library)
    if resume:
        given |= _as_before(context, out, given)
    for name in ("step_seconds", "speeds"):
        if given[name] is not None and given["network"] is None:
            raise ArgumentError(f"--{name.replace('_', '-')} needs --network, for example --network wifi")
    check_dataset(given["problem"])
    if context.params["estimate"]:
        print(estimate_of_comparison(**placed(given)))
        return
    try:
        result = run_comparison(**placed(given), out=out, resume=resume, progress=True)
    except ComparisonInterrupted as stopped:
        if stopped.result is not None:
            show(stopped.result)
        notice(f"to continue: {resume_command(str(stopped.folder), given)}")
        raise typer.Exit(INTERRUPTED) from stopped
    show(result)


def _as_before(context: typer.Context, out: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the comparison in `out` that this command line does not give.

    Raise ArgumentError if the folder names code or a file that this command line does not name again.
    """

    def is_open(option: str) -> bool:
        source = context.get_parameter_source(option)
        return source is not None and source.name == "DEFAULT"

    if is_open("out"):
        raise ArgumentError(
            "--resume needs the comparison's folder: pass --out, for example --out runs/digits-20261122-120000"
        )
    before = in_full(saved_in(out).get("arguments", {}))
    if not isinstance(before.get("problem"), str) or not isinstance(before.get("strategies"), str):
        raise ArgumentError(
            f"--out {out} contains a comparison that was started from Python: resume it in Python with resume=True"
        )
    asked = {name for name in given if not is_open(OPTION.get(name, name))}
    outside = named_again(before)
    for name in ("problem", "data", "network"):
        now, option = given[name], OPTION.get(name, name)
        if name in outside and name not in asked:
            same = f"--{option} {shlex.quote(str(before[name]))}"
            what = "code" if name == "problem" else "a file"
            raise ArgumentError(
                f"the comparison in --out {out} uses {what} outside the folder, which ExoGym does not load on "
                f"its own: if you trust it, pass {same} again"
            )
        if name in asked and (name in outside or name != "network") and now != before.get(name):
            was = f"--{option} {before[name]}" if before.get(name) else f"no --{option}"
            raise ArgumentError(
                f"--{option} {now}: the comparison in --out {out} had {was}: pass the same value, or another folder "
                "without --resume"
            )
    taken = {name: before[name] for name in given if name in before and name not in asked}
    for name, value in taken.items():
        if not (_is_plain(value) or (name in LISTS and isinstance(value, list) and all(map(_is_plain, value)))):
            raise ArgumentError(
                f"--out {out}: {name} is neither text nor a number: if this comparison was started from Python, "
                "resume it in Python with resume=True"
            )
    return taken


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def show(result: Comparison | Swept) -> None:
    """Print a study's verdict and table, and the names of its files."""
    print_table(result, sys.stdout)
    print(f"\nwritten to {result.folder}/: {', '.join(path.name for path in result.paths)}")
