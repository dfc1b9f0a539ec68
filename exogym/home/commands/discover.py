"""`exogym discover`: list the computers of this network that run `exogym agent`, and pair with one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from exogym.cli.asking import console_on
from exogym.cli.values import KEY_FILE, At, Debug, KeyFile, SSHConfig
from exogym.errors import ArgumentError, ExoGymError, nearest
from exogym.home.commands.agent import PORT, needs_packages
from exogym.progress import readable_bytes
from exogym.remote import Host, HostsConfig

if TYPE_CHECKING:
    from exogym.home.discovery import Found

AT_ONCE = 16  # computers asked at the same time


def discover(
    seconds: Annotated[float, typer.Option(metavar="S", help="Seconds to listen.")] = 3.0,
    at: At = None,
    pair_with: Annotated[
        str | None,
        typer.Option("--pair", metavar="NAME", help="Pair with the computer NAME, by the code that it shows."),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="Code that the computer of --pair shows. [default: ask in the terminal]"),
    ] = None,
    hosts: Annotated[Path, typer.Option(metavar="FILE", help="Hosts file with the paired computers.")] = Path(
        "distributed_hosts.json"
    ),
    key: KeyFile = KEY_FILE,
    ssh_config: SSHConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the computers that run exogym agent, or pair with one.

    Computers in the hosts file report their device and versions over SSH. --pair adds the named computer to the hosts
    file after you type the code that the named computer shows.
    """
    needs_packages()
    if seconds <= 0:
        raise ArgumentError(f"--seconds={seconds:g} must be more than 0")
    if code is not None and pair_with is None:
        raise ArgumentError("--code needs --pair: name the computer that shows the code")
    from exogym.home.discovery import enrol, pair

    found = agents(seconds, at or [])
    if pair_with is not None:
        target = chosen(found, pair_with)
        if code is None and not sys.stdin.isatty():
            raise ArgumentError(f"--pair {pair_with} needs --code CODE without a terminal")
        typed = code or typer.prompt(f"Code that {target.name} at {target.address} shows")
        paired = pair(target.address, target.port, typed, key)
        enrol(paired, hosts, key, ssh_config)
        print(f"paired with {paired.name}: {described(paired.facts)}; added to {hosts}")
        return
    known = {host.address: host for host in HostsConfig.load(hosts).hosts} if os.path.exists(hosts) else {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda one: _row(one, known.get(one.address)), found))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


def _row(found: Found, host: Host | None) -> dict[str, Any]:
    """Return an agent's row of the table. For a `host` of the hosts file, add the facts it reports over SSH."""
    from exogym.machines.remote.facts import cleaned
    from exogym.machines.remote.inquiry import ask

    row = asdict(found) | {"paired": False, "facts": {}, "trouble": None}
    if host is None:
        return row
    try:
        return row | {"facts": cleaned(ask(host, "facts")), "paired": True}
    except ExoGymError as error:
        return row | {"trouble": str(error)}


def agents(seconds: float, places: Sequence[str]) -> list[Found]:
    """Return the computers at `places` that run exogym agent, or all that announce themselves in the network.

    Args:
        seconds: how long to listen for announcements, if `places` is empty.
        places: texts ADDRESS or ADDRESS:PORT.

    Raises:
        ArgumentError: a place is not ADDRESS or ADDRESS:PORT.
        ExoGymError: no agent answers at a place.
    """
    from exogym.home.discovery import Found, find
    from exogym.home.discovery.announcing import name_at

    if not places:
        return find(seconds)
    found = []
    for place in places:
        address, _, number = place.partition(":")
        if number and not (number.isdecimal() and 0 < int(number) < 65536):
            raise ArgumentError(f"--at={place!r}: wanted ADDRESS or ADDRESS:PORT (default {PORT})")
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
        raise ArgumentError(f"several computers have the name {name}: give one address: {places}")
    if not alike:
        names = [one.name for one in found if one.answers]
        hint = nearest(name, names) if names else "no computer was found: start exogym agent there or give --at ADDRESS"
        raise ArgumentError(f"found no computer {name!r}: {hint}")
    return alike[0]


def described(facts: dict[str, Any]) -> str:
    """Return a paired computer's facts as one line of text.

    >>> described({"device": "cpu", "cores": 8, "memory_bytes": 16e9, "speed_flops": 2e11, "torch": "2.13.0"})
    'cpu, 8 cores, 16 GB, 200 GFLOP/s, torch 2.13.0'
    """
    parts = [str(facts["device"])] if "device" in facts else []
    parts += [f"{facts['cores']:.0f} cores"] if "cores" in facts else []
    parts += [readable_bytes(facts["memory_bytes"])] if "memory_bytes" in facts else []
    parts += [f"{facts['speed_flops'] / 1e9:.3g} GFLOP/s"] if "speed_flops" in facts else []
    parts += [f"{name} {facts[name]}" for name in ("exogym", "torch", "python") if name in facts]
    return ", ".join([*parts, *([facts["system"]] if "system" in facts else [])])


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the computers."""
    console = console_on(sys.stdout)
    if not rows:
        console.print(
            "no computer was found: start exogym agent on the other computers of this network. If mDNS cannot reach "
            "them (guest network, firewall on UDP 5353), give --at ADDRESS", soft_wrap=True,
        )  # fmt: skip
        return
    table = Table("name", "address", "", box=None, pad_edge=False)
    table.columns[2].overflow = "fold"
    for row in rows:
        state = "ready; exogym discover --pair to use it" if row["answers"] else "announced, but does not answer"
        if row["paired"]:
            state = f"paired: {described(row['facts'])}"
        elif row["trouble"]:
            state = f"is in the hosts file, but: {row['trouble']}"
        table.add_row(Text(row["name"]), Text(f"{row['address']}:{row['port']}"), Text(state))
    console.print(table)
