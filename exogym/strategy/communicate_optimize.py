"""Strategies composed of gradient modules, an inner optimizer and communication modules.

One step of every node, in order:

    1. gradient modules rewrite the gradients, (rows, P), before the inner optimizer;
    2. each row takes its inner optimizer's step;
    3. the communication modules that are due mix the rows, in the order given.

A module uses only the fleet and its communicator. Every tensor is (rows, ...).

If nodes are absent (`exogym.faults`), `fleet.comm.present` holds the ids of the present nodes, and a module reads and
writes only their rows. If no node is present, modules skip the communication and do not catch up later.

>>> issubclass(PeriodicModule, CommunicationModule), issubclass(CommunicationModule, Module)
(True, True)
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from exogym.core.combinations import check
from exogym.core.fleet import Fleet
from exogym.core.fleet.dealing import Dealing
from exogym.core.fleet.returning import take_rows
from exogym.core.fleet.state import Shared, Tensors
from exogym.errors import ArgumentError, StrategyError, check_choice
from exogym.faults import Faults
from exogym.strategy.averaging import FLAT, Averaging
from exogym.strategy.capabilities import Clients, Corrects, SeesLosses
from exogym.strategy.modules import (
    CommunicationModule,
    GradientModule,
    Module,
    PeriodicModule,
    example_weights,
    known_traffic,
    named,
)
from exogym.strategy.one_node import clip_rows
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


NEVER = 2**62  # a step after all others


class Tuning(Protocol):
    """Chooses H during a run. A wrapper of the strategy implements it."""

    def features(self) -> dict[str, str]: ...
    def start(self, composition: Composition, run: Run) -> None:
        """Prepare for a run before training, and register the tuner's state with the fleet."""

    def before_meeting(self, acting: Sequence[int]) -> None:
        """Called right before the communication modules with the numbers `acting` act."""

    def after_meeting(self, acting: Sequence[int], step: int) -> None:
        """Called right after the communication modules with the numbers `acting` have acted, after `step`."""


class CommunicateOptimizeStrategy(Strategy):
    """A strategy composed of communication modules, gradient modules and an inner optimizer.

    The strategy's bytes are the sum of its modules' bytes.

    Args:
        communication_modules: modules that act on the parameters after the inner step, in this order.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`.
        gradient_modules: modules that act on the gradients before the inner step, in this order.

    Attributes:
        averages: the options of `exogym.strategy.Averaging` that the class accepts in its argument `averaging`.

    If nodes are absent, each module continues with the present ones. A returning node receives parameters and buffers
    from another node by a broadcast of P b bytes (`bring_back`).

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
        for kind, name, given in (
            (CommunicationModule, "communication_modules", communication_modules),
            (GradientModule, "gradient_modules", gradient_modules),
        ):
            if not isinstance(given, list | tuple):
                raise ArgumentError(f"{name}={given!r} must be a list of modules")
            for module in given:
                if not isinstance(module, kind):
                    raise ArgumentError(
                        f"{module!r} is not a {kind.__name__}: subclass {kind.__name__}, or pass a module of "
                        "exogym.strategy"
                    )
        self.communication_modules, self.gradient_modules = list(communication_modules), list(gradient_modules)
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
        """Let this strategy average by `averaging`.

        Raises:
            ArgumentError: the strategy does not accept an option of `averaging`, or its modules cannot average that
                way.
        """
        for name in averaging.given().keys() & FLAT.keys() - {*self.averages}:
            instead = self.not_taken.get(name, f"it takes {' and '.join(self.averages) or 'no averaging='}")
            raise ArgumentError(f"{type(self).__name__} takes no averages with {name}: {instead}")
        self.averaging = averaging
        self.updates = averaging.updates(self.faults, bool(self.communication_modules))
        check(self.features())

    def features(self) -> dict[str, str]:
        name, found = type(self).__name__, super().features()
        own = [type(m).__name__ for m in self.modules if not m.weighted_means]
        in_mean = [type(m).__name__ for m in self.modules if m.right_in_mean]
        kinds = {t.kind for t in known_traffic(self.modules, 1000)}
        found.pop("its own mean", None)  # a robust rule is a separate feature
        if own:
            found["its own mean"] = f"{name}, which averages in its own way ({', '.join(own)})"
        if in_mean:
            found["values right in the mean only"] = (
                f"{name}, whose {', '.join(in_mean)} sends a part of a node's values"
            )
        if own or in_mean or kinds - {"all_reduce"}:
            what = ", ".join(dict.fromkeys([*own, *in_mean, *sorted(kinds)]))
            found["packed values"] = f"{name}, which does not send sums alone, but {what}"
        if any(getattr(m, "weighting", None) == "examples" for m in self.modules):
            found['weighting="examples"'] = "weighting='examples'"
        found |= {"gradient_modules": f"gradient_modules of {name}"} if self.gradient_modules else {}
        corrects = any(isinstance(module, Corrects) for module in self.communication_modules)
        found |= {"corrections": f"{name}, which corrects gradients"} if corrects else {}
        found |= self.averaging.features() | ({} if self.tuning is None else self.tuning.features())
        for module in self.modules:
            found |= module.features()
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
        """Bytes of a bucket of gradients, whose all-reduce may begin during the backward pass.

        The first gradient module sets the number, which is None if gradients have no buckets, or if clipping, changed
        updates or the way of averaging needs whole gradients.
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
            raise ArgumentError("a tuner chooses H, but a formula needs a fixed H: leave the tuner out")
        if self.round_lengths(1):
            raise ArgumentError("H is a function of the round, but a formula needs a fixed H: pass a number or a Plan")
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
        read_all = bool(self.gradient_modules) or self.updates is not None or self.tuning is not None
        return Clients(self.communication_modules, read_all)

    def features_in_parts(self) -> dict[str, str]:
        found = {name: said for module in self.modules for name, said in _of_parts(module).items()}
        return super().features_in_parts() | found


