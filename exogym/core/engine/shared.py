"""The wire between forked processes: shared memory carries rows, and sockets let processes wait for each other."""

from __future__ import annotations

import math
import mmap
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import Move, Wire, barrier, reduce_rows
from exogym.core.communicator.wire import reduce_native
from exogym.core.engine.hangs import Patience
from exogym.errors import TrainingError

HALF_BYTES = 8 << 20  # two halves in turn: processes may still read one while others write the other
HEAD_BYTES = 64  # before the pulses; holds flags
STOP = 0  # the flag that asks all processes to stop
TOKEN_BYTES = 8


class Lost(Exception):
    """Another process has ended too early."""

    def __init__(self, process: int):
        super().__init__(process)
        self.process = process


class Hung(Lost):
    """Another process hangs."""

    def __init__(self, process: int, patience: Patience):
        super().__init__(process)
        self.patience = patience


class SharedWire(Wire):
    """Carries rows between processes that share `memory`.

    A reduction works in pieces of as many columns as fit into `memory`. Each process writes its rows and waits for the
    others, sums its share of the columns in the fixed tree over node ids and waits again, and finally reads the sum.
    Every row is copied twice and every sum once.

    Args:
        placement: node ids of each process, together 0..N-1 ascending.
        process: this process's number; the main process is 0.
        memory: `memory_bytes(processes)` bytes of shared memory.
        lines: the main process has a connected socket to each other process. Each other process has one, to the main
            process.
        native: sum each process's rows first, then these sums. This needs fewer copies, but rounds differently.
        hang_s: seconds that another process's pulse may stand still, for the main process. None means no limit.
    """

    def __init__(
        self,
        placement: Sequence[Sequence[int]],
        process: int,
        memory: mmap.mmap,
        lines: Sequence[socket.socket],
        native: bool = False,
        hang_s: float | None = None,
    ):
        self.process = process
        super().__init__(placement[process], native)
        self.place(placement)
        self.lines, self.memory = list(lines), memory
        self.asked_to_stop = lambda: memory[STOP] != 0
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn, self._first_byte = 0, pulse_byte(len(placement))
        self._patience: dict[int, Patience] = {}
        for other, line in enumerate(self.lines, 1):
            line.settimeout(pulse.LOOK_S)
            if hang_s is not None and self.is_main:
                self._patience[other] = Patience(pulse.words_in(memory, pulse_byte(other)), hang_s)

    # Asking all processes to stop, without waiting for them

    def ask_to_stop(self) -> None:
        self.memory[STOP] = 1

    def close(self) -> None:
        for line in self.lines:
            line.close()

    # Waiting for all processes at the same call

    def agree(self, flag: bool) -> bool:
        return self._meet("agree", flag=flag)

    def _meet(self, *call: Any, flag: bool = False) -> bool:
        """Wait until all processes make the same `call` (or raise TrainingError). Return whether any set `flag`."""
        mark = hash(call) % (1 << 8 * TOKEN_BYTES) & ~1  # forks of one process hash alike
        if not self.is_main:
            self._write(self.lines[0], mark | flag, 0)
            return bool(self._read(self.lines[0], 0) & 1)
        tokens = [self._read(line, process) for process, line in enumerate(self.lines, 1)]
        if strangers := [k + 1 for k, token in enumerate(tokens) if token & ~1 != mark]:
            raise TrainingError(
                f"this process calls {call[0]}, but worker process {strangers[0]} makes another call. Every process "
                "must make the same calls in the same order. A callback runs in one process only: use the loop in it "
                "(loop.evaluate(node), loop.save()), not the fleet or its communicator"
            )
        answer = any(token & 1 for token in tokens) or flag
        for process, line in enumerate(self.lines, 1):
            self._write(line, mark | answer, process)
        return answer

    def _read(self, line: socket.socket, process: int) -> int:
        got = b""

        def has_come(seconds: float) -> bool:
            nonlocal got
            try:
                got = line.recv(TOKEN_BYTES)
            except TimeoutError:
                return False
            except ConnectionResetError:
                pass
            return True

        pulse.beat()
        self.wait_for(process, has_come)
        if not got:
            raise Lost(process)
        return int.from_bytes(got, "little")

    def wait_for(self, process: int, happened: Callable[[float], bool]) -> None:
        """Call `happened(seconds)`, which waits at most `seconds`, until an event of `process` makes it return True.

        Raise Hung if the process's pulse stands still.
        """
        patience = self._patience.get(process)
        while not happened(pulse.LOOK_S):
            pulse.beat()  # processes that wait for this one see its progress
            if patience is not None and patience.spent(pulse.LOOK_S):
                raise Hung(process, patience)

    def _write(self, line: socket.socket, token: int, process: int) -> None:
        try:
            line.sendall(token.to_bytes(TOKEN_BYTES, "little"))
        except ConnectionError:
            raise Lost(process) from None

    # Rows

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        flat, here = x.reshape(len(x), -1), self._here(ids)
        out = flat.new_empty(len(ids), flat.shape[1])
        for start, stop, piece in self._pieces(flat, len(ids)):
            _write_rows(piece, flat[:, start:stop], here)
            self._meet("rows", piece.shape, x.dtype, tuple(ids))
            out[:, start:stop] = piece
        return out.view(len(ids), *x.shape[1:])

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
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
            every = range(len(self.placement))
            return reduce_native(
                self, x, ids, op, weights, lambda own, op: self._reduced(own[None], [(self.process, 0)], every, op)
            )
        return self._reduced(x, self._here(ids), ids, op, weights)

    def _reduced(
        self, x: Tensor, here: list[tuple[int, int]], ids: Sequence[int], op: str, weights: Tensor | None = None
    ) -> Tensor:
        """Reduce the rows `ids` of all processes to (F,). `here` has this process's: (place in `ids`, row of `x`)."""
        out, processes = x.new_empty(x.shape[1]), len(self.placement)
        for start, stop, piece in self._pieces(x, len(ids) + 1):
            _write_rows(piece, x[:, start:stop], here)
            self._meet("reduce", piece.shape, x.dtype, tuple(ids), op)
            first, last = ((stop - start) * (self.process + k) // processes for k in (0, 1))
            if last > first:
                piece[-1, first:last] = reduce_rows(piece[:-1, first:last], ids, op, weights)
            barrier(self)
            out[start:stop] = piece[-1]
        return out

    def _here(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        return [(k, self.row_of[i]) for k, i in enumerate(ids) if i in self.row_of]

    def _pieces(self, x: Tensor, rows: int) -> Any:
        """Yield (start, stop, memory): a range of `x`'s columns, and shared memory (rows, stop - start) for it."""
        width, size = x.shape[1], x.element_size()
        most = max(1, HALF_BYTES // (max(1, rows) * size))
        for start in range(0, width, most):
            stop = min(start + most, width)
            self._turn ^= 1
            first = self._first_byte + self._turn * HALF_BYTES
            flat = self._bytes[first : first + rows * (stop - start) * size]
            yield start, stop, flat.view(x.dtype).view(rows, stop - start)


def _write_rows(piece: Tensor, x: Tensor, here: list[tuple[int, int]]) -> None:
    first = here[0][0] if here else 0
    if here == [(first + row, row) for row in range(len(x))]:
        piece[first : first + len(x)] = x
        return
    for k, row in here:
        piece[k] = x[row]


def pulse_byte(process: int) -> int:
    """Return the byte of a process's pulse in the shared memory. Rows follow the last process's pulse."""
    return HEAD_BYTES + pulse.BYTES * process


def memory_bytes(processes: int) -> int:
    return pulse_byte(processes) + 2 * HALF_BYTES
