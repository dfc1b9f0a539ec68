"""Prepare the script's processes each time before torch's elastic agent starts or restarts them."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from exogym.core.progress import notice
from exogym.machines.launch.config import LaunchConfig
from exogym.machines.launch.failures import AgentsRecord, first_failure, is_lost, tell
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.rendezvous import Node
from exogym.machines.launch.stopping import kill_what_is_left


class Attempts(DefaultLogsSpecs):
    """Prepares the environment of the script's processes. Torch calls `reify` right before it starts the processes.

    Args:
        folder: folder for the files in which the processes record their errors.
        output: the ranks' output. Before each start, it gets the rank of each process on this machine.
        node: this machine in the launch, with the current attempt's number. The number is the same on all machines.
        environment: variables to add to each process's environment.
        config: the launch's settings.

    Attributes:
        record: a filter for the log of torch's agent. It stores which process on this machine failed.
    """

    def __init__(self, folder: Path, output: RankOutput, node: Node, environment: dict[str, str], config: LaunchConfig):
        super().__init__(log_dir=str(folder / "errors"))
        self.folder, self.output, self.node, self.environment = folder, output, node, environment
        self.config, self.record = config, AgentsRecord()
        self.world_size, self.first_rank = 0, config.first_rank or 0
        self._error_files: dict[int, str] = {}  # error files of the last attempt

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        kill_what_is_left(self.folder)
        if self.node.attempt > 0:
            most = self.config.max_restarts
            of = f" of {most}" if self.node.attempt <= most else ""  # each node counts its own failures
            notice(f"{self._who_failed()}; starting again (restart {self.node.attempt}{of})")
        for local_rank, env in envs.items():
            env.update(self.environment)
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.node.attempt)
            self.output.ranks[local_rank] = self.first_rank + int(env["RANK"])
            self.world_size = int(env["WORLD_SIZE"])
        made = super().reify(envs)
        self.record.failed, self._error_files = None, made.error_files
        return made

    def _who_failed(self) -> str:
        """Return which rank of this node ended the last attempt, and how; or that another host's rank did."""
        ranks, files = self.output.ranks, self._error_files
        wrote = [local_rank for local_rank, path in files.items() if os.path.isfile(path)]
        failures = {ranks[local_rank]: ProcessFailure(local_rank, 0, 1, files[local_rank]) for local_rank in wrote}
        if self.record.failed is not None:
            local_rank, pid, exitcode = self.record.failed
            failures[ranks[local_rank]] = ProcessFailure(local_rank, pid, exitcode, files[local_rank])
        if failures:
            rank, failure = first_failure(failures)
            if not is_lost(failure):
                return tell(rank, failure)
            if len(failures) < len(
                files
            ):  # a rank without an error file may have been killed, or stopped by torch's agent
                return "a process failed"
        return "a process on another host failed" if self.config.nnodes > 1 else "a process failed"
