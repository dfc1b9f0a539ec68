"""Modules: the building blocks of a strategy, which act on the fleet and its communicator.

A gradient module implements `transform`, which rewrites the gradients of all rows before the inner optimizer. A
communication module implements `next_event` and `communicate`, which mixes the rows after the inner optimizer. Every
tensor is (rows, ...).

All other methods have defaults: `start` creates state, `rejoin` repairs a returning node's state, `finish` ends a run,
`consensus` gives the evaluation model, and `traffic`, `couples_every` and `features` describe the module.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.cuts import Cut, cut_of
from exogym.core.fleet.layout import Layout
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, StrategyError, check_count
from exogym.strategy.capabilities import check_declared
from exogym.strategy.rounds import RoundLength, Rounds
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class Module(Stateful, ABC):
    """Base class of gradient and communication modules, whose state checkpoints save automatically.

    A module's state is the tensors in `row_state` and `shared_state` and the numbers that `counters` names. For any
    other state, override `row`, `load_row`, `save_state` and `load_state`.

    Attributes:
        acts_on: what the module must see at once if several processes share a node's row: "elements" (any columns),
            "tensors" (whole parameters) or "row" (the whole row). Your own module must set it for such runs.
        row_state: (rows, ...) tensors by name. Each row belongs to a node and moves with it.
        shared_state: tensors by name, the same for all nodes.
        counters: names of the plain numbers that change during a run, such as a count of rounds; checkpoints save them.
            Saving fails if another plain number of the module has changed.
        layouts: the layouts of this process's blocks; `start` sets them.
        name: the name of the module's state in checkpoints. None means the class name.
        weighted_means: whether the module averages only by the communicator's means (`op="mean"`), which weight nodes
            by their work. If False, balance="batch" and balance="steps" are refused.
        right_in_mean: whether only the mean of the nodes' messages is meaningful, not each message: sparse entries,
            stochastically rounded values, values sent in part (error feedback), or pieces of a mean (shards, factors).
            No robust rule can replace such a mean: the median of sparse entries, for example, is zero.
        needs_length: whether the module's equation reads `run.total_steps`, which `exogym.attach` then requires.
    """

    acts_on = "elements"
    counters: tuple[str, ...] = ()
    weighted_means = right_in_mean = needs_length = False
    name: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls)

    def __init__(self) -> None:
        self.row_state: dict[str, Tensor] = {}
        self.shared_state: dict[str, Tensor] = {}
        self._at_first: dict[str, bool | int | float] = {}  # the plain numbers when the run began
        self.layouts: list[Layout] = []

    def start(self, fleet: Fleet, run: Run) -> None:
        """Create the module's state for `fleet`. Called once before training."""
        self.run = run
        self.layouts = [block.layout for block in fleet.blocks]

    # How it describes itself

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        """Return the collectives that this module repeats, for P parameters of b bytes on N nodes.

        `advise` refuses a module that does not override this method.

        Raises:
            ArgumentError: no formula is known.
        """
        raise ArgumentError(f"no formula is known for {type(self).__name__}: pass a Plan with its traffic")

    def couples_every(self, N: int) -> float:
        """Return the number of steps until N nodes have exchanged the whole model once."""
        return 1

    def features(self) -> dict[str, str]:
        """Return further features of this module, which ExoGym uses to check whether options can be combined.

        The dict maps names in `exogym.core.refusals` to texts for messages.
        """
        return {}

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        """Repair this module's state of `nodes`, which have returned and received the parameters for step `step`."""

    # State, for `fleet.state`

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return how a node's processes divide the state tensor `name`, or None if each process has all of it.

        If `name` ends in a block's number, the tensor is divided like this block's columns.
        """
        b = name.rpartition(".")[2]
        if b.isdigit() and int(b) < len(self.layouts) and shape:
            layout = self.layouts[int(b)]
            if shape[-1] in (layout.numel, layout.total):
                return cut_of(layout)
        if self.acts_on == "elements" or name.startswith("counter."):
            return None
        if name not in self.row_state.keys() | self.shared_state.keys():
            raise KeyError(name)
        return Cut(tuple(shape), tuple(shape), torch.arange(math.prod(shape)))

    def row(self, row: int) -> Tensors:
        return {name: value[row] for name, value in self.row_state.items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for name, value in self.row_state.items():
            value[row] = tensors[name]

    def shared(self) -> Tensors:
        numbers, at_first = self._numbers(), self._at_first
        changed = [name for name, value in numbers.items() if name not in at_first or at_first[name] != value]
        if lost := sorted({*changed} - {*self.counters}):
            raise StrategyError(
                f"{type(self).__name__}.{lost[0]} is a plain number that changes during the run, so a resumed run "
                f"would lose it: name it in the class, as in counters = ({lost[0]!r},)"
            )
        return self.save_state() | {f"counter.{name}": _as_tensor(numbers[name]) for name in self.counters}

    def load_shared(self, tensors: Tensors) -> None:
        self.load_state({name: x for name, x in tensors.items() if not name.startswith("counter.")})
        for name in self.counters:
            setattr(self, name, tensors[f"counter.{name}"].item())

    def note_numbers(self) -> None:
        """Record the plain numbers after `start`, so that `shared` can find the numbers that change."""
        self._at_first = self._numbers()

    def _numbers(self) -> dict[str, bool | int | float]:
        return {name: x for name, x in vars(self).items() if isinstance(x, bool | int | float)}

    def save_state(self) -> dict[str, Tensor]:
        """Return the shared state as named tensors."""
        return self.shared_state

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore the shared state from `tensors`."""
        for name, value in tensors.items():
            self.shared_state[name].copy_(value)


