"""State: everything that belongs to a node's row or is equal for all nodes, registered once under a name.

Every object that keeps something through training registers it with `fleet.state`. Checkpoints, resuming, returning
nodes and recovery without hosts loop over the registered parts, and know nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from exogym.core.fleet.layout import Cut
from exogym.errors import StrategyError

Tensors = dict[str, Tensor]


class Stateful:
    """Something that checkpoints must save. Override the methods it needs. Tensor names are local to it."""

    def row(self, row: int) -> Tensors:
        """Return the state of the node in local row `row`: tensors of any shape, not copied."""
        return {}

    def load_row(self, row: int, tensors: Tensors) -> None:
        """Put back what `row` returned, here or in another process."""

    def shared(self) -> Tensors:
        """Return the state that is equal for all nodes."""
        return {}

    def load_shared(self, tensors: Tensors) -> None:
        """Put back what `shared` returned; called after the rows are loaded."""

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return this process's part of the tensor `name`, if nodes have several processes; None: all of it.

        Args:
            shape: of the whole tensor, or of the local part.

        Raises:
            KeyError: no part of it is here.
        """
        return None

    def figures(self) -> dict[str, float]:
        """Return figures for the history at an evaluation, the same in every process."""
        return {}


class Shared(Stateful):
    """Wraps shared state given by two functions, without rows."""

    def __init__(self, save: Callable[[], Tensors], load: Callable[[Tensors], None]):
        self.shared, self.load_shared = save, load  # type: ignore[assignment, method-assign]


class State:
    """The registered parts of a run, by name, in the order of registration.

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
        """Save `part` under `name` from now on.

        Raises:
            StrategyError: the name is taken, or contains a dot, which separates part names from tensor names.
        """
        if name in self.parts or "." in name:
            raise StrategyError(
                f"{type(part).__name__} wants to keep its state as {name!r}, "
                + ("which has a dot in it" if "." in name else f"as {type(self.parts[name]).__name__} does already")
                + ": give it another name"
            )
        self.parts[name] = part

    def row(self, row: int, names: Iterable[str] | None = None) -> Tensors:
        """Return the state of the node in `row` from all parts, or from the parts `names`, as "<part>.<tensor>"."""
        chosen = self.parts if names is None else names
        return {f"{name}.{key}": x for name in chosen for key, x in self.parts[name].row(row).items()}

    def load_row(self, row: int, tensors: Tensors, names: Iterable[str] | None = None) -> None:
        """Put back what `row` returned for the same names."""
        for name in self.parts if names is None else names:
            self.parts[name].load_row(row, below(f"{name}.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return this process's part of a tensor, named "<part>.<tensor>" (see `Stateful.cut`)."""
        part, _, rest = name.partition(".")
        return self.parts[part].cut(rest, shape)

    def shared(self) -> Tensors:
        """Return the state that is equal for all nodes, of all parts."""
        return {f"{name}.{key}": x for name, part in self.parts.items() for key, x in part.shared().items()}

    def figures(self) -> dict[str, float]:
        """Return the figures of all parts for the history."""
        return {name: x for part in self.parts.values() for name, x in part.figures().items()}

    def load_shared(self, tensors: Tensors) -> None:
        """Put back what `shared` returned."""
        for name, part in self.parts.items():
            part.load_shared(below(f"{name}.", tensors))


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with `prefix`, under their names without it.

    >>> sorted(below("a.", {"a.x": None, "a.y": None, "b.x": None}))
    ['x', 'y']
    """
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
