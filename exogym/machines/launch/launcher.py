"""Start a script's processes on this machine and watch them, with torch's elastic agent."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym.core.progress import notice
from exogym.errors import ArgumentError, ExoGymError, TrainingError, checked
from exogym.machines.launch.config import BACKEND_VARIABLE, LaunchConfig
from exogym.machines.launch.door import SECRET, WrongSecret
from exogym.machines.launch.folders import launch_folder
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.stopping import Interrupted, ended_by, kill_what_is_left

if TYPE_CHECKING:
    from exogym.machines.launch.attempts import AgentsRecord
    from exogym.machines.launch.rendezvous import Machine

RUNNER = Path(__file__).with_name("runner.py")
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # torch's launcher does not unset it
SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"))


class DistributedLauncher:
    """Runs a script in several processes on this machine, as `config` says.

    >>> DistributedLauncher(LaunchConfig(nproc_per_node=2)).config.nproc_per_node
    2
    """

    def __init__(self, config: LaunchConfig):
        if not isinstance(config, LaunchConfig):
            raise ArgumentError(f"DistributedLauncher wants a LaunchConfig, got a {type(config).__name__}")
        self.config = config

    def launch(self, script: str | os.PathLike[str], *args: Any, module: bool = False) -> int:
        """Run `script` with `args` in every process on this machine, wait, and return the exit code.

        Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
        TORCHELASTIC_RESTART_COUNT (0 at first) in its environment. OMP_NUM_THREADS is 1 unless you have set it, and
        EXOGYM_BACKEND is the config's backend. The processes' output goes to the terminal, each line after `[rank N]`.
        If a process fails, the launcher stops all processes, and restarts them up to `max_restarts` times.

        Args:
            script: path of a Python file, or with `module=True` a module's name, as for `python -m`.
            args: the script's arguments, passed as text.
            module: True if `script` is a module's name.

        Returns:
            0 if all processes ended well; otherwise the exit code of the first failed process, or 128 + the signal that
            killed it.

        Raises:
            ArgumentError: the script does not exist, or a port is taken.
            TrainingError: not all machines connected within `start_timeout` seconds, or machine 0 was lost.
            KeyboardInterrupt: after Ctrl-C, when all processes have ended. (SIGTERM also first ends all processes, and
                then has its usual effect.)
        """
        target = os.fspath(script)
        if not module and not os.path.isfile(target):
            raise ArgumentError(f"script={target!r} does not exist in {os.getcwd()}: give the path of a Python file")
        log_dir = self._log_dir()
        # At the first signal the agent sends SIGTERM to the ranks and waits. A second signal kills them.
        with ended_by(SIGNALS) as stop, _kept(HANDLED), launch_folder() as folder:
            stop.again = functools.partial(kill_what_is_left, folder)
            output = RankOutput(folder, self.config.nproc_per_node, log_dir)
            try:
                code, said = self._run(folder, output, log_dir, "module" if module else "script", target, args)
            finally:
                stop.hold()
                kill_what_is_left(folder)
                output.close()
                kill_what_is_left(folder)  # a rank that was just starting
                gc.collect()  # frees the meeting's stores, which are in reference cycles, and their ports
            if said:
                notice(said)
            return code
        return 128 + stop.number  # the caller's handler of the signal did not end the process

    def _log_dir(self) -> Path | None:
        if self.config.log_dir is None:
            return None
        folder = Path(self.config.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"log_dir={str(folder)!r} cannot be made: {error}") from None
        return folder

    def _run(
        self, folder: Path, output: RankOutput, log_dir: Path | None, kind: str, target: str, args: tuple[Any, ...]
    ) -> tuple[int, str | None]:
        """Return the exit code and, if it is not 0, what to say."""
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch

        from exogym.machines.launch.attempts import Attempts, describe, exit_code, first_failure
        from exogym.machines.launch.rendezvous import Machine, check_address

        config = self.config
        check_address(config.address)
        node = Machine(config.node_rank, config.address, config.port, config.start_timeout)
        attempts = Attempts(folder, output, node, self._environment(), config)
        command = ["-u", str(RUNNER), str(folder), str(os.getpid()), kind, target, *map(str, args)]
        escaped = [word.replace("$", "$$") for word in command]  # the agent replaces $names
        try:
            level = logging.ERROR if config.max_restarts or config.nnodes > 1 else logging.CRITICAL
            with _quiet_agent(level, attempts.record):
                elastic_launch(self._agent_config(node, attempts), sys.executable)(*escaped)
            return 0, None
        except ChildFailedError as failed:
            rank, failure = first_failure(failed.failures)
            world_size = attempts.world_size if attempts.first_rank is None else None
            return exit_code(failure), describe((attempts.first_rank or 0) + rank, failure, world_size, log_dir)
        except SignalException as stop:
            raise Interrupted(stop.sigval) from None
        except (RendezvousError, DistNetworkError, DistStoreError) as error:
            raise self._no_meeting(error, node) from error

    def _environment(self) -> dict[str, str]:
        wanted = {"OMP_NUM_THREADS": "1"}
        if self.config.nnodes == 1:  # then the ranks' ports stay on the loopback
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
            if loopback is not None:
                wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        return added if self.config.backend is None else added | {BACKEND_VARIABLE: self.config.backend}

    def _agent_config(self, node: Machine, attempts: Any) -> Any:
        from torch.distributed.launcher.api import LaunchConfig as AgentConfig

        from exogym.machines.launch import rendezvous

        rendezvous.register()
        config = self.config
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

    def _no_meeting(self, error: Exception, node: Machine) -> ExoGymError:
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        config, cause = self.config, error.__cause__ or error
        if isinstance(cause, WrongSecret):
            return TrainingError(
                f"{cause}: set {SECRET} to the same text on all machines, or give another master_port= if the other "
                "run continues"
            )
        number = cause.errno if isinstance(cause, OSError) else None
        if number == errno.EADDRINUSE:
            return ArgumentError(
                f"port {config.port} is taken on this machine: give another master_port=, the "
                "same on all machines (with one machine, leave it out: a free port is found)"
            )
        if number == errno.EADDRNOTAVAIL:
            return ArgumentError(
                f"master_addr={config.address!r} belongs to no interface of this machine: give an address "
                "of this machine (`ip addr`, macOS: ifconfig), or a node_rank other than 0"
            )
        if node.attempt >= 0 and not isinstance(error, RendezvousTimeoutError):
            return TrainingError(f"a machine has left the run: {cause}")
        return TrainingError(
            f"not all nnodes={config.nnodes} machines met at {config.endpoint} within "
            f"start_timeout={config.start_timeout} seconds: start the launcher on each with the same nnodes, "
            "master_addr and master_port, and its own node_rank; this is machine "
            f"{config.node_rank} ({type(error).__name__}: {cause})"
        )


@checked
def launch_distributed_training(
    script: str | os.PathLike[str],
    *args: Any,
    nproc_per_node: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str | None = None,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    start_timeout: int = 600,
    log_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Run `script` with `args` in `nproc_per_node` processes on this machine, and return the exit code.

    This is the same as `DistributedLauncher(LaunchConfig(...)).launch(script, *args)`. See `LaunchConfig` for the other
    arguments.
    """
    config = LaunchConfig(
        nproc_per_node, nnodes, node_rank, master_addr, master_port, backend, max_restarts, monitor_interval,
        start_timeout, log_dir,
    )  # fmt: skip
    return DistributedLauncher(config).launch(script, *args)


@contextlib.contextmanager
def _kept(variable: str) -> Iterator[None]:
    """Restore an environment variable after the block."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


@contextlib.contextmanager
def _quiet_agent(level: int, record: AgentsRecord) -> Iterator[None]:
    """Limit the log of torch's agent to `level` and above inside the block, and let `record` listen."""
    from exogym.core.base.torch_private import AGENT_LOGGERS, FAILURE_LOGGER

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
