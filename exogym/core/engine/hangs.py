"""Processes that hang: where they stand is shown, and they are ended.

Forked processes look after each other where they meet (see `SharedWire`). A process of another world waits inside
torch, where it sees nothing; so each has a small process beside it that looks on, and kills it: it then counts as one
that died, to torch's elastic agent, to the launcher and to the membership server.
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
    """While entered, `pulse.SIGNAL` has this process write its stacks into `file`; `chain`: and go on to its handler.

    That needs no Python code to run, so it works in a process that hangs in a call of C.
    """
    faulthandler.register(pulse.SIGNAL, file=file, all_threads=True, chain=chain)
    try:
        yield
    finally:
        faulthandler.unregister(pulse.SIGNAL)


@contextlib.contextmanager
def watched(hang_s: float | None, rank: int, or_whom: str = "") -> Iterator[None]:
    """While entered, a process beside this one, of that `rank`, kills it if it hangs (`base.pulse`). None: no.

    `or_whom` follows the rank in the message: for whom it may wait inside a step, where nobody sees that it waits.
    """
    if hang_s is None:
        yield
        return
    with tempfile.TemporaryFile(buffering=0) as file, contextlib.ExitStack() as undo:
        number = file.fileno()
        file.truncate(mmap.PAGESIZE)
        undo.enter_context(pulse.kept_in(mmap.mmap(number, mmap.PAGESIZE)))
        file.seek(mmap.PAGESIZE)  # stacks are written behind the pulse
        undo.enter_context(shows_stacks(number))
        words = [sys.executable, "-I", "-S", pulse.__file__, str(os.getpid()), str(number), str(hang_s)]
        other = subprocess.Popen(
            [*words, f"rank {rank}{or_whom}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[number],
        )  # fmt: skip
        undo.callback(other.wait)
        undo.callback(other.kill)
        yield
