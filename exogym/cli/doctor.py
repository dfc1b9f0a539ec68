"""`exogym doctor`: look at the hosts of a hosts file, and say what to do about what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.table import Table
from rich.text import Text

from exogym.cli.asking import console_on
from exogym.cli.values import Debug, numbers_of
from exogym.errors import ArgumentError
from exogym.machines.remote import Check, HostsConfig, check_hosts
from exogym.machines.remote.measuring import MEASURED_FILE, measure_hosts


def doctor(
    hosts: Annotated[Path, typer.Option(metavar="FILE", help="The hosts, see docs/real_machines.md.")] = Path(
        "distributed_hosts.json"
    ),
    sync: Annotated[bool, typer.Option("--sync", help="The project will be copied; see that it can be.")] = False,
    save_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="See whether all hosts can write to this folder, and whether they share it."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Then time every collective and pair of hosts there, for advise --network."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For what --measure finds. [default: measured.json]")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --measure: also a step of this task, a name or module:function."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of --measure, bytes. [default: 4096,65536,262144,1048576,4194304,16777216]"),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for each answer.")] = 60.0,
    debug: Debug = False,
) -> None:
    """Look at all hosts: login, Python, versions, code, port, disk, clock, device, and the ways between them.

    The project's code is compared with that in the current folder. Nothing is started there; with --save-dir a small
    file is written and removed. Exit status 1 if anything is wrong; the last lines say what to do. With --measure
    the self-test runs on the hosts, if all is well, and what predictions start from is written here.
    """
    for option, given in {"--out": out, "--task": task, "--sizes": sizes}.items():
        if given is not None and not measure:
            raise ArgumentError(f"{option} needs --measure: give it too, or leave {option} out")
    if timeout <= 0:
        raise ArgumentError(f"--timeout={timeout:g} must be more than 0 seconds")
    config = HostsConfig.load(hosts)
    checks = check_hosts(config, sync=sync, save_dir=save_dir, answer_s=timeout)
    print_checks(checks, sys.stdout)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
    if measure:
        file = out or Path(MEASURED_FILE)
        numbers = numbers_of("--sizes", sizes)
        probed = None if numbers is None else [int(size) for size in numbers]
        measure_hosts(config, file, sync=sync, task=task, sizes_bytes=probed)
        print(f"measured: {file}; exogym advise --network {file} --step-seconds ... starts from it")


def print_checks(checks: Sequence[Check], file: TextIO) -> None:
    """Print the table, and below it a line with the remedy for each failure."""
    console = console_on(file)
    table = Table("host", "check", "", "seen", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    before = None
    for check in checks:
        ok = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        name = "" if check.host == before else check.host
        table.add_row(Text(name), Text(check.check), ok, Text(check.seen))
        before = check.host
    console.print(table)
    failed = [check for check in checks if not check.ok]
    for check in failed:
        console.print(Text(f"{check.host}, {check.check}: {check.remedy}"), soft_wrap=True)
    if not failed:
        console.print("all is well")
