"""The process of one rank: `python runner.py FOLDER LAUNCHER_PID script|module TARGET ARGUMENTS...`.

Runs the user's script as `python TARGET ARGUMENTS...` would, and beside that
    - sends what the rank prints to the launcher,
    - writes an error that ended the script to the file that torch's agent reads, with the time it happened,
    - ends when the launcher is gone.

It is run by its path and imports the standard library only, so that nothing is loaded before the script decides
what its environment is.
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


def end_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            sys.exit(f"the launcher (process {launcher}) is gone")


def mark_path(folder: str) -> str:
    """Return the file that says that this process runs, and that its process group is its own."""
    return os.path.join(folder, "running", str(os.getpid()))


def speak_to_launcher(folder: str) -> None:
    """Lead stdout and stderr into the launcher's pipes of this rank."""
    for descriptor, name in ((1, "out"), (2, "err")):
        path = os.path.join(folder, f"{os.environ['LOCAL_RANK']}.{name}")
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # an error, not a wait, where nobody reads
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        os.dup2(pipe, descriptor)
        os.close(pipe)


def record(error: BaseException) -> None:
    """Write `error` as torch's elastic agent expects it, with the exact time beside its whole seconds."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(now)), "time_s": now}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's: without this file and Python's runpy."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    return trace


def run(kind: str, target: str, arguments: list[str]) -> None:
    """Run the script or module as `python` would."""
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
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    os.unlink(mark)


if __name__ == "__main__":
    main()
