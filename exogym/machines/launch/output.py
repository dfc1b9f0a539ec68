"""The ranks' output. Each line is printed on the terminal after `[rank N]`, and saved unchanged in a file per rank."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import sys
import threading
from pathlib import Path
from typing import BinaryIO, TextIO

from exogym.core.progress import notice

CHUNK_BYTES = 1 << 16
PAUSE_S = 0.1
LINE_END = re.compile(r"\r\n|\n|\r")


class _RankPipe:
    """A rank's pipe, and the terminal stream for it."""

    def __init__(self, path: Path, local_rank: int, terminal: TextIO):
        os.mkfifo(path, 0o600)
        self.local_rank, self.terminal = local_rank, terminal
        self.pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.keeper = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # keeps the pipe open after the rank's end
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.rest = ""

    def lines(self, data: bytes, last: bool = False) -> list[str]:
        """Return the lines that the new `data` completes. A carriage return also ends a line (progress bars)."""
        text = self.rest + self.decoder.decode(data, last)
        held = "\r" if text.endswith("\r") and not last else ""  # the "\n" of "\r\n" may follow
        *done, self.rest = LINE_END.split(text.removesuffix(held) if held else text)
        self.rest += held
        if last and self.rest:
            done, self.rest = [*done, self.rest], ""
        return done

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.keeper)


class Screens:
    """Print the ranks' lines on terminals. If a terminal is closed, the ranks continue without it."""

    def __init__(self) -> None:
        self._deaf: set[int] = set()

    def show(self, terminal: TextIO, text: str) -> None:
        if id(terminal) in self._deaf:
            return
        try:
            try:
                terminal.write(text)
            except UnicodeEncodeError as error:
                terminal.write(text.encode(error.encoding, "replace").decode(error.encoding))
            terminal.flush()
        except (OSError, ValueError):  # closed, for example by `| head`
            self._deaf.add(id(terminal))


class LogFiles:
    """Append the ranks' output to files in `folder`. If writing fails (a full disk), training continues."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, BinaryIO | None] = {}

    def write(self, name: str, data: bytes) -> None:
        try:
            if name not in self._files:
                self._files[name] = None
                self._files[name] = (self.folder / name).open("ab", buffering=0)
            if (file := self._files[name]) is not None:
                file.write(data)
        except OSError as error:
            notice(f"{self.folder / name} is no longer written ({error}); training continues")
            self._files[name] = None

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


class RankOutput:
    """Receive the output of this machine's ranks through pipes, in a thread, and print and save it.

    Args:
        folder: folder for the pipes `{local_rank}.out` and `{local_rank}.err`.
        nproc: number of ranks on this machine.
        log_dir: folder for the files `training_rank_{rank}.log`, to which the output is appended, or None for no files.
    """

    def __init__(self, folder: Path, nproc: int, log_dir: Path | None):
        self.logs = None if log_dir is None else LogFiles(log_dir)
        self.ranks: dict[int, int] = {}  # local rank -> rank
        self._screens = Screens()
        self._streams = [
            _RankPipe(folder / f"{local_rank}.{name}", local_rank, terminal)
            for local_rank in range(nproc)
            for name, terminal in (("out", sys.stdout), ("err", sys.stderr))
        ]
        self._selector = selectors.DefaultSelector()
        for stream in self._streams:
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exogym-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Print and save the output that is still in the pipes, and end the thread."""
        self._stopping.set()
        self._thread.join()
        for stream in self._streams:
            self._show(stream, stream.lines(b"", last=True))
            stream.close()
        self._selector.close()
        if self.logs is not None:
            self.logs.close()

    def _run(self) -> None:
        while True:
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping else PAUSE_S)
            for key, _ in ready:
                data = os.read(key.fd, CHUNK_BYTES)
                if self.logs is not None:
                    self.logs.write(f"training_rank_{self.ranks[key.data.local_rank]}.log", data)
                self._show(key.data, key.data.lines(data))
            if stopping and not ready:
                return

    def _show(self, stream: _RankPipe, lines: list[str]) -> None:
        if lines:
            text = "".join(f"[rank {self.ranks[stream.local_rank]}] {line}\n" for line in lines)
            self._screens.show(stream.terminal, text)
