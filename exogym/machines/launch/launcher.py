"""Start a script's processes on this machine and watch them, with torch's elastic agent."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exogym.core.progress import notice
from exogym.errors import ArgumentError, checked
from exogym.machines.launch.config import LaunchConfig
from exogym.machines.launch.folders import launch_folder
from exogym.machines.launch.output import RankOutput
from exogym.machines.launch.stopping import ended_by, kill_what_is_left

HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # torch's launcher does not unset it
SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"))


class DistributedLauncher:
    """Run a script in several processes on this machine with the settings `config`.

    >>> DistributedLauncher(LaunchConfig(nproc_per_node=2)).config.nproc_per_node
    2
    """

    def __init__(self, config: LaunchConfig):
        if not isinstance(config, LaunchConfig):
            raise ArgumentError(f"DistributedLauncher needs a LaunchConfig, not a {type(config).__name__}")
        self.config = config

    def launch(self, script: str | os.PathLike[str], *args: Any, module: bool = False) -> int:
        """Run `script` with `args` in every process on this machine, wait for them, and return the exit code.

        Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
        TORCHELASTIC_RESTART_COUNT (0 at first) in its environment. OMP_NUM_THREADS is 1 unless you set it, and
        EXOGYM_BACKEND is the config's backend. The processes' output goes to the terminal, with `[rank N]` before each
        line. If a process fails, the launcher stops all processes and restarts them up to `max_restarts` times.

        Args:
            script: path of a Python file, or a module's name as for `python -m` if `module`.
            args: the script's arguments, passed as text.
            module: True if `script` is a module's name.

        Returns:
            0 if all processes succeeded; otherwise the exit code of the first failed process, or 128 + the signal that
            killed it.

        Raises:
            ArgumentError: the script does not exist, or a port is taken.
            TrainingError: not all machines connected within `start_timeout` seconds, or machine 0 was lost.
            KeyboardInterrupt: after Ctrl-C, once all processes have ended. (SIGTERM also ends all processes first, and
                then has its usual effect.)
        """
        target = os.fspath(script)
        if not module and not os.path.isfile(target):
            raise ArgumentError(f"script={target!r} does not exist in {os.getcwd()}: pass the path of a Python file")
        log_dir = self._log_dir()
        from exogym.machines.launch.attempts import run  # loads torch

        # At the first signal the agent sends SIGTERM to the ranks and waits. A second signal kills them.
        with ended_by(SIGNALS) as stop, _kept(HANDLED), launch_folder() as folder:
            stop.again = functools.partial(kill_what_is_left, folder)
            output = RankOutput(folder, self.config.nproc_per_node, log_dir)
            try:
                words = ["module" if module else "script", target, *map(str, args)]
                code, said = run(self.config, folder, output, log_dir, words)
            finally:
                stop.hold()
                kill_what_is_left(folder)
                output.close()
                kill_what_is_left(folder)  # a rank that was just starting
                gc.collect()  # frees the meeting's stores, which are in reference cycles, and their ports
            if said:
                notice(said)
            return code
        return 128 + stop.number  # the caller's signal handler did not end the process

    def _log_dir(self) -> Path | None:
        if self.config.log_dir is None:
            return None
        folder = Path(self.config.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"log_dir={str(folder)!r} cannot be created: {error}") from None
        return folder


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

    Equivalent to `DistributedLauncher(LaunchConfig(...)).launch(script, *args)`; see `LaunchConfig` for the arguments.
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
