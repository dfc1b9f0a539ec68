"""The random draws of federated rounds: the clients that take part, and their islands.

All draws depend only on (seed, round). So every process computes the draws itself, and no node sends them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from exogym.core.base.draws import numpy_generator
from exogym.core.combinations import features_of
from exogym.errors import check_count, check_number
from exogym.strategy.traffic import AskedRounds


class ClientDraws:
    """Draws a round's clients and islands. `AveragingCommunicator` describes the other arguments.

    Args:
        by_chance: whether each node is a client with probability `client_fraction`, independently. `privacy` needs
            True.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(
        self,
        client_fraction: float = 1.0,
        island_size: int | None = None,
        by_chance: bool = False,
    ):
        if island_size is not None:
            check_count("island_size", island_size)
        check_number("client_fraction", client_fraction, over=0, most=1)
        self.client_fraction, self.island_size, self.by_chance = client_fraction, island_size, by_chance
        self.samples = client_fraction < 1 or by_chance

    def features(self) -> dict[str, str]:
        """Return the options that are set: a dict from names in `exogym.core.combinations.FEATURES` to texts."""
        return features_of(island_size=self.island_size)

    def sizes(self, N: int) -> tuple[int, int]:
        """Return the number of clients in a round among N nodes, and the number of nodes in an island."""
        clients = max(math.ceil(self.client_fraction * N - 1e-9), 1)
        return clients, min(self.island_size or clients, clients)

    def couples_every(self, H: float, N: int) -> float:
        """Return the number of steps until N nodes have exchanged the whole model once, if a round has H steps."""
        clients, island = self.sizes(N)
        rounds = 1 if island == clients else math.ceil(math.log(clients, max(island, 2)))
        return H * rounds * N / clients

    def seats(self, N: int) -> int | None:
        """Return the largest number of nodes that act in a round; None if all N nodes act or islands have no server."""
        clients, island = self.sizes(N)
        if island < clients:
            return None
        if self.by_chance:  # practically never exceeded
            mean = self.client_fraction * N
            return min(N, math.ceil(mean + 8 * math.sqrt(mean) + 8))
        return clients if clients < N else None

    def clients(self, N: int, seed: int, round_: int) -> list[int]:
        """Return the sorted ids of the clients that are drawn for a round."""
        if self.by_chance:
            chance = numpy_generator(seed, "private clients", round_).random(N)
            return np.flatnonzero(chance < self.client_fraction).tolist()
        drawn = numpy_generator(seed, "clients", round_).choice(N, self.sizes(N)[0], replace=False)
        return sorted(drawn.tolist())

    def islands(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """Divide a round's `clients` into islands: disjoint groups that average separately."""
        if self.island_size is None or self.island_size >= len(clients):
            return [clients]
        order = numpy_generator(seed, "islands", round_).permutation(clients).tolist()
        return [sorted(order[i : i + self.island_size]) for i in range(0, len(order), self.island_size)]

    def rounds_among(self, N: int, H: int) -> AskedRounds | None:
        """Return a function that yields each round's clients, for `Plan.rounds`, or None if all N nodes are clients."""
        if self.client_fraction == 1 or N == 1:
            return None

        def rounds(step_s: np.ndarray) -> Iterator[tuple[list[list[int]], float | None]]:
            for round_ in itertools.count():
                groups = self.islands(self.clients(N, 0, round_), 0, round_)
                yield groups, None if len(groups) > 1 else 0.0

        return rounds