class GradientModule(Module):
    """Base class of modules that rewrite the gradients of all rows at every step before the inner optimizer.

    Attributes:
        clip_first: whether clipping acts on each node's own gradient before the module acts, not on the module's
            result.
    """

    clip_first = False
    bucket_bytes: int | None = None  # bytes of gradients that may travel during backward, if the wire supports it

    @abstractmethod
    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        """Rewrite `block.grads` of each block in `fleet`. `step` counts from 1; `lr` is the step's learning rate."""


class CommunicationModule(Module):
    """Base class of modules that mix rows after the inner step: `next_event` gives the step, `communicate` mixes.

    A module that corrects gradients, sees losses or chooses clients also inherits `Corrects`, `SeesLosses` or
    `ChoosesClients` (`exogym.strategy.capabilities`).

    Attributes:
        fresh_inner_state: whether inner optimizers start afresh after this module has acted.
    """

    fresh_inner_state = False

    @abstractmethod
    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which this module must act."""

    @abstractmethod
    def communicate(self, fleet: Fleet, step: int) -> None:
        """Mix rows after inner step number `step` (from 1)."""

    def sends_parameters(self, step: int) -> bool:
        """Return whether nodes send parameters when this module acts after `step`.

        If False, norm caps and bad nodes change nothing at that step.
        """
        return True

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Synchronize the last steps at the end of training: the `since` steps after this module last acted."""
        if since:
            self.communicate(fleet, step)

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        """Return the outer parameters, (P,) per block, or None if the evaluation model is the mean of the rows."""
        return None


class PeriodicModule(CommunicationModule):
    """A communication module that acts after every step divisible by `interval_steps`.

    Attributes:
        interval_steps: H, the steps of a round (of the first one, if rounds differ in length).
        rounds: the rounds, if H is a function of the round; otherwise None.
    """

    interval_steps = 1
    rounds: Rounds | None = None

    def take_rounds(self, H: RoundLength) -> None:
        """Set when this module acts: after every H steps, or after rounds of H(0), H(1), ... steps.

        `H` can also be a `Rounds` object.
        """
        if callable(H) or isinstance(H, Rounds):
            self.rounds = H if isinstance(H, Rounds) else Rounds(H)
            self.interval_steps = self.rounds.end_after(0)
        else:
            check_count("H", H)
            self.interval_steps = H

    def features(self) -> dict[str, str]:
        uneven = f"H={getattr(self.rounds, 'H', 'a function')!r}, in rounds of different lengths"
        return {} if self.rounds is None else {"rounds of different lengths": uneven}

    def next_event(self, step: int) -> int:
        if self.rounds is not None:
            return self.rounds.end_after(step)
        return (step // self.interval_steps + 1) * self.interval_steps

    def couples_every(self, N: int) -> float:
        return self.interval_steps

    def is_turn(self, step: int) -> bool:
        return self.next_event(step - 1) == step

    def round_of(self, step: int) -> int:
        """Return the round (from 0) that contains step number `step` (from 1)."""
        return (step - 1) // self.interval_steps if self.rounds is None else self.rounds.of_step(step)

    def end_of(self, round_: int) -> int:
        """Return the step (from 1) that ends round `round_` (from 0)."""
        return (round_ + 1) * self.interval_steps if self.rounds is None else sum(self.rounds.first(round_ + 1))


def _as_tensor(value: bool | int | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def named(modules: Sequence[Module]) -> dict[str, Module]:
    """Return the modules by name. The second module with the same name is called "<name> 2"."""
    found: dict[str, Module] = {}
    for module in modules:
        name = module.name or type(module).__name__
        count = sum(key == name or key.startswith(f"{name} ") for key in found)
        found[f"{name} {count + 1}" if count else name] = module
    return found


def views(matrices: Sequence[Tensor], layouts: Sequence[Layout], row: int) -> list[Tensor]:
    """Return the parameters in row `row` of `matrices`, (rows, P) per block, each in its own shape."""
    return [slot.of(x[row]) for x, layout in zip(matrices, layouts, strict=True) for slot in layout]


def known_traffic(modules: Sequence[Module], N: int) -> list[Traffic]:
    """Return the modules' traffic for a million parameters on N nodes, or [] if a formula is unknown."""
    try:
        return [t for module in modules for t in module.traffic(1e6, N, 4)]
    except ArgumentError:
        return []


def example_weights(run: Run, weighting: str) -> Tensor | None:
    """Return the nodes' numbers of examples, (N,), as weights of a mean.

    Return None for the plain mean: if `weighting` is "uniform", or all nodes have equally many examples.

    >>> import numpy as np
    >>> run = Run(num_nodes=2, seed=0, total_steps=10, examples=np.array([30, 10]), batch_size=8)
    >>> example_weights(run, "examples").tolist(), example_weights(run, "uniform")
    ([30.0, 10.0], None)
    """
    if weighting == "uniform" or len(set(run.examples.tolist())) == 1:
        return None
    return torch.from_numpy(run.examples.astype(np.float64))
