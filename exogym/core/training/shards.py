"""Sampling of data shards: the shard on which a node trains in its next round (arXiv:2401.09135, 4.2).

Fast nodes train on more examples. If each node kept one shard, slow nodes' data would count less. So a node draws a
shard when it begins a round. With |D_i| the examples of shard i, and n_i the examples drawn from it so far,

    p_i ~ max(|D_i| / sum_j |D_j| - n_i / sum_j n_j, 0)                       p_i ~ |D_i| if all are even

Drawn examples count at once, so nodes that draw the same shard at the same time train on different examples of it. A
step's learning rate follows its shard's schedule: the k-th step of shard i is at step k sum_j E_j / (N E_i) of T, with
E_i the steps of an epoch of shard i. So all shards end when the schedule ends.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.draws import numpy_generator
from exogym.data.stream import Stream
from exogym.strategy.strategy import Run


class Shards:
    """The shards that nodes draw, the same in every process.

    Attributes:
        handed: (N,) steps drawn from each shard so far.
        drawn: (N,) the shard of each node's round.
        first: (N,) the shard's step with which each node's round begins.

    >>> stream = Stream(list(range(8)), num_nodes=2, batch_size=2)
    >>> shards = Shards(stream, Run(2, 0, 100, stream.examples, 2))
    >>> shards.draw(0, 3)
    >>> shards.draw(1, 5)
    >>> sorted(shards.drawn.tolist()), shards.first.tolist(), sorted(shards.handed.tolist())
    ([0, 1], [0, 0], [3, 5])
    """

    def __init__(self, stream: Stream, run: Run):
        self.seed, self.total_steps = run.seed, run.total_steps
        self.sizes = [int(size) for size in stream.examples]
        self.batch = [min(int(b), size) for b, size in zip(stream.batch_sizes, self.sizes, strict=True)]
        epochs = [Fraction(size, b) for size, b in zip(self.sizes, self.batch, strict=True)]
        self.pace = [sum(epochs) / (len(epochs) * epoch) for epoch in epochs]
        self.handed, self.drawn, self.first = (np.zeros(len(self.sizes), dtype=np.int64) for _ in range(3))

    def chances(self) -> np.ndarray:
        """Return (N,) p, in exact numbers until the division."""
        seen = [int(steps) * b for steps, b in zip(self.handed, self.batch, strict=True)]
        lacking = [max(size * sum(seen) - n * sum(self.sizes), 0) for size, n in zip(self.sizes, seen, strict=True)]
        weights = lacking if any(lacking) else self.sizes
        return np.array([weight / sum(weights) for weight in weights])

    def draw(self, node: int, steps: int) -> None:
        """Draw a shard for a round of `steps` steps of `node`."""
        draws = numpy_generator(self.seed, "data shards", node, int(self.handed.sum()))
        shard = int(draws.choice(len(self.sizes), p=self.chances()))
        self.drawn[node], self.first[node] = shard, self.handed[shard]
        self.handed[shard] += steps

    def source(self, node: int, done: int) -> tuple[int, int]:
        """Return the shard of the node's round, and the shard's step after `done` steps of the round."""
        return int(self.drawn[node]), int(self.first[node]) + done

    def rates_at(self, shard: int, first: int, count: int) -> np.ndarray:
        """Return (count,) the schedule steps for `count` steps of a shard, from its step `first` on."""
        at = [int(k * self.pace[shard]) for k in range(first, first + count)]
        return np.minimum(at, self.total_steps - 1)

    def state(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in ("handed", "drawn", "first")}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.numpy().copy())
