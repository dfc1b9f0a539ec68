"""The command that each host of a run gets."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError
from exogym.machines.launch.config import FIRST_RANK
from exogym.machines.launch.door import SECRET
from exogym.machines.remote.hosts import Host, HostsConfig

# Environment variables of a process on a host.
MEMBERSHIP, SLOTS = "EXOGYM_MEMBERSHIP", "EXOGYM_SLOTS"
NETWORK, FIT, RUN = "EXOGYM_NETWORK", "EXOGYM_NETWORK_FIT", "EXOGYM_NETWORK_RUN"
PROGRESS, DEVICE, PROJECT = "EXOGYM_NETWORK_PROGRESS", "EXOGYM_DEVICE", "EXOGYM_PROJECT"
RETRY, LAUNCH = "EXOGYM_NETWORK_RETRY", "EXOGYM_LAUNCH"
RUNS = "runs"

START_TIMEOUT_S = 300  # for the launchers of all hosts to connect to each other
SILENCE_S = 60.0  # a host ends its part after this much silence of the controller (or the membership server)
STOP_S = 40.0  # from SIGTERM to SIGKILL; torch's agent gives its processes 30 s


@dataclass(frozen=True)
class HostOrder:
    """The command that one host of a run gets: the host's Python with some arguments.

    Attributes:
        host: the host.
        ranks: ranks of the processes that the command starts. The list is empty if the command starts the membership
            server (see `exogym.machines.remote.elastic`).
        words: the arguments of the host's Python, such as `-m exogym.launch ...`.
        folder: the command's working folder; `~` is the host's home folder.
        environment: variables to add to the host's environment.
        alone: True if the run has only this host, so that the processes use the loopback.
    """

    host: Host
    ranks: range
    words: list[str]
    folder: str
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    def given(self, reports: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings for `onhost/guard.py`, which runs the command on the host.

        Args:
            reports: settings of the host's reports (see `Board.asked_of`), or None for no reports.
        """
        return {
            "words": self.words, "folder": self.folder, "environment": self.environment,
            "address": None if self.alone else self.host.address,
            "is_loopback": self.host.is_loopback, "silence_s": SILENCE_S, "stop_s": STOP_S,
            "reports": reports,
        }  # fmt: skip


def orders(
    config: HostsConfig,
    script: str,
    args: Sequence[str],
    *,
    module: bool,
    project: str,
    environment: dict[str, str],
    max_restarts: int,
    min_hosts: int | None = None,
) -> list[HostOrder]:
    """Return each host's command, which runs `exogym.launch` (torch's elastic agent) with the host's number.

    If `min_hosts` is set, each host's agent watches only its own processes, and the first command starts the membership
    server on the master.

    Args:
        config: the hosts.
        script: path of a script in the project's folder, or a module's name.
        args: the script's arguments.
        module: True if `script` is a module's name.
        project: the project's folder on this machine, and on hosts without their own `path`.
        environment: variables to add to the environment on all hosts.
        max_restarts, min_hosts: as for `SSHLauncher`.
    """
    found = []
    master, port = config.master, config.master_port
    secret = {SECRET: secrets.token_hex(32)}
    slots = ",".join(str(host.slots) for host in config.hosts)
    environment = environment | secret | {SLOTS: slots}
    if min_hosts is not None:
        environment = environment | {MEMBERSHIP: f"{master.address} {port}"}
        asked = {"address": master.address, "port": port, "slots": [host.slots for host in config.hosts]}
        asked |= {"min_hosts": min_hosts, "start_timeout_s": START_TIMEOUT_S}
        words = ["-m", "exogym.machines.remote.elastic.membership", json.dumps(asked)]
        found.append(HostOrder(master, range(0), words, master.path or project, secret))
    for index, host in enumerate(config.hosts):
        own = {"OMP_NUM_THREADS": "1", DEVICE: host.device}
        words = ["-m", "exogym.launch", "--nproc_per_node", str(host.slots)]
        if min_hosts is not None:
            own[FIRST_RANK] = str(config.ranks(index)[0])
        else:
            words += ["--nnodes", str(len(config.hosts))]
        if min_hosts is None and len(config.hosts) > 1:
            words += ["--node_rank", str(index), "--master_addr", master.address, "--master_port", str(port)]
        words += ["--max_restarts", str(max_restarts), "--start_timeout", str(START_TIMEOUT_S)]
        words += ["-m", script] if module else [script]
        words += ["--", *args]
        alone = min_hosts is None and len(config.hosts) == 1
        found.append(HostOrder(host, config.ranks(index), words, host.path or project, own | environment, alone))
    return found


def inside(project: str, script: str | os.PathLike[str]) -> str:
    """Return the path of `script` relative to the project's folder, which is the same on all hosts.

    >>> inside("/home/ann/whisper", "/home/ann/whisper/train.py")
    './train.py'

    Raises:
        ArgumentError: the script is outside this folder.
    """
    root, path = Path(os.path.realpath(project)), Path(os.path.realpath(script))
    if not path.is_relative_to(root):
        raise ArgumentError(
            f"script={str(path)!r} is outside the project's folder {str(root)!r}, and the hosts have only this "
            "folder: pass a script in the project's folder (or another folder as project= of SSHLauncher)"
        )
    return os.path.join(".", path.relative_to(root))
