"""State: everything that a checkpoint saves, registered under names.

Some state belongs to single nodes, and some to all nodes together.

Every object whose values last from step to step registers itself with `fleet.state`. Checkpoints, resuming, returning
nodes and recovery from lost hosts loop over the registered objects, and know nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from exogym.core.fleet.cuts import Cut
from exogym.errors import StrategyError

Tensors = dict[str, Tensor]


class Stateful:
    """An object whose values checkpoints must save. Override the methods that the object needs.

    The names of the tensors need to be unique only within the object.
    """

    def row(self, row: int) -> Tensors:
        """Return the state of the node in this process's row `row`, as tensors of any shape. These are not copies."""
        return {}

    def load_row(self, row: int, tensors: Tensors) -> None:
        """Set the state of the node in this process's row `row` to `tensors`, which `row` returned in any process."""

    def shared(self) -> Tensors:
        """Return the state that is equal for all nodes."""
        return {}

    def load_shared(self, tensors: Tensors) -> None:
        """Set the state that is equal for all nodes to `tensors`, which `shared` returned.

        A run calls this method after it has loaded all rows.
        """

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return the `Cut` that gives this process its part of the tensor `name`, if a node has several processes.

        Return None if every process has the whole tensor.

        Args:
            shape: the shape of the whole tensor, or of this process's part.

        Raises:
            KeyError: this process has no part of the tensor.
        """
        return None

    def figures(self) -> dict[str, float]:
        """Return {name: number} to add to the history at an evaluation. All processes must return the same numbers."""
        return {}


class Shared(Stateful):
    """Save state that is equal for all nodes, with a function that returns the state and a function that loads it."""

    def __init__(self, save: Callable[[], Tensors], load: Callable[[Tensors], None]):
        self.shared, self.load_shared = save, load  # type: ignore[assignment, method-assign]


class State:
    """Hold a run's registered objects by name, in the order of registration, and return or set their state.

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
        """Register the object `part`. From now on its state is saved under `name`.

        Raises:
            StrategyError: another object has this name, or the name contains a dot. A dot separates an object's name
                from a tensor's name.
        """
        if name in self.parts or "." in name:
            raise StrategyError(
                f"{type(part).__name__} registers its state as {name!r}, "
                + (
                    "but a dot is not allowed"
                    if "." in name
                    else f"but {type(self.parts[name]).__name__} has this name"
                )
                + ": use another name"
            )
        self.parts[name] = part

    def row(self, row: int, names: Iterable[str] | None = None) -> Tensors:
        """Return the state of the node in `row` from all registered objects, or from the objects `names`.

        A tensor's name is "<object>.<tensor>".
        """
        chosen = self.parts if names is None else names
        return {f"{name}.{key}": x for name in chosen for key, x in self.parts[name].row(row).items()}

    def load_row(self, row: int, tensors: Tensors, names: Iterable[str] | None = None) -> None:
        """Set the state of the node in `row` to `tensors`, which `row` returned for the same `names`."""
        for name in self.parts if names is None else names:
            self.parts[name].load_row(row, below(f"{name}.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return the `Cut` of the tensor "<object>.<tensor>" in this process (see `Stateful.cut`)."""
        part, _, rest = name.partition(".")
        return self.parts[part].cut(rest, shape)

    def shared(self) -> Tensors:
        """Return the state that is equal for all nodes. A tensor's name is "<object>.<tensor>"."""
        return {f"{name}.{key}": x for name, part in self.parts.items() for key, x in part.shared().items()}

    def figures(self) -> dict[str, float]:
        """Return the numbers of all registered objects for the history (see `Stateful.figures`)."""
        return {name: x for part in self.parts.values() for name, x in part.figures().items()}

    def load_shared(self, tensors: Tensors) -> None:
        """Set the state that is equal for all nodes to `tensors`, which `shared` returned."""
        for name, part in self.parts.items():
            part.load_shared(below(f"{name}.", tensors))


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors whose names begin with `prefix`. The returned names do not have the prefix.

    >>> sorted(below("a.", {"a.x": None, "a.y": None, "b.x": None}))
    ['x', 'y']
    """
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
