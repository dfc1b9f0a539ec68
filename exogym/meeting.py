"""Node programs that meet at collectives, one running at a time.

Each program runs in a thread of its own, but only one thread moves at any moment: it runs until it calls a
collective or returns, then the next one runs. When all wait at the same collective it is carried out on the
stacked tensors, (rows, ...), and each gets its row back. So a strategy written for one node runs as written,
deterministically, around one module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.communicator import Communicator
from exogym.errors import StrategyError
from exogym.strategy.communicate import set_place


class _Abandoned(BaseException):
    """Raised in a waiting thread to end it after another node failed."""


class Meeting:
    """Runs one function per block of rows and carries out the collectives they meet at.

    Args:
        comm: the fleet's communicator.
        enter, leave: called with the block's index whenever its thread starts or stops moving.
        rows: rows of each block; one each by default.

    Raises:
        StrategyError: the nodes do not make the same calls.
    """

    def __init__(
        self,
        comm: Communicator,
        enter: Callable[[int], None],
        leave: Callable[[int], None],
        rows: Sequence[Sequence[int]] | None = None,
    ):
        self.comm, self.enter, self.leave = comm, enter, leave
        self.rows = rows
        members = range(len(comm.ranks)) if rows is None else range(len(rows))
        self.places = [_Place(index, rows is not None) for index in members]
        self.before_first: Callable[[], None] | None = None  # called before the next collective that moves tensors

    def run(self, functions: Sequence[Callable[[], None] | None]) -> None:
        """Run `functions[k]` as block k's program, to the end of all of them; None: its nodes are away."""
        for place, function in zip(self.places, functions, strict=True):
            if function is not None:
                place.begin(function)
        places = self.taking_part = [p for p, f in zip(self.places, functions, strict=True) if f is not None]
        try:
            moving = list(places)
            while moving:
                for place in moving:
                    self._move(place)
                moving = [place for place in places if not place.done]
                if moving:
                    self._meet(moving)
        finally:
            for place in places:
                place.abandon()

    def close(self) -> None:
        """End the threads."""
        for place in self.places:
            place.close()

    def _move(self, place: _Place) -> None:
        self.enter(place.index)
        try:
            place.move()
        finally:
            self.leave(place.index)
        if place.error is not None:
            raise place.error

    def _meet(self, waiting: list[_Place]) -> None:
        calls = {self._name(place): place.request for place in waiting}
        first_name, first = next(iter(calls.items()))
        if len(waiting) < len(self.taking_part):
            missing = next(p for p in self.taking_part if p.done)
            raise StrategyError(
                f"{first_name} waits at {first.kind}(), but {self._name(missing)} has ended its step without it: "
                "every node must make the same collective calls"
            )
        for name, request in calls.items():
            if request.signature != first.signature:
                raise StrategyError(
                    f"{first_name} calls {first.text}, but {name} calls {request.text}: every node must make the same "
                    "collective calls in the same order, with equal shapes"
                )
        for place, result in zip(waiting, self._carry_out(waiting, first), strict=True):
            place.result = result

    def _carry_out(self, waiting: list[_Place], call: _Request) -> list[Tensor | None]:
        comm, options = self.comm, call.options
        if call.kind == "barrier":
            comm.barrier()
            return [None] * len(waiting)
        if call.kind != "agree" and self.before_first is not None:
            self.before_first()
            self.before_first = None
        tensors = [place.request.tensor for place in waiting]
        everyone = len(waiting) == len(self.places)
        if self.rows is not None:
            x = torch.cat(tensors)
        elif everyone:
            x = torch.stack(tensors)
        else:  # rows of nodes that are away are not looked at
            x = tensors[0].new_zeros(len(self.places), *tensors[0].shape)
            x[[place.index for place in waiting]] = torch.stack(tensors)
        if call.kind == "agree":
            agreed = comm.wire.reduce(x.float(), comm.present, "max") > 0
            return [agreed] * len(waiting)
        result: Tensor = getattr(comm, call.kind)(x, **options)
        if call.kind == "gather":
            return [result if comm.ranks[place.index] == options["dst"] else None for place in waiting]
        if self.rows is None:
            return [result[place.index] for place in waiting]
        return [result[list(rows)] for rows in self.rows]

    def _name(self, place: _Place) -> str:
        if self.rows is None:
            return f"node {self.comm.ranks[place.index]}"
        return f"the block of nodes {[self.comm.ranks[row] for row in self.rows[place.index]]}"


class _Request:
    def __init__(self, kind: str, tensor: Tensor | None, options: dict[str, Any], has_rows: bool):
        self.kind, self.tensor, self.options = kind, tensor, options
        shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        alike = None if tensor is None else (tuple(tensor.shape[1:] if has_rows else tensor.shape), tensor.dtype)
        self.signature = (kind, alike, tuple(sorted(options.items())))
        given = [] if shape is None else [f"{shape[1]} {shape[0]}"]
        self.text = f"{kind}({', '.join(given + [f'{name}={value!r}' for name, value in options.items()])})"


class _Place:
    """One thread and the baton that lets it move."""

    def __init__(self, index: int, has_rows: bool):
        self.index, self.has_rows = index, has_rows
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.function: Callable[[], None] | None = None
        self.request: Any = None
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.done, self.abandoned = True, False
        self.thread = threading.Thread(target=self._live, name=f"exogym-node-{index}", daemon=True)
        self.thread.start()

    def begin(self, function: Callable[[], None]) -> None:
        self.function, self.done, self.error, self.request = function, False, None, None

    def move(self) -> None:
        """Let the thread run until it meets, ends or fails."""
        self.go.release()
        try:
            self.stopped.acquire()
        except BaseException:  # Ctrl-C: let the thread come to rest, so that it can be ended
            self.stopped.acquire()
            raise

    def abandon(self) -> None:
        """End a program that still waits at a collective."""
        if not self.done and self.request is not None:
            self.abandoned = True
            self.move()
        self.done, self.abandoned = True, False

    def close(self) -> None:
        self.function = None
        self.go.release()
        self.thread.join()

    def meet(self, kind: str, tensor: Tensor | None, **options: Any) -> Tensor | None:
        """Called in the thread: hand over `tensor` and wait for all others."""
        self.request = _Request(kind, tensor, options, self.has_rows)
        self.stopped.release()
        self.go.acquire()
        self.request = None
        if self.abandoned or self.function is None:
            raise _Abandoned
        return self.result

    def _live(self) -> None:
        set_place(self)
        while True:
            self.go.acquire()
            if self.function is None:
                return
            try:
                self.function()
            except _Abandoned:
                self.error = None
            except BaseException as error:
                self.error = error
            self.done = True
            self.stopped.release()
            if self.function is None:
                return
