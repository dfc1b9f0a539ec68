"""The command line: `exogym COMMAND`. One file per command; a command says what is wrong in one line.

Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer

from exogym.cli.advise import advise as advise_command
from exogym.cli.agent import agent as agent_command
from exogym.cli.benchmark import benchmark as benchmark_command
from exogym.cli.cluster import app as cluster_app
from exogym.cli.compare import compare as compare_command
from exogym.cli.demo import PASSED_ON
from exogym.cli.demo import demo as demo_command
from exogym.cli.discover import discover as discover_command
from exogym.cli.distributed import distributed_train as distributed_train_command
from exogym.cli.doctor import doctor as doctor_command
from exogym.cli.reproduce import reproduce as reproduce_command
from exogym.cli.runs import app as runs_app
from exogym.cli.sweep import sweep as sweep_command
from exogym.cli.ui import ui as ui_command
from exogym.cli.values import INTERRUPTED
from exogym.cli.wizard import wizard as wizard_command
from exogym.errors import ArgumentError, DataError, nearest
from exogym.progress import notice

# Typer brings its own copy of click or uses the installed one: what both raise for bad usage is this.
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="exogym",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Simulate distributed training on one machine, and measure what each method costs and gives.",
)
app.command("demo", context_settings=PASSED_ON)(demo_command)
app.command("compare")(compare_command)
app.command("sweep")(sweep_command)
app.command("ui")(ui_command)
app.command("advise")(advise_command)
app.command("distributed-train")(distributed_train_command)
app.command("doctor")(doctor_command)
app.command("wizard")(wizard_command)
app.command("agent")(agent_command)
app.command("discover")(discover_command)
app.add_typer(runs_app, name="runs")
app.add_typer(cluster_app, name="cluster")
app.command("reproduce")(reproduce_command)
app.command("benchmark")(benchmark_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"exogym {installed_version('exogym')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (those of the process if None) and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: notice(f"warning: {message}")
        try:
            status = app(given, prog_name="exogym", standalone_mode=False) or 0
        except (Exception, KeyboardInterrupt) as error:
            if "--debug" in given:
                traceback.print_exc()
            status = _report(error)
    if status == INTERRUPTED:
        print("exogym: interrupted", file=sys.stderr)
    return status


def _report(error: BaseException) -> int:
    """Say in one line on stderr what went wrong; return the exit status."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, _UsageError):
        text, status = error.format_message(), 2
        if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
            options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
            text = f"there is no option {option}: {nearest(option, [o for o in options if o.startswith('--')])}"
    elif isinstance(error, ArgumentError | DataError):
        text, status = str(error), 2
    else:
        known = type(error).__module__ == "exogym.errors"
        text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        status = 1
    print("exogym: error: " + " ".join(text.split()), file=sys.stderr)
    return status
