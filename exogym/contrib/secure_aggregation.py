"""Secure aggregation: a wrapper of one strategy whose server learns means, but no node's values.

    Secure(FedAvgStrategy(H=5))

`exogym.contrib.secure_sums` describes the protocol and its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from exogym.contrib.robust import wrapped
from exogym.contrib.secure_sums import SecureAggregation
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.strategy.averaging import Averaging
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.traffic import Traffic


def Secure(
    strategy: CommunicateOptimizeStrategy, settings: SecureAggregation | None = None
) -> CommunicateOptimizeStrategy:
    """Return the strategy, with means that a server computes without seeing any node's values.

    Args:
        strategy: a strategy of modules.
        settings: how integers represent values; None means `SecureAggregation()`.

    Raises:
        ArgumentError: `settings` is something else, or the strategy does not send sums only.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> Secure(DiLoCoStrategy(H=5)).averaging
    SecureAveraging(secure_aggregation=True)
    """
    return wrapped(strategy, SecureAveraging, secure_aggregation=True if settings is None else settings)


@dataclass(frozen=True, repr=False)
class SecureAveraging(Averaging):
    """The averages of `Secure`.

    Args:
        secure_aggregation: True, or a `SecureAggregation` with your arguments.
    """

    secure_aggregation: bool | SecureAggregation = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure_aggregation is not True and not isinstance(self.secure_aggregation, SecureAggregation):
            raise ArgumentError(f"settings={self.secure_aggregation!r} must be a SecureAggregation, or None")

    @property
    def secure(self) -> SecureAggregation:
        """The settings of secure aggregation."""
        given = self.secure_aggregation
        return given if isinstance(given, SecureAggregation) else SecureAggregation()

    @property
    def sums_buckets(self) -> bool:  # type: ignore[override]
        return False

    def features(self) -> dict[str, str]:
        return super().features() | {"secure_aggregation": f"secure_aggregation={self.secure_aggregation!r}"}

    def traffic(self, given: list[Traffic], N: int, b: float) -> list[Traffic]:
        return [
            Traffic(kind, size, t.every_steps, t.members, "server")
            for t in given
            for kind, size in self.secure.sent(t.payload_bytes / b, t.payload_bytes, t.members or N)
        ]

    def bind(self, comm: Communicator, weighs: bool, seed: int = 0) -> None:
        super().bind(comm, weighs, seed)
        comm.secure = replace(self.secure, seed=seed)
