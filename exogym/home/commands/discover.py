"""`exogym discover`: list the computers of this network that run `exogym agent`, and pair with one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from exogym.cli.asking import console_on
from exogym.cli.values import KEY_FILE, At, Debug, KeyFile, SSHConfig
from exogym.errors import ArgumentError, ExoGymError, nearest
from exogym.home.commands.agent import needs_packages
from exogym.home.discovery import Found, enrol, find, pair
from exogym.home.discovery.announcing import PORT, name_at
from exogym.remote import HostsConfig


def discover(
    seconds: Annotated[float, typer.Option(metavar="S", help="Seconds to listen.")] = 3.0,
    at: At = None,
    pair_with: Annotated[
        str | None,
        typer.Option("--pair", metavar="NAME", help="Pair with the computer NAME, using the code that it shows."),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", help="Code that the computer named by --pair shows. [default: ask in the terminal]"
        ),
    ] = None,
    hosts: Annotated[Path, typer.Option(metavar="FILE", help="Hosts file to which paired computers are added.")] = Path(
        "distributed_hosts.json"
    ),
    key: KeyFile = KEY_FILE,
    ssh_config: SSHConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the computers that run exogym agent, or pair with one.

    If you pass --pair and type the code that the named computer shows, the computer is added to the hosts file.
    """
    needs_packages()
    if seconds <= 0:
        raise ArgumentError(f"--seconds={seconds:g} must be greater than 0")
    if code is not None and pair_with is None:
        raise ArgumentError("--code needs --pair: name the computer that shows the code")
    found = agents(seconds, at or [])
    if pair_with is not None:
        target = chosen(found, pair_with)
        if code is None and not sys.stdin.isatty():
            raise ArgumentError(f"--pair {pair_with} cannot ask for the code without a terminal: pass --code CODE")
        typed = code or typer.prompt(f"Code that {target.name} at {target.address} shows")
        paired = pair(target.address, target.port, typed, key)
        enrol(paired, hosts, key, ssh_config)
        print(f"paired with {paired.name}; added to {hosts}")
        return
    known = {host.address for host in HostsConfig.load(hosts).hosts} if os.path.exists(hosts) else set()
    rows = [asdict(one) | {"paired": one.address in known} for one in found]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


def agents(seconds: float, places: Sequence[str]) -> list[Found]:
    """Return the computers at `places` that run exogym agent, or all that announce themselves in the network.

    Args:
        seconds: how long to listen for announcements, if `places` is empty.
        places: texts ADDRESS or ADDRESS:PORT.

    Raises:
        ArgumentError: a place is not ADDRESS or ADDRESS:PORT.
        ExoGymError: no agent answers at a place.
    """
    if not places:
        return find(seconds)
    found = []
    for place in places:
        address, _, number = place.partition(":")
        if number and not (number.isdecimal() and 0 < int(number) < 65536):
            raise ArgumentError(f"--at={place!r} must be ADDRESS or ADDRESS:PORT (default port: {PORT})")
        port = int(number or PORT)
        try:
            found.append(Found(name_at(address, port), address, port, True))
        except OSError as error:
            raise ExoGymError(f"{address} port {port} does not answer ({error}): start exogym agent there") from None
    return found


def chosen(found: Sequence[Found], name: str) -> Found:
    """Return the computer in `found` that has the name or address `name`.

    Raises:
        ArgumentError: no computer, or several computers, have this name.
    """
    alike = [one for one in found if one.answers and name in (one.name, one.address)]
    if len(alike) > 1:
        places = ", ".join(one.address for one in alike)
        raise ArgumentError(f"several computers are named {name}: use the address of one of them: {places}")
    if not alike:
        names = [one.name for one in found if one.answers]
        hint = (
            nearest(name, names) if names else "no computers were found: start exogym agent there, or pass --at ADDRESS"
        )
        raise ArgumentError(f"found no computer {name!r}: {hint}")
    return alike[0]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the computers."""
    console = console_on(sys.stdout)
    if not rows:
        console.print(
            "no computers were found: start exogym agent on the other computers on this network. If mDNS cannot reach "
            "them (guest network, firewall on UDP port 5353), pass --at ADDRESS", soft_wrap=True,
        )  # fmt: skip
        return
    table = Table("name", "address", "", box=None, pad_edge=False)
    table.columns[2].overflow = "fold"
    for row in rows:
        state = (
            "ready; to use it, run exogym discover --pair NAME" if row["answers"] else "announced, but does not answer"
        )
        if row["paired"]:
            state = "in the hosts file; to check it, run exogym doctor"
        table.add_row(Text(row["name"]), Text(f"{row['address']}:{row['port']}"), Text(state))
    console.print(table)
