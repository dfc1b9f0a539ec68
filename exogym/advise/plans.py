"""What a strategy sends: the collectives it repeats, from the byte formulas of its modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_count, checked
from exogym.strategy import Strategy
from exogym.strategy.async_diloco import AsyncDiLoCoStrategy
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, Module
from exogym.strategy.demo import DCTMomentum
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.registry import parse_strategy
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.sparta import SparseCommunicator


@dataclass(frozen=True)
class Traffic:
    """A collective that a strategy repeats.

    Attributes:
        kind: as the communicator names it.
        payload_bytes: what each giver hands over.
        every_steps: steps from one to the next; may be a mean, and so a fraction.
        members: nodes that take part; None: all.
        algorithm: how; None: left to `advise`.
        overlap_steps: steps it may be under way before it is waited for.
    """

    kind: str
    payload_bytes: float
    every_steps: float = 1.0
    members: int | None = None
    algorithm: str | None = None
    overlap_steps: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a strategy sends.

    Attributes:
        couples_every: the steps after which all of the model has been exchanged once.
        can_train: False where only the formula is known, and no strategy of that name can be trained here.
        local_steps: of a strategy whose nodes do not wait for each other, (N,) seconds of a step to (N,) steps of a
            round; `traffic` is then of one node and one round.
    """

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float
    can_train: bool = True
    local_steps: Callable[[np.ndarray], np.ndarray] | None = None


def plan_of(given: str | Strategy, parameters: float, num_nodes: int, bytes_per_element: float = 4) -> Plan:
    """Return what a strategy sends, by the formula of each of its modules.

    Raises:
        ArgumentError: an unknown strategy or option; a module that no formula is known for.

    >>> plan_of("diloco:H=50", 1e6, 4).traffic
    (Traffic(kind='all_reduce', payload_bytes=4000000.0, every_steps=50, members=None, algorithm=None, overlap_steps=0.0),)
    """  # noqa: E501
    if isinstance(given, str):
        name, _, options = given.partition(":")
        if name.lower() in _EXTRA:
            return _EXTRA[name.lower()](given, parameters, bytes_per_element, **_options(given, options))
        strategy = parse_strategy(given)
    else:
        strategy = given
    title = given if isinstance(given, str) else type(given).__name__
    if isinstance(strategy, AsyncDiLoCoStrategy):
        if strategy.grace_s:
            raise ArgumentError(f"{title}: no formula is known for nodes that wait for a while: leave out grace_s")
        both = tuple(Traffic(way, parameters * bytes_per_element, strategy.H, 1, "server") for way in ("push", "pull"))
        return Plan(title, both, strategy.H, local_steps=strategy.local_steps)
    if not isinstance(strategy, CommunicateOptimizeStrategy):
        raise ArgumentError(
            f"no formula is known for {title}, which is written for one node: give a Plan of its traffic"
        )
    parts = [_module_traffic(m, title, parameters, num_nodes, bytes_per_element) for m in strategy.modules]
    traffic = tuple(t for some, _ in parts for t in some)
    return Plan(title, traffic, min((couples for _, couples in parts), default=math.inf))


def _module_traffic(module: Module, title: str, P: float, N: int, b: float) -> tuple[list[Traffic], float]:
    """Return what a module sends, and after how many steps all of the model has been exchanged."""
    if getattr(module, "rounds", None) is not None:
        raise ArgumentError(
            f"{title}: H is a function of the round, and a formula needs one number: give it, or a Plan"
        )
    if isinstance(module, GradientAverage):
        return [Traffic("all_reduce", P * b)], 1
    if isinstance(module, DCTMomentum):  # chunks * k * (value + index)
        size = module.chunk**2
        index = 1 if size <= 256 else 2 if size <= 32768 else 4
        return [Traffic("all_gather", math.ceil(P / size) * min(module.topk, size) * (b + index))], 1
    if isinstance(module, DiLoCoCommunicator):
        return [Traffic("all_reduce", P * b, module.interval_steps)], module.interval_steps
    if isinstance(module, SparseCommunicator):
        return _sparse_traffic(module, P, N, b)
    if isinstance(module, AveragingCommunicator):
        if module.local_epochs is not None:
            raise ArgumentError(f"{title}: how many steps local_epochs takes depends on the data: give H instead")
        every = module.interval_steps
        clients = max(math.ceil(module.client_fraction * N - 1e-9), 1)
        island = min(module.island_size or clients, clients)
        way = "server" if clients < N else None
        rounds = 1 if island == clients else math.ceil(math.log(clients, max(island, 2)))
        members = clients if way else (None if island == N else island)
        return [Traffic("all_reduce", P * b, every, members, way)], every * rounds * N / clients
    raise ArgumentError(f"{title}: no formula is known for {type(module).__name__}: give a Plan of its traffic")


def _sparse_traffic(module: SparseCommunicator, P: float, N: int, b: float) -> tuple[list[Traffic], float]:
    count, every = module.p * P, module.interval_steps
    if not count or N == 1:
        return [], math.inf
    traffic = []
    if module.method == "topk":
        traffic.append(Traffic("broadcast", 4 * count, every))
    if module.bits is None:
        traffic.append(Traffic("all_reduce", count * b, every))
    else:
        traffic.append(Traffic("all_gather", count * module.bits / 8 + 4, every))
    return traffic, every / module.p


@checked
def _streaming(
    name: str, P: float, b: float, H: int = 100, fragments: int = 8, bits: float = 4, overlap: int = 1
) -> Plan:
    """Streaming DiLoCo (arXiv:2501.18512): each of F fragments every H steps, P/F elements of `bits`, both ways."""
    for option, value in (("H", H), ("fragments", fragments)):
        check_count(option, value)
    check_count("overlap", overlap, least=0)
    if not 0 < bits <= 64:
        raise ArgumentError(f"bits={bits!r} must be over 0 and at most 64")
    piece = Traffic("all_reduce", P / fragments * bits / 8, H / fragments, None, "exact", overlap)
    return Plan(name, (piece,), H, can_train=False)


@checked
def _eager(name: str, P: float, b: float, H: int = 100) -> Plan:
    """Eager DiLoCo (arXiv:2502.12996): P b bytes every H steps, under way for all of them."""
    check_count("H", H)
    return Plan(name, (Traffic("all_reduce", P * b, H, overlap_steps=H),), H, can_train=False)


_EXTRA = {"streaming": _streaming, "eager": _eager}
FORMULA_ONLY = tuple(_EXTRA)


def _options(text: str, options: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in filter(None, options.split(":")):
        name, _, value = part.partition("=")
        try:
            out[name.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise ArgumentError(
                f"strategy {text!r}: {part!r} should look like option=number, as in 'streaming:H=100:bits=4'"
            ) from None
    return out
