"""Strategies from flat options: those of `Averaging` and of contrib's wrappers stand among the strategy's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exogym.contrib import ByteBudget, Robust, Secure
from exogym.network.units import value_of
from exogym.strategy import Averaging, CommunicateOptimizeStrategy
from exogym.strategy.registry import parse_strategy

WRAPPERS: dict[str, Callable[[Any, Any], CommunicateOptimizeStrategy]] = {
    "robust": Robust,
    "secure_aggregation": lambda strategy, given: Secure(strategy, None if given is True else given),
    "tuner": ByteBudget,
}


def wrap(strategy: Any, given: dict[str, Any]) -> Any:
    for name, value in given.items():
        if value is not None and value is not False:
            strategy = WRAPPERS[name](strategy, value)
    return strategy


def made(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the strategy `kind(*args, **options)`, of whose options some may be wrappers, or of `Averaging`."""
    given = {name: options.pop(name) for name in WRAPPERS if name in options}
    averaging = {name: options.pop(name) for name in getattr(kind, "averages", ()) if name in options}
    return wrap(kind(*args, **options | ({"averaging": Averaging(**averaging)} if averaging else {})), given)


def parsed(text: str, **defaults: Any) -> Any:
    """Return `parse_strategy(text, **defaults)`, of whose options some may be wrappers."""
    name, *parts = text.split(":")
    outer = [part for part in parts if part.partition("=")[0] in WRAPPERS]
    inner = ":".join([name, *(part for part in parts if part not in outer)])
    given = {option: value_of(value) for option, _, value in (part.partition("=") for part in outer)}
    return wrap(parse_strategy(inner, **defaults), given)
