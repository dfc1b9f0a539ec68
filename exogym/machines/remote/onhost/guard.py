"""Run one command on a host, and end all its processes if the connection to the controller is lost.

The stdin of this program, the guard, is the connection to the controller. The controller writes a byte every few
seconds, and closes stdin to stop the command. If stdin is closed or silent, the guard sends SIGTERM to the command and,
after a while, SIGKILL to all remaining processes of the command, including processes in other sessions. `DISMISSED` on
stdin does the same without a message if the run no longer needs the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from exogym.machines.remote.onhost.health import HostReports
from exogym.machines.remote.onhost.interfaces import interface_of

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S, ALONE_S, SWEEP_S = 0.1, 3.0, 10.0
CANNOT_START = 126
SILENCE = "the controller was silent for too long"
DISMISSED = b"!"
UNNEEDED = "the run no longer needs the command"
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits: the connection was lost; a restart may succeed


def main(given: dict[str, Any], stream: IO[bytes]) -> int:
    """Run the command that `given` describes. Return its exit status, or 128 + the signal that killed it.

    Return `TRY_AGAIN` if the guard ended the command because the controller was silent.

    Args:
        given: a dict of settings. `words` has the command's arguments for this Python; `folder` and `environment` are
            the command's working folder and environment variables. `address` and `is_loopback` are for `interface_of`.
            The controller counts as lost after `silence_s` seconds of silence. SIGKILL follows `stop_s` seconds after
            SIGTERM. `reports` is for `HostReports`, or None for no reports.
        stream: the connection to the controller.
    """
    environment = dict(os.environ, **given["environment"])
    interface = "lo"
    if given.get("address"):
        try:
            interface = interface_of(given["address"], given["is_loopback"])
        except LookupError as error:
            return _refuse(str(error))
        environment.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    folder = os.path.abspath(os.path.expanduser(given["folder"]))
    environment["EXOGYM_PROJECT"] = folder
    _adopt_orphans()
    reports = None
    if given.get("reports"):
        reports = HostReports(given["reports"], folder, interface, lambda: _descendants(os.getpid()))
        environment.update(reports.environment)
    with _noted_signals() as noted, contextlib.ExitStack() as undo:
        if reports is not None:
            undo.callback(reports.close)
        try:
            child = subprocess.Popen(
                [sys.executable, *given["words"]], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        except OSError as error:
            return _refuse(f"cannot start the command in {folder}: {error}")
        if reports is not None:
            reports.start()
        reason = _watch(child, stream.fileno(), given["silence_s"], noted)
        if reason and reason != UNNEEDED:
            _say(f"{reason}: ending this host's processes")
        if reason:
            _stop(child, given["stop_s"])
        _sweep(child)
    if reason == SILENCE:
        return TRY_AGAIN
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _refuse(why: str) -> int:
    _say(why)
    return CANNOT_START


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the controller no longer reads
        print(f"exogym: {text}", file=sys.stderr, flush=True)


def _watch(child: subprocess.Popen[bytes], source: int, silence_s: float, noted: list[int]) -> str | None:
    """Wait for the child to end. Return a reason to end it earlier, or None."""
    heard = time.monotonic()
    while child.poll() is None:
        if noted:
            return f"signal {noted[0]}"
        if select.select([source], [], [], LOOK_S)[0]:
            said = os.read(source, 65536)
            if not said:
                return "the controller stopped the run or is lost"
            if DISMISSED in said:
                return UNNEEDED
            heard = time.monotonic()
        elif time.monotonic() - heard > silence_s:
            return SILENCE
    return None


def _stop(child: subprocess.Popen[bytes], stop_s: float) -> None:
    """Ask the child to end. Wait until it has ended or has no processes left.

    Torch's agent would wait minutes for agents on other hosts.
    """
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    deadline = time.monotonic() + stop_s
    busy = time.monotonic()
    while child.poll() is None and time.monotonic() < min(deadline, busy + ALONE_S):
        time.sleep(LOOK_S)
        if _descendants(os.getpid()) - {child.pid}:
            busy = time.monotonic()


def _sweep(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all its descendants that still run."""
    left = _descendants(os.getpid())
    if child.poll() is None:
        child.kill()
        child.wait()
    deadline = time.monotonic() + SWEEP_S
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        # Only Linux adopts orphans: elsewhere, processes seen before count while they are running.
        kept = set() if sys.platform == "linux" else left & {pid for pid, _ in _processes()}
        left = kept | _descendants(os.getpid())


def _descendants(root: int) -> set[int]:
    """Return the descendants of `root`. On Linux they include orphans, which `root` has adopted."""
    parents = dict(_processes())
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more


def _processes() -> Iterator[tuple[int, int]]:
    """Yield (process, parent) for each process on this host."""
    if os.path.isdir("/proc/self"):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit():
                    with open(f"/proc/{name}/stat", "rb") as file:
                        yield int(name), int(file.read().rpartition(b")")[2].split()[1])
        return
    listing = subprocess.Popen(["ps", "-A", "-o", "pid=", "-o", "ppid="], stdout=subprocess.PIPE)
    for line in listing.communicate()[0].splitlines():
        pid, parent = map(int, line.split())
        if pid != listing.pid:
            yield pid, parent


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """A context in which signals that ask this process to end are only recorded."""
    noted: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(number, lambda got, frame: noted.append(got)) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before):  # noqa: B905 (an older Python may run this)
            signal.signal(number, handler)


def _adopt_orphans() -> None:
    """Adopt orphans: become the parent of processes whose own parents have ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    """In the child process: receive SIGTERM if the guard is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
