"""Folder locks: only one run at a time uses a folder. A lock file in the folder names the process that holds it.

A process creates the complete lock file as a hard link. If several processes try at once, exactly one succeeds, also on
network file systems. On a file system without hard links, the process creates the lock file exclusively instead.
Processes on one machine try one after another: each first acquires the operating system's lock on the folder, which
ends with the process. Otherwise a slow process that has read a dead holder's file could remove its successor's file. On
network file systems without such locks, this remains possible.

The lock file records the holder's machine, the machine's last start, the process number and the process's start. Other
processes on the same machine can therefore check immediately whether the holder is dead. Processes on other machines
check the holder's heartbeat, which is the lock file's modification time. They compare it with the modification time of
a new file, so that only the file system's clock counts. The training loop itself renews the heartbeat while it makes
progress, because a separate thread would continue in a run that hangs.

A run without heartbeats can lose its folder to another run, so it checks its lock before it writes, and ends if the
folder is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from exogym.core.base.processes import identity, started
from exogym.errors import ArgumentError

LOCK = ".lock"
BEAT_S, STALE_S = 15.0, 1800.0  # seconds between heartbeats; seconds of silence after which a remote holder is dead
TRIES = 20
TURN_S = 30.0  # seconds for which a process waits for its turn to lock a folder
_held: set[str] = set()  # tokens of this process's locks


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, as described by its lock file. The defaults stand for an unreadable file.

    Attributes:
        run: a text that identifies the run, also after a restart.
        token: a random text that identifies this lock.
        machine: identifies the scope in which process numbers are unique: the machine, or a container on it.
        system: identifies the installed operating system; "" if unknown.
        boot: identifies the machine's last start; "" if unknown.
    """

    run: str = ""
    token: str = ""
    machine: str = ""
    system: str = ""
    boot: str = ""
    host: str = "an unknown host"
    pid: int = 0
    started: str = ""

    @classmethod
    def here(cls, run: str) -> Holder:
        pid = os.getpid()
        return cls(run, secrets.token_hex(8), *identity(), socket.gethostname(), pid, started(pid) or "")

    def is_dead(self) -> bool:
        """Return whether the holder is certainly dead."""
        machine, system, boot = identity()
        if self.machine == machine:
            now = started(self.pid)
            return now != self.started or (self.pid == os.getpid() and self.token not in _held)
        was_here = bool(system) and (self.system, self.host) == (system, socket.gethostname())
        return was_here and self.boot != boot


class Lock:
    """A lock on a folder, held by `holder`."""

    def __init__(self, path: Path, holder: Holder):
        self.path, self.holder = path, holder
        self._due = time.monotonic() + BEAT_S

    def beat(self) -> None:
        """Renew the lock's heartbeat if the last renewal was at least `BEAT_S` seconds ago."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # the next write will show the error
                if self.is_ours():
                    os.utime(self.path)

    def is_ours(self) -> bool:
        return _holder(self.path) == self.holder

    def check(self) -> None:
        """Raise OSError if this run no longer holds the folder."""
        if not self.is_ours():
            other = _holder(self.path)
            who = "nobody" if other is None else f"process {other.pid} on {other.host}"
            raise OSError(
                f"this run has lost its folder, which {who} has locked now, because the run was silent for over "
                f"{STALE_S:g} s or {self.path.name} was removed. It stops writing there, so that the runs don't mix"
            )

    def release(self) -> None:
        """Give up the lock, so that another run can use the folder."""
        if self.holder.token in _held:
            with contextlib.suppress(OSError):
                if self.is_ours():
                    self.path.unlink()
            _held.discard(self.holder.token)


def acquire(folder: Path, run: str, what: str = "save_dir") -> Lock:
    """Lock `folder` for the run `run`, replacing a lock of a dead process or of the same run.

    `what` is the name of the user's argument, for error messages.

    Raises:
        ArgumentError: another run holds the folder, or the folder cannot be written.
    """
    path, holder = folder / LOCK, Holder.here(run)
    beside = folder / f"{LOCK}-{holder.token}"
    lock = None
    _held.add(holder.token)
    try:
        with _turn(folder) as tries:
            for _ in range(tries):
                if _place(path, beside, holder):
                    lock = Lock(path, holder)
                    return lock
                other = _holder(path)
                if other is None:
                    continue
                age_s = _age_s(path, beside)
                if other.run != run and not other.is_dead() and age_s < STALE_S:
                    raise _in_use(path, other, age_s, what)
                _clear(path, other, beside)
        raise ArgumentError(
            f"{what}={str(folder)!r}: several runs tried to lock this folder at the same time. Use one folder per run"
        )
    except OSError as error:
        raise ArgumentError(f"{what}={str(folder)!r} cannot be written: {error}; choose another folder") from error
    finally:
        if lock is None:
            _held.discard(holder.token)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[int]:
    """Wait until no other process on this machine is in `acquire` for `folder`.

    Yield how often to try: 0 if another process still has its turn after `TURN_S` seconds.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    until, tries = time.monotonic() + TURN_S, TRIES
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    tries = 0
                    break
                time.sleep(0.01)
            except OSError:  # this file system has no such locks
                break
        yield tries
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process has the descriptor, too
        os.close(descriptor)


