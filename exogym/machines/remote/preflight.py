"""Check every host before a run starts, and name a remedy for each problem.

All hosts are checked at the same time, each over one connection. Checks that cannot work are skipped: without a login,
for example, Python is not checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exogym.errors import ArgumentError, ExoGymError, checked
from exogym.machines.remote.hosts import HostsConfig
from exogym.machines.remote.inquiry import ANSWER_S
from exogym.machines.remote.inspection import Check, Controller, Inspection


@checked
def check_hosts(
    hosts_config: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig,
    *,
    project: str | os.PathLike[str] | None = None,
    sync: bool = False,
    save_dir: str | None = None,
    code: bool = True,
    answer_s: float = ANSWER_S,
) -> list[Check]:
    """Check all hosts at the same time. Return one `Check` per host and check, in the order of the hosts file.

    Args:
        hosts_config: see `HostsConfig.load`.
        project: the project's folder on this machine. Default: the current folder.
        sync: True if the project will be copied to the hosts. Then check for rsync instead of the project's files.
        save_dir: folder for checkpoints. Check that every host can write to this folder, and whether the hosts share
            it. If `save_dir` is None, this check is left out.
        code: True to check that the project's Python files on the hosts equal the files on this machine.
        answer_s: seconds to wait for each of a host's answers.

    Raises:
        ArgumentError: the hosts file is wrong, or names a file that does not exist.

    >>> [check.check for check in check_hosts({"master": {"address": "localhost", "device": "cpu"}}, code=False)]
    ['login', 'python', 'clock', 'torch', 'exogym', 'disk', 'device', 'address', 'port']
    """
    config = HostsConfig.load(hosts_config)
    _check_files(config)
    here = Controller(os.path.abspath(project or os.getcwd()), sync, save_dir, code)
    inspections = [Inspection(config, i, here, answer_s) for i in range(len(config.hosts))]
    with ThreadPoolExecutor(len(inspections)) as pool:
        try:
            list(pool.map(Inspection.look, inspections))
            places = {i: inspection.place for i, inspection in enumerate(inspections) if inspection.place is not None}
            if len(places) > 1:
                list(pool.map(lambda inspection: inspection.reach(places), inspections))
            list(pool.map(Inspection.end, inspections))
        except BaseException:  # Ctrl-C above all
            for inspection in inspections:
                inspection.abort()
            raise
    return [check for inspection in inspections for check in inspection.checks]


def _check_files(config: HostsConfig) -> None:
    """Refuse a missing key or ssh config. Otherwise ssh would ignore it and might log in differently."""
    for host in config.hosts:
        for field, path in (("ssh_key_path", host.key), ("ssh_config_path", host.ssh_config)):
            if path is not None and not host.is_local and not os.path.isfile(path):
                raise ArgumentError(
                    f"{field}={path!r} (for {host.address}) does not exist on this machine: name an existing "
                    "file, or leave the field out to use your SSH config"
                )


def require(checks: Sequence[Check]) -> None:
    """Raise ExoGymError if a check failed, with a line for each failure and its remedy."""
    failed = [check for check in checks if not check.ok]
    if failed:
        lines = [f"{check.host}: {check.check}: {check.seen}. Remedy: {check.remedy}" for check in failed]
        raise ExoGymError("the hosts are not ready (exogym doctor shows all):\n  " + "\n  ".join(lines))
