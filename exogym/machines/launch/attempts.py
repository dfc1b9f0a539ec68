"""Prepare the script's processes before torch's elastic agent starts or restarts them, and describe their failures."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from exogym.core.base.torch_private import failure_of
from exogym.core.progress import notice
from exogym.machines.launch.config import FIRST_RANK, LaunchConfig
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.rendezvous import Machine
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

    def __init__(
        self, folder: Path, output: RankOutput, node: Machine, environment: dict[str, str], config: LaunchConfig
    ):
        super().__init__(log_dir=str(folder / "errors"))
        self.folder, self.output, self.node, self.environment = folder, output, node, environment
        self.config, self.record = config, AgentsRecord()
        self.world_size = 0
        self.first_rank = int(os.environ[FIRST_RANK]) if FIRST_RANK in os.environ else None
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
            self.output.ranks[local_rank] = (self.first_rank or 0) + int(env["RANK"])
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


class AgentsRecord(logging.Filter):
    """A log filter that hides torch's line about a failed process and stores the facts. `tell` describes the failure.

    Attributes:
        failed: (local rank, process id, exit code) of the last failure, or None if no process on this machine has
            failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: tuple[int, int, int] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        failed = failure_of(record)
        self.failed = failed or self.failed
        return failed is None


def _recorded(failure: ProcessFailure) -> dict[str, str | float]:
    """Return the rank's own record of its error: `message`, `time_s`, `lost`. {} if it wrote none."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return {}
    extra = message.get("extraInfo", {})
    time_s = float(extra.get("time_s", extra.get("timestamp", 0)))
    return {"message": message.get("message", ""), "time_s": time_s, "lost": bool(extra.get("lost"))}


def is_lost(failure: ProcessFailure) -> bool:
    """Return whether a rank failed only because another rank had ended and their connection was lost."""
    return bool(_recorded(failure).get("lost"))


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the failure that most likely caused the others.

    A rank that died without recording an error (killed or crashed) comes first, because such an end causes errors on
    other ranks. Ranks with a recorded error follow, from the earliest error to the latest. Then come ranks that only
    lost a connection to another rank. Ranks that the launcher stopped come last.
    """

    def order(rank: int) -> tuple[int, float, int]:
        failure = failures[rank]
        if recorded := _recorded(failure):
            return (2 if recorded["lost"] else 1), float(recorded["time_s"]), rank
        return (3 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp, rank

    rank = min(failures, key=order)
    return rank, failures[rank]


def exit_code(failure: ProcessFailure) -> int:
    """Return the launch's exit code after a rank's failure, as in a shell: 128 + the signal for a killed rank.

    If the launcher stopped the rank while the rank handled its own error, the code is 1, as if the rank had ended by
    itself.
    """
    if failure.exitcode == -signal.SIGTERM and _recorded(failure):
        return 1
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def tell(rank: int, failure: ProcessFailure, world_size: int | None = None) -> str:
    """Return a description of a rank's failure, for example "rank 1 was killed by signal 9 (SIGKILL)"."""
    recorded = _recorded(failure)
    if recorded.get("lost"):
        how = "lost its connection to another rank, which failed first"
    elif failure.exitcode < 0 and exit_code(failure) > 128:
        how = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        how = f"ended with exit code {exit_code(failure)}"
    text = f"rank {rank}{'' if world_size is None else f' of {world_size}'} {how}"
    if recorded and not recorded["lost"]:
        text += f": {str(recorded['message']).splitlines()[0]}"
    return text


def describe(rank: int, failure: ProcessFailure, world_size: int | None, log_dir: Path | None) -> str:
    """Return one line that describes a rank's failure and says where to read the rank's output."""
    where = [f'above, after "[rank {rank}]"']
    if log_dir is not None:
        where.append(f"in {log_dir / f'training_rank_{rank}.log'}")
    return f"{tell(rank, failure, world_size)}; what it printed is {' and '.join(where)}"
