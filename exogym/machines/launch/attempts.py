"""Run a script's processes with torch's elastic agent: prepare them before each start, and describe their failures."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig as AgentConfig
from torch.distributed.launcher.api import elastic_launch

from exogym.core.base.torch_private import AGENT_LOGGERS, FAILURE_LOGGER, failure_of
from exogym.core.progress import notice
from exogym.errors import ArgumentError, ExoGymError, TrainingError
from exogym.machines.launch import rendezvous
from exogym.machines.launch.config import BACKEND_VARIABLE, FIRST_RANK, LaunchConfig
from exogym.machines.launch.door import SECRET, WrongSecret
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.rendezvous import Machine
from exogym.machines.launch.stopping import Interrupted, kill_what_is_left

RUNNER = Path(__file__).with_name("runner.py")


def run(
    config: LaunchConfig, folder: Path, output: RankOutput, log_dir: Path | None, words: Sequence[str]
) -> tuple[int, str | None]:
    """Run a script in the processes of `config`. Return the exit code and, if it is not 0, a message.

    Args:
        folder: the launch's folder.
        output: the ranks' output, which also goes into files in `log_dir`.
        words: "script" or "module", the script's path or the module's name, and its arguments.
    """
    rendezvous.check_address(config.address)
    node = Machine(config.node_rank, config.address, config.port, config.start_timeout)
    attempts = Attempts(folder, output, node, config)
    command = ["-u", str(RUNNER), str(folder), str(os.getpid()), *words]
    escaped = [word.replace("$", "$$") for word in command]  # the agent replaces $names
    try:
        with _quiet_agent(config, attempts.record):
            elastic_launch(_agent_config(config, node, attempts), sys.executable)(*escaped)
        return 0, None
    except ChildFailedError as failed:
        rank, failure = first_failure(failed.failures)
        world_size = attempts.world_size if attempts.first_rank is None else None
        return exit_code(failure), describe((attempts.first_rank or 0) + rank, failure, world_size, log_dir)
    except SignalException as stop:
        raise Interrupted(stop.sigval) from None
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise _no_meeting(config, error, node) from error


def _agent_config(config: LaunchConfig, node: Machine, attempts: Attempts) -> AgentConfig:
    rendezvous.register()
    return AgentConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        run_id=rendezvous.NAME,
        rdzv_backend=rendezvous.NAME,
        rdzv_endpoint=config.endpoint,
        rdzv_configs={"node": node},
        local_addr=config.address,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        logs_specs=attempts,
        signals_to_handle="",  # the launcher handles signals itself
    )


@contextlib.contextmanager
def _quiet_agent(config: LaunchConfig, record: AgentsRecord) -> Iterator[None]:
    """A context in which torch's agent logs only new errors, which `record` receives."""
    level = logging.ERROR if config.max_restarts or config.nnodes > 1 else logging.CRITICAL
    before = {
        log: log.level
        for name, log in logging.root.manager.loggerDict.items()
        if name.startswith(AGENT_LOGGERS) and isinstance(log, logging.Logger)
    }
    for log in before:
        log.setLevel(level)
    logging.getLogger(FAILURE_LOGGER).addFilter(record)
    try:
        yield
    finally:
        logging.getLogger(FAILURE_LOGGER).removeFilter(record)
        for log, level in before.items():
            log.setLevel(level)


def _no_meeting(config: LaunchConfig, error: Exception, node: Machine) -> ExoGymError:
    cause = error.__cause__ or error
    if isinstance(cause, WrongSecret):
        return TrainingError(
            f"{cause}: set {SECRET} to the same text on all machines, or pass another master_port= if the other run "
            "continues"
        )
    number = cause.errno if isinstance(cause, OSError) else None
    if number == errno.EADDRINUSE:
        return ArgumentError(
            f"port {config.port} is taken on this machine: pass another master_port=, the same on all machines (on a "
            "single machine, leave it out to use a free port)"
        )
    if number == errno.EADDRNOTAVAIL:
        return ArgumentError(
            f"master_addr={config.address!r} belongs to no interface of this machine: pass an address of this machine "
            "(`ip addr`, macOS: ifconfig), or a node_rank other than 0"
        )
    if node.attempt >= 0 and not isinstance(error, RendezvousTimeoutError):
        return TrainingError(f"a machine has left the run: {cause}")
    return TrainingError(
        f"not all nnodes={config.nnodes} machines met at {config.endpoint} within "
        f"start_timeout={config.start_timeout} seconds: start the launcher on each with the same nnodes, "
        "master_addr and master_port, and its own node_rank; this is machine "
        f"{config.node_rank} ({type(error).__name__}: {cause})"
    )


def _environment(config: LaunchConfig) -> dict[str, str]:
    """Return the variables to add to each process's environment."""
    wanted = {"OMP_NUM_THREADS": "1"}
    if config.nnodes == 1:  # then the ranks' ports stay on the loopback
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:
            wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    return added if config.backend is None else added | {BACKEND_VARIABLE: config.backend}


class Attempts(DefaultLogsSpecs):
    """Prepares the environment of the script's processes. Torch calls `reify` right before it starts the processes.

    Args:
        folder: folder for the files in which the processes record their errors.
        output: the ranks' output. Before each start, it gets the rank of each process on this machine.
        node: this machine in the launch, with the current attempt's number. The number is the same on all machines.
        config: the launch's settings.

    Attributes:
        record: a filter for the log of torch's agent. It stores which process on this machine failed.
    """

    def __init__(self, folder: Path, output: RankOutput, node: Machine, config: LaunchConfig):
        super().__init__(log_dir=str(folder / "errors"))
        self.folder, self.output, self.node, self.environment = folder, output, node, _environment(config)
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
        """Return which rank of this node ended the last attempt and how, or that another host's rank did."""
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
    """A log filter that hides torch's line about a failed process and stores its facts for `tell`.

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
    """Return whether a rank failed only because it lost its connection to a rank that had ended."""
    return bool(_recorded(failure).get("lost"))


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the failure that most likely caused the others.

    A rank that died without recording an error (killed or crashed) comes first, because its end causes errors on other
    ranks. Ranks with a recorded error follow in order of time, then ranks that only lost a connection to another rank,
    and last the ranks that the launcher stopped.
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

    If the launcher stopped the rank while it was handling its own error, the code is 1, as if it had ended by itself.
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
    """Return one line that describes a rank's failure and where to find its output."""
    where = [f'above, after "[rank {rank}]"']
    if log_dir is not None:
        where.append(f"in {log_dir / f'training_rank_{rank}.log'}")
    return f"{tell(rank, failure, world_size)}; what it printed is {' and '.join(where)}"
