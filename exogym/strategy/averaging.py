"""How strategies average: `Averaging`, the value of `averaging=` in DDP, DiLoCo, FedAvg and its direct relatives.

`transport` chooses the algorithm of all-reduces; results are bitwise identical. For a payload S and n members:

    ring      each member sends and receives 2(n-1)/n S
    tree      sums go up a binomial tree to the node with the lowest id, and the result comes down. Each member sends
              and receives 2(n-1)/n S on average, the root ceil(log2 n) S and a leaf S
    server    each member sends and receives S; the server sends and receives n S, and is not a member

`exogym.network.costs` gives each algorithm's time on a network. `exogym.contrib` has wrappers that average differently,
by subclasses of `Averaging`: robust rules (`Robust`) and secure aggregation (`Secure`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from exogym.core.communicator import TRANSPORTS, Communicator
from exogym.errors import ArgumentError, check_choice
from exogym.faults import Faults
from exogym.strategy.personal import Chosen, check_personal
from exogym.strategy.privacy import DifferentialPrivacy, check_privacy
from exogym.strategy.traffic import Traffic
from exogym.strategy.updates import Updates


@dataclass(frozen=True)
class Averaging:
    """How a strategy averages: the transport, differential privacy, and personal parameters.

    Args:
        transport: "ring", "tree" or "server". None means the strategy's own choice.
        privacy: a `DifferentialPrivacy`. The history then records the `epsilon` spent.
        personal: the parameters and buffers that each client keeps to itself, while the others are averaged. Pass a
            pattern of names such as "head.*", a list of patterns, or the number of the model's last layers.

    Raises:
        ArgumentError: the transport is unknown, or a value has the wrong type.

    Each strategy accepts some of these options and refuses the others. A subclass is another way of averaging.

    Attributes:
        takes_weights: whether means may weight nodes differently.
        sums_buckets: whether gradients may be summed bucket by bucket during the backward pass.

    >>> from exogym.strategy import DiLoCoStrategy, FedAvgStrategy
    >>> FedAvgStrategy(averaging=Averaging(personal="head.*"))
    FedAvgStrategy(averaging=Averaging(personal='head.*'))
    >>> DiLoCoStrategy(transport="tree")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: DiLoCoStrategy() has no argument 'transport': give averaging=Averaging(transport=...)
    """

    transport: str | None = None
    privacy: DifferentialPrivacy | None = None
    personal: Chosen | None = None

    takes_weights: ClassVar[bool] = True
    sums_buckets: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        if self.privacy is not None:
            check_privacy(self.privacy)
        if self.personal is not None:
            check_personal(self.personal)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}

    def features(self) -> dict[str, str]:
        """Return a dict that maps the features of these averages (names in `exogym.core.refusals`) to texts.

        The strategy's module reports `privacy` and `personal` itself.
        """
        sums = self.transport in ("ring", "tree")
        return {'transport="ring" or "tree"': f"transport={self.transport!r}"} if sums else {}

    def check_members(self, name: str, traffic: list[Traffic], N: int) -> None:
        """Raise ArgumentError if strategy `name` with the collectives `traffic` averages over too few of N nodes."""

    def traffic(self, given: list[Traffic], N: int, b: float) -> list[Traffic]:
        """Return the collectives that replace `given` under these options, for N nodes and b bytes per element."""
        return [replace(t, algorithm=self.transport or t.algorithm) if t.kind == "all_reduce" else t for t in given]

    def updates(self, faults: Faults | None, on_parameters: bool) -> Updates | None:
        """Return the module that changes nodes' updates before they are sent, or None if nothing changes them.

        Args:
            faults: the faults whose bad nodes send wrong updates, or None without bad nodes.
            on_parameters: whether nodes send parameters, not only gradients.
        """
        return None if faults is None else Updates(faults, on_parameters)

    def bind(self, comm: Communicator, weighs: bool, seed: int = 0) -> None:
        """Apply these options to the communicator `comm`.

        `weighs` is True if means have weights; `seed` is the run's seed.
        """
        comm.transport = self.transport


def averaging_of(given: Averaging | None) -> Averaging:
    """Return a strategy's argument `averaging`; None means no options.

    Raises:
        ArgumentError: `given` is something else.
    """
    if not isinstance(given, Averaging | None):
        raise ArgumentError(f"averaging={given!r} must be an Averaging, such as Averaging(transport='tree')")
    return given or Averaging()


FLAT = {name: f"give averaging=Averaging({name}=...)" for name in ("transport", "privacy", "personal")}


def spread(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's given arguments, with the options of its `Averaging` among them, as in a text.

    >>> spread({"H": 5, "averaging": Averaging(transport="tree")})
    {'H': 5, 'transport': 'tree'}
    """
    averaging = given.get("averaging")
    if not isinstance(averaging, Averaging):
        return dict(given)
    return {name: value for name, value in given.items() if name != "averaging"} | averaging.given()
