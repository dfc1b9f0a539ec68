"""Robust averages: a wrapper that limits how much a few bad nodes can change a strategy's averages.

    Robust(FedAvgStrategy(H=5), "median")

`exogym.contrib.rules` describes the rules and their bytes. The rule "norm_cap" (Sun, Kairouz, Suresh, McMahan, Can You
Really Backdoor Federated Learning?, arXiv:1911.07963) scales each node's update u down to a cap M before the mean:

    u <- u min(1, M / |u|)

M is a fixed number, which costs no bytes, or the median of the norms (the lower of two middle values, ignoring nodes
without an update), for which nodes share their norms in an all-gather of 8 bytes. A node's update is its gradient if
nodes average gradients, and otherwise its parameters minus their values after its last synchronization.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exogym.contrib.rules import RULES, Rule, rule_of
from exogym.core.combinations import check
from exogym.core.communicator import Communicator
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_choice, retired
from exogym.faults import Faults
from exogym.strategy.averaging import Averaging
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.traffic import Traffic
from exogym.strategy.updates import Updates, norm_of

NORM_BYTES = 8


@dataclass(frozen=True)
class NormCap:
    """Scale updates whose 2-norm exceeds a cap down to it, then average.

    Args:
        norm: the cap. None means the median norm of all sent updates (for an even number, the lower middle value), for
            which nodes exchange their norms in an all-gather with a payload of 8 bytes.

    Raises:
        ArgumentError: `norm` is not a number over 0.
    """

    norm: float | None = None

    def __post_init__(self) -> None:
        given = self.norm
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
            raise ArgumentError(f"NormCap(norm={given!r}) wants a number over 0, or None for the median norm")


def Robust(strategy: CommunicateOptimizeStrategy, rule: str | Rule | NormCap) -> CommunicateOptimizeStrategy:
    """Return the strategy with a robust rule instead of its means.

    Args:
        strategy: a strategy of modules.
        rule: "median", "trimmed_mean", "krum" or "norm_cap", or a `Median`, `TrimmedMean`, `Krum` or `NormCap` with
            your arguments.

    Raises:
        ArgumentError: the rule is unknown, or the strategy's averages cannot use it.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> Robust(DiLoCoStrategy(H=5), "median").averaging
    RobustAveraging(robust='median')
    """
    return wrapped(strategy, RobustAveraging, robust=rule)


def modular(strategy: Any) -> CommunicateOptimizeStrategy:
    """Return a strategy that a wrapper of this package can change.

    Raises:
        ArgumentError: the strategy has no modules, or is a method of this package.
    """
    if getattr(strategy, "driven_by", None) != "rounds":
        raise ArgumentError(
            f"strategy={strategy!r} is not made of modules: wrap a strategy of modules, such as DiLoCoStrategy() or "
            "FedAvgStrategy()"
        )
    if strategy.tried is not None:
        raise ArgumentError(
            f"{type(strategy).__name__} was not tested with a wrapper of exogym.contrib: wrap a strategy of the "
            "core (docs/promises.md)"
        )
    return strategy


def wrapped(strategy: Any, kind: type[Averaging], **options: Any) -> CommunicateOptimizeStrategy:
    """Return a copy of the strategy that averages by `kind`, with `options` in addition to its own.

    Raises:
        ArgumentError: the strategy has no modules, or another wrapper has already changed its averages.
    """
    averaging = modular(strategy).averaging
    if type(averaging) is not Averaging:
        raise ArgumentError(f"strategy={strategy!r} has another way of averaging already: wrap it once")
    made, averaging = copy.copy(strategy), kind(**averaging.given(), **options)
    vars(made)["given_arguments"] = vars(strategy)["given_arguments"] | {"averaging": averaging}
    made.average_by(averaging)
    return made


@dataclass(frozen=True, repr=False)
class RobustAveraging(Averaging):
    """The averages of `Robust`.

    Args:
        robust: the rule.
    """

    robust: str | Rule | NormCap | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.robust, str):
            if (instead := retired(self.robust, "robust")) is not None:
                raise ArgumentError(f"robust={self.robust!r}: {instead}")
            check_choice("robust", self.robust, [*RULES, "norm_cap"])
        elif not isinstance(self.robust, Rule | NormCap):
            raise ArgumentError(f"robust={self.robust!r} must be a name, such as 'median', or a rule, such as Krum()")

    @property
    def rule(self) -> Rule | None:
        """The robust rule that replaces the mean, or None if nodes take means of capped updates."""
        given = self.robust
        return None if given is None or given == "norm_cap" or isinstance(given, NormCap) else rule_of(given)

    @property
    def cap(self) -> NormCap | None:
        """The cap on the norms of updates, or None."""
        return NormCap() if self.robust == "norm_cap" else self.robust if isinstance(self.robust, NormCap) else None

    @property
    def takes_weights(self) -> bool:  # type: ignore[override]
        return self.rule is None

    @property
    def sums_buckets(self) -> bool:  # type: ignore[override]
        return False

    def features(self) -> dict[str, str]:
        name = 'robust="norm_cap"' if self.rule is None else "robust"
        return super().features() | {name: f"robust={self.robust!r}"}

    def check_members(self, name: str, traffic: list[Traffic], N: int) -> None:
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
        sent = super().traffic(given, N, b)
        if self.rule is not None:
            kind, algorithm = self.rule.collective
            return [
                replace(t, kind=kind, algorithm=algorithm) if (t.kind, t.algorithm == "server") == ("all_reduce", False)
                else t for t in sent
            ]  # fmt: skip
        if self.cap is not None and self.cap.norm is None and sent:
            sent.append(Traffic("all_gather", NORM_BYTES, min(t.every_steps for t in given)))
        return sent

    def updates(self, faults: Faults | None, on_parameters: bool) -> Updates | None:
        return super().updates(faults, on_parameters) if self.cap is None else Capped(self.cap, faults, on_parameters)

    def bind(self, comm: Communicator, weighs: bool, seed: int = 0) -> None:
        """Apply the rule to the communicator `comm`.

        Raises:
            ArgumentError: means have weights, which the rule cannot use.
        """
        super().bind(comm, weighs, seed)
        comm.rule = self.rule
        if weighs:
            check(self.features() | {"weights by examples": "weights by examples"})


class Capped(Updates):
    """Caps the norms of nodes' updates, after the attacks of bad nodes.

    Args:
        cap: the cap on the updates' norms.
        faults, on_parameters: see `Updates`.
    """

    def __init__(self, cap: NormCap, faults: Faults | None, on_parameters: bool):
        super().__init__(faults, on_parameters)
        self.cap = cap
        self.name = "Updates"  # checkpoints have always used this name

    def changing(self, fleet: Fleet) -> list[int]:
        return list(fleet.comm.present)

    def change(self, fleet: Fleet, step: int, updates: dict[int, list[Tensor]]) -> list[int]:
        attacked = super().change(fleet, step, updates)
        norms = {row: norm_of(u, fleet) for row, u in updates.items()}
        most = self.cap.norm
        if most is None:
            mine = torch.tensor([norms.get(row, 0.0) for row in range(len(fleet))], dtype=torch.float64)
            all_norms = fleet.comm.wire.rows(mine, fleet.comm.present).tolist()  # in all processes
            movers = [node for node, norm in zip(fleet.comm.present, all_norms, strict=True) if norm]
            if not movers:
                return attacked
            most = float(fleet.comm.all_gather(mine, members=movers)[0].median())
        over = {row: norm for row, norm in norms.items() if norm > most}
        for row, norm in over.items():
            for x in updates[row]:
                x.mul_(most / norm)
        return sorted({*attacked, *over})
