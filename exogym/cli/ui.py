"""`exogym ui`: the page over the run folders."""

from __future__ import annotations

import importlib.util
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from exogym.errors import ExoGymError


def ui(
    where: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder in which the runs lie.")] = Path("runs"),
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any that is free.")] = 8421,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; one that others reach needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What a browser must bring. [default: drawn at random]")
    ] = None,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser where there is one.")] = True,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    """Show runs, comparisons and sweeps in the browser, while they train: a page on this machine that only reads.

    Prints the address with its token. Ctrl-C ends it; runs go on.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ExoGymError(f"the page needs {missing[0]}, which is not installed: pip install 'exogym[ui]'")
    from exogym.ui import serve

    def ready(address: str) -> None:
        print(address, flush=True)
        has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if opens and sys.stdout.isatty() and has_screen:
            webbrowser.open(address)

    serve(where, port, host, token, ready)
