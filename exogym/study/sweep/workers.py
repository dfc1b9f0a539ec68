"""Train a sweep's runs, in as many processes as are useful.

Each run has its own forked process, which writes the results into the run's folder. So nothing is pickled, a killed run
harms no other run, and each run's memory is freed at its end. Another run begins only if a core is free and the free
memory suffices for a run as large as the largest run so far. If processes cannot be forked (a GPU in use, no Linux),
this process trains the runs one after another.

A function that trains runs elsewhere must have the signature of `train_all`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from exogym.core.base import streams
from exogym.core.base.devices import free_memory_bytes
from exogym.core.engine.forks import can_fork, die_with, fork
from exogym.errors import ArgumentError, WorkerError, check_count
from exogym.study.compare.session import Session

POLL_S = 0.02
SPARE = 1.3  # free memory before another run begins, over the memory of the largest run so far
KIB = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes
CPU = torch.device("cpu")
Job = tuple[Session, str, int]  # a run: session, label and seed


def processes_that_pay(asked: int | str, jobs: int, device: torch.device) -> int:
    """Return the number of runs to train at the same time.

    Args:
        asked: the number that the user gave, or "auto": one run per core, or one run at a time on a GPU.
        jobs: the number of runs to train.

    Raises:
        ArgumentError: `asked` is more than one run, but this process cannot be forked.
    """
    forks = can_fork() and device.type == "cpu"
    if asked == "auto":
        return min(len(os.sched_getaffinity(0)), max(jobs, 1)) if forks else 1
    check_count("processes", asked)
    if int(asked) > 1 and not forks:
        raise ArgumentError(
            f"processes={asked}: several runs at once need Linux and the CPU (here: {sys.platform}, {device}): leave "
            "processes at 1"
        )
    return int(asked)


def train_all(jobs: Sequence[Job], processes: int, ended: Callable[[Job], None]) -> None:
    """Train all runs, at most `processes` at the same time. Call `ended` after each run, in this process.

    Raises:
        WorkerError: a run's process ended without a result; raised after all other runs have ended.
        KeyboardInterrupt: the user pressed Ctrl-C; raised after the active runs have saved their state and ended.
    """
    if processes == 1:
        for job in jobs:
            session, label, seed = job
            session.settle(label, seed)
            ended(job)
        return
    waiting, running, lost = list(jobs), dict[int, Job](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < processes and (not running or _has_room()):
                running[_forked(waiting[0])] = waiting[0]
                del waiting[0]
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    job = running.pop(pid)
                    if status:
                        lost.append(f"{job[1]}, seed {job[2]} ({_why(status)})")
                    else:
                        ended(job)
            jobs[0][0].beat()
            time.sleep(POLL_S)
    finally:
        for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
            _end(running, number, patience_s)
    check_none_lost(jobs, lost)


def check_none_lost(jobs: Sequence[Job], lost: Sequence[str]) -> None:
    """Raise WorkerError if runs ended without a result. `lost` has their names and the reasons."""
    if lost:
        raise WorkerError(
            f"{len(lost)} of {len(jobs)} runs ended without a result: {'; '.join(lost)}. The others are complete; "
            "resume trains only the lost runs"
        )


def _has_room() -> bool:
    """Return whether free memory suffices for one more run like the largest finished run or this process."""
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return free_memory_bytes(CPU) > SPARE * largest * KIB


def _forked(job: Job) -> int:
    """Train in a new process. Return its number."""
    streams.flush()
    parent, pid = os.getpid(), fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides and sends SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        session, label, seed = job
        session.watch = None
        session.settle(label, seed)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:  # the main process asked it to stop
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc(file=streams.STDERR)
    finally:
        with contextlib.suppress(BaseException):
            streams.flush()
        os._exit(code)


def _end(running: dict[int, Job], number: signal.Signals, patience_s: float) -> None:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    until = time.monotonic() + patience_s
    while running and time.monotonic() < until:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[pid]
        time.sleep(POLL_S)


def _why(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"killed by {name}" + ("; the system does so when memory runs out" if name == "SIGKILL" else "")
    code = os.waitstatus_to_exitcode(status)
    return "stopped by SIGTERM" if code == 128 + signal.SIGTERM else f"exit code {code}, its traceback is above"
