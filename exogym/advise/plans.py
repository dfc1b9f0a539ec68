"""What a strategy sends: the collectives it repeats, from the byte formulas of its modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from exogym.errors import ArgumentError, check_count, checked
from exogym.strategy import Strategy
from exogym.strategy.registry import parse_strategy
from exogym.strategy.traffic import Plan, Traffic


def plan_of(given: str | Strategy, parameters: float, num_nodes: int, bytes_per_element: float = 4) -> Plan:
    """Return what a strategy sends, by the formula of each of its modules.

    Raises:
        ArgumentError: an unknown strategy or option; a module that no formula is known for.

    >>> plan_of("diloco:H=50", 1e6, 4).traffic
    (Traffic(kind='all_reduce', payload_bytes=4000000.0, every_steps=50, members=None, algorithm=None, overlap_steps=0, fan=1.0),)
    """  # noqa: E501
    if isinstance(given, str):
        name, _, options = given.partition(":")
        if name.lower() in _EXTRA:
            return _EXTRA[name.lower()](given, parameters, bytes_per_element, **_options(given, options))
        strategy = parse_strategy(given)
    else:
        strategy = given
    title = given if isinstance(given, str) else type(given).__name__
    try:
        return replace(strategy.plan(parameters, num_nodes, bytes_per_element), name=title)
    except ArgumentError as error:
        raise ArgumentError(f"{title}: {error}") from error


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
