"""The collectives that a strategy repeats, from the byte formulas of its modules."""

from __future__ import annotations

import math
from dataclasses import replace

from exogym.errors import ArgumentError
from exogym.strategy import Strategy
from exogym.strategy.averaging import spread
from exogym.strategy.registry import parse_strategy
from exogym.strategy.traffic import Plan


def plan_of(given: str | Strategy, parameters: float, num_nodes: int, bytes_per_element: float = 4) -> Plan:
    """Return the collectives that a strategy repeats, from its modules' formulas.

    Raises:
        ArgumentError: the strategy or an option is unknown, or a module has no formula.

    >>> plan_of("diloco:H=50", 1e6, 4).traffic
    (Traffic(kind='all_reduce', payload_bytes=4000000.0, every_steps=50, members=None, algorithm=None, overlap_steps=0.0, fan=1.0),)
    """  # noqa: E501
    strategy = parse_strategy(given) if isinstance(given, str) else given
    title = title_of(given)
    try:
        plan = strategy.plan(parameters, num_nodes, bytes_per_element)
        method = given if isinstance(given, str) else _text_of(given)
        return replace(plan, name=title, needs_gradients=strategy.needs_gradients, method=method)
    except ArgumentError as error:
        raise ArgumentError(f"{title}: {error}") from error


def title_of(given: str | Strategy) -> str:
    """Return a strategy's text, or the call that creates a `Strategy`.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> title_of("diloco:H=50"), title_of(DiLoCoStrategy(H=50))
    ('diloco:H=50', 'DiLoCoStrategy(H=50)')
    """
    return given if isinstance(given, str) else repr(given)


def _text_of(strategy: Strategy) -> str:
    """Return a strategy's registered name with the options that text can express, or "" if it has no name."""
    if not strategy.registered or strategy.name is None:
        return ""
    given = spread(vars(strategy).get("given_arguments", {})).items()
    plain = [f"{option}={value}" for option, value in given if isinstance(value, str | int | float)]
    return ":".join([strategy.name, *plain])


def period_of(plan: Plan) -> int:
    """Return the steps until a strategy has exchanged its whole model: 1 if nodes communicate in every step.

    >>> period_of(plan_of("diloco:H=50", 1e6, 4)), period_of(plan_of("sparta", 1e6, 4))
    (50, 1)
    """
    every = max((traffic.every_steps for traffic in plan.traffic), default=1.0)
    return max(1, math.ceil(plan.couples_every)) if every > 1 and math.isfinite(plan.couples_every) else 1
