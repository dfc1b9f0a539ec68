"""Client sampling with seats: only the clients that train now have rows. After a round, other clients use the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from exogym.core.communicator import gather
from exogym.core.compute.spans import Losses
from exogym.core.compute.worker import Worker
from exogym.core.fleet.seats import Seats, Store
from exogym.core.training.around import Around
from exogym.core.training.driver import Algorithm, meet
from exogym.core.training.options import FitOptions
from exogym.data.single import check_single
from exogym.data.stream import Stream


class Seating(Around):
    """Wrap an algorithm with fewer rows than nodes. `seats` assigns the rows to clients."""

    def __init__(self, within: Algorithm, seats: Seats):
        super().__init__(within)
        self.seats = seats
        self._ended: tuple[Sequence[int], Tensor] | None = None
        self._seat(0)

    @property
    def nodes(self) -> Sequence[int]:
        return self.seats.working

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        def seated() -> None:
            before_mixing()
            self._ended = self._end(losses)  # before their nodes give up the rows
            self._seat(step)

        meet(self.fleet, self.nodes)
        met = self.within.act(step, losses, seated)
        meet(self.fleet, self.nodes)
        return met

    def end_stretch(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        ended, self._ended = self._ended or self._end(losses), None
        return ended

    def finish(self, step: int) -> None:
        meet(self.fleet, self.nodes)
        self._seat(step)
        self.within.finish(step)
        meet(self.fleet, self.nodes)

    def close(self) -> None:
        self.within.close()
        self.seats.store.close()

    def _end(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        return self.nodes, self.fleet.comm.wire.rows(losses.end(), self.nodes)

    def _seat(self, step: int) -> None:
        """Give rows to the clients that train next. The clients that trained until `step` still have theirs."""
        self.seats.take(*self.within.seated(step))
        meet(self.fleet, self.seats.nodes)


def seats_of(options: FitOptions, worker: Worker, stream: Stream, steps: int) -> Seats:
    """Return the assignment of rows to nodes, if rows are fewer. Saved state must be registered before."""
    fleet, wire = worker.fleet, worker.fleet.comm.wire
    folder = None if options.save_dir is None else Path(options.save_dir) / f".clients-{wire.process}"

    def arrived(nodes: Sequence[int]) -> None:
        found = gather(wire, [[node, stream.length(node)] for node in nodes])
        stream.learn((node, examples) for told in found for node, examples in told)
        if worker.fails_alone:
            check_single(stream, [node for told in found for node, _ in told], steps, worker.micro_batch_size)

    return Seats(fleet, Store(options.placement.client_state_memory, folder), arrived)
