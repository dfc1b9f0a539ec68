"""`exogym agent`: let this computer be found in its network, and paired with by a code."""

from __future__ import annotations

import getpass
import socket
import threading
from typing import Annotated

import typer

from exogym.cli.values import Debug
from exogym.errors import needs

PACKAGES = ("zeroconf", "spake2", "cryptography")
PORT = 8422


def needs_packages() -> None:
    """See that the extra is installed.

    Raises:
        ExoGymError: it is not.
    """
    for name in PACKAGES:
        needs(name, "discover")


def agent(
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What others see. [default: the name of this computer]")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="IP", help="Of this computer, where to listen. [default: the only one]")
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="To listen on; 0: any that is free.")] = PORT,
    ssh_port: Annotated[int, typer.Option(metavar="N", help="Of this computer's SSH server.")] = 22,
    authorized_keys: Annotated[
        str, typer.Option(metavar="FILE", help="Where the keys of those stand who may log in.")
    ] = "~/.ssh/authorized_keys",
    debug: Debug = False,
) -> None:
    """Let this computer be found by exogym discover and exogym wizard, until Ctrl-C.

    Others are told its name, and nothing more. Who types the code that is shown here may log in over SSH as this user,
    and is told device, memory, speed and versions.
    """
    needs_packages()
    from exogym.machines.discovery import Agent, announced, facts
    from exogym.machines.discovery.announcing import own_address, plain_name

    where = own_address(address)
    waiting = Agent(
        plain_name(name or socket.gethostname()), where, port, user=getpass.getuser(), ssh_port=ssh_port,
        authorized_keys=authorized_keys, facts=facts(), show=lambda line: print(line, flush=True),
    )  # fmt: skip
    try:
        with announced(waiting.name, where, waiting.port) as final:
            waiting.name = final
            print(f"{final} can be found at {where} port {waiting.port}; Ctrl-C ends it", flush=True)
            serving = threading.Thread(target=waiting.serve, daemon=True)
            serving.start()
            serving.join()
    finally:
        waiting.close()
