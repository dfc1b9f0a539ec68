"""Sampling of data shards: draw the shard (share of the data) for a node's next round (arXiv:2401.09135, 4.2).

Fast nodes train on more examples. If each node kept one shard, slow nodes' data would count less. So a node draws a
shard when it begins a round. |D_i| is the number of examples in shard i, and n_i the number of examples drawn from
shard i so far. The probability p_i of shard i is proportional (~) to this:

    p_i ~ max(|D_i| / sum_j |D_j| - n_i / sum_j n_j, 0)                       p_i ~ |D_i| if all these values are 0

Drawn examples count in n_i at once, so nodes that draw the same shard at the same time train on different examples. A
step's learning rate follows its shard's schedule. E_i is the number of steps in an epoch of shard i, and N the number
of nodes. The k-th step of shard i has the learning rate of the schedule's step k sum_j E_j / (N E_i). So all shards end
when the schedule ends.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.rng import numpy_generator
from exogym.data.stream import Stream
from exogym.strategy.strategy import Run


class Shards:
    """The shards that nodes draw. Every process draws the same shards.

    Attributes:
        handed: (N,) steps drawn from each shard so far.
        drawn: (N,) the shard of each node's current round.
        first: (N,) the step of that shard at which the node's round begins.

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
        if stream.drops_last:
            epochs = [Fraction(stream.own_steps(node)) for node in range(len(self.sizes))]
        self.pace = [sum(epochs) / (len(epochs) * epoch) for epoch in epochs]
        self.handed, self.drawn, self.first = (np.zeros(len(self.sizes), dtype=np.int64) for _ in range(3))

    def chances(self) -> np.ndarray:
        """Return (N,) the probability p_i of each shard. Only the final division rounds."""
        seen = [int(steps) * b for steps, b in zip(self.handed, self.batch, strict=True)]
        lacking = [max(size * sum(seen) - n * sum(self.sizes), 0) for size, n in zip(self.sizes, seen, strict=True)]
        weights = lacking if any(lacking) else self.sizes
        return np.array([weight / sum(weights) for weight in weights])

    def draw(self, node: int, steps: int) -> None:
        """Draw the shard for the next round of `node`, which takes `steps` steps."""
        draws = numpy_generator(self.seed, "data shards", node, int(self.handed.sum()))
        shard = int(draws.choice(len(self.sizes), p=self.chances()))
        self.drawn[node], self.first[node] = shard, self.handed[shard]
        self.handed[shard] += steps

    def source(self, node: int, done: int) -> tuple[int, int]:
        """Return the shard of the node's current round, and the shard's step after `done` steps of this round."""
        return int(self.drawn[node]), int(self.first[node]) + done

    def rates_at(self, shard: int, first: int, count: int) -> np.ndarray:
        """Return (count,) the schedule's steps for `count` steps of a shard, from the shard's step `first` on."""
        at = [int(k * self.pace[shard]) for k in range(first, first + count)]
        return np.minimum(at, self.total_steps - 1)

    def state(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in ("handed", "drawn", "first")}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.numpy().copy())
