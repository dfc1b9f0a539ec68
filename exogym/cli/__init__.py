"""The command line: `exogym COMMAND`. Each command has its own file. Errors are printed as one line on stderr.

Exit status: 0 if all is done, 1 if something failed, 2 for bad input, 130 after Ctrl-C, 141 if stdout is closed.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import warnings
from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from exogym.cli.values import INTERRUPTED
from exogym.core.base.streams import BROKEN_PIPE, fill_in, is_stdout_gone, replace_letters
from exogym.errors import ArgumentError, DataError, nearest, retired
from exogym.progress import STDERR, notice

# The error for bad usage. Typer uses its own copy of click or the installed one; this finds the right class.
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_OUT_OF_MEMORY = re.compile(
    r"can(no|')t allocate memory|not enough memory|out of memory|bad_alloc|failed to map segment", re.IGNORECASE
)

# Each command: its module, and its line in `exogym --help`. Modules load only when their command runs, so
# `exogym --help` does not wait for torch.
COMMANDS = {
    "demo": ("exogym.cli.demo", "Compare six ways to train four nodes in half a minute."),
    "compare": ("exogym.cli.compare", "Train one model under several strategies; compare them."),
    "sweep": ("exogym.cli.sweep", "Train with every combination of the options you list."),
    "ui": ("exogym.cli.ui", "Show runs in the browser, and start new ones."),
    "advise": ("exogym.cli.advise", "Recommend a strategy for a network."),
    "distributed-train": ("exogym.cli.distributed", "Train on several hosts over SSH."),
    "doctor": ("exogym.cli.doctor", "Check the hosts: login, Python, versions, ports, clocks."),
    "wizard": ("exogym.home.commands.wizard", "Train on the computers of this network, step by step."),
    "agent": ("exogym.home.commands.agent", "Let other computers find this one and pair with it."),
    "discover": ("exogym.home.commands.discover", "List computers that run exogym agent; pair with one."),
    "runs": ("exogym.cli.runs", "List, show, compare, export and remove run folders."),
    "cluster": ("exogym.clusters.commands.cluster", "Write job files for SLURM and Kubernetes."),
}


SETTINGS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
HELP = {"help_option_names": ["-h", "--help"]}


class _Loaded(UserDict[str, Any]):
    """Commands by name. A command loads at its first use."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(self.data[name][0])
        parent = typer.Typer(**SETTINGS, context_settings=HELP, callback=lambda: None)
        if hasattr(module, "app"):
            parent.add_typer(module.app, name=name)
        else:
            settings = getattr(module, "PASSED_ON", HELP)
            parent.command(name, context_settings=settings)(getattr(module, name.replace("-", "_")))
        group: Any = typer.main.get_command(parent)
        return group.commands[name]


class _Commands(typer.core.TyperGroup):
    """A command with the subcommands of a table. Its help loads none of them."""

    table: Mapping[str, tuple[str, str]] = COMMANDS

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.commands: Any = _Loaded(self.table)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])


app = typer.Typer(
    **SETTINGS,
    name="exogym",
    cls=_Commands,
    context_settings=HELP,
    help="Simulate distributed training on one machine; compare methods by bytes, time and quality.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"exogym {installed_version('exogym')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def application(commands: Mapping[str, tuple[str, str]], line: str) -> typer.Typer:
    """Return a command line described by `line`, of `commands` {name: (module, line of help)}."""
    kind = type("_Commands", (_Commands,), {"table": commands})
    return typer.Typer(**SETTINGS, cls=kind, context_settings=HELP, help=line, callback=lambda: None)


def main(arguments: Sequence[str] | None = None, of: typer.Typer = app, name: str = "exogym") -> int:
    """Run a command line and return the exit status.

    Args:
        arguments: the command and its options. None means the process's own arguments.
        of, name: the command line, by default `exogym`'s, and its name in its help.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    fill_in()
    replace_letters()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: notice(f"warning: {message}")
        try:
            status = of(given, prog_name=name, standalone_mode=False) or 0
            sys.stdout.flush()
        except SystemExit as end:  # click exits with 1 if it cannot print
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            status = BROKEN_PIPE
        except (Exception, KeyboardInterrupt) as error:
            if "--debug" in given:
                traceback.print_exc(file=STDERR)
            status = BROKEN_PIPE if isinstance(error, OSError) and is_stdout_gone() else _report(error, given)
    if status == INTERRUPTED:
        print("exogym: interrupted", file=STDERR)
    return status


def _report(error: BaseException, given: Sequence[str]) -> int:
    """Print the error of the arguments `given` as one line on stderr and return the exit status."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, _UsageError):
        text, status = error.format_message(), 2
        if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
            options = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
            names = [name for name in options if name.startswith("--")]
            instead = retired(option.removeprefix("--").replace("-", "_"), error.ctx.info_name if error.ctx else "")
            text = f"unknown option {option}: {instead or nearest(option, names)}"
        elif instead := _retired_word(error, given):
            text = f"{text.rstrip('.')}: {instead}"
    elif limit := _limit_in(error):
        text, status = limit
    elif isinstance(error, ArgumentError | DataError):
        text, status = str(error), 2
    else:
        known = type(error).__module__ == "exogym.errors"
        text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        status = 1
    print("exogym: error: " + " ".join(text.split()), file=STDERR)
    return status


def _retired_word(error: Any, given: Sequence[str]) -> str | None:
    """Return what to use instead of a retired command, or of an option's retired value, or None for another error."""
    of, taken = getattr(error, "param", None), error.ctx.info_name if error.ctx else ""
    if of is None and "command" not in error.format_message():
        return None
    where = taken if of is None else of.name
    return next(filter(None, (retired(word.rpartition("=")[2].replace("-", "_"), where) for word in given)), None)


def _limit_in(error: BaseException | None) -> tuple[str, int] | None:
    """Return what to say, and the exit status, if an error means that files or memory ran out, or a path has a NUL."""
    is_ours = type(error).__module__ == "exogym.errors"
    while error is not None:
        text = " ".join(str(error).split())
        if "Too many open files" in text:
            import resource  # not on every system

            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"too many open files (limit: {most}); raise the limit, for example with ulimit -n 4096", 1
        if isinstance(error, MemoryError) or (not is_ours and _OUT_OF_MEMORY.search(text)):
            return (
                f"out of memory ({text[:200] or 'MemoryError'}): use fewer nodes, a smaller batch or a smaller model, "
                "or raise the limit (ulimit -v)",
                1,
            )
        if isinstance(error, ValueError) and "embedded null" in text:
            return "a path contains the character NUL, which file names cannot contain: use another path", 2
        error = error.__cause__ or error.__context__
    return None
