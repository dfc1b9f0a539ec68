"""Strategies by composition: gradient modules, the inner optimizer, communication modules.

One step of every node, in order:

    1. gradient modules rewrite the gradients, (rows, P), before the inner optimizer;
    2. each row takes its inner optimizer's step;
    3. the communication modules whose turn it is mix the rows, in the order given.

A module acts on the fleet and its communicator and on nothing else. Every tensor is (rows, ...).

With absent nodes (`exogym.faults`): before the steps above the driver sets `fleet.comm.present` to the ids that take
part, and a module reads and writes their rows only. Nobody present: nobody communicates, and it is not made up for.

>>> issubclass(PeriodicModule, CommunicationModule), issubclass(CommunicationModule, Module)
(True, True)
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from exogym.core.combinations import check, features_of, refuse
from exogym.core.fleet import Fleet
from exogym.core.fleet.dealing import Dealing
from exogym.core.fleet.presence import take_rows
from exogym.core.fleet.state import Shared, Tensors
from exogym.errors import ArgumentError, StrategyError, check_choice
from exogym.faults import Faults
from exogym.strategy.averaging import Averaging, AveragingOptions, with_options
from exogym.strategy.modules import (
    CommunicationModule,
    GradientModule,
    Module,
    PeriodicModule,
    example_weights,
    named,
)
from exogym.strategy.optim import OptimSpec
from exogym.strategy.options import split
from exogym.strategy.strategy import Inner, Run, Strategy, clip_rows
from exogym.strategy.traffic import Plan, Traffic
from exogym.strategy.tuning import Costs, Tuning
from exogym.strategy.updates import Updates

__all__ = [
    "NEVER",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "GradientModule",
    "Module",
    "PeriodicModule",
    "example_weights",
]
NEVER = 2**62  # a step after all others


class CommunicateOptimizeStrategy(Strategy):
    """Any communication modules, any gradient modules, any inner optimizer.

    Args:
        communication_modules: act on the parameters after the inner step, in this order.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: as `Strategy`.
        gradient_modules: act on the gradients before the inner step, in this order.
        transport, robust, secure_aggregation: how the means over nodes are taken, as
            `exogym.strategy.averaging.Averaging`. Every subclass takes them, and `tuner`, a name or a
            `exogym.strategy.tuning.Tuner`, though its constructor does not name them.

    Bytes are the sum over the modules.

    With absent nodes: each module goes on with those that are there, and a node that comes back takes parameters and
    buffers (`bring_back`): P b bytes, a broadcast from the node it takes them from.

    >>> from exogym.strategy import CommunicateOptimizeStrategy
    >>> from exogym.strategy.sparta import SparseCommunicator
    >>> from exogym.strategy.federated_averaging import AveragingCommunicator
    >>> strategy = CommunicateOptimizeStrategy(
    ...     communication_modules=[SparseCommunicator(sparsification_rate=0.01), AveragingCommunicator(island_size=4)],
    ...     inner_optim='adamw')
    """

    driven_by = "rounds"
    stacked = True

    def __init__(
        self,
        inner_optim: Any = "adamw",
        communication_modules: Sequence[CommunicationModule] = (),
        *,
        gradient_modules: Sequence[GradientModule] = (),
        **options: Unpack[AveragingOptions],
    ):
        self.inner = Inner(inner_optim, **split(options, Inner)[0])
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
                        f"{module!r} is not a {kind.__name__}; subclass it, or see exogym.strategy for ready ones"
                    )
        self.faults: Faults | None = None
        self.tuning: Tuning | None = None
        self.average_by(**split(options, Averaging)[0])

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("step", "_init_node", "communicate_gradients", "update_parameters", "rejoin"):
            if name in cls.__dict__:
                raise StrategyError(
                    f"{cls.__name__} overrides {name}() of a strategy that acts on rows, where it is never called: "
                    "subclass Strategy to write for one node, or pass your own CommunicationModule"
                )
        if "__init__" in cls.__dict__:
            cls.__init__ = with_options(cls.__init__)  # type: ignore[method-assign]

    def average_by(self, **options: Any) -> None:
        """Take means as `Averaging(**options)` says.

        Raises:
            ArgumentError: an unknown way, or one that the modules cannot take.
        """
        self.averaging = Averaging(**options)
        self._look_at_updates()
        check(self.features())

    def features(self) -> dict[str, str]:
        name, found = type(self).__name__, super().features()
        own = [type(m).__name__ for m in self.modules if not m.weighted_means]
        parts = [type(m).__name__ for m in self.modules if m.only_means]
        found.pop("a mean of its own", None)  # a robust rule is a feature of its own
        found |= {"a mean of its own": f"{name}, which averages in a way of its own ({', '.join(own)})"} if own else {}
        found |= (
            {"parts of a mean": f"{name}, which averages in a way of its own ({', '.join(parts)})"} if parts else {}
        )
        if in_mean := [type(m).__name__ for m in self.modules if m.right_in_mean]:
            found["values right in the mean only"] = (
                f"{name}, whose {', '.join(in_mean)} sends a part of what a node has"
            )
        found |= {"gradient_modules": f"gradient_modules of {name}"} if self.gradient_modules else {}
        if len(self.communication_modules) + len(self.gradient_modules) > 1:
            found["several modules"] = f"{name}, which has several modules"
        found |= {"corrections": f"{name}, which corrects gradients"} if self.corrections else {}
        found |= self.averaging.features() | ({} if self.tuning is None else self.tuning.features())
        for module in self.modules:
            found |= module.features() | _of_parts(module)
        traffic, is_known = self._traffic(1000)
        kinds = {t.kind for t in traffic}
        if not is_known:
            return found | ({"packed values": _packed(name, [*own, *parts])} if own or parts else {})
        if own or parts or kinds - {"all_reduce"}:
            found["packed values"] = _packed(name, [*own, *parts, *sorted(kinds)])
        if "all_reduce" not in kinds:
            sends = ", ".join(sorted(kinds)) or "nothing"
            found["no all-reduce"] = f"{name}, which has no all-reduce (it sends {sends})"
        return found

    def _traffic(self, N: int) -> tuple[list[Traffic], bool]:
        """Return what the modules repeat with a million parameters on N nodes, if that is known, and whether it is."""
        try:
            return [t for module in self.modules for t in module.traffic(1e6, N, 4)], True
        except ArgumentError:
            return [], False

    def beside(self, faults: Faults) -> CommunicateOptimizeStrategy:
        other = copy.copy(self)
        other.faults = faults
        other._look_at_updates()
        return other

    def tune_by(self, tuning: Tuning) -> None:
        """Let `tuning` choose an argument of this strategy as it goes.

        Raises:
            ArgumentError: no module follows it, or the strategy has something that a tuner cannot be combined with.
        """
        self.tuning = tuning
        check(self.features())
        self.tuned = [
            m for m, module in enumerate(self.communication_modules)
            if (tuning.rounds is None or getattr(module, "rounds", None) is tuning.rounds)
            and (tuning.name != "p_sparta" or module.tune(tuning.name, tuning.value))
        ]  # fmt: skip
        if not self.tuned:
            what = f"{type(self).__name__}, which does not follow {tuning.name} in rounds of its own"
            refuse(features_of(tuner=tuning.tuner) | {"nothing to tune": what})
        self._look_at_updates()

    def _costs(self, fleet: Fleet, run: Run) -> Costs | None:
        """Return what the rest of a run costs by the formulas of the modules; None: one has no formula."""
        assert self.tuning is not None
        P = sum(block.layout.total for block in fleet.blocks)
        row_bytes = sum(block.layout.total * block.layout.dtype.itemsize for block in fleet.blocks)
        rounds = self.tuning.rounds

        def sent(traffic: list[Traffic]) -> float:
            told = self.averaging.traffic(traffic, run.num_nodes, row_bytes / P)
            return sum(t.sent_bytes(run.num_nodes) / t.every_steps for t in told)

        def follows(module: Any) -> bool:
            return any(getattr(x, "rounds", None) is rounds for x in (module, getattr(module, "average", None)))

        def at(module: Module, p: float) -> float:
            other = copy.copy(module)
            other.tune("p_sparta", p)
            return sent(other.traffic(P, run.num_nodes, row_bytes / P))

        try:
            if rounds is None:
                tuned = [self.communication_modules[m] for m in self.tuned]
                slope = sum(2 * (at(m, 1.0) - at(m, 0.5)) for m in tuned)
                final = sent([Traffic("all_reduce", float(row_bytes))]) if run.final_sync else 0.0
                offset = max(0.0, sum(at(m, 1.0) for m in tuned) - slope)
                every = max(getattr(m, "interval_steps", 1) for m in tuned)
                return Costs(slope, offset, final, slope * every / math.sqrt(P))
            formulas = [(m, m.traffic(P, run.num_nodes, row_bytes / P)) for m in self.modules]
        except ArgumentError:
            return None
        each = sent([t for m, traffic in formulas if follows(m) for t in traffic]) * rounds.end_after(0)
        per_step = sent([t for m, traffic in formulas if not follows(m) for t in traffic])
        return Costs(each, per_step, each if run.final_sync else 0.0)

    def _look_at_updates(self) -> None:
        sees_drift = self.tuning is not None and self.tuning.tuner.sees == "drift"
        wanted = self.averaging.cap is not None or self.faults is not None or sees_drift
        self.updates = Updates(self.averaging.cap, self.faults, bool(self.communication_modules)) if wanted else None
        self._dealings: dict[str, Dealing] = {}

    # What the training loop asks

    def start(self, fleet: Fleet, run: Run) -> None:
        self.last_events = [0] * len(self.communication_modules)
        fleet.state.register("strategy", Shared(self._events, self._load_events))
        self._dealings.clear()
        for name, module in named(self.modules).items():
            with self._given(module, fleet) as given:
                module.run = run
                if given is not None:
                    module.start(given, run)
                    fleet.state.register(name, module)
                    module.shared()  # what cannot be saved is to be known now
        weighs = any(getattr(module, "weights", None) is not None for module in self.modules)
        self.averaging.check_members(type(self).__name__, self._traffic(run.num_nodes)[0], run.num_nodes)
        self.averaging.bind(fleet.comm, weighs, run.seed)
        if self.tuning is not None:
            self.tuning.start(fleet, run, self._costs(fleet, run) if self.tuning.tuner.sees == "bytes" else None)
            fleet.state.register("tuning", self.tuning)
        if self.gradient_modules and self.local_steps(0, 1) is not None:
            check(self.features() | {"nodes that rest": "a communication module that lets nodes rest"})

    def _given(
        self, module: Module, fleet: Fleet, gradients: bool = False
    ) -> contextlib.AbstractContextManager[Fleet | None]:
        """Return the fleet that a module acts on; None, where it has nothing in this process of the node."""
        if fleet.comm.wire.inside.parts == 1 or module.acts_on == "elements":
            return contextlib.nullcontext(fleet)
        if module.acts_on not in self._dealings:
            self._dealings[module.acts_on] = Dealing(fleet, module.acts_on)
        return self._dealings[module.acts_on].acting(gradients)

    def _events(self) -> Tensors:
        return {"last_events": torch.tensor(self.last_events, dtype=torch.int64)}

    def _load_events(self, tensors: Tensors) -> None:
        self.last_events = tensors["last_events"].tolist()

    @property
    def corrections(self) -> list[Callable[[int, Sequence[Tensor], Sequence[Tensor | None]], None]]:
        """What rewrites a node's own gradients at every local step, in order."""
        return [module.correct for module in self.communication_modules if module.corrects]

    @property
    def modules(self) -> list[Module]:
        return [*self.gradient_modules, *self.communication_modules, *([self.updates] if self.updates else [])]

    @property
    def bucket_bytes(self) -> int | None:
        """Size of the buckets whose sum may begin while backward runs: the first gradient module's, unclipped."""
        first = self.gradient_modules[:1]
        one_by_one = bool(self.updates or self.averaging.rule or self.averaging.secure)
        seen_whole = one_by_one or any(module.clip_first for module in self.gradient_modules)
        return None if seen_whole or not first else first[0].bucket_bytes

    @property
    def needs_gradients(self) -> bool:  # type: ignore[override]
        return bool(self.gradient_modules)

    @property
    def weighted_means(self) -> bool:  # type: ignore[override]
        return self.averaging.rule is None and all(module.weighted_means for module in self.modules)

    def plan(self, P: float, N: int, b: float) -> Plan:
        if self.tuning is not None:
            raise ArgumentError(f"a tuner chooses {self.tuning.name} as it goes, and a formula needs one: leave it out")
        if self.round_lengths(1):
            raise ArgumentError("H is a function of the round, and a formula needs one number: give it, or a Plan")
        given = [t for module in self.modules for t in module.traffic(P, N, b)]
        self.averaging.check_members(type(self).__name__, given, N)
        traffic = tuple(self.averaging.traffic(given, N, b))
        couples = min((module.couples_every(N) for module in self.modules), default=math.inf)
        rounds = [found for m in self.communication_modules if (found := m.rounds_among(N)) is not None]
        if len(rounds) > 1:
            raise ArgumentError(
                "two modules each ask nodes of their own, and no formula is known for both: give a Plan"
            )
        return Plan(type(self).__name__, traffic, couples, rounds=rounds[0] if rounds else None)

    def next_event(self, step: int) -> int:
        if self.gradient_modules:
            return step + 1
        return min((module.next_event(step) for module in self.communication_modules), default=NEVER)

    def round_lengths(self, total_steps: int) -> dict[str, list[int]]:
        uneven = {
            f"{m}.{type(module).__name__}": getattr(module, "rounds", None) for m, module in enumerate(self.modules)
        }
        known = {name: rounds for name, rounds in uneven.items() if rounds is not None and rounds.foreseen}
        return {name: rounds.lengths(total_steps) for name, rounds in known.items()}

    def is_event(self, step: int) -> bool:
        """Return whether a communication module acts after `step`."""
        return any(module.next_event(step - 1) == step for module in self.communication_modules)

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        plans = [p for m in self.communication_modules if (p := m.local_steps(first, last)) is not None]
        return np.minimum.reduce(plans) if plans else None

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return the clients of the server's round that ends with `step`, and the seconds it goes on waiting."""
        found = [one for module in self.communication_modules if (one := module.server_round(step)) is not None]
        return (sorted({i for ids, _ in found for i in ids}), max(wait_s for _, wait_s in found)) if found else None

    def seats(self, num_nodes: int) -> int | None:
        """Return how many nodes act in a round at most, where the others need no row; None: all have one."""
        if self.gradient_modules or self.updates is not None or self.tuning is not None:
            return None
        most = [module.seats(num_nodes) for module in self.communication_modules]
        known = [count for count in most if count is not None]
        return max(known) if known and len(known) == len(most) else None

    @property
    def asks_clients(self) -> bool:
        return any(module.asks_clients for module in self.communication_modules)

    @property
    def asks_all_lengths(self) -> bool:
        return any(module.asks_all_lengths for module in self.communication_modules)

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        """Return who acts in the round after `step`, and who in the one that `step` is in; with seats only."""
        found = [module.seated(step) for module in self.communication_modules]
        return sorted({i for after, _ in found for i in after}), sorted({i for _, now in found for i in now})

    def transform_gradients(self, fleet: Fleet, step: int, lr: float) -> None:
        if not fleet.comm.present:
            return
        clip_first = any(module.clip_first for module in self.gradient_modules)
        if clip_first:
            self._clip(fleet)
        if self.updates is not None and self.gradient_modules:
            self.updates.before_gradients(fleet, step)
        for module in self.gradient_modules:
            with self._given(module, fleet, gradients=True) as given:
                if given is not None:
                    module.transform(given, step, lr)
        if not clip_first:
            self._clip(fleet)

    def communicate(self, fleet: Fleet, step: int) -> bool:
        """Let the modules whose turn it is act. Returns whether inner states are to start afresh."""
        fresh = False
        if not fleet.comm.present and not self.asks_clients:
            return fresh
        acting = [m for m, module in enumerate(self.communication_modules) if module.next_event(step - 1) == step]
        if self.updates is not None and acting:
            self.updates.before_parameters(fleet, step)
        tuning = self.tuning if self.tuning is not None and set(acting) & set(self.tuned) else None
        if tuning is not None:
            tuning.before_meeting(fleet, [] if self.updates is None else list(self.updates.row_state.values()))
        for index in acting:
            module = self.communication_modules[index]
            with self._given(module, fleet) as given:
                if given is not None:
                    module.communicate(given, step)
            self.last_events[index] = step
            fresh = fresh or module.fresh_inner_state
        if self.updates is not None and acting:
            self.updates.after_meeting(fleet)
        if tuning is not None:
            tuning.after_meeting(fleet, step)
            for other in self.modules:
                other.tune(tuning.name, tuning.value)
        return fresh

    def bring_back(self, fleet: Fleet, nodes: Sequence[int], source: int, step: int, forget: bool = False) -> bool:
        """Bring back `nodes`, which were away at step `step - 1` and are there for step `step`.

        They take the outer parameters where there are some, else those of `source`, and its buffers; the modules put
        their own state in order. Inner optimizer states and step counts stay what they were, unless gradients meet
        at every step: then replicas are to be equal again. Nodes that `forget` take all that from `source`, and what
        its modules keep of it.

        Payload P b bytes, broadcast by `source` to `nodes`; buffers counted apart.

        Returns:
            Whether the nodes are to take over the inner optimizer state of `source` too, and the fleet's step.
        """
        joining = list(nodes)
        for communication in () if forget else self.communication_modules:
            joining = communication.joining(joining, step)
        if joining:
            outer = self.consensus(fleet)
            for b, block in enumerate(fleet.blocks):
                take_rows(fleet, block.params, source, joining, None if outer is None else outer[b][None])
            with fleet.comm.counted_as("buffers"):
                for rows in fleet.buffers.values():
                    take_rows(fleet, rows, source, joining)
            for module in self.modules:
                with self._given(module, fleet) as given:
                    if given is not None:
                        for rows in module.row_state.values() if forget else ():
                            take_rows(given, rows, source, joining)
                        module.rejoin(given, joining, step)
        return self.needs_gradients or forget

    def finish(self, fleet: Fleet, step: int) -> None:
        if not fleet.comm.present and not self.asks_clients:
            return
        if self.updates is not None and self.communication_modules and step > max(self.last_events):
            self.updates.before_parameters(fleet, step)
        for index, module in enumerate(self.communication_modules):
            with self._given(module, fleet) as given:
                if given is not None:
                    module.finish(given, step, step - self.last_events[index])
            self.last_events[index] = step

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        for module in reversed(self.communication_modules):
            dealing = self._dealings.get(module.acts_on)
            if dealing is None:
                outer = module.consensus(fleet)
            else:
                outer = dealing.back(module.consensus(dealing.view) if dealing.is_here else None)
            if outer is not None:
                return outer
        return None

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        found = (module.consensus_buffers(fleet) for module in reversed(self.communication_modules))
        return next((buffers for buffers in found if buffers is not None), None)

    def _clip(self, fleet: Fleet) -> None:
        if self.inner.max_norm is None:
            return
        grads = []
        for block in fleet.blocks:
            assert block.grads is not None
            grads.append(block.grads[:1] if block.grads.stride(0) == 0 else block.grads)
        clip_rows(grads, self.inner.max_norm, stacked=True, inside=fleet.comm.wire.inside)


CommunicateOptimizeStrategy.__init__ = with_options(CommunicateOptimizeStrategy.__init__)  # type: ignore[method-assign]


def _of_parts(module: Module) -> dict[str, str]:
    """Return what does not go with several processes for each node, where each has a part of a row."""
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
