"""What a strategy sends, as a formula: the collectives it repeats, for a model and a fleet of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


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


@dataclass(frozen=True)
class Plan:
    """What a strategy sends.

    Attributes:
        couples_every: the steps after which all of the model has been exchanged once, and has arrived.
        can_train: False where there is only the formula, so that `advise` shows it and never recommends it.
        local_steps: of a strategy whose nodes do not wait for each other, (N,) seconds of a step to (N,) steps of a
            round; `traffic` is then of one node and one round.
        quorum: of such a strategy, nodes that must have come to the server before any of them goes on.
    """

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float
    can_train: bool = True
    local_steps: Callable[[np.ndarray], np.ndarray] | None = None
    quorum: int = 1
