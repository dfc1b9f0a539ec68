"""Folder locks: a folder belongs to one run at a time. A file in it names the process that holds it.

The file appears whole, by a hard link, which network file systems also make only once. Without hard links it is created
exclusively. It records the holder's machine, the machine's start, the process number and its start. So on the same
machine a dead holder is known at once. On another machine its heartbeat decides: the file's modification time. The
training loop renews it while it makes progress. It is compared with a new file's time, so only the file system's clock
counts. No thread renews it, since a thread would continue in a run that hangs. If a run was silent for so long that
another run took its folder, it notices before it writes, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from exogym.core.base.processes import identity, started
from exogym.errors import ArgumentError

LOCK = ".lock"
BEAT_S, STALE_S = 15.0, 1800.0  # seconds between heartbeats; seconds of silence after which a remote holder is dead
TRIES = 20
_held: set[str] = set()  # tokens of this process's locks


@dataclass(frozen=True)
class Holder:
    """A folder's holder. The defaults are for an unreadable file.

    Attributes:
        run: the run's token; a run may have several processes one after the other.
        token: this lock's token.
        machine: scope in which process numbers are unique.
        system: the machine's installation.
        boot: the machine's start.
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
        """Renew the heartbeat if it is due."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # the next write will show the error
                if self.is_ours():
                    os.utime(self.path)

    def is_ours(self) -> bool:
        return _holder(self.path) == self.holder

    def check(self) -> None:
        """Raise OSError if another run holds the folder, or nobody does."""
        if not self.is_ours():
            other = _holder(self.path)
            who = "nobody" if other is None else f"process {other.pid} on {other.host}"
            raise OSError(
                f"this run has lost its folder; {who} holds it now. The run was silent for over {STALE_S:g} s, or "
                f"{self.path.name} was removed. It writes nothing more there, so that two runs do not mix"
            )

    def release(self) -> None:
        """Release the folder."""
        if self.holder.token in _held:
            with contextlib.suppress(OSError):
                if self.is_ours():
                    self.path.unlink()
            _held.discard(self.holder.token)


def acquire(folder: Path, run: str, what: str = "save_dir") -> Lock:
    """Lock `folder` (the argument `what`) for `run`. A dead process's lock, or the same run's, is taken over.

    Raises:
        ArgumentError: another run holds the folder, or it cannot be written.
    """
    path, holder = folder / LOCK, Holder.here(run)
    beside = folder / f"{LOCK}-{holder.token}"
    lock = None
    _held.add(holder.token)
    try:
        for _ in range(TRIES):
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
            f"{what}={str(folder)!r}: several runs asked for it at the same time. Give each run its own folder"
        )
    except OSError as error:
        raise ArgumentError(f"{what}={str(folder)!r} cannot be written: {error}; choose another folder") from error
    finally:
        if lock is None:
            _held.discard(holder.token)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _place(path: Path, beside: Path, holder: Holder) -> bool:
    """Put the holder's file at `path` if that is free, and leave a copy at `beside`."""
    text = json.dumps(asdict(holder)).encode()
    _write(beside, text, os.O_TRUNC)
    try:
        os.link(beside, path)
    except FileExistsError:
        return os.stat(beside).st_nlink > 1  # made, although the answer was lost and the request repeated
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
    """Return the holder; None without a file. An unreadable file gives a `Holder` with defaults."""
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
    """Return whether `file` was left by a dead process. `now` must have been touched a moment ago."""
    return os.lstat(now).st_mtime - os.lstat(file).st_mtime > STALE_S


def _clear(path: Path, other: Holder, beside: Path) -> None:
    """Remove the file of `other`. If a newer file was taken by mistake, put it back."""
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
