"""Who keeps which folder of checkpoints: the hosts of a run may share one, or have one each.

All processes are given the same `save_dir`, which need not be the same folder everywhere. What is done once in a folder
(making, naming, removing) is done by its keeper, the first process that sees it. Where all see one folder, or all are
forks of one process, that is the main process.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from exogym.core.base.files import make_folder
from exogym.core.base.locks import Lock, acquire
from exogym.core.communicator import Wire, gather, tell
from exogym.errors import ArgumentError, ExoGymError

MARK = ".seen-"
T = TypeVar("T")


@dataclass(frozen=True)
class Keepers:
    """Who keeps which folder, as one process sees it.

    Attributes:
        of: for each process the keeper of its folder.
        places: for each process where its folder is, `host:path`.
        here: the number of this process.
        run, lock: what names the run; in a keeper, its hold on the folder.

    >>> Keepers((0, 0, 2), ("a:/x", "a:/x", "b:/x"), here=1).is_keeper
    False
    """

    of: tuple[int, ...]
    places: tuple[str, ...]
    here: int = 0
    run: str = ""
    lock: Lock | None = None

    @property
    def is_keeper(self) -> bool:
        return self.of[self.here] == self.here

    @property
    def are_one(self) -> bool:
        """Whether there is one folder."""
        return len(set(self.of)) == 1

    def beat(self) -> None:
        """Say, now and then, that the run lives."""
        if self.lock is not None:
            self.lock.beat()

    def check(self) -> None:
        """Raise OSError where the folder is not this run's any more."""
        if self.lock is not None:
            self.lock.check()

    def release(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.release()


def check_folder(path: str | Path) -> list[Path]:
    """Make the folder and write to it once; return the folders that were made, the deepest first.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        return make_folder(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _unwritable(path, error) from error


def one_keeper(folder: Path, wire: Wire) -> Keepers:
    """Return that the main process keeps `folder` for all."""
    count = len(wire.world.placement)
    return Keepers((0,) * count, (_place(folder),) * count, wire.world.process)


def find_keepers(folder: Path, wire: Wire) -> Keepers:
    """Return who keeps which folder; each process leaves a mark in its `folder`, which is there, for a moment.

    Raises:
        ArgumentError: one sees the mark of another, which does not see its own.
    """
    if wire.shares_memory:
        return one_keeper(folder, wire)
    run, here = tell(wire, secrets.token_hex(8)), wire.world.process
    marks = [folder / f"{MARK}{run}-{process}" for process in range(len(wire.world.placement))]
    everywhere(wire, lambda: _leave(marks[here]))
    # Asked for by name: a network file system may show an old list of the folder, but looks for a name it never saw.
    found = gather(wire, [next((k for k, mark in enumerate(marks) if mark.exists()), here), _place(folder)])
    marks[here].unlink(missing_ok=True)
    of, places = tuple(keeper for keeper, _ in found), tuple(place for _, place in found)
    for process, keeper in enumerate(of):
        if of[keeper] != keeper:
            raise ArgumentError(
                f"save_dir={str(folder)!r}: process {process} ({places[process]}) sees what process {keeper} "
                f"({places[keeper]}) writes, but {keeper} does not see all that {process} sees: give a folder that "
                "all hosts see alike, or one for each host"
            )
    return Keepers(of, places, here)


def holding(folder: Path, wire: Wire, keepers: Keepers, before: Keepers | None = None) -> Keepers:
    """Return `keepers`, each of which holds its folder from now on; `before`: those of the same run until now.

    Raises:
        ArgumentError: another run holds one of the folders.
    """
    known = [run for run in gather(wire, "" if before is None else before.run) if run]
    run = known[0] if known else tell(wire, secrets.token_hex(8))
    mine: list[Lock] = []

    def hold() -> None:
        if before is not None and before.lock is not None and before.lock.is_ours():
            mine.append(before.lock)
        else:
            mine.append(acquire(folder, run))

    try:
        everywhere(wire, lambda: hold() if keepers.is_keeper else None)
    except BaseException:
        for lock in mine:
            lock.release()
        raise
    return replace(keepers, run=run, lock=mine[0] if mine else None)


def everywhere(wire: Wire, do: Callable[[], T]) -> T:
    """Return what `do` gives here, once it has gone well in every process.

    Raises:
        ExoGymError: what it raised in one of them, in every process.
    """
    cause, found = None, []
    try:
        found.append(do())
    except ExoGymError as error:
        cause = error
    troubles = gather(wire, None if cause is None else str(cause))
    if cause is not None:
        raise cause
    for process, trouble in enumerate(troubles):
        if trouble is not None:
            raise ExoGymError(trouble if wire.shares_memory else f"process {process}: {trouble}")
    return found[0]


def on_main(wire: Wire, choose: Callable[[], Any]) -> Any:
    """Return what `choose` gives (JSON-able) in the main process, in every process.

    Raises:
        ExoGymError: what it raised there, in every process.
    """
    return tell(wire, everywhere(wire, lambda: choose() if wire.is_main else None))


def _place(folder: Path) -> str:
    return f"{socket.gethostname()}:{folder.absolute()}"


def _leave(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as error:
        raise _unwritable(mark.parent, error) from error


def _unwritable(folder: str | Path, error: Exception) -> ArgumentError:
    why = getattr(error, "strerror", None) or error
    return ArgumentError(f"save_dir={str(folder)!r} cannot be written: {why}; choose another folder")
