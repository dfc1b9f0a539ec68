"""Run in processes forked from the caller's process, on one machine, with rows in shared memory.

`run_forked` forks one process for each block of rows. The caller's process is the main process and holds the first
block. A fork takes a millisecond and gives each process the current model and data, so nothing is pickled, and models,
functions and data sets from a notebook cell work. The processes wait for each other over pairs of sockets, without any
port. The main process notices if another process dies or hangs, and if it ends itself, the system ends the others.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from exogym.core.base import pulse
from exogym.core.engine.children import killed, started
from exogym.core.engine.hangs import shows_stacks, stacks_of
from exogym.core.engine.reports import held, packed, unpacked
from exogym.core.engine.shared import STOP, Hung, Lost, SharedWire, memory_bytes, pulse_byte
from exogym.errors import WorkerError

Result = TypeVar("Result")
PATIENCE_S, POLL_S = 2.0, 0.001  # seconds: to end after a stop; between two checks of a process


def run_forked(
    placement: Sequence[Sequence[int]], body: Callable[[SharedWire], Result], native: bool = False,
    hang_s: float | None = None,
) -> Result:  # fmt: skip
    """Run `body(wire)` here and in a forked process for each other block of rows. Return the result of this process.

    A forked process hangs if its pulse stands still for `hang_s` seconds (see `exogym.core.engine.hangs`). None means
    no limit. This process, which the user started, has no limit, as if it ran alone.

    Raises:
        WorkerError: a process was killed or hung. The message names the process, its nodes, and the signal or stacks.
        Exception: any error that `body` raised. An error from another process has that process's traceback as a note.
    """
    memory = mmap.mmap(-1, memory_bytes(len(placement)))
    children: list[_Child] = []

    def wire_of(process: int, lines: Sequence[socket.socket]) -> SharedWire:
        return SharedWire(placement, process, memory, lines, native, hang_s)

    def work(child: _Child) -> None:
        with pulse.kept_in(memory, pulse_byte(child.process)), shows_stacks(child.report.fileno()):
            body(wire_of(child.process, [child.own_line]))

    def code_of(child: _Child) -> int:
        for other in children:
            other.line.close()
        for ignored in (signal.SIGINT, signal.SIGTERM):  # the main process handles them
            signal.signal(ignored, signal.SIG_IGN)
        try:
            work(child)
            return 0
        except Lost:  # the main process is gone or ending
            return 1
        except BaseException as error:
            child.write_report(error)
            return 1

    try:
        for process in range(1, len(placement)):
            children.append(child := _Child(process))
            child.pid = started(functools.partial(code_of, child))
            child.status = None
            child.own_line.close()
        wire = wire_of(0, [child.line for child in children])
        try:
            result = body(wire)
            wire.close()
            for child in children:
                wire.wait_for(child.process, child.has_ended)
                if child.status:
                    raise Lost(child.process)
            return result
        except Lost as lost:
            child, nodes = children[lost.process - 1], placement[lost.process]
            if isinstance(lost, Hung) and not child.has_ended(0):
                error: BaseException = child.hangs(nodes, lost)
            else:  # also if a process that it started holds its line, so that it seemed to hang
                error = child.why(nodes)
        raise error
    finally:
        patience_s = PATIENCE_S if memory[STOP] else 0.0  # processes that were asked to stop end by themselves
        for child in children:  # processes that wait for their lines end
            child.line.close()
        for child in children:
            child.end(patience_s)


class _Child:
    """A forked process, seen from the main process.

    Attributes:
        line: the main process's end of the line to this process, whose own end is `own_line`.
        report: a file in memory, for the error with which this process fails, or its stacks if it hangs.
        status: the process's exit status, or None while it runs.
    """

    def __init__(self, process: int):
        self.process, self.pid = process, 0
        self.line, self.own_line = socket.socketpair()
        self.report = open(os.memfd_create("report"), "rb+", buffering=0)  # noqa: SIM115
        self.status: int | None = 0  # nothing runs before the fork

    def write_report(self, error: BaseException) -> None:
        """In the forked process: report `error` to the main process."""
        self.report.write(pickle.dumps(packed(error)))
        self.own_line.shutdown(socket.SHUT_RDWR)  # also if processes that this one started hold the line

    def wait(self, patience_s: float = math.inf) -> None:
        """Wait at most `patience_s` seconds until the forked process ends."""
        until = time.monotonic() + patience_s
        while self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = status
            elif time.monotonic() > until:
                return
            else:
                time.sleep(POLL_S)

    def has_ended(self, within_s: float) -> bool:
        self.wait(within_s)
        return self.status is not None

    def hangs(self, nodes: Sequence[int], hung: Hung) -> WorkerError:
        """Return the error that reports this hung process. `end` kills the process."""
        text = f"{self.who(nodes)} {hung.patience.complaint(self.pid)}; it was killed. Earlier checkpoints are valid"
        found = stacks_of(self.pid, self.report.fileno())
        return WorkerError(text + (f". Its stacks:\n{found}" if found else ""))

    def who(self, nodes: Sequence[int]) -> str:
        return f"worker process {self.process} ({held(nodes)})"

    def why(self, nodes: Sequence[int]) -> BaseException:
        """Return the error that reports why this process has ended too early."""
        self.wait()
        assert self.status is not None
        who = self.who(nodes)
        self.report.seek(0)
        if report := self.report.read():
            given, text = pickle.loads(report)
            return unpacked(given, text, who)
        if os.WIFSIGNALED(self.status):
            return WorkerError(f"{who} was {killed(self.status)}; earlier checkpoints remain valid")
        return WorkerError(
            f"{who} ended with exit code {os.waitstatus_to_exitcode(self.status)}; checkpoints are valid"
        )

    def end(self, patience_s: float) -> None:
        """Kill the forked process if it still runs after `patience_s` seconds."""
        try:
            self.wait(patience_s)
        finally:
            if self.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                _, self.status = os.waitpid(self.pid, 0)
            self.own_line.close()
            self.report.close()
