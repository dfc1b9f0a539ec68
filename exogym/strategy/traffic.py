"""A strategy's traffic as a formula: the collectives it repeats, for a model and a fleet of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from exogym.core.communicator.ledger import FACTORS


@dataclass(frozen=True)
class Traffic:
    """A collective that a strategy repeats.

    Attributes:
        kind: the communicator's name for it.
        payload_bytes: bytes that each giver hands over.
        every_steps: steps from one to the next; may be a mean, and so a fraction.
        members: nodes that take part; None: all.
        algorithm: its collective algorithm; None: `advise` chooses.
        overlap_steps: steps from sending to arrival, for averages that arrive late. In a simulation's clock, averages
            that arrive late overlap with computing. On hosts, a run waits for them where it sends them.
        fan: of a mix: the number of neighbors to which a giver hands the payload's parts.
    """

    kind: str
    payload_bytes: float
    every_steps: float = 1.0
    members: int | None = None
    algorithm: str | None = None
    overlap_steps: float = 0.0
    fan: float = 1.0

    def sent_bytes(self, N: int) -> float:
        """Return the bytes that a node sends in one such collective, in the mean over N nodes.

        >>> Traffic("all_reduce", 100.0).sent_bytes(4), Traffic("all_reduce", 100.0, 1, 1, "server").sent_bytes(4)
        (150.0, 25.0)
        """
        n = N if self.members is None else self.members
        if self.kind in ("broadcast", "reduce"):
            return self.payload_bytes * (n - 1) / n
        way = self.algorithm or next((way for kind, way in FACTORS if kind == self.kind), "")
        factor = FACTORS.get((self.kind, way), lambda n: 1.0)(n)  # point-to-point collectives send the payload itself
        among = n / N if way == "server" else 1.0  # islands cover all nodes, a server's clients do not
        return self.payload_bytes * factor * among


# (N,) seconds of a step -> round by round, the groups that average, and the least seconds that a server gives them for
# computing. None instead of the seconds: the groups share no server, and wait only for their own members
AskedRounds = Callable[[np.ndarray], Iterator[tuple[list[list[int]], float | None]]]


@dataclass(frozen=True)
class Plan:
    """A strategy's whole communication.

    Attributes:
        couples_every: steps in which the whole model is exchanged once and has arrived.
        can_train: False if only the formula exists, so that `advise` shows the plan and never recommends it.
        local_steps: for strategies whose nodes do not wait for each other: (N,) seconds of a step -> (N,) steps of a
            round. `traffic` then counts one node and one round.
        quorum: for such a strategy: nodes that must have come to the server before any of them continues.
        rounds: for strategies in which only some nodes take part in each round: which nodes. It applies to traffic that
            sets `members`.
    """

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float
    can_train: bool = True
    local_steps: Callable[[np.ndarray], np.ndarray] | None = None
    quorum: int = 1
    rounds: AskedRounds | None = None
