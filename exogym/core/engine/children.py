"""Fork this process: for a run's blocks of rows (`exogym.core.engine.forks`), or for whole runs (`Forks`)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from exogym.core.base import streams
from exogym.core.base.devices import CPU, Device, is_accelerator_used

Item = TypeVar("Item")
DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
LOOK_S = 0.02  # between two looks at the processes of `Forks`
SPARE = 1.3  # free memory before another of these processes begins, over the memory of the largest one so far
KIB = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes


def fork() -> int:
    """Fork this process. Return the child's process id, or 0 in the child.

    The child's garbage collector ignores the caller's objects, because the destructor of a process group would wait for
    threads that a fork does not copy.
    """
    collects = gc.isenabled()
    gc.disable()
    pid = os.fork()
    if not pid:
        gc.freeze()
    if collects:
        gc.enable()
    return pid


def started(work: Callable[[], int]) -> int:
    """Start a process that calls `work` and exits with the code that it returns. Return the process's id."""
    streams.flush()
    parent, pid = os.getpid(), fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        signal.set_wakeup_fd(-1)
        code = work()
    except BaseException:
        traceback.print_exc(file=streams.STDERR)
    finally:
        with contextlib.suppress(BaseException):
            streams.flush()
        os._exit(code)


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def killed(status: int) -> str:
    """Describe the signal that killed a process with this status."""
    name = signal.Signals(os.WTERMSIG(status)).name
    return f"killed by {name}" + ("; the system does so when memory runs out" if name == "SIGKILL" else "")


class Forks(Generic[Item]):
    """Call a function for several items in parallel, each in its own forked process.

    Nothing is pickled, and return values are lost, so the function must write its results to files.

    Args:
        work: the function.

    >>> pool = Forks(print)
    >>> Forks.are_possible() and pool.has_room()
    True
    """

    def __init__(self, work: Callable[[Item], object]):
        self.work = work

    @staticmethod
    def are_possible() -> bool:
        """Return whether this process can be forked safely: on Linux, with no accelerator in use."""
        return sys.platform == "linux" and not is_accelerator_used()

    def has_room(self) -> bool:
        """Return whether free memory suffices for one more process like the largest that ended, or like this one."""
        largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Device(CPU).free_bytes() > SPARE * largest * KIB

    def start(self, item: Item) -> int:
        """Call the function in a new process, and return the process's id. Only SIGTERM stops the process."""

        def code() -> int:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides and sends SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                self.work(item)
                return 0
            except KeyboardInterrupt:
                return 130
            except SystemExit as end:  # the main process asked it to stop
                return end.code if isinstance(end.code, int) else 1

        return started(code)

    def ended(self, running: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Wait briefly, then yield each process that has ended, with the reason if its function failed, or ""."""
        time.sleep(LOOK_S)
        for pid in running:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done and os.WIFSIGNALED(status):
                yield pid, killed(status)
            elif done:
                code = os.waitstatus_to_exitcode(status)
                why = (
                    "stopped by SIGTERM"
                    if code == 128 + signal.SIGTERM
                    else f"exit code {code}, its traceback is above"
                )
                yield pid, why if code else ""

    def stop(self, running: Sequence[int]) -> None:
        """Ask processes to end, and kill those that have not ended after half a minute."""
        left = list(running)
        for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + patience_s
            while left and time.monotonic() < until:
                left = [pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]]
                time.sleep(LOOK_S)
