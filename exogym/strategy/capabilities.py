"""Rarer abilities of communication modules: small protocols, which a module declares by inheriting them.

    class Proximal(PeriodicModule, Corrects):
        def correct(self, row, parameters, grads): ...

A module that defines a protocol's method without inheriting it gets the protocol, too (`adopt`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError
from exogym.strategy.traffic import AskedRounds


class Corrects(ABC):
    """Rewrites each node's own gradients at every local step. Cannot be combined with gradient modules."""

    @abstractmethod
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Rewrite in place the gradients of the node in `row`, at every local step, before they are clipped.

        It is for methods that change local steps themselves (a proximal term, a control variate). It may read the
        module's state of that row, but nothing of other nodes. `parameters` are the row's, in fleet order. A
        parameter without a gradient has None.
        """


class HasOuterModel(ABC):
    """Keeps a model that all nodes share and that is not the mean of the rows."""

    @abstractmethod
    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None if the mean of the rows is the model."""

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        """Return the outer parameters' buffers by name, or None if the mean of the rows' buffers serves."""
        return None


class Tunable(ABC):
    """Lets a tuner change an argument. H and the outer rate need no such module."""

    @abstractmethod
    def tune(self, name: str, value: float) -> bool:
        """Use `value` for the strategy's argument `name` from now on. Return whether this module has the argument."""


class ChoosesClients(ABC):  # noqa: B024 (a module overrides what it needs)
    """Lets some nodes rest during a round, or take fewer steps.

    Attributes:
        asks_clients: whether a server asks some nodes to take part in a round, and they may be unavailable.
        asks_all_lengths: whether it must know each node's number of examples before any node acts.
    """

    asks_clients = asks_all_lengths = False

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) inner steps each node takes while the fleet goes from step `first` to `last`; None: all."""
        return None

    def joining(self, nodes: list[int], step: int) -> list[int]:
        """Return which of `nodes`, which return for step `step`, take parameters then; all by default."""
        return nodes

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return whose reports count in the server's round that ends with `step`, and how many seconds it waits longer.

        It waits after their computing. None: no such server exists, or none of its rounds ends with `step`. The server
        ends the round for all nodes: on the virtual clock no node begins the next round earlier.
        """
        return None

    def rounds_among(self, N: int) -> AskedRounds | None:
        """Return the clients asked in each round, for `Plan.rounds`; None: all N nodes take part."""
        return None

    def seats(self, num_nodes: int) -> int | None:
        """Return the largest number of nodes that act in a round. None, the default: each node always needs a row.

        It is for a module that gives a round's nodes their parameters at its begin, and reads no other nodes. Then only
        these nodes have rows, and at the round's end the next round's nodes.
        """
        return None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        """Return the nodes of the round after `step`, and of the current round; only with `seats`."""
        raise NotImplementedError


CAPABILITIES = (Corrects, HasOuterModel, Tunable, ChoosesClients)


def adopt(module: type) -> None:
    """Declare the capabilities of a class of modules.

    A class that defines one method of a capability gets the capability, and the defaults of its other methods.

    >>> class Proximal:
    ...     def correct(self, row, parameters, grads): ...
    >>> adopt(Proximal)
    >>> isinstance(Proximal(), Corrects), isinstance(Proximal(), HasOuterModel)
    (True, False)
    """
    for capability in CAPABILITIES:
        names = [name for name in vars(capability) if not name.startswith("_")]
        if not issubclass(module, capability) and any(name in vars(module) for name in names):
            for name in names:
                if not hasattr(module, name):
                    setattr(module, name, vars(capability)[name])
            capability.register(module)


class Clients(ChoosesClients):
    """All modules of a strategy that choose clients, as one."""

    def __init__(self, modules: Sequence[object]):
        self.modules = [module for module in modules if isinstance(module, ChoosesClients)]
        self.are_all = len(self.modules) == len(modules)
        self.asks_clients = any(module.asks_clients for module in self.modules)
        self.asks_all_lengths = any(module.asks_all_lengths for module in self.modules)

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        plans = [p for module in self.modules if (p := module.local_steps(first, last)) is not None]
        return np.minimum.reduce(plans) if plans else None

    def joining(self, nodes: list[int], step: int) -> list[int]:
        for module in self.modules:
            nodes = module.joining(nodes, step)
        return nodes

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        found = [one for module in self.modules if (one := module.server_round(step)) is not None]
        return (sorted({i for ids, _ in found for i in ids}), max(wait_s for _, wait_s in found)) if found else None

    def rounds_among(self, N: int) -> AskedRounds | None:
        found = [one for module in self.modules if (one := module.rounds_among(N)) is not None]
        if len(found) > 1:
            raise ArgumentError(
                "two modules ask their own nodes, and no formula is known for both together: give a Plan"
            )
        return found[0] if found else None

    def seats(self, num_nodes: int) -> int | None:
        most = [module.seats(num_nodes) for module in self.modules]
        known = [count for count in most if count is not None]
        return max(known) if known and self.are_all and len(known) == len(most) else None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        found = [module.seated(step) for module in self.modules]
        return sorted({i for after, _ in found for i in after}), sorted({i for _, now in found for i in now})
