"""Data sets that a factory makes, one per node, when a run first needs them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from exogym.data.bulk import Take, bulk_take
from exogym.errors import DataError, ExoGymError


class Made(Sequence[Any]):
    """Make each node's data set with `factory` on first use, and keep the last `kept` used in memory.

    Args:
        check: function of a data set and a description of its origin that returns the data set or raises DataError.
        kept: number of data sets to keep. Default: all.

    >>> made = Made(lambda rank, n, is_train: [rank] * (rank + 1), 1000, True, lambda made, origin: made, kept=2)
    >>> made[5], len(made), made.takes(5)
    ([5, 5, 5, 5, 5, 5], 1000, None)
    """

    def __init__(
        self, factory: Any, num_nodes: int, is_train: bool, check: Callable[[Any, str], Any], kept: int | None = None
    ):
        self.factory, self.num_nodes, self.is_train, self.check, self.kept = factory, num_nodes, is_train, check, kept
        self._here: OrderedDict[int, tuple[Any, Take | None]] = OrderedDict()
        self._by_name: bool | None = None  # whether to pass the third argument by name; the first call finds out

    def __len__(self) -> int:
        return self.num_nodes

    def __getitem__(self, node: Any) -> Any:
        return self._entry(node)[0]

    def takes(self, node: int) -> Take | None:
        """Return a function that reads many of the node's examples at once, or None if there is none."""
        return self._entry(node)[1]

    def _entry(self, node: int) -> tuple[Any, Take | None]:
        if not 0 <= node < self.num_nodes:
            raise IndexError(node)
        if node in self._here:
            self._here.move_to_end(node)
            return self._here[node]
        origin = f"the factory's data set for node {node}"
        made = self.check(self._call(node), origin)
        self._here[node] = made, None if made is None else bulk_take(made)
        while self.kept is not None and len(self._here) > self.kept:
            self._here.popitem(last=False)
        return self._here[node]

    def _call(self, node: int) -> Any:
        """Call the factory for one node.

        Raises:
            DataError: the factory does not accept a factory's arguments, or failed for this node.
        """
        name = getattr(self.factory, "__name__", type(self.factory).__name__)
        if self._by_name is None:
            self._by_name = self._goes_by_name(name)
        try:
            if self._by_name:
                return self.factory(node, self.num_nodes, train_dataset=self.is_train)
            return self.factory(node, self.num_nodes, self.is_train)
        except ExoGymError:
            raise
        except Exception as error:
            error.add_note(
                f"in the data set factory {name}, called for node {node} of {self.num_nodes:,}: try "
                f"{name}{(node, self.num_nodes, self.is_train)} alone"
            )
            raise

    def _goes_by_name(self, name: str) -> bool:
        """Return whether the factory's third argument is named `train_dataset`; raise DataError for other arguments."""
        try:
            signature = inspect.signature(self.factory)
        except (TypeError, ValueError):  # a builtin
            return False
        by_name = "train_dataset" in signature.parameters
        try:
            _ = signature.bind(0, 1, train_dataset=True) if by_name else signature.bind(0, 1, True)
        except TypeError as error:
            raise DataError(
                f"{name}{signature} cannot be called as a data set factory ({error}): expected "
                "(rank, num_nodes, is_train) or (rank, num_nodes, train_dataset)"
            ) from None
        return by_name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": OrderedDict()}
