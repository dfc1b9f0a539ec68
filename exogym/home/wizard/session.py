"""The folder of a run that `exogym wizard` has prepared, with the files that repeat the run, and the run's time."""

from __future__ import annotations

import configparser
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError
from exogym.files import regular_text, replacing, write_json
from exogym.machines.remote.profile import PREFIX, RunProfile, load_profile
from exogym.network import readable_seconds
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


@dataclass(frozen=True)
class Taken:
    """A run's measured time, read from its run folder, beside the wizard's estimate of the time.

    Attributes:
        estimated_s: predicted seconds of training.
        seconds: measured seconds of training. If the run was restarted, this time begins at the last start.
        total_s: measured seconds from the start of the command until the results had been fetched.
    """

    estimated_s: float
    seconds: float
    total_s: float

    @classmethod
    def of(cls, folder: Path, estimated_s: float, total_s: float) -> Taken | None:
        """Read a run's times from its run folder. Return None if the folder does not record the run's start or end."""
        at: dict[str, float] = {}
        try:
            for line in regular_text(folder / "events.jsonl").splitlines():
                event = json.loads(line)
                at[event["kind"]] = float(event["at_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not {"start", "done"} <= at.keys():
            return None
        return cls(estimated_s, at["done"] - at["start"], total_s)

    def __str__(self) -> str:
        """Describe the times in one line.

        >>> print(Taken(estimated_s=40.0, seconds=50.0, total_s=59.0))
        training took 50 s, estimated 40 s, 25 % more; 59 s with starting and copying
        """
        off = self.seconds / self.estimated_s - 1
        more = f"{abs(off):.0%}".replace("%", " %") + (" more" if off >= 0 else " less")
        took, wanted, total = map(readable_seconds, (self.seconds, self.estimated_s, self.total_s))
        return f"training took {took}, estimated {wanted}, {more}; {total} with starting and copying"
