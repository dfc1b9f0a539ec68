"""`exogym agent`: let other computers of the network find this computer and pair with it, by a code."""

from __future__ import annotations

import getpass
import socket
import threading
from typing import Annotated

import typer

from exogym.cli.values import Debug
from exogym.errors import needs
from exogym.home.discovery import Agent, announced
from exogym.home.discovery.announcing import PORT, own_address, plain_name

PACKAGES = ("zeroconf", "spake2", "cryptography")


def needs_packages() -> None:
    """Raise ExoGymError if a package of the extra `discover` is not installed."""
    for name in PACKAGES:
        needs(name, "discover")


def agent(
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Name that others see. [default: this computer's name]")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="IP", help="Address of this computer to listen on. [default: the default route's]"),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on. 0 chooses a free port.")
    ] = PORT,
    ssh_port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="Port of this computer's SSH server.")
    ] = 22,
    authorized_keys: Annotated[
        str, typer.Option(metavar="FILE", help="File to which the keys of paired computers are added.")
    ] = "~/.ssh/authorized_keys",
    debug: Debug = False,
) -> None:
    """Let exogym discover and exogym wizard find this computer, until Ctrl-C.

    Before pairing, other computers see only this computer's name. To pair, type the code that is shown here on
    another computer, which may then log in to this computer over SSH as the current user.
    """
    needs_packages()
    where = own_address(address)
    waiting = Agent(
        plain_name(name or socket.gethostname()), where, port, user=getpass.getuser(), ssh_port=ssh_port,
        authorized_keys=authorized_keys, show=lambda line: print(line, flush=True),
    )  # fmt: skip
    try:
        with announced(waiting.name, where, waiting.port) as final:
            waiting.name = final
            print(f"{final} can be found at {where} port {waiting.port}; press Ctrl-C to stop", flush=True)
            serving = threading.Thread(target=waiting.serve, daemon=True)
            serving.start()
            serving.join()
    finally:
        waiting.close()
