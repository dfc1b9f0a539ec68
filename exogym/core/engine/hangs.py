"""Find hung processes, show their stacks, and kill them.

Forked processes watch each other while they wait for each other (see `SharedWire`). Processes of a launcher wait inside
torch, where they cannot watch others. So each such process has a small watcher process, which kills the process if it
hangs. Torch's elastic agent, the launcher and the membership server then see a crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from exogym.core.base import pulse


@contextlib.contextmanager
def shows_stacks(file: int, chain: bool = False) -> Iterator[None]:
    """A context in which `pulse.SIGNAL` makes this process write its stacks into `file`.

    This also works if the process hangs in C code, because the signal's handler runs no Python code. If `chain` is
    True, the handler then calls the previous handler.
    """
    faulthandler.register(pulse.SIGNAL, file=file, all_threads=True, chain=chain)
    try:
        yield
    finally:
        faulthandler.unregister(pulse.SIGNAL)


@contextlib.contextmanager
def watched(hang_s: float | None, rank: int, or_others: str = "") -> Iterator[None]:
    """A context in which a watcher process kills this process if it hangs (see `exogym.core.base.pulse`).

    Args:
        hang_s: seconds without progress after which a process counts as hung. None means no watcher.
        rank: this process's rank, for the message.
        or_others: text after the rank in the message. It names other processes that may be hung instead. This process
            may wait for these processes inside a step, and the watcher does not see such waiting.
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
        words = [sys.executable, "-I", "-S", pulse.__file__, str(os.getpid()), str(number), str(hang_s)]
        other = subprocess.Popen(
            [*words, f"rank {rank}{or_others}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[number],
        )  # fmt: skip
        undo.callback(other.wait)
        undo.callback(other.kill)
        yield
