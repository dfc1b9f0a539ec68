"""Keepers: the processes that look after a run's checkpoint folders.

The path `save_dir` is one folder that all hosts share, or a different folder on each host. A folder's keeper is the
process with the lowest number that sees the folder, and alone makes, renames and removes files there. If all processes
see one folder, or are forks of one process, the keeper is the main process.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from exogym.core.base.locks import Lock, acquire
from exogym.core.communicator import Wire, gather, tell
from exogym.errors import ArgumentError, ExoGymError

MARK = ".seen-"
T = TypeVar("T")


@dataclass(frozen=True)
class Keepers:
    """The keepers of a run's folders, as known in one process.

    Attributes:
        of: for each process, the number of its folder's keeper.
        places: for each process, the location of its folder, as `host:path`.
        here: this process's number.
        run: the run's name.
        lock: the keeper's lock on its folder. None in a process that is no keeper.

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
        """Whether all processes use one folder."""
        return len(set(self.of)) == 1

    def beat(self) -> None:
        """Write a heartbeat into the lock, if this process is a keeper."""
        if self.lock is not None:
            self.lock.beat()

    def check(self) -> None:
        """Raise OSError if this run no longer holds the folder's lock."""
        if self.lock is not None:
            self.lock.check()

    def release(self) -> None:
        """Release the lock, so that other runs can use the folder."""
        if self.lock is not None:
            self.lock.release()


def one_keeper(folder: Path, wire: Wire) -> Keepers:
    """Return keepers for one `folder` that all processes use: the main process is its keeper."""
    count = len(wire.world.placement)
    return Keepers((0,) * count, (_place(folder),) * count, wire.world.process)


def find_keepers(folder: Path, wire: Wire) -> Keepers:
    """Find the processes that keep an existing `folder`.

    Each process briefly puts a file into its `folder`, and looks there for the files of other processes. Raise
    ArgumentError if one process sees a second process's file, but the second does not see the first one's file.
    """
    if wire.shares_memory:
        return one_keeper(folder, wire)
    run, here = tell(wire, secrets.token_hex(8)), wire.world.process
    marks = [folder / f"{MARK}{run}-{process}" for process in range(len(wire.world.placement))]
    everywhere(wire, lambda: _leave(marks[here]))
    # Look for each mark by name: a network file system may show an old list of the folder, but looks up a new name.
    found = gather(wire, [next((k for k, mark in enumerate(marks) if mark.exists()), here), _place(folder)])
    marks[here].unlink(missing_ok=True)
    of, places = tuple(keeper for keeper, _ in found), tuple(place for _, place in found)
    for process, keeper in enumerate(of):
        if of[keeper] != keeper:
            raise ArgumentError(
                f"save_dir={str(folder)!r}: process {process} ({places[process]}) sees the files of process {keeper} "
                f"({places[keeper]}), but {keeper} does not see all files that {process} sees. Pass one folder that "
                "all hosts share, or a separate folder on each host"
            )
    return Keepers(of, places, here)


def holding(folder: Path, wire: Wire, keepers: Keepers, before: Keepers | None = None) -> Keepers:
    """Return `keepers` with locks on their folders, given those `before`. Raise ArgumentError if one is locked."""
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
    """Run `do` in every process and return this process's result. If one fails, raise ExoGymError in all."""
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
    """Run `choose` in the main process, and return its JSON result, or raise ExoGymError, in every process."""
    return tell(wire, everywhere(wire, lambda: choose() if wire.is_main else None))


def _place(folder: Path) -> str:
    return f"{socket.gethostname()}:{folder.absolute()}"


def _leave(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as error:
        raise ArgumentError(
            f"save_dir={str(mark.parent)!r} cannot be written ({error}): choose another folder"
        ) from error
