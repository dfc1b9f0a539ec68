"""A process that `SSHLauncher` started: its settings from the environment, and messages between such processes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from exogym.core.base.files import replacing
from exogym.core.communicator import Wire
from exogym.core.engine.engines import place, world_size
from exogym.core.engine.wire import ProcessWire
from exogym.core.saving.checkpoint_files import list_checkpoints
from exogym.machines.launch.config import FIRST_RANK
from exogym.machines.remote.orders import (
    DEVICE,
    FIT,
    LAUNCH,
    MEMBERSHIP,
    NETWORK,
    PROGRESS,
    PROJECT,
    RETRY,
    RUN,
    RUNS,
    SLOTS,
)  # fmt: skip


@dataclass(frozen=True)
class LaunchedPart:
    """The settings that `SSHLauncher` passed to this process in environment variables.

    Attributes:
        rank: this process's rank.
        fit: number (from 1) of the script's `NetworkTrainer.fit` call whose results the controller is waiting for, or
            None.
        folder: folder in which rank 0 writes the results, or None.
        device: this host's device in the hosts file.
        progress: True to show progress.
        restarts: number of restarts so far.
        membership: (address, port) of the membership server, or None if the run needs all hosts.
        slots: number of processes on each host.
        local_rank: this process's number on its host.
        launch: this launch's random name, which restarts keep.
    """

    rank: int
    fit: int | None
    folder: Path | None
    device: str
    progress: bool
    restarts: int
    membership: tuple[str, int] | None = None
    slots: tuple[int, ...] = ()
    local_rank: int = 0
    launch: str = ""

    @classmethod
    def of_this_process(cls) -> LaunchedPart | None:
        """Return this process's settings, or None if `SSHLauncher` did not start it.

        >>> LaunchedPart.of_this_process() is None
        True
        """
        given = os.environ
        if given.get(NETWORK) != "1" or "RANK" not in given:
            return None
        folder = Path(given[PROJECT]) / RUNS / given[RUN] if RUN in given else None
        address, _, port = given.get(MEMBERSHIP, "").rpartition(" ")
        return cls(
            rank=int(given["RANK"]) + int(given.get(FIRST_RANK, "0")),
            fit=int(given[FIT]) if FIT in given else None,
            folder=folder,
            device=given.get(DEVICE, "auto"),
            progress=given.get(PROGRESS) == "1",
            restarts=int(given.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(given.get(RETRY, "0")),
            membership=(address, int(port)) if port else None,
            slots=tuple(map(int, given[SLOTS].split(","))) if SLOTS in given else (),
            local_rank=int(given.get("LOCAL_RANK", "0")),
            launch=given.get(LAUNCH, ""),
        )

    def owns(self, save_dir: str | os.PathLike[str]) -> bool:
        """Return whether the checkpoints in `save_dir` belong to this launch.

        The launch's first start writes its name into a file in `save_dir`, unless the folder already has checkpoints,
        so a restart after a failure never continues from an earlier run's checkpoints.
        """
        mark = Path(save_dir) / ".launch"
        with contextlib.suppress(OSError):  # a later check rejects unwritable folders, with a remedy
            if not self.restarts and not list_checkpoints(mark.parent):
                with replacing(mark) as file:
                    file.write(self.launch)
            return mark.read_text("utf-8") == self.launch
        return False


def own_wire() -> Wire:
    """Return a wire between all processes, each with one row."""
    world = world_size()
    return ProcessWire(place(world, world)) if world > 1 else Wire([0])