class Composition:
    """Runs the modules of a `CommunicateOptimizeStrategy` on a fleet.

    Raises:
        ArgumentError: the modules cannot be combined in this run.
    """

    def __init__(self, strategy: CommunicateOptimizeStrategy, fleet: Fleet, run: Run):
        self.strategy, self.fleet = strategy, fleet
        self.max_norm, self.clients = strategy.inner.max_norm, strategy.clients
        self.communications, self.gradients = strategy.communication_modules, strategy.gradient_modules
        self.modules, self.updates, self.tuning = strategy.modules, strategy.updates, strategy.tuning
        self.seeing = [module for module in self.communications if isinstance(module, SeesLosses)]
        self.last_events = [0] * len(self.communications)
        self._dealings: dict[str, Dealing] = {}
        fleet.state.register("strategy", Shared(self._events, self._load_events))
        for name, module in named(self.modules).items():
            module.run = run
            with self._given(module) as given:
                if given is not None:
                    module.start(given, run)
                    fleet.state.register(name, module)
                    module.note_numbers()
        weighs = any(getattr(module, "weights", None) is not None for module in self.modules)
        strategy.averaging.check_members(
            type(strategy).__name__, known_traffic(self.modules, run.num_nodes), run.num_nodes
        )
        strategy.averaging.bind(fleet.comm, weighs, run.seed)
        if self.tuning is not None:
            self.tuning.start(self, run)
        if self.gradients and self.clients.local_steps(0, 1) is not None:
            check(strategy.features() | {"nodes that rest": "a communication module that lets nodes rest"})

    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which a module must act."""
        if self.gradients:
            return step + 1
        return min((module.next_event(step) for module in self.communications), default=NEVER)

    def is_event(self, step: int) -> bool:
        """Return whether a communication module acts after `step`."""
        return any(module.next_event(step - 1) == step for module in self.communications)

    def transform_gradients(self, step: int, lr: float) -> None:
        """Rewrite and clip the gradients of all rows before inner step number `step`."""
        fleet = self.fleet
        if not fleet.comm.present:
            return
        clip_first = any(module.clip_first for module in self.gradients)
        if clip_first:
            self._clip()
        if self.updates is not None and self.gradients:
            self.updates.before_gradients(fleet, step)
        for module in self.gradients:
            with self._given(module, gradients=True) as given:
                if given is not None:
                    module.transform(given, step, lr)
        if not clip_first:
            self._clip()

    def see_losses(self, first: int, losses: Tensor) -> None:
        """Pass the rows' losses (rows, steps) of the steps after step `first` to the modules."""
        for module in self.seeing:
            module.see_losses(self.fleet, first, losses)

    def communicate(self, step: int) -> bool:
        """Run the communication modules that act after `step`; return whether inner optimizers start afresh."""
        fleet = self.fleet
        if not fleet.comm.present and not self.clients.asks_clients:
            return False
        acting = [m for m, module in enumerate(self.communications) if module.next_event(step - 1) == step]
        with self._around(acting, step):
            for m in acting:
                with self._given(self.communications[m]) as given:
                    if given is not None:
                        self.communications[m].communicate(given, step)
                self.last_events[m] = step
        return any(self.communications[m].fresh_inner_state for m in acting)

    def _send(self, acting: Sequence[int], step: int) -> bool:
        return any(self.communications[m].sends_parameters(step) for m in acting)

    @contextlib.contextmanager
    def _around(self, acting: Sequence[int], step: int) -> Iterator[None]:
        """Apply changed updates and call the tuner, before and after modules communicate."""
        fleet, updates, tuning = self.fleet, self.updates if acting else None, self.tuning
        if updates is not None and self._send(acting, step):
            updates.before_parameters(fleet, step)
        if tuning is not None:
            tuning.before_meeting(acting)
        yield
        if updates is not None:
            updates.after_meeting(fleet)
        if tuning is not None:
            tuning.after_meeting(acting, step)

    def bring_back(
        self, nodes: Sequence[int], source: int, step: int, forget: bool = False, outer: list[Tensor] | None = None
    ) -> bool:
        """Prepare `nodes`, which were absent at step `step - 1`, to take part in step `step`.

        The nodes receive the parameters `outer` (by default `consensus()`), or the parameters of node `source` if there
        are no outer parameters. The nodes also receive the buffers of `source`, and with `forget` its modules' state.
        Each module then repairs its own state of these nodes.

        `source` broadcasts a payload of P b bytes to `nodes`, for P parameters of b bytes; bytes of buffers are counted
        separately.

        Returns:
            Whether the caller must also give the nodes the inner optimizer state of `source` and the fleet's step,
                because of `forget` or because gradients are averaged at every step and all nodes must be equal.
                Otherwise the nodes keep their inner optimizer states and step counts.
        """
        fleet, joining = self.fleet, list(nodes)
        if not forget:
            joining = self.clients.joining(joining, step)
        if joining:
            outer = self.consensus() if outer is None else outer
            for b, block in enumerate(fleet.blocks):
                take_rows(fleet, block.params, source, joining, None if outer is None else outer[b][None])
            with fleet.comm.counted_as("buffers"):
                for rows in fleet.shared_buffers.values():
                    take_rows(fleet, rows, source, joining)
            if forget:
                fleet.forget_own(joining)
            for module in self.modules:
                with self._given(module) as given:
                    if given is not None:
                        for rows in module.row_state.values() if forget else ():
                            take_rows(given, rows, source, joining)
                        module.rejoin(given, joining, step)
        return bool(self.gradients) or forget

    def finish(self, step: int) -> None:
        """Synchronize the last steps of every communication module at the end of training."""
        if not self.fleet.comm.present and not self.clients.asks_clients:
            return
        unsent = [m for m, last in enumerate(self.last_events) if last < step]
        if self.updates is not None and len(unsent) == len(self.communications) and self._send(unsent, step):
            self.updates.before_parameters(self.fleet, step)
        for m, module in enumerate(self.communications):
            with self._given(module) as given:
                if given is not None:
                    module.finish(given, step, step - self.last_events[m])
            self.last_events[m] = step

    def consensus(self) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None if the evaluation model is the mean of the rows."""
        for module in reversed(self.communications):
            dealing = self._dealings.get(module.acts_on)
            if dealing is None:
                outer = module.consensus(self.fleet)
            else:
                outer = dealing.back(module.consensus(dealing.view) if dealing.is_here else None)
            if outer is not None:
                return outer
        return None

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        """Return the evaluation model's buffers by name, or None if they are the mean of the rows' buffers."""
        return self.clients.consensus_buffers(self.fleet)

    def _given(self, module: Module, gradients: bool = False) -> contextlib.AbstractContextManager[Fleet | None]:
        """Return the fleet on which a module acts, or None if the module has no work in this process of the node."""
        if self.fleet.comm.wire.columns.parts == 1 or module.acts_on == "elements":
            return contextlib.nullcontext(self.fleet)
        if module.acts_on not in self._dealings:
            self._dealings[module.acts_on] = Dealing(self.fleet, module.acts_on)
        return self._dealings[module.acts_on].acting(gradients)

    def _events(self) -> Tensors:
        return {"last_events": torch.tensor(self.last_events, dtype=torch.int64)}

    def _load_events(self, tensors: Tensors) -> None:
        self.last_events = tensors["last_events"].tolist()

    def _clip(self) -> None:
        if self.max_norm is None:
            return
        grads = []
        for block in self.fleet.blocks:
            assert block.grads is not None
            grads.append(block.grads[:1] if block.grads.stride(0) == 0 else block.grads)
        clip_rows(grads, self.max_norm, stacked=True, columns=self.fleet.comm.wire.columns)


def _of_parts(module: Module) -> dict[str, str]:
    """Return the features that keep a module from running on part of a row, if each node has several processes."""
    name, found = type(module).__name__, {}
    foreign = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("exogym.")]
    said = "acts_on" in vars(module) or any("acts_on" in vars(kind) for kind in foreign)
    if type(module) in foreign and not said:
        found["acts_on left unsaid"] = f"{name}, which does not say what it acts on"
    check_choice(f"{name}.acts_on", module.acts_on, ("elements", "tensors", "row"))
    spec = getattr(getattr(module, "rule", None), "spec", None)
    if isinstance(spec, OptimSpec) and spec.is_function:
        found["an optimizer from a function"] = f"outer_optim={spec!r}"
    elif isinstance(spec, OptimSpec) and module.acts_on == "elements" and spec.acts_on != "elements":
        found["an outer optimizer of whole tensors"] = f"outer_optim={spec!r}, which looks at whole tensors"
    return found