def _place(path: Path, beside: Path, holder: Holder) -> bool:
    """Put the holder's file at `path` if it doesn't exist, and leave a copy at `beside`."""
    text = json.dumps(asdict(holder)).encode()
    _write(beside, text, os.O_TRUNC)
    try:
        os.link(beside, path)
    except FileExistsError:
        return os.stat(beside).st_nlink > 1  # created, although the answer was lost and the request repeated
    except OSError:  # this file system has no links
        try:
            _write(path, text, os.O_EXCL)
        except FileExistsError:
            return False
    return True


def _write(path: Path, text: bytes, how: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | how, 0o644)
    try:
        os.write(descriptor, text)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holder(path: Path) -> Holder | None:
    """Return the holder, or None if there is no file. An unreadable file gives a `Holder` with defaults."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return Holder()
        given = json.loads(path.read_bytes()[:4096])
        known = {field.name: type(field.default) for field in fields(Holder)}
        if {name: type(value) for name, value in given.items()} == known:
            return Holder(**given)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, RecursionError):
        pass
    return Holder()


def _age_s(path: Path, beside: Path) -> float:
    """Return the seconds since the last heartbeat, by the file system's clock."""
    try:
        os.utime(beside)
        return os.stat(beside).st_mtime - os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def is_old(file: Path, now: Path) -> bool:
    """Return whether the process that last renewed `file` counts as dead by the file's age.

    `now` is a file on the same file system that has just been touched.
    """
    return os.lstat(now).st_mtime - os.lstat(file).st_mtime > STALE_S


def _clear(path: Path, other: Holder, beside: Path) -> None:
    """Remove the file of `other`, and put it back if it turns out to be a newer file."""
    old = beside.with_name(f"{beside.name}.old")
    try:
        os.rename(path, old)
        if _holder(old) != other:
            with contextlib.suppress(OSError):
                os.link(old, path)
        old.unlink(missing_ok=True)
    except FileNotFoundError:
        return


def _in_use(path: Path, other: Holder, age_s: float, what: str) -> ArgumentError:
    here = identity()[0] == other.machine
    who = f"process {other.pid} on {'this machine' if here else other.host}" if other.pid else "another process"
    wait = (
        "" if here else f", whose last heartbeat is {max(0.0, age_s):.0f} s old (it counts as dead after {STALE_S:g} s)"
    )
    return ArgumentError(
        f"{what}={str(path.parent)!r} is in use by another run, {who}{wait}. Choose another folder, or wait until that "
        f"run has ended. If you are sure that it has, remove {path}"
    )
