"""`exogym ui`: show run folders in the browser."""

from __future__ import annotations

import importlib.util
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from exogym.cli.values import Debug
from exogym.errors import ArgumentError, ExoGymError
from exogym.progress import notice

COMMANDS = ("compare", "sweep")  # commands that the page may start
OURS = ("out", "resume", "estimate", "debug", "help")  # their options that the page sets itself
BASIC = (
    *("dataset", "strategies", "strategy", "axes", "num_nodes", "max_steps", "batch_size", "seeds", "lr"),
    *("partitioner", "network", "device"),
)  # the page names these first


def ui(
    context: typer.Context,
    where: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that contains the runs.")] = Path("runs"),
    port: Annotated[
        int,
        typer.Option(metavar="N", help="Port to listen on. If it is in use, the next free one; 0 means any free port."),
    ] = 8421,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on. If others can reach it, --token is required."),
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Secret that the browser must send. [default: random]")
    ] = None,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser if this machine has a display.")
    ] = True,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Prevent the page from starting, stopping and resuming runs.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", help="Let the page run your code (MODULE:FUNCTION), read files and resume scripts."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Show runs, comparisons and sweeps in the browser while they train, and start new ones.

    Prints the address of the page, including the token. By default, only this machine can open the page. After Ctrl-C,
    the page ends and the runs continue.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ExoGymError(f"the page needs {missing[0]}, which is not installed: pip install 'exogym[ui]'")
    from exogym.ui import serve

    if not where.is_dir():
        if os.path.lexists(where):
            raise ArgumentError(f"--runs {where} is not a folder: pass the folder that contains the runs")
        notice(f"--runs {where} does not exist yet, so the page shows no runs")

    def ready(address: str) -> None:
        print(address, flush=True)
        notice("open this address in a browser; Ctrl-C stops the page, but not its runs")
        has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if opens and sys.stdout.isatty() and has_screen:
            webbrowser.open(address)

    serve(where, port, host, token, ready, None if read_only else lambda: forms_of(context), allow_code)


def forms_of(context: typer.Context) -> dict[str, list[dict[str, Any]]]:
    """Return the options of exogym compare and exogym sweep as JSON values, for the forms of the page."""
    from exogym.cli.values import DATASETS
    from exogym.data.partition import FORMS
    from exogym.network import PRESETS
    from exogym.study.compare.asked import PASSED_AS_TEXT
    from exogym.study.compare.catalog import choices_of

    texts = [name for name, kind in PASSED_AS_TEXT.items() if kind is str]
    examples = {"partitioner": list(FORMS), "network": list(PRESETS), "device": ["auto", "cpu", "cuda", "mps"]}
    offered = examples | {name: choices_of(name) for name in (*texts, "engine")} | {"dataset": list(DATASETS)}
    commands: Any = context.find_root().command
    forms = {}
    for command in COMMANDS:
        options = [option for option in commands.get_command(context, command).params if option.name not in OURS]
        forms[command] = [
            {
                "name": option.name, "help": option.help or "",
                "flag": (option.secondary_opts if option.is_flag and option.default else option.opts)[0],
                "default": option.default if isinstance(option.default, str | int | float) else None,
                "multiple": option.multiple, "is_flag": option.is_flag,
                "choices": offered.get(option.name, []), "is_basic": option.name in BASIC,
            }
            for option in options
        ]  # fmt: skip
    return forms
