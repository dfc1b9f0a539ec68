"""State: what belongs to a node's row, and what is equal for all nodes, registered once under a name.

Whoever keeps something through training registers it with `fleet.state`. A checkpoint, resuming, the return of a node
that was away and recovery without hosts are loops over what is registered, and know none of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from exogym.core.fleet.layout import Cut
from exogym.errors import StrategyError

Tensors = dict[str, Tensor]


class Stateful:
    """A part of a run that keeps something; a subclass overrides what it has. Names are its own, without its name."""

    def row(self, row: int) -> Tensors:
        """Return what the node of `row` here owns: tensors of any shape, as they are (not copied)."""
        return {}

    def load_row(self, row: int, tensors: Tensors) -> None:
        """Put back what `row` returned, here or in another process."""

    def shared(self) -> Tensors:
        """Return what is equal for all nodes."""
        return {}

    def load_shared(self, tensors: Tensors) -> None:
        """Put back what `shared` returned; called after the rows have been loaded."""

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return what of the tensor `name` is in this process, where nodes are several; None: all of it.

        Args:
            shape: of the whole, or of what is here.

        Raises:
            KeyError: nothing of it is here.
        """
        return None

    def figures(self) -> dict[str, float]:
        """Return numbers that are to stand in the history at an evaluation, the same in every process."""
        return {}


class Shared(Stateful):
    """Something without rows, by its two functions."""

    def __init__(self, save: Callable[[], Tensors], load: Callable[[Tensors], None]):
        self.shared, self.load_shared = save, load  # type: ignore[assignment, method-assign]


class State:
    """The parts of a run that keep something, by name, in the order in which they were registered.

    >>> import torch
    >>> class Momentum(Stateful):
    ...     def __init__(self, rows):
    ...         self.values = torch.zeros(rows, 3)
    ...     def row(self, row):
    ...         return {"values": self.values[row]}
    ...     def load_row(self, row, tensors):
    ...         self.values[row] = tensors["values"]
    >>> state, momentum = State(), Momentum(rows=2)
    >>> state.register("momentum", momentum)
    >>> state.load_row(1, {"momentum.values": torch.ones(3)})
    >>> state.row(1)
    {'momentum.values': tensor([1., 1., 1.])}
    """

    def __init__(self) -> None:
        self.parts: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Keep `part` under `name` from now on.

        Raises:
            StrategyError: the name is taken, or has a dot in it, which parts names from their tensors.
        """
        if name in self.parts or "." in name:
            raise StrategyError(
                f"{type(part).__name__} wants to keep its state as {name!r}, "
                + ("which has a dot in it" if "." in name else f"as {type(self.parts[name]).__name__} does already")
                + ": give it another name"
            )
        self.parts[name] = part

    def row(self, row: int, names: Iterable[str] | None = None) -> Tensors:
        """Return what the node of `row` owns in all parts, or in those of `names`, as "<part>.<tensor>"."""
        chosen = self.parts if names is None else names
        return {f"{name}.{key}": x for name in chosen for key, x in self.parts[name].row(row).items()}

    def load_row(self, row: int, tensors: Tensors, names: Iterable[str] | None = None) -> None:
        """Put back what `row` returned for the same names."""
        for name in self.parts if names is None else names:
            self.parts[name].load_row(row, below(f"{name}.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return what of a tensor, named as "<part>.<tensor>", is in this process (see `Stateful.cut`)."""
        part, _, rest = name.partition(".")
        return self.parts[part].cut(rest, shape)

    def shared(self) -> Tensors:
        """Return what is equal for all nodes in all parts."""
        return {f"{name}.{key}": x for name, part in self.parts.items() for key, x in part.shared().items()}

    def figures(self) -> dict[str, float]:
        """Return what all parts want to stand in the history."""
        return {name: x for part in self.parts.values() for name, x in part.figures().items()}

    def load_shared(self, tensors: Tensors) -> None:
        """Put back what `shared` returned."""
        for name, part in self.parts.items():
            part.load_shared(below(f"{name}.", tensors))


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with `prefix`, without it.

    >>> sorted(below("a.", {"a.x": None, "a.y": None, "b.x": None}))
    ['x', 'y']
    """
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
