"""Start the processes on all hosts, wait for them, and leave no process running at the end.

If `min_hosts` is set, the run continues without a lost host, which is started again once it can be reached.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence

from exogym.core.progress import notice
from exogym.machines.remote import ssh
from exogym.machines.remote.channel import Channel, Logs
from exogym.machines.remote.health import Board
from exogym.machines.remote.hosts import Host
from exogym.machines.remote.onhost.guard import TRY_AGAIN
from exogym.machines.remote.orders import STOP_S, HostOrder

BEAT_S = 5.0
FOLLOW_S = 10.0  # after a host has failed, time for the others to end by themselves
END_S = 300.0  # after a host has finished, time for the others to write their results
ALONE_S = 300.0  # time to wait for unreachable hosts while no host runs
LOOK_S = 0.2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


def pause_s(attempt: int) -> float:
    """Return the seconds to wait before restart number `attempt`, counted from 0: 5, 10, 20, 40, 60, 60, ...

    >>> [pause_s(attempt) for attempt in range(5)]
    [5.0, 10.0, 20.0, 40.0, 60.0]
    """
    return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 30), LONGEST_PAUSE_S)


class RunWatch:
    """Run commands on hosts, and wait for them.

    Args:
        orders: one command per host and, if `goes_on`, a command that starts the membership server.
        logs: prints and saves the hosts' output.
        board: records the hosts' states.
        goes_on: whether the run continues without a lost host, which is started again once it can be reached.

    Attributes:
        finished: hosts whose command has finished without an error.
        lost: True if a connection was lost, so that a restart of the run may succeed.
    """

    def __init__(self, orders: Sequence[HostOrder], logs: Logs, board: Board, goes_on: bool = False):
        self.orders, self.logs, self.board, self.goes_on = orders, logs, board, goes_on
        self.channels: list[Channel] = []
        self.finished: list[Host] = []
        self.lost = False
        logs.first = None
        self._failed: list[Channel] = []
        self._ended: queue.Queue[Channel] = queue.Queue()
        self._again: list[tuple[float, int]] = []  # (time, order) of the next restarts
        self._attempts = [0] * len(orders)
        self._code, self._deadline = 0, float("inf")

    def run(self) -> int:
        """Run all commands to their end. Return 0, or the exit code of the host that failed first."""
        done = threading.Event()
        beats = threading.Thread(target=self._beat, args=(done,), daemon=True)
        try:
            for number in range(len(self.orders)):
                self._start(number)
            beats.start()
            self._wait()
            return 0 if self.goes_on and self.finished else self._code
        finally:
            done.set()
            self._end()

    def _start(self, number: int) -> None:
        self.channels.append(Channel(number, self.orders[number], self.logs, self.board, self._ended.put))

    def _running(self) -> list[Channel]:
        """Return the channels of hosts, not of the membership server, that have not ended."""
        return [channel for channel in self.channels if channel.status is None and channel.order.ranks]

    def _wait(self) -> None:
        ran = time.monotonic()
        while time.monotonic() < self._deadline:
            if self._running():
                ran = time.monotonic()
            elif not self._again or self.finished or time.monotonic() > ran + ALONE_S:
                break
            with contextlib.suppress(queue.Empty):
                self._take(self._ended.get(timeout=LOOK_S))
            now = time.monotonic()
            for number in [number for at, number in self._again if at <= now and not self.finished]:
                self._start(number)
            self._again = [(at, number) for at, number in self._again if at > now]
        for channel in self.channels if self.finished else []:
            if not channel.order.ranks:
                channel.dismiss()  # the membership server was needed to tell returning hosts that the run has finished
                channel.join(FOLLOW_S)
        while not self._ended.empty():
            self._take(self._ended.get())
        if self._failed and not self.goes_on:
            self._blame()

    def _blame(self) -> None:
        """Print which host failed first: the host of the failed rank, or a lost host, or the first to end."""
        number = None if self.logs.first is None else self.logs.first[0]
        first = min(self._failed, key=lambda channel: (channel.number != number, not _was_cut_off(channel)))
        self._code = first.status or 0
        if not _was_cut_off(first):
            notice(_why(first, self.logs))

    def _take(self, channel: Channel) -> None:
        """Handle the end of a host's part."""
        assert channel.status is not None
        if channel.status == 0:
            self.board.ended(channel.order, "done")
        else:
            self.board.ended(channel.order, "lost" if _was_cut_off(channel) else "failed", _why(channel, self.logs))
        if channel.status == 0 and channel.order.ranks:
            self.finished.append(channel.order.host)
            if self.goes_on:
                self._not_after(END_S)
            return
        if channel.status == 0 or (self.goes_on and self.finished):
            return
        gone = _was_cut_off(channel)
        self.lost = self.lost or gone
        if gone and self.goes_on and channel.order.ranks and self._deadline == float("inf"):
            attempt = self._attempts[channel.number]
            self._attempts[channel.number] += 1
            self._again.append((time.monotonic() + pause_s(attempt), channel.number))
            notice(f"{_why(channel, self.logs)}; trying again in {pause_s(attempt):g} s")
        elif gone or self.goes_on:
            notice(_why(channel, self.logs))
        self._failed.append(channel)
        if not self.goes_on or not channel.order.ranks:
            self._not_after(FOLLOW_S)
        self._code = self._code or channel.status

    def _not_after(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(BEAT_S):
            for channel in list(self.channels):
                channel.beat()

    def _end(self) -> None:
        """Stop all hosts' parts and wait for them. A second Ctrl-C cuts the connections immediately.

        The membership server ends last, because the others need it to save the run together.
        """
        try:
            deadline = time.monotonic() + STOP_S + FOLLOW_S
            servers = [channel for channel in self.channels if not channel.order.ranks and channel.status is None]
            for group in (self._running(), servers):
                for channel in group:
                    channel.stop()
                for channel in group:
                    if not channel.join(max(0.0, deadline - time.monotonic())):
                        host = channel.order.host
                        notice(f"{host.address} did not answer the order to stop; its processes will end by themselves")
        finally:
            for channel in self.channels:
                if channel.process.poll() is None:
                    channel.kill()


def _was_cut_off(channel: Channel) -> bool:
    return channel.status == TRY_AGAIN or (channel.status == ssh.SSH_FAILED and not channel.order.host.is_local)


def _why(channel: Channel, logs: Logs) -> str:
    host = channel.order.host
    if channel.status == TRY_AGAIN:
        return f"{host.address} was cut off from the other hosts"
    if _was_cut_off(channel):
        return f"the connection to {host.address}, or the run's guard there, is lost"
    where = f"above and in {logs.folder}" if logs.echo else f"in {logs.folder}"
    return f"{host.address} ended with exit code {channel.status}; its output is {where}"
