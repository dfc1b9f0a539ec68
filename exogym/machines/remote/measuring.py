"""Measure hosts and their network with the self-test, and write a file from which ExoGym predicts times."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from exogym.core.base.files import temporary_folder, write_json
from exogym.errors import ExoGymError, checked
from exogym.machines.remote.hosts import HostsConfig
from exogym.machines.remote.launcher import SSHLauncher
from exogym.network import Network

MEASURED_FILE = "measured.json"
START = '{"num_nodes": '  # start of the line that rank 0 prints
ERROR = "exogym.distributed: error: "


@checked
def measure_hosts(
    hosts_config: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig,
    file: str | os.PathLike[str],
    *,
    sync: bool = False,
    task: str | None = None,
    data: str | None = None,
    batch_size: int | None = None,
    task_options: str | None = None,
    sizes_bytes: Sequence[int] | None = None,
    project: str | os.PathLike[str] | None = None,
) -> Network:
    """Measure the network between the hosts, write the result to `file`, and return the measured `Network`.

    The hosts time every collective and the link of every pair of processes and, if `task` is set, a training step. The
    file lists the host's address for each slot.

    Args:
        hosts_config, sync, project: as for `SSHLauncher`.
        task: a task's name, or `module:function` of the project. None: no training step is timed.
        data, batch_size, task_options: the task's data, batch size and options, as in a profile; default: the task's
            own.
        sizes_bytes: message sizes to probe; default: the self-test's sizes.

    Raises:
        ExoGymError: the hosts are not ready, or the self-test failed on them. The message says why.
    """
    words = ["--json", "-"]
    words += [] if task is None else ["--task", task]
    words += [] if data is None else ["--data", data]
    words += [] if batch_size is None else ["--batch-size", str(batch_size)]
    words += [] if task_options is None else ["--task-options", task_options]
    words += [] if sizes_bytes is None else ["--sizes_bytes", *map(str, sizes_bytes)]
    with temporary_folder() as folder:
        launcher = SSHLauncher(hosts_config, sync=sync, project=project, out=folder, echo=False)
        code = launcher.launch("exogym.distributed", *words, module=True)
        assert launcher.folder is not None
        logs = {log.name: log.read_text("utf-8") for log in sorted(launcher.folder.glob("*.log"))}
    said = [line for line in logs.get("training_rank_0.log", "").splitlines() if line.startswith(START)]
    if code or not said:
        lines = [line for text in logs.values() for line in text.splitlines() if line.strip()]
        named = [line.partition(ERROR)[2] for line in lines if ERROR in line]
        why = named[0] if named else launcher.first_failure or "; ".join(lines[-3:])
        raise ExoGymError(f"the self-test failed on the hosts (exit code {code}): {why}")
    fields = json.loads(said[-1])
    fields["hosts"] = launcher.config.addresses
    network = Network.of(fields)
    write_json(file, fields)
    return network
