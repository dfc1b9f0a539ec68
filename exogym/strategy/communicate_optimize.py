"""Strategies by composition: gradient modules, the inner optimizer, communication modules.

One step of every node, in order:

    1. gradient modules rewrite the gradients, (rows, P), before the inner optimizer;
    2. each row takes its inner optimizer's step;
    3. the communication modules whose turn it is mix the rows, in the order given.

A module acts on the fleet and its communicator and on nothing else. Every tensor is (rows, ...).

With absent nodes (`exogym.faults`): before the steps above the driver sets `fleet.comm.present` to the ids that take
part, and a module reads and writes their rows only. Nobody present: nobody communicates, and it is not made up for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.errors import ArgumentError, StrategyError, checked
from exogym.fleet import Fleet, Stateful
from exogym.fleet.presence import take_rows
from exogym.fleet.state import Shared, Tensors
from exogym.strategy.rounds import RoundLength, Rounds
from exogym.strategy.schedule import Scheduler
from exogym.strategy.strategy import Inner, Run, Strategy, clip_rows
from exogym.strategy.traffic import Plan, Traffic

NEVER = 2**62


class Module(Stateful, ABC):
    """What gradient and communication modules share: a start, and state as tensors in plain dicts.

    Attributes:
        acts_on: "elements" where any block of columns will do, "tensors" where whole layers are needed.
        row_state: name to (rows, ...) tensor; a row belongs to its node and moves with it.
        shared_state: name to tensor that is the same for all nodes.
        counters: names of the attributes that hold plain numbers which change while it runs, such as a count of rounds;
            they are saved with the shared state. A number that changes and is not named here ends a run that is saved.
        name: what its state is kept under; None: the name of its class.
        weighted_means: whether all that it averages are means of the communicator (`op="mean"`), where nodes weigh what
            they have done; without it `balance="batch"` and "steps" are refused.
    """

    acts_on = "elements"
    weighted_means = False
    counters: tuple[str, ...] = ()
    name: str | None = None

    def __init__(self) -> None:
        self.row_state: dict[str, Tensor] = {}
        self.shared_state: dict[str, Tensor] = {}
        self._at_first: dict[str, bool | int | float] | None = None  # plain numbers, when the run began

    def start(self, fleet: Fleet, run: Run) -> None:
        """Make the state for this fleet. Called once, before training."""
        self.run = run

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        """Return the collectives it repeats with P parameters of b bytes on N nodes; without one `advise` refuses it.

        Raises:
            ArgumentError: no formula is known.
        """
        raise ArgumentError(f"no formula is known for {type(self).__name__}: give a Plan of its traffic")

    def couples_every(self, N: int) -> float:
        """Return the steps after which all of the model has been exchanged once."""
        return 1

    # What `fleet.state` asks

    def row(self, row: int) -> Tensors:
        return {name: value[row] for name, value in self.row_state.items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for name, value in self.row_state.items():
            value[row] = tensors[name]

    def shared(self) -> Tensors:
        numbers = self._numbers()
        at_first = self._at_first = numbers if self._at_first is None else self._at_first
        changed = [name for name, value in numbers.items() if name not in at_first or at_first[name] != value]
        if lost := sorted({*changed} - {*self.counters}):
            raise StrategyError(
                f"{type(self).__name__}.{lost[0]} is a plain number that changes while the run goes on, and would be "
                f"lost when it is taken up again: name it in the class, as in counters = ({lost[0]!r},)"
            )
        return self.save_state() | {f"counter.{name}": _as_tensor(numbers[name]) for name in self.counters}

    def load_shared(self, tensors: Tensors) -> None:
        self.load_state({name: x for name, x in tensors.items() if not name.startswith("counter.")})
        for name in self.counters:
            setattr(self, name, tensors[f"counter.{name}"].item())

    def _numbers(self) -> dict[str, bool | int | float]:
        return {name: x for name, x in vars(self).items() if isinstance(x, bool | int | float)}

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        """Put the state of `nodes` in order: they were away, and have just taken parameters before step `step`."""

    def save_state(self) -> dict[str, Tensor]:
        """Return the shared state as named tensors."""
        return self.shared_state

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Put shared state back."""
        for name, value in tensors.items():
            self.shared_state[name].copy_(value)


