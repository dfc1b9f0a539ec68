"""The folder of a run that `exogym wizard` has prepared, with the files that repeat the run."""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError
from exogym.files import replacing, write_json
from exogym.machines.remote.profile import PREFIX, RunProfile, load_profile
from exogym.remote import HostsConfig

HOSTS, CONFIG, MEASURED = "distributed_hosts.json", "config.ini", "measured.json"
PROFILE = "wizard"


@dataclass(frozen=True)
class WizardRun:
    """A run that `exogym wizard` has prepared: a folder with a hosts file and a profile.

    Attributes:
        sync: True to copy the folder to the hosts before each run.
    """

    folder: Path
    profile: RunProfile
    hosts: HostsConfig
    sync: bool

    @property
    def command(self) -> str:
        """The command that repeats the run. Enter it in the run's folder."""
        return f"exogym distributed-train {PROFILE}{' --sync' if self.sync else ''}"


def make_session(
    folder: str | os.PathLike[str], fields: dict[str, Any], hosts: dict[str, Any], sync: bool
) -> WizardRun:
    """Write the folder of a run with its hosts file and profile, and return the `WizardRun`.

    Args:
        fields: the profile's fields, without `hosts_config`. Fields with the value None are left out.
        hosts: the contents of the hosts file.

    Raises:
        ArgumentError: the folder has the profile of another run, or a field is wrong.
    """
    place = Path(folder)
    if (place / CONFIG).exists():
        raise ArgumentError(f"{place} already has a {CONFIG}: choose another --folder")
    parser = configparser.ConfigParser(interpolation=None)
    given = {name: str(value) for name, value in fields.items() if value is not None}
    parser[PREFIX + PROFILE] = given | {"hosts_config": HOSTS}
    place.mkdir(parents=True, exist_ok=True)
    with replacing(place / CONFIG) as file:
        parser.write(file)
    try:
        profile = load_profile(place / CONFIG, PROFILE)
    except ArgumentError:
        (place / CONFIG).unlink()
        raise
    write_json(place / HOSTS, hosts, indent=2)
    return WizardRun(place, profile, HostsConfig.load(place / HOSTS), sync)
