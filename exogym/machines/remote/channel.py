"""The connection to one host during a run. It receives the host's output, and sends signs of life to the host."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import IO, TextIO

from exogym.core.progress import notice, readable_bytes
from exogym.machines.launch.output import LogFiles, Screens
from exogym.machines.remote import ssh
from exogym.machines.remote.budget import LINE_BYTES, PRINTED_BYTES, Quota
from exogym.machines.remote.health import Board
from exogym.machines.remote.onhost.guard import DISMISSED
from exogym.machines.remote.orders import HostOrder

# Harmless messages of torch: about hosts without a name in the network, and, with a stack trace, about hosts that end
# after the master. (The host's launcher names a rank that has failed.)
HARMLESS = re.compile(r"\[c10d\] The hostname of the client socket cannot be retrieved")
HARMLESS_BLOCK = re.compile(r"TCPStore\.cpp:\d+\] \[c10d\] (send|recv)\w+ failed on ")
IN_BLOCK = re.compile(
    r"Exception raised from |frame #\d+: |<omitting python frames>|$"
)  # the empty line ends the block
RANK = re.compile(r"\[rank (\d{1,9})\] ?(.*)", re.S)
# The launcher's line about the rank that failed, not about ranks that only lost their connection to it.
FAILED = re.compile(r"exogym: (?!rank [\d of]+ lost its connection)(rank \d+.*); what it printed is ", re.S)


class Logs:
    """Print the hosts' output, with the host's address before each line, and save it in the run's folder.

    Args:
        folder: folder for `training_rank_{rank}.log` (a rank's output) and `host_{number}.log` (output of the host's
            launcher or ssh). At most `PRINTED_BYTES` are saved for each host.
        echo: whether to print the output on this machine's terminal as well.

    Attributes:
        first: the first failure as (number of the rank's host, the launcher's line about the rank), or None.
    """

    def __init__(self, folder: Path, echo: bool = True):
        self.folder, self.echo = folder, echo
        self._budgets: dict[int, Quota] = {}
        self._full: set[int] = set()  # hosts whose limit is reached
        self.first: tuple[int, str] | None = None
        self._files, self._screens = LogFiles(folder), Screens()
        self._lock = threading.Lock()
        self._blocks: set[tuple[int, int, str]] = set()  # (host, stream, file) inside a harmless block

    def take(self, number: int, address: str, line: str, terminal: TextIO, ranks: Container[int] | None = None) -> None:
        """Print and save a line of host `number`'s output. Only lines of `ranks` go to ranks' files."""
        found = RANK.match(line)
        if found is not None and ranks is not None and int(found[1]) not in ranks:
            found = None
        name = f"training_rank_{found[1]}.log" if found else f"host_{number}.log"
        text = found[2] if found else line
        with self._lock:
            if self._has_room(number, address, len(text.encode("utf-8", "replace")) + 1):
                self._files.write(name, f"{text}\n".encode("utf-8", "replace"))
            if self.first is None and found is None and (failed := FAILED.match(line)):
                self.first = number, failed[1]
            if not self._is_harmless((number, id(terminal), name), text) and self.echo:
                self._screens.show(terminal, f"[{address}] {line}\n")

    def _has_room(self, number: int, address: str, count: int) -> bool:
        if number in self._full:
            return False
        if self._budgets.setdefault(number, Quota(PRINTED_BYTES)).take(count):
            return True
        self._full.add(number)
        why = f"{address} has printed {readable_bytes(PRINTED_BYTES)}: its later output is not saved in {self.folder}"
        self._files.write(f"host_{number}.log", f"exogym: {why}\n".encode())
        notice(why)
        return False

    def _is_harmless(self, source: tuple[int, int, str], text: str) -> bool:
        inside = source in self._blocks and IN_BLOCK.match(text) is not None
        if HARMLESS_BLOCK.search(text) or (inside and text):
            self._blocks.add(source)
            return True
        self._blocks.discard(source)
        return inside or HARMLESS.search(text) is not None

    def close(self) -> None:
        self._files.close()


class Channel:
    """Start a host's processes of a run over SSH, and receive the host's output and reports.

    Args:
        number: position of `order` in the list of the run's commands.
        order: the command for the host.
        logs: prints and saves the host's output.
        board: receives the host's reports.
        ended: called with this channel, in another thread, when the host's command has ended with the exit status
            `status`.
    """

    def __init__(self, number: int, order: HostOrder, logs: Logs, board: Board, ended: Callable[[Channel], None]):
        self.number, self.order, self.logs, self.board, self._ended = number, order, logs, board, ended
        self.status: int | None = None
        board.started(order)
        self.process = ssh.start(order.host, "guard", order.given(board.asked_of(order)))
        assert self.process.stdin is not None
        self._input: int | None = self.process.stdin.fileno()
        os.set_blocking(self._input, False)
        self._lock = threading.Lock()
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for thread in [*self._readers, threading.Thread(target=self._wait, daemon=True)]:
            thread.start()

    def beat(self) -> None:
        """Send the host a sign that the controller still runs."""
        self._send(b".")

    def dismiss(self) -> None:
        """Have the host end the command without a message, because the run no longer needs it."""
        self._send(DISMISSED)

    def _send(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._input is not None:
                os.write(self._input, data)

    def stop(self) -> None:
        """Ask the host to end its processes of the run."""
        with self._lock, contextlib.suppress(OSError):
            if self._input is not None:
                self._input = None
                assert self.process.stdin is not None
                self.process.stdin.close()

    def kill(self) -> None:
        """Cut the connection to the host, which then ends its processes of the run by itself."""
        self.stop()
        self.process.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait until the host's command has ended. Return False if it is still running after `timeout_s` seconds."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        for reader in self._readers:
            reader.join(timeout_s)
        return True

    def _read(self, stream: IO[bytes], terminal: TextIO) -> None:
        mark, begun, ranks = self.board.mark.encode(), b"", self.order.ranks
        while raw := stream.readline(LINE_BYTES):
            before, found, report = raw.partition(mark)
            if found:  # a rank's incomplete line may stand before it
                self.board.take(self.order, report.decode("utf-8", "replace"))
                begun = (begun + before)[:LINE_BYTES]
                continue
            line = (begun + raw).decode("utf-8", "replace").rstrip("\r\n")
            begun = b""
            self.logs.take(self.number, self.order.host.address, line, terminal, ranks)
        if begun:
            text = begun.decode("utf-8", "replace")
            self.logs.take(self.number, self.order.host.address, text, terminal, ranks)
        stream.close()

    def _wait(self) -> None:
        status = self.process.wait()
        for reader in self._readers:
            reader.join()
        self.stop()
        self.status = status if status >= 0 else 128 - status
        self._ended(self)
