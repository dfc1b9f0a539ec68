"""A strategy's traffic as a formula: the collectives that nodes repeat, for any model and number of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from exogym.core.communicator.ledger import sent_factor


class ModelSize(float):
    """A model's number of parameters P, together with their shapes.

    Use it as a number; formulas whose bytes depend on shapes read them by `shapes_of`.

    >>> size = ModelSize.of([(64, 32), (32,)])
    >>> size, shapes_of(size), shapes_of(2080)
    (2080.0, ((64, 32), (32,)), None)
    """

    shapes: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Self:
        """Return the size of a model with these shapes. Parameters without elements do not count."""
        kept = tuple(tuple(shape) for shape in shapes if math.prod(shape))
        size = cls(sum(map(math.prod, kept)))
        size.shapes = kept
        return size


def shapes_of(P: float) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of a model's parameters, or None if only their number is known."""
    return P.shapes if isinstance(P, ModelSize) else None


@dataclass(frozen=True)
class Traffic:
    """A collective that a strategy repeats.

    Attributes:
        kind: the collective's name, such as "all_reduce".
        payload_bytes: bytes that each sending node hands over.
        every_steps: steps from one such collective to the next; if the intervals differ, their mean, possibly a
            fraction.
        members: the number of nodes that take part. None means all nodes.
        algorithm: the collective's algorithm. None means that `advise` chooses it.
        overlap_steps: for late averages, the steps from sending to arrival, in which they overlap with computing (see
            `DiLoCoStrategy`).
        fan: if neighbors mix, the number of neighbors to which a node sends pieces of its payload.
    """

    kind: str
    payload_bytes: float
    every_steps: float = 1.0
    members: int | None = None
    algorithm: str | None = None
    overlap_steps: float = 0.0
    fan: float = 1.0

    def sent_bytes(self, N: int) -> float:
        """Return the bytes that a node sends in one such collective, as a mean over N nodes.

        >>> Traffic("all_reduce", 100.0).sent_bytes(4), Traffic("all_reduce", 100.0, 1, 1, "server").sent_bytes(4)
        (150.0, 25.0)
        """
        n = N if self.members is None else self.members
        served = self.algorithm in ("server", "island", "relay") or self.kind in ("push", "pull")
        among = n / N if served else 1.0  # a server's clients are not all nodes
        return self.payload_bytes * sent_factor(self.kind, self.algorithm, n) * among


# (N,) seconds of a step -> round by round, the groups that average, and the least seconds that a server gives them for
# computing. None instead of the seconds: the groups share no server, and wait only for their own members
AskedRounds = Callable[[np.ndarray], Iterator[tuple[list[list[int]], float | None]]]


@dataclass(frozen=True)
class Plan:
    """The whole communication of a strategy.

    Attributes:
        name: the strategy's name.
        traffic: the collectives that the strategy repeats.
        couples_every: steps until nodes have exchanged the whole model once.
        can_train: whether ExoGym can train the strategy. If False, `advise` shows the plan but never recommends it.
        local_steps: for strategies whose nodes do not wait for each other, a function that maps (N,) seconds of a step
            to (N,) steps of a round. `traffic` then counts one node and one round.
        quorum: for such strategies, the number of nodes that must have reached the server before any of them continues.
        needs_gradients: whether nodes average gradients, and so agree at every step on which gradients exist.
        rounds: for strategies in which only some nodes take part in each round, a function that yields these nodes
            round by round. It applies to the collectives in `traffic` that set `members`.
        method: the text under which `advise` looks for earlier runs, such as "diloco:H=50"; by default `name`.
    """

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float
    can_train: bool = True
    local_steps: Callable[[np.ndarray], np.ndarray] | None = None
    quorum: int = 1
    rounds: AskedRounds | None = None
    needs_gradients: bool = False
    method: str = ""
