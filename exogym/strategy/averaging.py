"""How strategies average: options that every strategy of means takes, and none of them has to know.

`transport` says how all-reduces travel, S being the payload of each of n members; results are the same, bit for bit:

    ring      2(n-1)/n S each way for everyone
    tree      up a binomial tree to the lowest id and down again: 2(n-1)/n S each way in the mean, ceil(log2 n) S at
              the root, S at a leaf
    server    S each way for everyone, n S for a server that is none of them

What each takes on a network is in `exogym.network.costs`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from exogym.communicator import TRANSPORTS, Communicator
from exogym.errors import ArgumentError, check_choice, checked
from exogym.strategy.traffic import Traffic


@dataclass(frozen=True)
class Averaging:
    """How the means of a strategy are taken.

    Args:
        transport: "ring", "tree" or "server"; None: what the strategy itself would take.

    Raises:
        ArgumentError: an unknown transport.
    """

    transport: str | None = None

    def __post_init__(self) -> None:
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)

    def check(self, name: str, traffic: Iterable[Traffic], is_known: bool) -> None:
        """Raise ArgumentError where strategy `name`, whose `traffic` is known or not, cannot average so."""
        kinds = {t.kind for t in traffic}
        if self.transport is not None and is_known and "all_reduce" not in kinds:
            raise ArgumentError(
                f"transport={self.transport!r}: {name} has no all-reduce, which may go in several ways; it sends "
                f"{', '.join(sorted(kinds)) or 'nothing'}: leave transport out"
            )
        if self.transport in ("ring", "tree") and any(t.algorithm == "server" for t in traffic):
            raise ArgumentError(
                f"transport={self.transport!r}: the clients of the next round get the parameters from a server, since "
                "they may not have been among those who averaged: leave transport out, or client_fraction"
            )

    def traffic(self, given: Traffic) -> list[Traffic]:
        """Return what a collective of the strategy becomes."""
        if self.transport is None or given.kind != "all_reduce":
            return [given]
        return [replace(given, algorithm=self.transport)]

    def bind(self, comm: Communicator) -> None:
        """Let `comm` average so."""
        comm.transport = self.transport


OPTIONS = {name: p for name, p in inspect.signature(Averaging).parameters.items()}


def with_options(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a strategy with the arguments of `Averaging` beside its own."""
    own = inspect.signature(init)
    further = [p.replace(kind=p.KEYWORD_ONLY) for name, p in OPTIONS.items() if name not in own.parameters]

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {p.name: kwargs.pop(p.name) for p in further if p.name in kwargs}
        init(self, *args, **kwargs)
        if given:
            self.average_by(**given)

    call.__signature__ = own.replace(parameters=[*own.parameters.values(), *further])  # type: ignore[attr-defined]
    return checked(call)
