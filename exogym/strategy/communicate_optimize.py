"""Strategies composed of gradient modules, an inner optimizer and communication modules.

One step of every node, in order:

    1. gradient modules rewrite the gradients, (rows, P), before the inner optimizer;
    2. each row takes its inner optimizer's step;
    3. the communication modules that are due mix the rows, in the order given.

A module uses only the fleet and its communicator. Every tensor is (rows, ...).

With absent nodes (`exogym.faults`), ExoGym first sets `fleet.comm.present` to the ids of the present nodes. A
module reads and writes only these nodes' rows. If no node is present, the modules do not communicate, and they do not
catch up later.

>>> issubclass(PeriodicModule, CommunicationModule), issubclass(CommunicationModule, Module)
(True, True)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Self, Unpack

from exogym.core.combinations import check
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, StrategyError, check_choice
from exogym.faults import Faults
from exogym.strategy.averaging import FLAT, Averaging
from exogym.strategy.capabilities import Clients, Corrects
from exogym.strategy.composition import Composition, Tuning
from exogym.strategy.modules import (
    CommunicationModule,
    GradientModule,
    Module,
    PeriodicModule,
    example_weights,
    known_traffic,
)
from exogym.strategy.optim import OptimSpec
from exogym.strategy.options import taking
from exogym.strategy.strategy import Inner, InnerOptions, Run, Strategy
from exogym.strategy.traffic import Plan

__all__ = [
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "GradientModule",
    "Module",
    "PeriodicModule",
    "example_weights",
]


class CommunicateOptimizeStrategy(Strategy):
    """A strategy composed of communication modules, gradient modules and an inner optimizer.

    The strategy's bytes are the sum of its modules' bytes.

    Args:
        communication_modules: act on the parameters after the inner step, in this order.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`.
        gradient_modules: act on the gradients before the inner step, in this order.

    Attributes:
        averages: the options of `exogym.strategy.Averaging` that the class takes, in one argument `averaging`.

    With absent nodes, each module continues with the present nodes. A returning node takes parameters and buffers from
    another node, which broadcasts P b bytes (`bring_back`).

    >>> from exogym.strategy import CommunicateOptimizeStrategy
    >>> from exogym.strategy.sparta import SparseCommunicator
    >>> from exogym.strategy.federated_averaging import AveragingCommunicator
    >>> strategy = CommunicateOptimizeStrategy(
    ...     communication_modules=[SparseCommunicator(sparsification_rate=0.01), AveragingCommunicator(island_size=4)],
    ...     inner_optim='adamw')
    """

    driven_by = "rounds"
    stacked = True
    averages: tuple[str, ...] = ()

    @taking
    def __init__(
        self,
        inner_optim: Any = "adamw",
        communication_modules: Sequence[CommunicationModule] = (),
        *,
        gradient_modules: Sequence[GradientModule] = (),
        **options: Unpack[InnerOptions],
    ):
        self.inner = Inner.of(inner_optim, options)
        for name, given in (("communication_modules", communication_modules), ("gradient_modules", gradient_modules)):
            if not isinstance(given, list | tuple):
                raise ArgumentError(f"{name}={given!r} must be a list of modules")
        self.communication_modules = list(communication_modules)
        self.gradient_modules = list(gradient_modules)
        for kind, modules in (
            (CommunicationModule, self.communication_modules),
            (GradientModule, self.gradient_modules),
        ):
            for module in modules:
                if not isinstance(module, kind):
                    raise ArgumentError(
                        f"{module!r} is not a {kind.__name__}: subclass {kind.__name__}, or take a module of "
                        "exogym.strategy"
                    )
        self.faults: Faults | None = None
        self.tuning: Tuning | None = None
        self.average_by(Averaging())

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("step", "_init_node", "communicate_gradients", "update_parameters", "rejoin"):
            if name in cls.__dict__:
                raise StrategyError(
                    f"{cls.__name__} overrides {name}(), which is never called in a strategy that acts on rows: "
                    "subclass Strategy to write for one node, or pass your own CommunicationModule"
                )

    def average_by(self, averaging: Averaging) -> None:
        """Let this strategy take averages by `averaging`.

        Raises:
            ArgumentError: the strategy does not take one of its options, or the modules cannot average that way.
        """
        for name in averaging.given().keys() & FLAT.keys() - {*self.averages}:
            instead = self.not_taken.get(name, f"it takes {' and '.join(self.averages) or 'no averaging='}")
            raise ArgumentError(f"{type(self).__name__} takes no averages with {name}: {instead}")
        self.averaging = averaging
        self.updates = averaging.updates(self.faults, bool(self.communication_modules))
        check(self.features())

    def with_averaging(self, averaging: Averaging) -> Self:
        """Return a copy of this strategy that takes averages by `averaging`.

        Raises:
            ArgumentError: see `average_by`.
        """
        other = copy.copy(self)
        vars(other)["given_arguments"] = vars(self)["given_arguments"] | {"averaging": averaging}
        other.average_by(averaging)
        return other

    def features(self) -> dict[str, str]:
        name, found = type(self).__name__, super().features()
        own = [type(m).__name__ for m in self.modules if not m.weighted_means]
        parts = [type(m).__name__ for m in self.modules if m.only_means]
        found.pop("its own mean", None)  # a robust rule is a separate feature
        found |= {"its own mean": f"{name}, which averages in its own way ({', '.join(own)})"} if own else {}
        found |= {"parts of a mean": f"{name}, which averages in its own way ({', '.join(parts)})"} if parts else {}
        if in_mean := [type(m).__name__ for m in self.modules if m.right_in_mean]:
            found["values right in the mean only"] = (
                f"{name}, whose {', '.join(in_mean)} sends a part of a node's values"
            )
        if any(getattr(m, "weighting", None) == "examples" for m in self.modules):
            found['weighting="examples"'] = "weighting='examples'"
        found |= {"gradient_modules": f"gradient_modules of {name}"} if self.gradient_modules else {}
        corrects = any(isinstance(module, Corrects) for module in self.communication_modules)
        found |= {"corrections": f"{name}, which corrects gradients"} if corrects else {}
        found |= self.averaging.features() | ({} if self.tuning is None else self.tuning.features())
        for module in self.modules:
            found |= module.features()
        traffic, is_known = known_traffic(self.modules, 1000)
        kinds = {t.kind for t in traffic}
        if not is_known:
            return found | ({"packed values": _packed(name, [*own, *parts])} if own or parts else {})
        if own or parts or kinds - {"all_reduce"}:
            found["packed values"] = _packed(name, [*own, *parts, *sorted(kinds)])
        return found

    def beside(self, faults: Faults) -> CommunicateOptimizeStrategy:
        other = copy.copy(self)
        other.faults = faults
        other.updates = self.averaging.updates(faults, bool(self.communication_modules))
        return other

    def on(self, fleet: Fleet, run: Run) -> Composition:
        """Return a `Composition`, which runs this strategy's modules on `fleet`."""
        return Composition(self, fleet, run)

    @property
    def modules(self) -> list[Module]:
        return [*self.gradient_modules, *self.communication_modules, *([self.updates] if self.updates else [])]

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of a bucket of gradients whose all-reduce may begin during the backward pass.

        The first gradient module sets this number. Return None if gradients have no buckets, or if clipping, changed
        updates or the way of averaging needs whole gradients first.
        """
        first = self.gradient_modules[:1]
        one_by_one = self.updates is not None or not self.averaging.sums_buckets
        seen_whole = one_by_one or any(module.clip_first for module in self.gradient_modules)
        return None if seen_whole or not first else first[0].bucket_bytes

    @property
    def needs_gradients(self) -> bool:  # type: ignore[override]
        return bool(self.gradient_modules)

    @property
    def weighted_means(self) -> bool:  # type: ignore[override]
        return self.averaging.takes_weights and all(module.weighted_means for module in self.modules)

    def plan(self, P: float, N: int, b: float) -> Plan:
        if self.tuning is not None:
            raise ArgumentError(
                f"a tuner chooses {self.tuning.name}, but a formula needs one value: leave the tuner out"
            )
        if self.round_lengths(1):
            raise ArgumentError("H is a function of the round, but a formula needs one number: give a number or a Plan")
        given = [t for module in self.modules for t in module.traffic(P, N, b)]
        self.averaging.check_members(type(self).__name__, given, N)
        traffic = tuple(self.averaging.traffic(given, N, b))
        couples = min((module.couples_every(N) for module in self.modules), default=math.inf)
        return Plan(type(self).__name__, traffic, couples, rounds=self.clients.rounds_among(N))

    def round_lengths(self, total_steps: int) -> dict[str, list[int]]:
        uneven = {
            f"{m}.{type(module).__name__}": getattr(module, "rounds", None) for m, module in enumerate(self.modules)
        }
        known = {name: rounds for name, rounds in uneven.items() if rounds is not None and rounds.foreseen}
        return {name: rounds.lengths(total_steps) for name, rounds in known.items()}

    @property
    def clients(self) -> Clients:
        """The modules that choose which nodes act in a round."""
        return Clients(self.communication_modules)

    def features_in_parts(self) -> dict[str, str]:
        return {name: said for module in self.modules for name, said in _of_parts(module).items()}

    def seats(self, num_nodes: int) -> int | None:
        """Return the largest number of nodes that act in a round, or None if every node always needs its own row."""
        if self.gradient_modules or self.updates is not None or self.tuning is not None:
            return None
        return self.clients.seats(num_nodes)

    @property
    def asks_clients(self) -> bool:
        return self.clients.asks_clients

    @property
    def asks_all_lengths(self) -> bool:
        return self.clients.asks_all_lengths


def _of_parts(module: Module) -> dict[str, str]:
    """Return what forbids a module to run on a part of a row, if each node has several processes."""
    name, found = type(module).__name__, {}
    if not module.says_what_it_acts_on:
        found["acts_on left unsaid"] = f"{name}, which does not say what it acts on"
    check_choice(f"{name}.acts_on", module.acts_on, ("elements", "tensors", "row"))
    spec = getattr(getattr(module, "rule", None), "spec", None)
    if isinstance(spec, OptimSpec) and module.acts_on == "elements" and spec.acts_on != "elements":
        found["an outer optimizer of whole tensors"] = f"outer_optim={spec!r}, which looks at whole tensors"
    return found


def _packed(name: str, what: Sequence[str]) -> str:
    return f"{name}, which does not send sums alone, but {', '.join(what)}"
