"""The base class of strategies whose nodes train at their own pace, and the interface of their servers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.combinations import refuse
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, StrategyError, check_count
from exogym.strategy.strategy import Strategy
from exogym.strategy.traffic import Plan, Traffic


class ParameterServer:
    """A server that holds the outer parameters theta and updates them with the nodes' Deltas.

    A node's Delta is the parameters that it pulled minus its parameters after its round.

    Args:
        theta: the initial outer parameters, (P,) per block; the server copies them.

    Attributes:
        theta: the outer parameters, (P,) per block.
        version: number of updates of theta.
        kept, counted: names of the attributes that checkpoints save: tensors per block (`kept`) and numbers
            (`counted`).
    """

    kept: tuple[str, ...] = ("theta",)
    counted: tuple[str, ...] = ("version",)

    def __init__(self, theta: list[Tensor]):
        self.theta, self.version = [x.clone() for x in theta], 0

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        """Apply a node's Delta to theta, or keep it for a later update.

        Args:
            delta: the Delta, (P,) per block; this method may overwrite it.
            staleness: number of updates of theta since the node pulled theta.
            steps: local steps of the node's round.
            batch_size: examples per step.
        """
        raise NotImplementedError

    def given(self) -> list[Tensor]:
        """Return the parameters that nodes pull, (P,) per block: theta, or a look-ahead of theta."""
        return self.theta

    def release(self) -> None:
        """Update theta with all Deltas kept so far, before nodes pull theta."""

    def flush(self) -> None:
        """Update theta with all Deltas that remain at the end of training."""
        self.release()

    def state(self) -> dict[str, Tensor]:
        tensors = {f"{name}.{b}": x for name in self.kept for b, x in enumerate(getattr(self, name))}
        counts = [getattr(self, name) for name in self.counted]
        dtype = torch.float64 if any(isinstance(count, float) for count in counts) else torch.int64
        return tensors | {"counts": torch.tensor(counts, dtype=dtype)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, x in self.state().items():
            x.copy_(tensors[name])
        for name, count in zip(self.counted, tensors["counts"].tolist(), strict=True):
            setattr(self, name, type(getattr(self, name))(count))


class ClockedStrategy(Strategy):
    """Base class of strategies with a server whose nodes train at their own pace on a virtual clock.

    A node pulls parameters from the server, trains, and pushes Delta: the pulled parameters minus its own.

    Attributes:
        H: local steps of a node's round; with `dylu`, of the fastest node's round.
        grace_s: virtual seconds for which the server waits for more nodes once enough have arrived.
        max_staleness: the server drops a Delta if theta was updated more often than this between the node's pull and
            its push. None means that the server drops none.
        takes_parameters: whether the server receives theta minus the node's parameters instead of Delta.
        island_size: the number of consecutive nodes in an island (the last may be smaller). Each island has its own
            server below a global server (`relays`). None means one server for all nodes.
    """

    driven_by = "clock"
    H: int
    dylu = False
    grace_s: float
    max_staleness: int | None = None
    takes_parameters = False
    island_size: int | None = None

    def server(self, fleet: Fleet) -> ParameterServer:
        """Return a new server whose theta is the fleet's initial parameters; with islands, one island's server."""
        raise NotImplementedError

    def global_server(self, fleet: Fleet) -> ParameterServer:
        """Return a new server above the islands' servers, whose theta is the fleet's initial parameters."""
        raise NotImplementedError

    def relays(self, islands: list[list[int]], servers: list[Any], fleet: Fleet, order: Any) -> Any:
        """Return the object that carries messages between the islands' servers and the global server, its `top`.

        The object has the methods `begin`, `arrive`, `settle`, `finish`, `state` and `load_state` of
        `exogym.contrib.halos.Relays`.

        Args:
            islands: each island's nodes.
            servers: each island's server.
            order: the run's `exogym.core.training.order.Order`.
        """
        raise NotImplementedError

    def quorum_of(self, num_nodes: int) -> int:
        """Return how many of `num_nodes` nodes must have reached the server before any of them pulls theta."""
        return 1

    def local_steps(self, seconds: np.ndarray) -> np.ndarray:
        """Return the local steps H_w of each node's round, (N,), from the nodes' mean `seconds` per step, (N,).

        With `dylu`, H_w = max(1, floor(v_w / max v * H)) for v_w = 1 / `seconds[w]`; otherwise H_w = H.

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
            f"{type(self).__name__} cannot run one node at a time, because nodes do not synchronize step by step: "
            "give the strategy to LocalTrainer.fit"
        )


def check_numbers(*given: tuple[str, Any, float]) -> None:
    """Raise ArgumentError unless the value in each (name, value, most) is a number from 0 to `most`."""
    for name, value, most in given:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            limit = "" if math.isinf(most) else f" to {most:g}"
            raise ArgumentError(f"{name}={value!r} must be a number from 0{limit}")


def check_rounds(H: Any, name: str) -> None:
    """Raise ArgumentError unless the H of the strategy `name` is a whole number of at least 1.

    H cannot be a function because each node has its own rounds.
    """
    if callable(H):
        refuse({"its own clock": name, "H as a function": f"H={H!r}"})
    check_count("H", H)
