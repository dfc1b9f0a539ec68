"""`exogym doctor`: check the hosts of a hosts file, and name a remedy for each problem."""

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
from exogym.machines.remote.measuring import MEASURED_FILE, measure_hosts
from exogym.remote import Check, HostsConfig, check_hosts


def doctor(
    hosts: Annotated[Path, typer.Option(metavar="FILE", help="Hosts file that lists the computers.")] = Path(
        "distributed_hosts.json"
    ),
    sync: Annotated[
        bool, typer.Option("--sync", help="Check that the project can be copied instead of comparing its files.")
    ] = False,
    save_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for checkpoints: check that all hosts can write to it, and whether they share it.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="After the checks, measure every collective and pair of hosts, for advise --network."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the measurement. [default: measured.json]")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --measure: also time a step of this task (a name, or module:function)."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="With --measure: sizes of messages in bytes. [default: 4096,65536,262144,1048576,4194304,16777216]",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check all hosts before a run, and suggest a remedy for each problem.

    Checks login, Python, versions, code, port, disk, clock, device, and the connections between hosts. The code on each
    host must equal the code in the current folder. The checks leave nothing running on the hosts; --save-dir
    writes and removes a small file. The exit status is 1 if a check fails. If all checks pass, --measure runs the
    self-test on the hosts and writes the measurement, which predictions use, to a file on this machine.
    """
    for option, given in {"--out": out, "--task": task, "--sizes": sizes}.items():
        if given is not None and not measure:
            raise ArgumentError(f"{option} needs --measure: pass --measure as well, or omit {option}")
    config = HostsConfig.load(hosts)
    checks = check_hosts(config, sync=sync, save_dir=save_dir)
    print_checks(checks, sys.stdout)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
    if measure:
        file = out or Path(MEASURED_FILE)
        numbers = numbers_of("--sizes", sizes)
        probed = None if numbers is None else [int(size) for size in numbers]
        measure_hosts(config, file, sync=sync, task=task, sizes_bytes=probed)
        print(f"written: {file}, for exogym advise --network {file} --step-seconds ...")


def print_checks(checks: Sequence[Check], file: TextIO) -> None:
    """Print a table of the checks, followed by a remedy for each failed check."""
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
        console.print("all checks passed")
