"""Run checks and estimates in separate processes: `Apart`. They end with the page's server, also if it is killed.

So an option with which a check would take minutes, or fill the memory, blocks no other request.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exogym.errors import ArgumentError, ExoGymError

CHECK_S = 10.0  # a check takes milliseconds, unless sizes are very large
START_S = 120.0  # to load torch
CHECKS = "from exogym.ui.checking import answer_parent; answer_parent()"
COMMAND = (  # as `python -m exogym`
    "import runpy; from exogym.core.base.processes import lines_from_parent; lines_from_parent(); "
    "runpy.run_module('exogym', run_name='__main__', alter_sys=True)"
)


class Replaced(ExoGymError):
    """Raised when a newer check has taken the place of a waiting one."""


class Apart:
    """Starts processes that work for the page, and ends them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._processes = set[subprocess.Popen[str]]()
        self._checker: subprocess.Popen[str] | None = None
        self._newest, self._is_checking, self._is_closed = 0, False, False

    def close(self) -> None:
        """End all processes now, and start no others."""
        with self._changed:
            self._is_closed = True
            ending = list(self._processes)
        for process in ending:
            process.kill()
        if not self._is_checking and self._checker is not None:
            self._forget(self._checker)
            self._checker = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no check runs. Only the newest check waits; for the others `Replaced` is raised."""
        with self._changed:
            self._newest = mine = self._newest + 1
            self._changed.notify_all()
            while self._is_checking and mine == self._newest:
                self._changed.wait()
            if mine != self._newest:
                raise Replaced("a newer check has replaced this one: send it again")
            self._is_checking = True
        try:
            yield
        finally:
            with self._changed:
                self._is_checking = False
                self._changed.notify_all()

    def check(self, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `exogym.ui.checking.check` returns, or an error after `CHECK_S` seconds. Call it in a `turn`."""
        process, line, is_late = self._checker, "", False
        if process is not None and process.poll() is not None:
            self._forget(process)
            process = None
        if process is None:
            self._checker = process = self._begin(CHECKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            _line(process, START_S)  # it is ready
        with contextlib.suppress(OSError):  # the process has ended
            assert process.stdin is not None
            process.stdin.write(json.dumps([command, given]) + "\n")
            process.stdin.flush()
            line, is_late = _line(process, CHECK_S)
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self._checker = None
        self._forget(process)
        why = f"took over {CHECK_S:g} s" if is_late else "ended its process, which may have needed too much memory"
        return {"error": f"the check of these options {why}: choose smaller numbers", "plan": ""}

    def run(self, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        """Run an `exogym` command for at most `limit_s` seconds. Return its exit status, output and errors."""
        theirs, ours = os.pipe()  # `communicate` would close the input at once
        try:
            process = self._begin(
                COMMAND, *words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )  # fmt: skip
            try:
                output, errors = process.communicate(timeout=limit_s)
            finally:
                self._forget(process)
            return process.returncode, output, errors
        finally:
            os.close(theirs)
            os.close(ours)

    def _begin(self, code: str, *words: str, **pipes: int) -> subprocess.Popen[str]:
        with self._changed:
            if self._is_closed:
                raise ArgumentError("the page is ending: start exogym ui again")
            process = subprocess.Popen(  # in a session of its own, Ctrl-C reaches only the page
                [sys.executable, "-c", code, *words], text=True, start_new_session=True, **pipes
            )  # type: ignore[call-overload]
            self._processes.add(process)
        return process

    def _forget(self, process: subprocess.Popen[str]) -> None:
        with self._changed:
            self._processes.discard(process)
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent lines
                stream.close()


def _line(process: subprocess.Popen[str], limit_s: float) -> tuple[str, bool]:
    """Return the next line of a process, or "" if it ends. After `limit_s` seconds it is killed, and True returned."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline(), late.is_set()
    finally:
        timer.cancel()
        timer.join()
