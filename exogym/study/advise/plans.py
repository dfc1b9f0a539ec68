"""A strategy's repeated collectives, from the byte formulas of its modules."""

from __future__ import annotations

import math
from dataclasses import replace

from exogym.errors import ArgumentError
from exogym.strategy import Strategy
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
    title = given if isinstance(given, str) else type(given).__name__
    try:
        plan = strategy.plan(parameters, num_nodes, bytes_per_element)
        return replace(plan, name=title, needs_gradients=strategy.needs_gradients)
    except ArgumentError as error:
        raise ArgumentError(f"{title}: {error}") from error


def period_of(plan: Plan) -> int:
    """Return the steps until a strategy's model has changed as a whole. It is 1 if nodes communicate in every step.

    >>> period_of(plan_of("diloco:H=50", 1e6, 4)), period_of(plan_of("sparta", 1e6, 4))
    (50, 1)
    """
    every = max((traffic.every_steps for traffic in plan.traffic), default=1.0)
    return max(1, math.ceil(plan.couples_every)) if every > 1 and math.isfinite(plan.couples_every) else 1