class GradientModule(Module):
    """Rewrites the gradients of all rows before the inner optimizer, at every step.

    Attributes:
        clip_first: clip each node's own gradient before this module instead of its result.
    """

    clip_first = False
    bucket_bytes: int | None = None  # of gradients that may travel while backward runs, where the wire can

    @abstractmethod
    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        """Rewrite `block.grads` of each block; `step` counts from 1, `lr` is the step's learning rate."""


class CommunicationModule(Module):
    """Mixes rows after the inner step."""

    fresh_inner_state = False

    @abstractmethod
    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which this module must act."""

    @abstractmethod
    def communicate(self, fleet: Fleet, step: int) -> None:
        """Mix rows after inner step number `step` (from 1)."""

    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Rewrite in place the gradients of the node in `row`, at every local step, before they are clipped.

        Override it where a method changes local steps themselves (a proximal term, a control variate); it may read the
        module's own state of the row and nothing of other nodes. `parameters` are the row's, in fleet order; a gradient
        is None where the step gave none. Not together with gradient modules, which act on all rows.
        """

    @property
    def corrects(self) -> bool:
        """Whether `correct` does anything."""
        return type(self).correct is not CommunicationModule.correct

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) inner steps each node takes while the fleet goes from step `first` to `last`; None: all."""
        return None

    def joining(self, nodes: list[int], step: int) -> list[int]:
        """Return those of `nodes`, which come back for step `step`, that take parameters then; all by default."""
        return nodes

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Synchronise what is left at the end; `since` steps passed after the last event."""
        if since:
            self.communicate(fleet, step)

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None where the mean of the rows is the model."""
        return None


class PeriodicModule(CommunicationModule):
    """A communication module that acts after every step divisible by `interval_steps`.

    Attributes:
        interval_steps: H; where `rounds` differ in length, the first one's.
        rounds: where each ends, if H is a function of the round; else None.
    """

    interval_steps = 1
    rounds: Rounds | None = None

    def take_rounds(self, H: RoundLength) -> None:
        """Act after every H steps, or at the end of each round of H(0), H(1), ... steps."""
        rounds = Rounds(H)
        self.interval_steps = rounds.end_after(0)
        self.rounds = None if rounds.are_even else rounds

    def next_event(self, step: int) -> int:
        if self.rounds is not None:
            return self.rounds.end_after(step)
        return (step // self.interval_steps + 1) * self.interval_steps

    def couples_every(self, N: int) -> float:
        return self.interval_steps

    def is_turn(self, step: int) -> bool:
        return self.next_event(step - 1) == step

    def round_of(self, step: int) -> int:
        """Return the round (from 0) in which step number `step` (from 1) is taken."""
        return (step - 1) // self.interval_steps if self.rounds is None else self.rounds.of_step(step)


class CommunicateOptimizeStrategy(Strategy):
    """Any communication modules, any gradient modules, any inner optimizer.

    Args:
        communication_modules: act on the parameters after the inner step, in this order.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: as `Strategy`.
        gradient_modules: act on the gradients before the inner step, in this order.

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

    @checked
    def __init__(
        self,
        inner_optim: Any = "adamw",
        communication_modules: Sequence[CommunicationModule] = (),
        *,
        lr: float | None = None,
        inner_lr: float | None = None,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
        gradient_modules: Sequence[GradientModule] = (),
    ):
        self.inner = Inner(inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps)
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("step", "_init_node", "communicate_gradients", "update_parameters", "rejoin"):
            if name in cls.__dict__:
                raise StrategyError(
                    f"{cls.__name__} overrides {name}() of a strategy that acts on rows, where it is never called: "
                    "subclass Strategy to write for one node, or pass your own CommunicationModule"
                )

    # What the training loop asks

    def start(self, fleet: Fleet, run: Run) -> None:
        self.last_events = [0] * len(self.communication_modules)
        fleet.state.register("strategy", Shared(self._events, self._load_events))
        for name, module in named(self.modules).items():
            module.start(fleet, run)
            fleet.state.register(name, module)
            module.shared()  # what cannot be saved is to be known now
        if self.gradient_modules and self.local_steps(0, 1) is not None:
            raise ArgumentError(
                "gradient modules act on the gradients of all nodes at every step, but a communication module lets "
                "nodes rest (client_fraction, local_steps, local_epochs): use one or the other"
            )
        if self.gradient_modules and self.corrections:
            raise ArgumentError(
                "gradient modules act on the gradients of all nodes at every step, but a communication module corrects "
                "each node's own: use one or the other"
            )

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
        return [*self.gradient_modules, *self.communication_modules]

    @property
    def bucket_bytes(self) -> int | None:
        """Size of the buckets whose sum may begin while backward runs: the first gradient module's, unclipped."""
        first = self.gradient_modules[:1]
        return (
            None if any(module.clip_first for module in self.gradient_modules) or not first else first[0].bucket_bytes
        )

    @property
    def needs_gradients(self) -> bool:  # type: ignore[override]
        return bool(self.gradient_modules)

    @property
    def weighted_means(self) -> bool:  # type: ignore[override]
        return not self.unweighted()

    def unweighted(self) -> list[str]:
        return [type(module).__name__ for module in self.modules if not module.weighted_means]

    def plan(self, P: float, N: int, b: float) -> Plan:
        if self.round_lengths(1):
            raise ArgumentError("H is a function of the round, and a formula needs one number: give it, or a Plan")
        traffic = tuple(t for module in self.modules for t in module.traffic(P, N, b))
        couples = min((module.couples_every(N) for module in self.modules), default=math.inf)
        return Plan(type(self).__name__, traffic, couples)

    def next_event(self, step: int) -> int:
        if self.gradient_modules:
            return step + 1
        return min((module.next_event(step) for module in self.communication_modules), default=NEVER)

    def round_lengths(self, total_steps: int) -> dict[str, list[int]]:
        uneven = {
            f"{m}.{type(module).__name__}": getattr(module, "rounds", None) for m, module in enumerate(self.modules)
        }
        return {name: rounds.lengths(total_steps) for name, rounds in uneven.items() if rounds is not None}

    def is_event(self, step: int) -> bool:
        """Return whether a communication module acts after `step`."""
        return any(module.next_event(step - 1) == step for module in self.communication_modules)

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        plans = [p for m in self.communication_modules if (p := m.local_steps(first, last)) is not None]
        return np.minimum.reduce(plans) if plans else None

    def transform_gradients(self, fleet: Fleet, step: int, lr: float) -> None:
        if not fleet.comm.present:
            return
        clip_first = any(module.clip_first for module in self.gradient_modules)
        if clip_first:
            self._clip(fleet)
        for module in self.gradient_modules:
            module.transform(fleet, step, lr)
        if not clip_first:
            self._clip(fleet)

    def communicate(self, fleet: Fleet, step: int) -> bool:
        """Let the modules whose turn it is act. Returns whether inner states are to start afresh."""
        fresh = False
        if not fleet.comm.present:
            return fresh
        for index, module in enumerate(self.communication_modules):
            if module.next_event(step - 1) == step:
                module.communicate(fleet, step)
                self.last_events[index] = step
                fresh = fresh or module.fresh_inner_state
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
                for rows in module.row_state.values() if forget else ():
                    take_rows(fleet, rows, source, joining)
                module.rejoin(fleet, joining, step)
        return self.needs_gradients or forget

    def finish(self, fleet: Fleet, step: int) -> None:
        if not fleet.comm.present:
            return
        for index, module in enumerate(self.communication_modules):
            module.finish(fleet, step, step - self.last_events[index])
            self.last_events[index] = step

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        for module in reversed(self.communication_modules):
            outer = module.consensus(fleet)
            if outer is not None:
                return outer
        return None

    def _clip(self, fleet: Fleet) -> None:
        if self.inner.max_norm is None:
            return
        grads = []
        for block in fleet.blocks:
            assert block.grads is not None
            grads.append(block.grads[:1] if block.grads.stride(0) == 0 else block.grads)
        clip_rows(grads, self.inner.max_norm, stacked=True)


def named(modules: Sequence[Module]) -> dict[str, Module]:
    """Return modules by their names; a second one of a name is "<name> 2"."""
    found: dict[str, Module] = {}
    for module in modules:
        name = module.name or type(module).__name__
        count = sum(key == name or key.startswith(f"{name} ") for key in found)
        found[f"{name} {count + 1}" if count else name] = module
    return found


def _as_tensor(value: bool | int | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def example_weights(run: Run, weighting: str) -> Tensor | None:
    """Return (N,) weights by data, or None where all are equal (the plain mean, exact)."""
    if weighting == "uniform" or len(set(run.examples.tolist())) == 1:
        return None
    return torch.from_numpy(run.examples.astype(np.float64))
