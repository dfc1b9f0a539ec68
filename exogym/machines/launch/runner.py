"""Run the process of one rank: `python runner.py FOLDER LAUNCHER_PID script|module TARGET ARGUMENTS...`.

The process runs the user's script as `python TARGET ARGUMENTS...` would. It also
    - sends the rank's output to the launcher,
    - writes the error that ended the script, with its time, to a file that torch's elastic agent reads,
    - prints only one line, without a traceback, for ExoGym's own errors and for errors that another rank's end caused,
    - ends if the launcher has ended.

This file is run by its path and imports only the standard library, so that the user's script can still set environment
variables before torch is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType

PR_SET_PDEATHSIG = 1
# Texts of torch's RuntimeErrors after the process at a connection's other end has ended.
CUT = ("Connection reset by peer", "Connection closed by peer", "Connection was likely closed", "Broken pipe")


def end_with(launcher: int) -> None:
    """Have the kernel end this process if the launcher is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            sys.exit(f"the launcher (process {launcher}) is gone")


def mark_path(folder: str) -> str:
    """Return the path of the file that exists while this process is running."""
    return os.path.join(folder, "running", str(os.getpid()))


def speak_to_launcher(folder: str) -> None:
    """Redirect this process's stdout and stderr into the pipes that the launcher reads."""
    for descriptor, name in ((1, "out"), (2, "err")):
        path = os.path.join(folder, f"{os.environ['LOCAL_RANK']}.{name}")
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # without a reader: an error, not a wait
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        os.dup2(pipe, descriptor)
        os.close(pipe)


def kinds(error: BaseException) -> list[str]:
    """Return the full names of the error's class and its base classes, without importing these classes."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]


def is_lost(error: BaseException) -> bool:
    """Return whether `error` was caused only by the end of another rank.

    >>> is_lost(RuntimeError("[1] Connection closed by peer [10.0.0.2]:33421")), is_lost(ValueError("Broken pipe"))
    (True, False)
    """
    if isinstance(error, KeyboardInterrupt):
        return "exogym.errors.Stopped" in kinds(error) and error.elsewhere  # type: ignore[attr-defined]
    cut = isinstance(error, RuntimeError) and any(words in str(error) for words in CUT)
    return cut or "exogym.machines.remote.elastic.wire.MemberLost" in kinds(error)


def show(error: BaseException) -> None:
    """Print `error` on stderr: one line for ExoGym's own errors and lost connections, otherwise the traceback."""
    if isinstance(error, KeyboardInterrupt):
        print(f"exogym: stopped by {error}", file=sys.stderr)
    elif is_lost(error):
        first = (str(error).splitlines() or [""])[0].partition(". ")[0]
        print(f"exogym: this rank lost its connection to another rank, which failed first ({first})", file=sys.stderr)
    elif "exogym.errors.ExoGymError" in kinds(error):
        print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def record(error: BaseException) -> None:
    """Write `error` to the error file of torch's elastic agent, with the exact time and the result of `is_lost`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(now)), "time_s": now, "lost": is_lost(error)}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, which are in this file or Python's runpy."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    return trace


def run(kind: str, target: str, arguments: list[str]) -> None:
    """Run the script or module `target` with its `arguments`, as `python` would."""
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(target)) if kind == "script" else os.getcwd()
    if kind == "script":
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def main() -> None:
    folder, launcher, kind, target, *arguments = sys.argv[1:]
    end_with(int(launcher))
    mark = mark_path(folder)
    open(mark, "x").close()
    speak_to_launcher(folder)
    faulthandler.enable()
    try:
        run(kind, target, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            record(error)
            raise
    except Exception as error:
        error.with_traceback(own_frames(error.__traceback__))
        record(error)
        show(error)
        sys.exit(1)
    except KeyboardInterrupt as error:
        if not is_lost(error):
            raise
        record(error)
        show(error)
        sys.exit(128 + signal.SIGINT)
    os.unlink(mark)


if __name__ == "__main__":
    main()
