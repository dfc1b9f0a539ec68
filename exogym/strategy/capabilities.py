"""What only some communication modules do: small protocols, which a module declares by inheriting them.

    class Proximal(PeriodicModule, Corrects):
        def correct(self, row, parameters, grads): ...

A module that defines a method of one of them has it, too, if it does not say so (`adopt`).
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
    """Rewrites each node's own gradients at every local step. Not together with gradient modules."""

    @abstractmethod
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Rewrite in place the gradients of the node in `row`, at every local step, before they are clipped.

        For a method that changes local steps themselves (a proximal term, a control variate); it may read the module's
        own state of the row and nothing of other nodes. `parameters` are the row's, in fleet order; a gradient is None
        where the step gave none.
        """


class HasOuterModel(ABC):
    """Keeps a model that all nodes share, other than the mean of the rows."""

    @abstractmethod
    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None where the mean of the rows is the model."""

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        """Return the buffers of the outer parameters, by name, or None where these have the mean of the rows'."""
        return None


class Tunable(ABC):
    """Follows a tuner in an argument other than H and the outer rate, which need no word of a module."""

    @abstractmethod
    def tune(self, name: str, value: float) -> bool:
        """Take another value of the strategy's argument `name` from now on; return whether it is this module's."""


class ChoosesClients(ABC):  # noqa: B024 (a module overrides what it needs)
    """Lets some of the nodes take part in a round, or some of them take fewer steps.

    Attributes:
        asks_clients: whether a server asks some of the nodes to take part in a round, who may not be there.
        asks_all_lengths: whether it must know how many examples each node has before any acts.
    """

    asks_clients = asks_all_lengths = False

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) inner steps each node takes while the fleet goes from step `first` to `last`; None: all."""
        return None

    def joining(self, nodes: list[int], step: int) -> list[int]:
        """Return those of `nodes`, which come back for step `step`, that take parameters then; all by default."""
        return nodes

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return whose reports count in a server's round that ends with `step`, and the seconds it waits for others.

        It waits once they have computed. None: there is no such server, or no round of it ends with `step`. The server
        ends the round for all nodes: on the virtual clock nobody begins the next round before.
        """
        return None

    def rounds_among(self, N: int) -> AskedRounds | None:
        """Return who is asked in each round, for `Plan.rounds`; None: all N nodes take part."""
        return None

    def seats(self, num_nodes: int) -> int | None:
        """Return how many nodes act in a round at most; None: each needs a row all the time, which is the default.

        For a module that gives the nodes of a round their parameters when it begins, and looks at no others: then only
        these, and those of the next round when it ends, have rows.
        """
        return None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        """Return the nodes of the round after `step`, and of the round that `step` is in; where there are `seats`."""
        raise NotImplementedError


CAPABILITIES = (Corrects, HasOuterModel, Tunable, ChoosesClients)


def adopt(module: type) -> None:
    """Let a class of modules that defines a method of a capability have this capability, with its other methods.

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
    """The modules of a strategy that choose clients, as one."""

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
                "two modules each ask nodes of their own, and no formula is known for both: give a Plan"
            )
        return found[0] if found else None

    def seats(self, num_nodes: int) -> int | None:
        most = [module.seats(num_nodes) for module in self.modules]
        known = [count for count in most if count is not None]
        return max(known) if known and self.are_all and len(known) == len(most) else None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        found = [module.seated(step) for module in self.modules]
        return sorted({i for after, _ in found for i in after}), sorted({i for _, now in found for i in now})
