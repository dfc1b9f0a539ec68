"""Capabilities: optional abilities of communication modules, each a small base class that a module inherits.

class Proximal(PeriodicModule, Corrects):
    def correct(self, row, parameters, grads): ...
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from exogym.core.base.lazy import absent
from exogym.core.base.retired import RETIRED
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy.traffic import AskedRounds

__getattr__ = functools.partial(absent, __name__)  # capabilities that used to be here


class Corrects(ABC):
    """Rewrites each node's own gradients at every local step, in a strategy without gradient modules."""

    @abstractmethod
    def correct(self, row: int, parameters: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Rewrite the gradients `grads` of the node in `row`, in place, at every local step before clipping.

        Override it to add, for example, a proximal term or a control variate. The method may read the module's state of
        this row, but not of other rows. `parameters` are the node's parameters in the fleet's order. `grads` has None
        for a parameter without a gradient; if the method writes None into `grads`, the inner optimizer skips this
        parameter and its optimizer state in this step.
        """


class SeesLosses(ABC):
    """Sees each node's own training losses."""

    @abstractmethod
    def see_losses(self, fleet: Fleet, first: int, losses: Tensor) -> None:
        """Receive the losses (rows, steps) of the steps after step `first`, before `communicate` is called.

        The last of these steps is the next one at which any module acts, or an earlier one, such as an evaluation's. A
        loss is the mean over the node's local steps in one step of the run: NaN if the node took none, possibly
        infinite with on_nonfinite="skip".
        """


class ChoosesClients(ABC):  # noqa: B024 (a module overrides what it needs)
    """Lets some nodes rest during a round or take fewer steps than others.

    Attributes:
        asks_clients: whether a server asks some nodes, which may be unavailable, to take part in a round.
        asks_all_lengths: whether the module must know each node's number of examples before any node trains.
    """

    asks_clients = asks_all_lengths = False

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        """Return each node's number of inner steps from the fleet's step `first` to step `last`, (N,).

        Return None if every node takes all of them.
        """
        return None

    def joining(self, nodes: list[int], step: int) -> list[int]:
        """Return which of the returning `nodes` receive parameters before step `step` (by default all)."""
        return nodes

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return the clients whose reports count in the server's round that ends with `step`, and extra seconds.

        The server ends the round these seconds after the slowest of the clients has computed, and no node begins the
        next round earlier on the virtual clock. Return None if the strategy has no such server or no round ends with
        `step`.
        """
        return None

    def rounds_among(self, N: int) -> AskedRounds | None:
        """Return a function that yields each round's clients, for `Plan.rounds`, or None if all N nodes are clients."""
        return None

    def seats(self, num_nodes: int) -> int | None:
        """Return the largest number of nodes that act in a round, or None (default) if all nodes need a row.

        A module may return a number if it gives a round's nodes their parameters when the round begins and never reads
        other nodes' rows. Then only the round's nodes have rows, and at the round's end also the next round's nodes.
        """
        return None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        """Return the nodes of the round that begins after `step` and of the round that ends with `step`.

        Called only if `seats` returns a number.
        """
        raise NotImplementedError

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        """Return the evaluation model's buffers by name, or None if these are the mean of the rows' buffers."""
        return None


CAPABILITIES = (Corrects, SeesLosses, ChoosesClients)


def check_declared(module: type) -> None:
    """Raise StrategyError if a module class has a retired name or a capability's method without the capability."""
    for name in vars(module):
        if (instead := RETIRED.get(f"module.{name}")) is not None:
            raise StrategyError(f"{module.__name__} has {name}, which is retired: {instead}")
        for capability in CAPABILITIES:
            if name in vars(capability) and not name.startswith("_") and not issubclass(module, capability):
                raise StrategyError(
                    f"{module.__name__} has {name}, which only a {capability.__name__} has: let the class also inherit "
                    f"exogym.strategy.capabilities.{capability.__name__}"
                )


class Clients(ChoosesClients):
    """Combines all of a strategy's modules that choose clients into one `ChoosesClients`.

    Args:
        modules: the strategy's communication modules.
        read_all_rows: whether other parts of the strategy need the rows of all nodes.
    """

    def __init__(self, modules: Sequence[object] = (), read_all_rows: bool = False):
        self.modules = [module for module in modules if isinstance(module, ChoosesClients)]
        self.read_all_rows = read_all_rows or len(self.modules) < len(modules)
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
            raise ArgumentError("two modules choose clients, and no formula covers both: pass a Plan")
        return found[0] if found else None

    def seats(self, num_nodes: int) -> int | None:
        most = [] if self.read_all_rows else [module.seats(num_nodes) for module in self.modules]
        known = [count for count in most if count is not None]
        return max(known) if known and len(known) == len(most) else None

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        found = [module.seated(step) for module in self.modules]
        return sorted({i for after, _ in found for i in after}), sorted({i for _, now in found for i in now})

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        found = (module.consensus_buffers(fleet) for module in reversed(self.modules))
        return next((buffers for buffers in found if buffers is not None), None)
