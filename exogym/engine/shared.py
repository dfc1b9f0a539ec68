"""Processes on one machine, forked from the caller's, whose rows meet in shared memory.

`run_forked` forks one process a block of rows; the caller's own process is the main one and holds the first. A fork
takes a millisecond and gives each process the model and the data as they stand, so nothing is pickled: models,
functions and data sets made in a notebook cell work. Rows meet in memory that all processes share, and wait for one
another over pipes, so no port is opened, a process that dies is noticed, and none outlives the caller's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from exogym.communicator import Parcel, Wire, reduce_rows
from exogym.errors import TrainingError, WorkerError

Result = TypeVar("Result")
HALF_BYTES = 8 << 20  # two halves in turn: one may still be read while the other is written
HEAD_BYTES = 64  # holds the flag that asks all processes to stop
PATIENCE_S, POLL_S = 2.0, 0.01  # for processes that were asked to stop; between looks at whether one has ended
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class Lost(Exception):
    """Another process is gone; `args[0]` is its number."""


class SharedWire(Wire):
    """Carries rows between processes that share `memory`.

    Columns are cut into pieces that fit; each process writes its rows, all wait, each sums its share of the columns
    in the tree over global ids, all wait, each reads the sum. A row is copied twice and a sum once.

    Args:
        placement: global ids of each process, together 0..N-1 ascending.
        process: which of them this is; 0 is the main one.
        memory: `memory_bytes()` of shared memory.
        pipes: of the main process, (read, write) for each other one; of another, one pair.
        native: sum each process's rows first, then those sums: fewer copies, other rounding.
    """

    def __init__(
        self,
        placement: Sequence[Sequence[int]],
        process: int,
        memory: mmap.mmap,
        pipes: Sequence[tuple[int, int]],
        native: bool = False,
    ):
        super().__init__(placement[process], native)
        self.placement, self.process = [list(ids) for ids in placement], process
        self.is_main, self.is_hidden = process == 0, process > 0
        self.pipes, self.memory = list(pipes), memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn = 0

    # Asking all to stop, without a meeting

    def ask_to_stop(self) -> None:
        self.memory[0] = 1

    def asked_to_stop(self) -> bool:
        return self.memory[0] != 0

    # Meetings

    def agree(self, flag: bool) -> bool:
        return self._meet("agree", flag=flag)

    def barrier(self) -> None:
        self._meet("barrier")

    def _meet(self, *call: Any, flag: bool = False) -> bool:
        """Wait for all at the same `call`; return whether any has the flag up.

        Raises:
            TrainingError: the processes do not make the same calls.
        """
        mark = hash(call) % 128 << 1  # forks of one process hash alike
        if not self.is_main:
            (read, write) = self.pipes[0]
            self._write(write, mark | flag, 0)
            return bool(self._read(read, 0) & 1)
        tokens = [self._read(read, k + 1) for k, (read, _) in enumerate(self.pipes)]
        if strangers := [k + 1 for k, token in enumerate(tokens) if token & ~1 != mark]:
            raise TrainingError(
                f"this process calls {call[0]} where worker process {strangers[0]} makes another call: every process "
                "must make the same ones in the same order. A callback runs in one process only: let it ask the loop "
                "(loop.evaluate(node), loop.save()), not the fleet or its communicator"
            )
        answer = any(token & 1 for token in tokens) or flag
        for k, (_, write) in enumerate(self.pipes):
            self._write(write, mark | answer, k + 1)
        return answer

    def _read(self, pipe: int, process: int) -> int:
        got = os.read(pipe, 1)
        if not got:
            raise Lost(process)
        return got[0]

    def _write(self, pipe: int, token: int, process: int) -> None:
        try:
            os.write(pipe, bytes([token]))
        except BrokenPipeError:
            raise Lost(process) from None

    def tell(self, value: Any) -> Any:
        text = json.dumps(value).encode() if self.is_main else b""
        length = int(self._from_main(torch.tensor([len(text)])))
        written = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(length).byte()
        return json.loads(self._from_main(written).numpy().tobytes())

    def _from_main(self, x: Tensor) -> Tensor:
        return self.rows(x[None].expand(len(self.ranks), -1), self.placement[0][:1])[0]

    # Rows

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        ids = list(ids)
        flat = x.reshape(len(x), -1)
        out = flat.new_empty(len(ids), flat.shape[1])
        for start, stop, piece in self._pieces(flat, len(ids)):
            self._write_rows(piece, flat[:, start:stop], ids)
            self._meet("rows", piece.shape, x.dtype, tuple(ids))
            out[:, start:stop] = piece
        return out.view(len(ids), *x.shape[1:])

    def _carry(self, given: Mapping[int, Tensor], moves: Sequence[tuple[int, int, Parcel]]) -> dict[int, Tensor]:
        got = {}
        for giver, taker, parcel in moves:
            row = given[giver].reshape(1, -1) if giver in self.row_of else None
            like = torch.empty(1, math.prod(parcel.shape), dtype=parcel.dtype)
            for start, stop, piece in self._pieces(like, 1):
                if row is not None:
                    piece.copy_(row[:, start:stop])
                self._meet("hand over", giver, taker, piece.shape, parcel.dtype)
                if taker in self.row_of:
                    like[:, start:stop] = piece
            if taker in self.row_of:
                got[taker] = like.view(parcel.shape)
        return got

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        if self.native:
            return self._reduce_native(x, ids, op, weights)
        ids = list(ids)
        out = x.new_empty(x.shape[1])
        for start, stop, piece in self._pieces(x, len(ids) + 1):
            members, total = piece[:-1], piece[-1]
            self._write_rows(members, x[:, start:stop], ids)
            self._meet("reduce", piece.shape, x.dtype, tuple(ids), op)
            self._share(members, total, ids, op, weights)
            self.barrier()
            out[start:stop] = total
        return out

    def _share(self, members: Tensor, total: Tensor, ids: list[int], op: str, weights: Tensor | None) -> None:
        """Reduce this process's share of the columns of `members` (n, F) into `total` (F,)."""
        width, processes = members.shape[1], len(self.placement)
        first, last = (width * (self.process + k) // processes for k in (0, 1))
        if last > first:
            total[first:last] = reduce_rows(members[:, first:last], ids, op, weights)

    def _combine(self, partial: Tensor, op: str) -> Tensor:
        processes = list(range(len(self.placement)))
        out = torch.empty_like(partial)
        for start, stop, piece in self._pieces(partial[None], len(processes) + 1):
            piece[self.process] = partial[start:stop]
            self._meet("reduce", piece.shape, partial.dtype, op)
            self._share(piece[:-1], piece[-1], processes, op, None)
            self.barrier()
            out[start:stop] = piece[-1]
        return out

    def _write_rows(self, piece: Tensor, x: Tensor, ids: Sequence[int]) -> None:
        here = [(k, self.row_of[i]) for k, i in enumerate(ids) if i in self.row_of]
        first = here[0][0] if here else 0
        if here == [(first + row, row) for row in range(len(x))]:
            piece[first : first + len(x)] = x
            return
        for k, row in here:
            piece[k] = x[row]

    def _pieces(self, x: Tensor, rows: int) -> Any:
        """Yield (start, stop, place): columns of `x` and shared memory (rows, stop - start) for them."""
        width, size = x.shape[1], x.element_size()
        most = max(1, HALF_BYTES // (max(1, rows) * size))
        for start in range(0, width, most):
            stop = min(start + most, width)
            self._turn ^= 1
            first = HEAD_BYTES + self._turn * HALF_BYTES
            flat = self._bytes[first : first + rows * (stop - start) * size]
            yield start, stop, flat.view(x.dtype).view(rows, stop - start)


def memory_bytes() -> int:
    return HEAD_BYTES + 2 * HALF_BYTES


def can_fork() -> bool:
    """Say whether this process can be forked safely: Linux, and no GPU in use."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()


def run_forked(
    placement: Sequence[Sequence[int]], body: Callable[[SharedWire], Result], native: bool = False
) -> Result:
    """Run `body(wire)` in this process and in one forked process for each further block; return what it gives here.

    Raises:
        what `body` raised here or in another process, then with that process's traceback as a note;
        WorkerError: a process was killed; the message names it, its nodes and the signal.
    """
    memory = mmap.mmap(-1, memory_bytes())
    children: list[_Child] = []
    pipes: list[tuple[int, int]] = []
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for process in range(1, len(placement)):
            children.append(_fork(placement, process, memory, pipes, children, body, native))
            pipes.append((children[-1].read, children[-1].write))
        wire = SharedWire(placement, 0, memory, pipes, native)
        try:
            result = body(wire)
            for child in children:
                child.hang_up()
                child.wait()
                if child.status:
                    raise Lost(child.process)
            return result
        except Lost as lost:
            error = children[lost.args[0] - 1].why(placement[lost.args[0]])
        raise error
    finally:
        patience_s = PATIENCE_S if memory[0] else 0.0  # asked to stop, they come to an end of their own
        for child in children:
            child.hang_up()
        for child in children:
            child.end(patience_s)


def _fork(
    placement: Sequence[Sequence[int]], process: int, memory: mmap.mmap, pipes: list[tuple[int, int]],
    children: list[_Child], body: Callable[[SharedWire], Any], native: bool,
) -> _Child:  # fmt: skip
    up_read, up_write = os.pipe()
    down_read, down_write = os.pipe()
    error_read, error_write = os.pipe()
    parent, collects = os.getpid(), gc.isenabled()
    gc.disable()
    pid = os.fork()
    if pid:
        if collects:
            gc.enable()
        for pipe in (up_write, down_read, error_write):
            os.close(pipe)
        return _Child(process, pid, up_read, down_write, error_read)
    # What the caller has left as garbage is not this process's to collect: a process group among it would wait in its
    # destructor for threads that a fork does not take along.
    gc.freeze()
    if collects:
        gc.enable()
    code = 1
    try:
        _die_with(parent)
        for pipe in (up_read, down_write, error_read, *(p for pair in pipes for p in pair)):
            os.close(pipe)
        for child in children:
            os.close(child.errors)
        signal.set_wakeup_fd(-1)
        for ignored in (signal.SIGINT, signal.SIGTERM):  # the main process decides, and tells
            signal.signal(ignored, signal.SIG_IGN)
        wire = SharedWire(placement, process, memory, [(down_read, up_write)], native)
        body(wire)
        code = 0
    except Lost:
        pass  # the main process is gone or ending
    except BaseException as error:
        os.close(up_write)  # so the main process hears of it, and reads the report
        _report(error_write, error)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _report(pipe: int, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        given = pickle.dumps(error)
        pickle.loads(given)
    except Exception:
        given = pickle.dumps(TrainingError(f"{type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        os.write(pipe, pickle.dumps((given, text[-40_000:])))


class _Child:
    """A forked process as the main one sees it."""

    def __init__(self, process: int, pid: int, read: int, write: int, errors: int):
        self.process, self.pid, self.read, self.write, self.errors = process, pid, read, write, errors
        self.status: int | None = None
        self.report = b""
        self._open = [read, write]

    def hang_up(self) -> None:
        """Meet the process no more: where it still waits for that, it ends."""
        while self._open:
            os.close(self._open.pop())

    def wait(self, patience_s: float = math.inf) -> None:
        """Wait until the process has ended, so long at most, and take its report."""
        until = time.monotonic() + patience_s
        while self.status is None and time.monotonic() <= until:
            if select.select([self.errors], [], [], POLL_S)[0] and (part := os.read(self.errors, 1 << 16)):
                self.report += part
                continue
            # Processes that it started may hold the pipe open: its end is asked for by number.
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if ended else None
        while self.status is not None and select.select([self.errors], [], [], 0)[0]:
            part = os.read(self.errors, 1 << 16)
            if not part:
                break
            self.report += part

    def why(self, nodes: Sequence[int]) -> BaseException:
        """Return the error to raise for a process that is gone."""
        self.wait()
        assert self.status is not None
        held = f"nodes {nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else f"node {nodes[0]}"
        who = f"worker process {self.process} ({held})"
        if self.report:
            given, text = pickle.loads(self.report)
            error: BaseException = pickle.loads(given)
            error.add_note(f"raised in {who}:\n{text}")
            return error
        if os.WIFSIGNALED(self.status):
            name = signal.Signals(os.WTERMSIG(self.status)).name
            cause = "; the system does so when memory runs out" if name == "SIGKILL" else ""
            return WorkerError(f"{who} was killed by {name}{cause}; checkpoints written before stand")
        return WorkerError(f"{who} ended with exit code {os.waitstatus_to_exitcode(self.status)}; checkpoints stand")

    def end(self, patience_s: float) -> None:
        """Kill the process if it still runs after so many seconds, and leave nothing of it."""
        self.hang_up()
        try:
            if self.status is None:
                self.wait(patience_s)
        finally:
            if self.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                _, self.status = os.waitpid(self.pid, 0)
            os.close(self.errors)
