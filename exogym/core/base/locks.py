"""A folder belongs to one run at a time: a file in it names the process that holds it.

The file appears whole, by a hard link, which also network file systems make once only; where there are no links it is
created exclusively. It says on which machine, and since which start of it, the holder runs, its number and when it
began. So on the same machine a holder that is gone is known at once. Elsewhere its beat tells: the file's time of
change, set again by the training loop while it makes progress, and compared with that of a file made now, so that only
the clock of the file system counts. There is no thread that beats: one would go on for a run that hangs. A run that was
silent for so long that another took its folder finds out before it writes, and ends.
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
BEAT_S, STALE_S = 15.0, 1800.0  # between two beats; without one, after which a holder elsewhere counts as dead
TRIES = 20
_held: set[str] = set()  # tokens of the locks of this process


@dataclass(frozen=True)
class Holder:
    """Who holds a folder; the defaults are those of a file that says nothing.

    Attributes:
        run, token: of the run, which may have several processes one after the other; and of this very lock.
        machine: where process numbers mean the same; `system`: the installation, and `boot`: its start.
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
        """Say whether it is certain that the holder is gone."""
        machine, system, boot = identity()
        if self.machine == machine:
            now = started(self.pid)
            return now != self.started or (self.pid == os.getpid() and self.token not in _held)
        was_here = bool(system) and (self.system, self.host) == (system, socket.gethostname())
        return was_here and self.boot != boot


class Lock:
    """A folder that is held, by `holder`."""

    def __init__(self, path: Path, holder: Holder):
        self.path, self.holder = path, holder
        self._due = time.monotonic() + BEAT_S

    def beat(self) -> None:
        """Say that the run lives, if it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # what comes of it is seen when something is to be written
                if self.is_ours():
                    os.utime(self.path)

    def is_ours(self) -> bool:
        return _holder(self.path) == self.holder

    def check(self) -> None:
        """Raise OSError where another run holds the folder, or nobody does."""
        if not self.is_ours():
            other = _holder(self.path)
            who = "nobody" if other is None else f"process {other.pid} on {other.host}"
            raise OSError(
                f"this run held the folder and does not any more, {who} does: it was silent for over {STALE_S:g} s, or "
                f"{self.path.name} was removed; what the other run saves is not to be mixed with its own"
            )

    def release(self) -> None:
        """Hold the folder no longer."""
        if self.holder.token in _held:
            with contextlib.suppress(OSError):
                if self.is_ours():
                    self.path.unlink()
            _held.discard(self.holder.token)


def acquire(folder: Path, run: str, what: str = "save_dir") -> Lock:
    """Hold `folder`, the argument `what`, for `run`; take it over from a process of the same run, or one that is dead.

    Raises:
        ArgumentError: another run holds it, or it cannot be written.
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
        raise ArgumentError(f"{what}={str(folder)!r}: several runs want it at once: give each a folder of its own")
    except OSError as error:
        raise ArgumentError(f"{what}={str(folder)!r} cannot be written: {error}; choose another folder") from error
    finally:
        if lock is None:
            _held.discard(holder.token)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _place(path: Path, beside: Path, holder: Holder) -> bool:
    """Put the holder's file at `path`, if there is none; leave one like it at `beside`."""
    text = json.dumps(asdict(holder)).encode()
    _write(beside, text, os.O_TRUNC)
    try:
        os.link(beside, path)
    except FileExistsError:
        return os.stat(beside).st_nlink > 1  # made, but the answer was lost and the request sent again
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
    """Return who holds it; None where there is no file. What cannot be read has a holder that says nothing."""
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
    """Return the seconds since the last beat, by the clock that sets the times of files there."""
    try:
        os.utime(beside)
        return os.stat(beside).st_mtime - os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def is_old(file: Path, now: Path) -> bool:
    """Say whether a file was left by a process that is gone, `now` having been touched a moment ago."""
    return os.lstat(now).st_mtime - os.lstat(file).st_mtime > STALE_S


def _clear(path: Path, other: Holder, beside: Path) -> None:
    """Take away the file of `other`, and no newer one: that, taken by mistake, is put back."""
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
    wait = "" if here else f", whose last sign of life is {max(0.0, age_s):.0f} s old ({STALE_S:g} s count as death)"
    return ArgumentError(
        f"{what}={str(path.parent)!r} is in use by another run, {who}{wait}: choose another folder, or wait until it "
        f"has ended. If you are sure that it has, remove {path}"
    )
