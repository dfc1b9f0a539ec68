"""Carry rows while nodes compute. A thread makes a wire's calls, in order, over a second process group.

Every process starts the same transfers in the same order, so the threads make the same calls in the same order. Sums go
through the fixed tree, as without the thread, so the bits are the same.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import Wire, barrier
from exogym.core.engine.world import new_group

Around = Callable[[Callable[[], Any]], Any]  # see `ProcessWire.around`
GIVE_UP_S = 30.0  # for the last transfer of a process that has failed
_RUNNING: dict[threading.Thread, queue.SimpleQueue[Carried | None]] = {}  # threads that have not ended


class Carried:
    """A `Transfer` that `Behind` has started."""

    def __init__(self, call: Callable[[Wire], Tensor], like: Tensor, around: Around):
        self.call, self.result, self.around = call, torch.empty_like(like), around
        self.error: BaseException | None = None
        self.is_complete = threading.Event()

    def wait(self) -> None:
        with pulse.at(pulse.WAITING):
            self.around(self._wait)

    def _wait(self) -> None:
        self.is_complete.wait()
        if self.error is not None:
            raise self.error


class Behind:
    """The thread and the process group that carry rows while the processes of a run compute.

    All processes make their `Behind` at the same time; `line` returns a wire between them over a given process group.
    After an error, each later transfer raises the same error.
    """

    def __init__(self, line: Callable[[dist.ProcessGroup], Wire]):
        self.group = new_group()
        self.line = line(self.group)
        self._waiting: list[Carried] = []  # for `launch`
        self._transfers: queue.SimpleQueue[Carried | None] = queue.SimpleQueue()
        # A daemon, because a process that fails must not wait for a lost process. After a failed run, the thread ends
        # with this object.
        self._thread = threading.Thread(
            target=_carry, args=(self.line, self._transfers), name="exogym transfers", daemon=True
        )
        weakref.finalize(self, self._transfers.put, None)
        _RUNNING[self._thread] = self._transfers
        self._thread.start()
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # runs before the process leaves its groups, because it is registered last

    def start(self, call: Callable[[Wire], Tensor], like: Tensor, around: Around) -> Carried:
        """Return a transfer that makes the call `call(line)` in the thread, after the next `launch`.

        `like` has the shape of its result. Waiting for the transfer goes through `around`.
        """
        transfer = Carried(call, like, around)
        self._waiting.append(transfer)
        return transfer

    def launch(self) -> None:
        """Begin all transfers that have not begun."""
        for transfer in self._waiting:
            self._transfers.put(transfer)
        self._waiting.clear()

    def leave(self) -> None:
        """Wait for all transfers of all processes, and end the thread and the group."""
        self.launch()
        self._transfers.put(None)
        with pulse.at(pulse.WAITING):
            self._thread.join()
            barrier(self.line)  # gloo fails in a process that still receives when another process has left
        dist.destroy_process_group(self.group)


def _end_all() -> None:
    """End all threads, at the end of a process that has failed.

    Python would end a daemon thread inside a transfer, which aborts the process. Transfers with ended processes fail,
    too.
    """
    for thread, transfers in list(_RUNNING.items()):
        transfers.put(None)
        thread.join(GIVE_UP_S)


def _carry(line: Wire, transfers: queue.SimpleQueue[Carried | None]) -> None:
    error: BaseException | None = None
    with torch.no_grad(), pulse.of_thread(pulse.words_in(bytearray(pulse.BYTES))):
        while (transfer := transfers.get()) is not None:
            try:
                if error is None:
                    transfer.result.copy_(transfer.call(line))
            except BaseException as raised:
                error = raised
            transfer.error = error
            del transfer.call  # and the tensors that it has read
            transfer.is_complete.set()
    _RUNNING.pop(threading.current_thread(), None)
