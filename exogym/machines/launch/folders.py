"""The folder of a launch, in the system's temporary folder: the ranks' pipes, their marks and their errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from exogym.core.base.files import end_of, temporary_folder, write_json
from exogym.core.base.processes import described, identity, is_alive, started
from exogym.machines.launch.stopping import RUNNING

PREFIX, OWNER = "exogym-launch-", "launcher.json"
OWNER_BYTES = 4096


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """A context that makes a launch's folder, and removes it at the end.

    It also removes the folders that killed launchers have left.

    Raises:
        ExoGymError: no temporary folder can be written.
    """
    with temporary_folder(PREFIX) as folder:
        for other in folder.parent.glob(f"{PREFIX}*"):
            if other != folder and is_left(other):
                _remove(other)
        (folder / RUNNING).mkdir()
        write_json(folder / OWNER, described())
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its `OWNER` last, so that a later launch can finish the removal if this process is killed."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def is_left(folder: Path) -> bool:
    """Return whether a killed launcher of this user left `folder`: the launcher and its ranks are certainly dead."""
    try:
        about = os.lstat(folder)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return False
        owner = json.loads(end_of(folder / OWNER, OWNER_BYTES))
        if owner["machine"] != identity()[0] or is_alive(owner) is not False:
            return False
        marks = (folder / RUNNING).iterdir() if (folder / RUNNING).exists() else ()  # the removal may have begun
        return all(started(int(mark.name)) is None for mark in marks)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # such as a folder that a launcher has just made
        return False
