"""Start a script on all hosts of a hosts file, print its output on this machine, and end all its processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exogym.core.base.files import new_folder
from exogym.core.progress import notice
from exogym.errors import ArgumentError, check_count, checked
from exogym.machines.launch.stopping import ended_by
from exogym.machines.remote.budget import Quota
from exogym.machines.remote.channel import Logs
from exogym.machines.remote.fetching import fetch
from exogym.machines.remote.health import Board
from exogym.machines.remote.hosts import Host, HostsConfig
from exogym.machines.remote.inspection import Check, check_hosts, require
from exogym.machines.remote.orders import LAUNCH, NETWORK, RETRY, RUNS, HostOrder, inside, orders
from exogym.machines.remote.sync import sync_project
from exogym.machines.remote.watch import RunWatch, pause_s


class SSHLauncher:
    """Run scripts on the hosts of a hosts file.

    Args:
        hosts_config: a hosts file or a dict (see `HostsConfig.load`).
        sync: whether to copy the project's folder to the hosts first, with rsync.
        max_restarts: how often all processes may be restarted after a failure.
        min_hosts: continue the run while at least this many hosts are left, and readmit hosts that return. Each host
            then has its own `max_restarts`, and the script's training must support lost hosts (see `NetworkTrainer`).
            None: the run needs all hosts.
        retries: maximum number of restarts of the whole run, with exponential backoff, after losing a host.
            The processes find the number of restarts in EXOGYM_NETWORK_RETRY.
        project: the project's folder on this machine. Default: the current folder.
        out: folder in which each run creates a folder for its logs.
        echo: whether to print the processes' output on this machine.

    Attributes:
        folder: the last run's folder.
        finished: hosts that finished the last run without an error.
        first_failure: description of the last run's first failure, or None if unknown.

    >>> launcher = SSHLauncher({"master": "localhost"}, max_restarts=1)
    >>> launcher.config.slots
    1
    """

    @checked
    def __init__(
        self,
        hosts_config: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig,
        *,
        sync: bool = False,
        max_restarts: int = 0,
        min_hosts: int | None = None,
        retries: int = 0,
        project: str | os.PathLike[str] | None = None,
        out: str | os.PathLike[str] = RUNS,
        echo: bool = True,
    ):
        self.config = HostsConfig.load(hosts_config)
        check_count("max_restarts", max_restarts, least=0)
        check_count("retries", retries, least=0)
        if min_hosts is not None:
            check_count("min_hosts", min_hosts)
            if min_hosts > len(self.config.hosts):
                raise ArgumentError(
                    f"min_hosts={min_hosts}, but the hosts file has {len(self.config.hosts)} hosts: lower it"
                )
        self.min_hosts, self.retries = min_hosts, retries
        self.finished: list[Host] = []
        self._budgets: dict[Host, Quota] = {}  # for fetched files
        self.sync, self.max_restarts = sync, max_restarts
        self.project = os.path.realpath(project or os.getcwd())
        self.out, self.echo = Path(out), echo
        self.folder: Path | None = None
        self.first_failure: str | None = None

    def check(self, save_dir: str | None = None) -> list[Check]:
        """Run all checks on all hosts, and return the list of `Check` results (see `check_hosts`)."""
        return check_hosts(self.config, project=self.project, sync=self.sync, save_dir=save_dir)

    @checked
    def launch(
        self,
        script: str | os.PathLike[str],
        *args: Any,
        module: bool = False,
        environment: Mapping[str, str] | None = None,
        save_dir: str | None = None,
        folder: Path | None = None,
        mirror: Path | None = None,
    ) -> int:
        """Run `script` with `args` in every slot of every host, wait for them, and return the exit code.

        The hosts are checked first. The script's processes have torchrun's environment variables and EXOGYM_NETWORK=1.
        This machine prints their output, with the host's address before each line, and saves it in `folder`.

        Args:
            script: the path of a Python file in the project's folder, or a module's name if `module`.
            args: the script's arguments, passed as text.
            module: True if `script` is a module's name.
            environment: variables to add to the environment on all hosts.
            save_dir: folder for the script's checkpoints, which all hosts share, or which is a separate folder on each
                host.
            folder: folder for the logs; default: a new folder in `out`.
            mirror: path, at or below `folder`, for a copy of the run folder, which rank 0 writes on the master
                (`runs/...` in the project's folder). New records are copied during training. None: nothing is copied.

        Returns:
            0, or the exit code of the host that failed first.

        Raises:
            ArgumentError: the script does not exist, or is outside the project's folder.
            ExoGymError: the hosts are not ready; the message says what to do.
            KeyboardInterrupt: after Ctrl-C, once the processes on all hosts have ended. SIGTERM and SIGHUP also end the
                processes first, and then have their usual effect.
        """
        target = os.fspath(script) if module else self._script(script)

        launch = secrets.token_hex(8)

        def parts(retry: int = 0) -> list[HostOrder]:
            told = {NETWORK: "1", LAUNCH: launch} | dict(environment or {}) | ({RETRY: str(retry)} if retry else {})
            return orders(
                self.config, target, [str(word) for word in args], module=module, project=self.project,
                environment=told, max_restarts=self.max_restarts, min_hosts=self.min_hosts,
            )  # fmt: skip

        with ended_by((signal.SIGTERM, signal.SIGHUP)):
            self._prepare(save_dir, folder)
            self.folder = folder or new_folder(self.out, Path(target).stem)
            logs = Logs(self.folder, self.echo)
            host_mirror = None if mirror is None else os.path.join(RUNS, mirror.relative_to(self.folder.parent))
            board = Board(self.folder, mirror, host_mirror)
            slots, hosts = self.config.slots, len(self.config.hosts)
            count = f"{slots} process{'es' * (slots > 1)} on {hosts} host{'s' * (hosts > 1)}"
            notice(f"the hosts are ready; starting {count}; logs in {from_here(self.folder)}")
            try:
                return self._run(parts, logs, board, save_dir)
            finally:
                board.close()
                self.first_failure = None if logs.first is None else logs.first[1]
                logs.close()
        return 128 + signal.SIGTERM  # the caller's signal handler did not end the process

    def fetch(self, path: str, target: Path, host: Host | None = None) -> None:
        """Copy a file from a host to this machine, completely or not at all.

        Args:
            path: the file's path in the project's folder on the host.
            target: path of the copy on this machine.
            host: the host, by default the master.

        Raises:
            ExoGymError: the file doesn't exist, is larger than the disk space that a host's files may fill here, or was
                damaged on the way.
        """
        host = host or self.config.master
        budget = self._budgets.setdefault(host, Quota.of_disk(target.parent))
        fetch(host, host.path or self.project, path, target, budget)

    # Inside

    def _script(self, script: str | os.PathLike[str]) -> str:
        path = os.path.join(self.project, os.fspath(script))
        if not os.path.isfile(path):
            raise ArgumentError(
                f"script={path!r} does not exist: pass the path of a Python file in the project's folder"
            )
        return inside(self.project, path)

    def _prepare(self, save_dir: str | None, folder: Path | None) -> None:
        """Check the hosts and copy the project. If this fails, remove an empty `folder`."""
        try:
            require(self.check(save_dir))
            if self.sync:
                sync_project(self.config, self.project)
        except BaseException:
            if folder is not None:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def _run(self, parts: Callable[[int], list[HostOrder]], logs: Logs, board: Board, save_dir: str | None) -> int:
        """Run the parts, and rerun all of them after a pause if a host is lost, up to `retries` times."""
        retry = 0
        while True:
            watch = RunWatch(parts(retry), logs, board, goes_on=self.min_hosts is not None)
            code = watch.run()
            self.finished = watch.finished
            while code and watch.lost and retry < self.retries:
                pause, retry = pause_s(retry), retry + 1
                notice(f"starting again in {pause:g} s (retry {retry} of {self.retries})")
                time.sleep(pause)
                failed = [check for check in self.check(save_dir) if not check.ok]
                if not failed:
                    break
                notice(f"{failed[0].host}: {failed[0].check}: {failed[0].seen}")
            else:
                return code


def from_here(folder: Path) -> Path:
    """Return `folder` relative to the current folder, or unchanged if it is outside the current folder.

    >>> from_here(Path.cwd() / "runs" / "train"), from_here(Path("/tmp/train"))
    (PosixPath('runs/train'), PosixPath('/tmp/train'))
    """
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
