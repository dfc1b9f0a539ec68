"""What nodes send while they compute: transfers that have begun, by flight."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from exogym.core.communicator.wire import Transfer, Wire


class Transfers:
    """The transfers of a communicator that nobody has waited for.

    Args:
        wire: carries the rows.

    Attributes:
        overlap: carry the results of flights while nodes compute, if the wire can. Only for runs without absent nodes.
    """

    def __init__(self, wire: Wire):
        self.wire, self.overlap = wire, False
        self._begun: dict[int, list[Transfer]] = {}

    def result_of(self, call: Callable[[Wire], Tensor], like: Tensor, flight: int | None) -> Tensor:
        """Return the result of `call(wire)`, a tensor like `like`.

        In a flight, the call may be under way when this method returns. Then the result's values are undefined until
        `settle`.
        """
        if flight is None or not (self.overlap and self.wire.carries_behind):
            return call(self.wire)
        transfer = self.wire.start(call, like)
        self._begun.setdefault(flight, []).append(transfer)
        return transfer.result

    def are_under_way(self, flight: int) -> bool:
        """Return whether results of `flight` are undefined, because nobody has waited for them."""
        return flight in self._begun

    def settle(self, flight: int | None = None) -> None:
        """Wait until the results of `flight` are complete. Without `flight`, wait for all flights.

        No virtual time passes.
        """
        for number in list(self._begun) if flight is None else [flight]:
            for transfer in self._begun.pop(number, []):
                transfer.wait()
