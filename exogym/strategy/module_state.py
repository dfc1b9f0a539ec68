"""What a module keeps: tensors in two dicts, and numbers by their names. So checkpoints need no code of the module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.fleet import Stateful
from exogym.core.fleet.layout import Cut, Layout, cut_of
from exogym.core.fleet.state import Tensors
from exogym.errors import StrategyError


class Kept(Stateful):
    """The state of a module, as `fleet.state` asks for it. A module that keeps more overrides the methods.

    Attributes:
        row_state: name to (rows, ...) tensor; a row belongs to its node and moves with it.
        shared_state: name to tensor that is the same for all nodes.
        counters: names of the attributes that hold plain numbers which change while it runs, such as a count of rounds;
            they are saved with the shared state. A number that changes and is not named here ends a run that is saved.
        layouts: of the blocks here, once it has started.
    """

    acts_on = "elements"
    counters: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.row_state: dict[str, Tensor] = {}
        self.shared_state: dict[str, Tensor] = {}
        self._at_first: dict[str, bool | int | float] | None = None  # plain numbers, when the run began
        self.layouts: list[Layout] = []

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """A tensor whose name ends in the number of a block, and whose last axis is of its columns, is cut by them."""
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

    def save_state(self) -> dict[str, Tensor]:
        """Return the shared state as named tensors."""
        return self.shared_state

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Put shared state back."""
        for name, value in tensors.items():
            self.shared_state[name].copy_(value)


def _as_tensor(value: bool | int | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
