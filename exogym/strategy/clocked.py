"""The common base of strategies whose nodes go at their own pace, and the methods that the driver calls on a server."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy.options import taking
from exogym.strategy.strategy import Strategy
from exogym.strategy.traffic import Plan, Traffic


class ParameterServer(Protocol):
    """Keeps theta, and turns the nodes' Delta into the next theta.

    Attributes:
        theta: (P,) per block.
        version: number of updates of theta.
    """

    theta: list[Tensor]
    version: int

    def apply(self, delta: list[Tensor], staleness: int, steps: int, batch_size: int) -> None:
        """Take in a node's Delta, (P,) per block. May overwrite it.

        Args:
            staleness: updates of theta since the node pulled it.
            steps: local steps in the Delta.
            batch_size: examples per step.
        """

    def release(self) -> None:
        """Update theta with the waiting Delta, because nodes are about to pull."""

    def flush(self) -> None:
        """Take in all waiting Delta, because training ends."""

    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, tensors: dict[str, Tensor]) -> None: ...


class ClockedStrategy(Strategy):
    """A strategy with a server, whose nodes have their own rounds, in the order of virtual clocks.

    Attributes:
        H: local steps of a round; with `dylu` the fastest node's.
        grace_s: virtual seconds that the server waits for others once enough nodes have arrived.
        max_staleness: drop a Delta if theta was updated more often since its node pulled. None: drop nothing.
        shard_sampling: nodes draw a shard of the data for each round (`exogym.core.training.shards`).
        delay_compensation: lambda of Delta + lambda Delta * Delta * (theta - theta_pulled), elementwise.
    """

    driven_by = "clock"
    H: int
    dylu = False
    grace_s: float
    max_staleness: int | None = None
    delay_compensation = 0.0
    shard_sampling = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = taking(cls.__init__)  # type: ignore[method-assign]

    def server(self, fleet: Fleet) -> ParameterServer:
        """Return the server at the start of training."""
        raise NotImplementedError

    def quorum_of(self, num_nodes: int) -> int:
        """Return how many nodes must have arrived before any of them pulls."""
        return 1

    def local_steps(self, seconds: np.ndarray) -> np.ndarray:
        """Return (N,) H_w for (N,) mean `seconds` of a node's step: max(1, floor(v_w / max v * H)) with `dylu`.

        >>> from exogym.strategy import AsyncDiLoCoStrategy
        >>> AsyncDiLoCoStrategy(H=40, dylu=True).local_steps(np.array([4.0, 2.0, 1.0])).tolist()
        [10, 20, 40]
        """
        if not self.dylu:
            return np.full(len(seconds), self.H)
        share = seconds.min() / seconds
        return np.maximum(1, np.floor(share * self.H + 1e-9).astype(np.int64))

    def plan(self, P: float, N: int, b: float) -> Plan:
        if self.grace_s:
            raise ArgumentError(
                f"grace_s={self.grace_s}: no formula is known for a server that waits: leave grace_s out"
            )
        both = tuple(Traffic(way, P * b, self.H, 1, "server") for way in ("push", "pull"))
        return Plan(type(self).__name__, both, self.H, local_steps=self.local_steps, quorum=self.quorum_of(N))

    def _init_node(self, model: Any, rank: Any, num_nodes: int) -> None:
        raise StrategyError(
            f"{type(self).__name__}: its nodes do not meet step by step, so it cannot run one node at a time: "
            "give it to LocalTrainer.fit"
        )


def check_numbers(*given: tuple[str, Any, float]) -> None:
    """Raise ArgumentError for a (name, value, most) whose value is not a number from 0 to `most`."""
    for name, value, most in given:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            limit = "" if math.isinf(most) else f" to {most:g}"
            raise ArgumentError(f"{name}={value!r} must be a number from 0{limit}")
