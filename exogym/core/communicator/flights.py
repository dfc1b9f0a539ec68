"""Flights: collectives during which their members continue computing, until they need the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from exogym.core.communicator.ledger import Event, Recorder
from exogym.core.communicator.wire import Wire


class Flights(Recorder):
    """The methods of a `Communicator` for collectives that overlap with computing."""

    def new_flight(self) -> int:
        """Return a new flight for `on_its_way`: a number for collectives that overlap with computing.

        The number is the same in every process, and in a resumed run.
        """
        self._numbers += 1
        return self._numbers

    @contextlib.contextmanager
    def on_its_way(self, flight: int | None) -> Iterator[None]:
        """A context whose collectives overlap with computing, in virtual time, until `arrive(flight)`.

        If `flight` is None, members wait for each collective.
        """
        before, self._flight = self._flight, flight
        try:
            yield
        finally:
            self._flight = before

    def arrive(self, flight: int) -> None:
        """Make the members of the collectives with the number `flight` wait for them."""
        self.settle(flight)
        nothing = np.zeros(0)
        event = Event("arrive", "", (), 0.0, nothing, nothing, self._tag, (), flight=flight)
        self.ledger.tell(event) if self.held is None else self.held.append(event)

    def result_of(self, call: Callable[[Wire], Tensor], like: Tensor, flight: int | None) -> Tensor:
        """Return the result of `call(wire)`, a tensor like `like`.

        In a flight, the call may be pending when this method returns, and the result is undefined until `settle`.
        """
        if flight is None or not (self.overlap and self.wire.carries_behind):
            return call(self.wire)
        transfer = self.wire.start(call, like)
        self._begun.setdefault(flight, []).append(transfer)
        return transfer.result

    def are_under_way(self, flight: int) -> bool:
        """Return whether `flight` has pending transfers, so that its results are undefined."""
        return flight in self._begun

    def settle(self, flight: int | None = None) -> None:
        """Wait until the results of `flight`, or of all flights, are complete.

        No virtual time passes.
        """
        self.wire.launch()
        for number in list(self._begun) if flight is None else [flight]:
            for transfer in self._begun.pop(number, []):
                transfer.wait()
