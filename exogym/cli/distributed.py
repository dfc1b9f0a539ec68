"""`exogym distributed-train`: train on the hosts of a hosts file, with the options of a profile in a config file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from exogym.cli.values import Debug
from exogym.errors import ArgumentError, ExoGymError
from exogym.files import new_folder
from exogym.home.wizard import hand_over
from exogym.machines.remote.orders import RUNS
from exogym.machines.remote.profile import RunProfile, load_profile, options_of
from exogym.machines.remote.results import FitResults, carry_out, facts_of, names
from exogym.progress import STDERR
from exogym.remote import HostsConfig, SSHLauncher

JOB = "exogym.machines.remote.job"


def distributed_train(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="NAME of the section [distributed:NAME] in the config file.")
    ],
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hosts file. [default: the profile's hosts_config]")
    ] = None,
    config: Annotated[Path, typer.Option(metavar="FILE", help="Config file that contains the profile.")] = Path(
        "config.ini"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in save_dir.")] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Copy the current folder to the hosts with rsync first.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train on several hosts over SSH.

    Prints the output of all ranks, and copies the final model to a new folder in runs/. The exit status is 0, or the
    status of the first host that failed.
    """
    run = load_profile(config, profile, resume=resume)
    file = hosts or run.hosts_config
    if file is None:
        raise ArgumentError("no hosts file: pass --hosts FILE, or set hosts_config in the profile")
    known = HostsConfig.load(file)
    if run.nodes is not None and run.nodes < known.slots:
        raise ArgumentError(
            f"nodes = {run.nodes}, but the hosts file has {known.slots} slots: set nodes to at least {known.slots}"
        )
    train(profile, run, known, sync)


def train(name: str, run: RunProfile, hosts: HostsConfig, sync: bool) -> FitResults:
    """Train on hosts with a profile's options, from the current folder. Return the results, which are in a new folder.

    Args:
        name: the profile's name.
        run: the profile.
        sync: whether to copy the current folder to the hosts first.

    Raises:
        typer.Exit: a host failed. The exit status is the host's.
    """
    launcher = SSHLauncher(
        hosts, sync=sync, max_restarts=run.max_restarts, min_hosts=run.min_hosts, retries=run.retries
    )
    folder = new_folder(Path(RUNS).absolute(), name.replace("/", "-"))
    code = carry_out(
        launcher, folder, 1, JOB, json.dumps(asdict(run)), module=True, shows_progress=STDERR.isatty(),
        save_dir=run.save_dir,
    )  # fmt: skip
    if code:
        raise typer.Exit(code)
    found = facts_of(folder, 1)
    found.history.to_csv(folder / "history.csv")
    last = next((row for row in reversed(found.history.rows(node=None)) if row["val_loss"] is not None), None)
    quality = "" if last is None else f"step {last['step']}, validation loss {last['val_loss']:.4f}; "
    print(f"{quality}written to {folder}/: {names(1)[0]}, history.csv, logs of all ranks", flush=True)
    try:
        lines = hand_over(run.task, run.data, options_of(run.task_options), folder / names(1)[0])
    except (ExoGymError, OSError) as error:
        lines = [f"the model is only in that file; making a model to use failed: {error}"]
    print("\n".join(lines))
    return found
