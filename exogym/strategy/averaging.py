"""Averaging options. Every strategy that averages accepts these options, and needs no code for them.

`transport` chooses the algorithm of all-reduces. All algorithms give the same bits. With payload S and n members:

    ring      each member sends and receives 2(n-1)/n S
    tree      sums go up a binomial tree to the node with the lowest id, and the result goes down. Each member sends
              and receives 2(n-1)/n S on average; the root ceil(log2 n) S, a leaf S
    server    each member sends and receives S; the server sends and receives n S, and is not a member

`exogym.network.costs` gives each algorithm's time on a network.

`robust` replaces the mean by a rule whose result a few bad nodes can change only little. The rules and their bytes are
described in `exogym.core.communicator.robust`, and `NormCap` in `exogym.strategy.updates`. With `secure_aggregation` a
server learns means but no node's values: see `exogym.core.communicator.secure`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from exogym.core.combinations import check
from exogym.core.communicator import RULES, TRANSPORTS, Communicator, Rule, SecureAggregation, rule_of
from exogym.errors import ArgumentError, check_choice, checked, without_aliases
from exogym.strategy.options import defined, parameters_of, signature_of
from exogym.strategy.strategy import InnerOptions
from exogym.strategy.traffic import Traffic
from exogym.strategy.tuning import Tuner, begun, tuner_of

NORM_BYTES = 8


@dataclass(frozen=True)
class NormCap:
    """Scale down updates whose 2-norm is over a cap, then take the mean.

    Args:
        norm: the cap. If None, the cap is the median of the norms of all sent updates (for an even number, the lower
            middle value). To find the median, nodes exchange their norms by an all-gather with a payload of 8 bytes.

    Raises:
        ArgumentError: `norm` is not a number over 0.
    """

    norm: float | None = None

    def __post_init__(self) -> None:
        given = self.norm
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
            raise ArgumentError(f"NormCap(norm={given!r}) wants a number over 0, or None for the median norm")


@dataclass(frozen=True)
class Averaging:
    """A strategy's averaging options: transport, robust rule and secure aggregation.

    Args:
        transport: "ring", "tree" or "server". None means the strategy's own choice.
        robust: "median", "trimmed_mean", "krum", "bulyan", "geometric_median", "centered_clip", "norm_cap", or a
            `Median`, `TrimmedMean`, `Krum`, `Bulyan`, `GeometricMedian`, `CenteredClip` or `NormCap` with your
            arguments. None means the mean.
        secure_aggregation: True, or a `SecureAggregation` with your arguments.

    Raises:
        ArgumentError: a name is unknown, or two options contradict each other.
    """

    transport: str | None = None
    robust: str | Rule | NormCap | None = None
    secure_aggregation: bool | SecureAggregation = False

    def __post_init__(self) -> None:
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        if isinstance(self.robust, str):
            check_choice("robust", self.robust, [*RULES, "norm_cap"])
        elif not isinstance(self.robust, Rule | NormCap | None):
            raise ArgumentError(f"robust={self.robust!r} must be a name, such as 'median', or a rule, such as Krum()")
        if not isinstance(self.secure_aggregation, bool | SecureAggregation):
            raise ArgumentError(
                f"secure_aggregation={self.secure_aggregation!r} must be True, False or a SecureAggregation"
            )
        check(self.features())

    @property
    def rule(self) -> Rule | None:
        """The robust rule that replaces the mean, or None if nodes take means."""
        return None if self.robust in (None, "norm_cap") or isinstance(self.robust, NormCap) else rule_of(self.robust)

    @property
    def secure(self) -> SecureAggregation | None:
        """The settings of secure aggregation, or None if secure aggregation is off."""
        given = self.secure_aggregation
        return SecureAggregation() if given is True else given or None

    @property
    def cap(self) -> NormCap | None:
        """The cap on the norms of updates, or None if updates have no cap."""
        return NormCap() if self.robust == "norm_cap" else self.robust if isinstance(self.robust, NormCap) else None

    def features(self) -> dict[str, str]:
        """Return the options that are set: a dict from names in `exogym.core.combinations.FEATURES` to texts."""
        found = {}
        if self.robust is not None:
            found['robust="norm_cap"' if self.rule is None else "robust"] = f"robust={self.robust!r}"
        if self.secure is not None:
            found["secure_aggregation"] = f"secure_aggregation={self.secure_aggregation!r}"
        if self.transport is not None:
            found["transport"] = f"transport={self.transport!r}"
        if self.transport in ("ring", "tree"):
            found['transport="ring" or "tree"'] = f"transport={self.transport!r}"
        return found

    def check_members(self, name: str, traffic: Iterable[Traffic], N: int) -> None:
        """Raise ArgumentError if the robust rule needs more nodes to tolerate a bad node.

        `traffic` gives the number of the N nodes over which strategy `name` averages.
        """
        if (rule := self.rule) is None:
            return
        for n in sorted({N, *(t.members for t in traffic if t.members)}):
            if 1 < n < rule.least:
                instead = [given for given, kind in RULES.items() if kind.least <= n]
                raise ArgumentError(
                    f"robust={self.robust!r} needs {rule.least} nodes to tolerate a bad one, but {name} averages only "
                    f"{n}: average over {rule.least} nodes, or "
                    + (f"use {' or '.join(map(repr, instead))}" if instead else "leave robust out")
                )

    def traffic(self, given: list[Traffic], N: int, b: float) -> list[Traffic]:
        """Return the collectives that N nodes use instead of `given` under these options, at b bytes per element."""
        if self.secure is not None:
            return [
                Traffic(kind, size, t.every_steps, t.members, "server")
                for t in given
                for kind, size in self.secure.sent(t.payload_bytes / b, t.payload_bytes, t.members or N)
            ]
        sent = [self._way(t) if t.kind == "all_reduce" else t for t in given]
        if self.cap is not None and self.cap.norm is None and sent:
            sent.append(Traffic("all_gather", NORM_BYTES, min(t.every_steps for t in given)))
        return sent

    def _way(self, t: Traffic) -> Traffic:
        algorithm = self.transport or t.algorithm
        if self.rule is not None and algorithm != "server":
            kind, algorithm = self.rule.collective
            return replace(t, kind=kind, algorithm=algorithm)
        return replace(t, algorithm=algorithm)

    def bind(self, comm: Communicator, weighs: bool, seed: int = 0) -> None:
        """Make the communicator `comm` average by these options.

        `weighs` says whether means have weights, and `seed` is the run's seed.

        Raises:
            ArgumentError: means have weights, but the robust rule cannot use weights.
        """
        comm.transport, comm.rule = self.transport, self.rule
        comm.secure = None if self.secure is None else replace(self.secure, seed=seed)
        if weighs:
            check(self.features() | {"weights by examples": "weights by examples"})


class AveragingOptions(InnerOptions, total=False):
    """Options of every `CommunicateOptimizeStrategy`: arguments of the inner optimizer and `Averaging`, and `tuner`."""

    transport: str | None
    robust: str | Rule | NormCap | None
    secure_aggregation: bool | SecureAggregation
    tuner: float | Tuner | None


def tuned(tuner: float | Tuner | None = None) -> Tuner | None:
    """Return the option `tuner` as a `Tuner`, or None without a tuner."""
    return None if tuner is None else tuner_of(tuner)


defined(AveragingOptions, Averaging, tuned)


def with_options(init: Callable[..., None]) -> Callable[..., None]:
    """Return the strategy constructor `init`, extended by the averaging options and `tuner` of `AveragingOptions`.

    If a tuner chooses an argument of `init`, `init` receives the tuner's first value. The new constructor handles the
    options that `init` does not take.
    """
    own = signature_of(init)
    further = [
        p for p in parameters_of(AveragingOptions)
        if p.name not in own.parameters and p.name not in InnerOptions.__annotations__
    ]  # fmt: skip

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = without_aliases(kwargs, own.parameters)
        tuner, tuning = tuned(kwargs.pop("tuner", None)), None
        later = {p.name: kwargs.pop(p.name) for p in further if p.name in kwargs}
        if tuner is not None:
            bound = own.bind(self, *args, **kwargs)
            tuning = begun(tuner, own, bound, type(self).__name__)
            args, kwargs = bound.args[1:], without_aliases(bound.kwargs, own.parameters)
        init(self, *args, **kwargs)
        if later:
            self.average_by(**later)
        if tuning is not None:
            self.tune_by(tuning)

    call.__signature__ = own.replace(parameters=[*own.parameters.values(), *further])  # type: ignore[attr-defined]
    return checked(call)
