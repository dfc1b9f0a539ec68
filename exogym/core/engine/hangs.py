"""Find hung processes, show their stacks, and kill them.

A process's pulse (`exogym.core.base.pulse`) may stay unchanged for

- `hang_s` seconds in a step;
- `PATIENCE` times as long at the start, in the first step, an evaluation, a checkpoint or a callback;
- any time while the process waits for other processes.

The main process watches its forks while it waits for them (see `SharedWire`). Processes of a launcher wait inside
torch, where they cannot watch others. So each such process starts this file as a script in a small watcher process,
which kills the process if it hangs. Torch's elastic agent, the launcher and the membership server then see a crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # the watcher process, in which no other package may hide the standard library
    sys.path.append(str(Path(__file__).parents[3]))

from exogym.core.base import pulse

AT = (
    "in a training step",
    "in its first step",
    "outside a step (start, data, evaluation, checkpoint, callback)",
    "waiting for other processes",
)
PATIENCE = 6
STACKS_S = 2.0  # the longest wait for a process's stacks
# On this signal a watched process writes the stacks of its threads.
SIGNAL: int = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGINFO", signal.SIGUSR2)


class Patience:
    """Measure how long a pulse has been unchanged, and compare this time with the limit for the process's activity.

    Time in which the watching process itself was stopped does not count.

    >>> words = pulse.words_in(bytearray(16))
    >>> patience = Patience(words, hang_s=1.0)
    >>> [patience.spent(0.5) for _ in range(4)]
    [False, False, False, True]
    """

    def __init__(self, words: memoryview, hang_s: float):
        self.words, self.hang_s = words, hang_s
        self._seen, self._looked_s = -1, 0.0

    @property
    def limit_s(self) -> float:
        return self.hang_s * (1 if self.words[1] == pulse.WORKING else PATIENCE)

    def start_anew(self) -> None:
        self._seen = -1

    def spent(self, seconds: float) -> bool:
        """Read the pulse `seconds` after the previous call. Return whether it has been unchanged for too long."""
        if self.words[0] != self._seen:
            self._seen, self._looked_s = self.words[0], 0.0
            return False
        self._looked_s += seconds
        return self._looked_s > self.limit_s

    def complaint(self, pid: int) -> str:
        stopped = ", stopped by a signal (SIGSTOP)" if is_stopped(pid) else ""
        return (
            f"hangs: no progress for {self.limit_s:g} s {AT[self.words[1]]}{stopped} (hang_s={self.hang_s:g}; "
            "None: no limit)"
        )


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has paused the process `pid`. Outside Linux, always return False."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"T"
    return False


def stacks_of(pid: int, file: int, start: int = 0) -> str:
    """Let the process `pid` write its threads' stacks to `file`, from byte `start`; return them, or "" if it can't."""
    if is_stopped(pid):
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
    found, until = b"", time.monotonic() + STACKS_S
    while time.monotonic() < until:
        time.sleep(0.1)
        before, found = found, os.pread(file, 1 << 16, start)
        if found and found == before:
            break
    return found.decode("utf-8", "replace").strip()


@contextlib.contextmanager
def shows_stacks(file: int) -> Iterator[None]:
    """A context in which `SIGNAL` makes this process write its stacks into `file`, even if it hangs in C code."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)


@contextlib.contextmanager
def watched(hang_s: float | None, rank: int, or_others: str = "") -> Iterator[None]:
    """A context in which a watcher process kills this process if it hangs (see `exogym.core.base.pulse`).

    Args:
        hang_s: seconds without progress after which a process counts as hung. None means no watcher.
        rank: this process's rank, for the message.
        or_others: text after the rank in the message, which names other processes that may be hung instead: this
            process may wait for them inside a step, which the watcher can't see.
    """
    if hang_s is None:
        yield
        return
    with tempfile.TemporaryFile(buffering=0) as file, contextlib.ExitStack() as undo:
        number = file.fileno()
        file.truncate(mmap.PAGESIZE)
        undo.enter_context(pulse.kept_in(mmap.mmap(number, mmap.PAGESIZE)))
        file.seek(mmap.PAGESIZE)  # stacks follow the pulse
        undo.enter_context(shows_stacks(number))
        words = [str(os.getpid()), str(number), str(hang_s), f"rank {rank}{or_others}"]
        other = subprocess.Popen(  # without the packages of the environment: it starts in 50 ms
            [sys.executable, "-I", "-S", __file__, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[number],
        )  # fmt: skip
        undo.callback(other.wait)
        undo.callback(other.kill)
        yield


def look_after(pid: int, file: int, hang_s: float, name: str) -> None:
    """Watch the parent process `pid`, whose pulse is in `file`, and kill it if it hangs.

    The reason and the stacks go to stderr and to the file that torch's elastic agent reads. The watch ends when `pid`
    is no longer this process's parent.
    """
    words = pulse.words_in(mmap.mmap(file, mmap.PAGESIZE))
    patience = Patience(words, hang_s)
    while True:
        time.sleep(pulse.LOOK_S)
        if os.getppid() != pid:
            return
        if words[1] == pulse.WAITING and not is_stopped(pid):
            patience.start_anew()
        elif patience.spent(pulse.LOOK_S):
            break
    complaint = f"{name} {patience.complaint(pid)}"
    stacks = stacks_of(pid, file, mmap.PAGESIZE)
    text = f"{complaint}; ExoGym kills it." + (f" Its stacks:\n{stacks}" if stacks else "")
    path, now = os.environ.get("TORCHELASTIC_ERROR_FILE"), time.time()
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(now)), "time_s": now, "lost": False}
        with contextlib.suppress(OSError), open(path, "w") as record:
            json.dump({"message": {"message": f"WorkerError: {complaint}", "extraInfo": extra}}, record)
    with contextlib.suppress(OSError):
        print(f"exogym: {text}", file=sys.stderr, flush=True)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles them when it can
        signal.signal(number, signal.SIG_IGN)
    look_after(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
