"""What a strategy sends, as a formula: the collectives it repeats, for a model and a fleet of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from exogym.core.communicator.ledger import FACTORS


@dataclass(frozen=True)
class Traffic:
    """A collective that a strategy repeats.

    Attributes:
        kind: as the communicator names it.
        payload_bytes: what each giver hands over.
        every_steps: steps from one to the next; may be a mean, and so a fraction.
        members: nodes that take part; None: all.
        algorithm: how; None: left to `advise`.
        overlap_steps: steps from sending to arrival, for averages that arrive late. In a simulation's clock, averages
            that arrive late overlap with computing. On hosts, a run waits for them where it sends them.
        fan: of a mix, to how many neighbours a giver hands the payload's parts.
    """

    kind: str
    payload_bytes: float
    every_steps: float = 1.0
    members: int | None = None
    algorithm: str | None = None
    overlap_steps: float = 0.0
    fan: float = 1.0

    def sent_bytes(self, N: int) -> float:
        """Return what a node sends in one of them, in the mean over N nodes.

        >>> Traffic("all_reduce", 100.0).sent_bytes(4), Traffic("all_reduce", 100.0, 1, 1, "server").sent_bytes(4)
        (150.0, 25.0)
        """
        n = N if self.members is None else self.members
        if self.kind in ("broadcast", "reduce"):
            return self.payload_bytes * (n - 1) / n
        way = self.algorithm or next((way for kind, way in FACTORS if kind == self.kind), "")
        factor = FACTORS.get((self.kind, way), lambda n: 1.0)(n)  # what goes to one other, or several, is told as it is
        among = n / N if way == "server" else 1.0  # islands cover all nodes, the clients of a server do not
        return self.payload_bytes * factor * among


# (N,) seconds of a step to, round by round, the groups that average and the least seconds that a server gives them for
# computing; None in their place: the groups have no server in common, and wait for nobody else
AskedRounds = Callable[[np.ndarray], Iterator[tuple[list[list[int]], float | None]]]


@dataclass(frozen=True)
class Plan:
    """What a strategy sends.

    Attributes:
        couples_every: the steps after which all of the model has been exchanged once, and has arrived.
        can_train: False where there is only the formula, so that `advise` shows it and never recommends it.
        local_steps: of a strategy whose nodes do not wait for each other, (N,) seconds of a step to (N,) steps of a
            round; `traffic` is then of one node and one round.
        quorum: of such a strategy, nodes that must have come to the server before any of them goes on.
        rounds: of a strategy in which some of the nodes take part in each round and the others sit it out: who does.
            It is for the traffic that says how many `members` it has.
    """

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float
    can_train: bool = True
    local_steps: Callable[[np.ndarray], np.ndarray] | None = None
    quorum: int = 1
    rounds: AskedRounds | None = None
