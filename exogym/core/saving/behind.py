"""Write checkpoints while nodes compute: copy the run's state, then let a thread write the copy.

The thread calls the same function as a run that waits, so the files have the same bytes. Processes agree over their own
second wire. The next checkpoint waits for the one under way, so at most one copy is in memory beside the state. While a
process waits for its thread, its pulse follows the thread's, so a disk that does not answer counts as a hang.

Forked processes have no second wire: they write a checkpoint themselves, while training waits. A thread would compete
with them for the machine's cores.
"""

from __future__ import annotations

import atexit
import math
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from exogym.core.base import pulse, streams
from exogym.core.base.devices import CPU, Device
from exogym.core.base.processes import identity
from exogym.core.communicator import Wire, gather
from exogym.core.saving.checkpoint_files import Snapshot
from exogym.errors import CheckpointError

MOST = 0.5  # largest share of the free memory for copies of the state
GIVE_UP_S = 30.0  # for a checkpoint under way in a run that has failed, if it needs other processes


class Writer:
    """Writes checkpoints in a thread, one after the other.

    Use it as a context: at the end, it waits for the checkpoint under way, except after a KeyboardInterrupt. The next
    run with the folder removes the files of such a checkpoint.

    Args:
        save: function that writes a snapshot over the given wire, and returns the checkpoint's folder.
        written: function that is called in the main thread with a written checkpoint's step and folder.
    """

    def __init__(self, wire: Wire, save: Callable[[Snapshot, Wire], Path], written: Callable[[int, Path], None]):
        self.wire, self._save, self._written = wire, save, written
        self._line: Wire | None = None
        self._is_possible = True
        self._neighbors = 1  # this machine's processes
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # Python 3.11 takes a thread for ended if Ctrl-C interrupts its `join`
        self._pulse = pulse.words_in(bytearray(pulse.BYTES))
        self._step = 0
        self._path: Path | None = None
        self._error: BaseException | None = None

    def start(self, snapshot: Snapshot) -> bool:
        """Copy `snapshot`, begin to write the copy, and return True. All processes make this call.

        Return False if the caller must write the snapshot itself: the wire has no second line, or the copies of this
        machine's processes would need more than half of the free memory.
        """
        if self._line is None and self._is_possible:
            self._line = self.wire.aside()
            self._is_possible = self._line is not None
            if self._line is not None:
                machines = [tuple(machine) for machine in gather(self.wire, list(identity()))]
                self._neighbors = machines.count(identity())
        is_large = snapshot.nbytes * self._neighbors > MOST * Device(CPU).free_bytes()
        if not self._is_possible or self.wire.agree(is_large):
            return False
        assert self._line is not None
        self._step, self._path, self._error = snapshot.meta["step"], None, None
        self._done.clear()
        # A daemon: after a second Ctrl-C, or for a lost process, Python must not wait for it.
        self._thread = threading.Thread(
            target=self._run, args=(snapshot.copied(),), name="exogym checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def look(self) -> None:
        """Report the checkpoint under way if it is complete. Do not wait.

        Raise CheckpointError if it could not be written. Several processes raise this error together, in `finish`.
        """
        if self._thread is None or not self._done.is_set():
            return
        if self._error is None or not self.wire.is_shared:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way, and report it, or raise CheckpointError if it could not be written."""
        if self._thread is None:
            return
        pulse.wait_for(self._done, self._pulse)
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._path is not None
        self._written(self._step, self._path)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except KeyboardInterrupt as second:  # while this process waits
            self._end(second)
            raise

    def _end(self, error: BaseException | None) -> None:
        """Wait for the checkpoint under way, at the end of a run that may have failed with `error`."""
        if error is None or self._thread is None:
            self.finish()
            return
        wait_s = GIVE_UP_S if self.wire.is_shared else math.inf
        if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C: the first one lets the run end
            wait_s = 0.0
        if not pulse.wait_for(self._done, self._pulse, wait_s):
            more = f" after {wait_s:g} s more" if wait_s else ""
            error.add_note(f"the checkpoint of step {self._step} was not complete{more}")
            if not wait_s:
                atexit.register(_end_without, self._done)
            return
        try:
            self.finish()
        except Exception as own:
            error.add_note(
                f"{own}" if isinstance(own, CheckpointError) else f"checkpoint of step {self._step}: {own!r}"
            )

    def _run(self, snapshot: Snapshot) -> None:
        assert self._line is not None
        try:
            with pulse.of_thread(self._pulse):
                self._path = self._save(snapshot, self._line)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


def _end_without(done: threading.Event) -> None:
    """At the end of a process after a second Ctrl-C: end now, in Python's way, if the thread still writes.

    Python itself would abort, because it ends a thread that is inside the writing library.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not done.is_set():
        streams.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    done.wait()
