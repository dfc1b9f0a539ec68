"""The options of a sweep with their values, and the cells: all combinations of these values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exogym.errors import ArgumentError
from exogym.options import LONG
from exogym.study.compare.asked import PASSED_AS_TEXT

# Options of the run and their types. Any other option belongs to the strategy.
OF_THE_RUN: dict[str, type] = PASSED_AS_TEXT | {
    "num_nodes": int, "max_steps": int, "batch_size": int, "lr": float, "partitioner": str, "network": str,
    "step_seconds": str,
}  # fmt: skip
STRATEGY = "strategy"
MOST_CELLS = 5000  # of a sweep; sweep.json, which any program may have written, may have no more
LOGARITHMIC = 10  # from this ratio of its positive ends on, a search treats a range as logarithmic
_RANGE = re.compile(r"\s*(-?[\d.]+(?:e[-+]?\d+)?)\.\.(-?[\d.]+(?:e[-+]?\d+)?)\s*", re.IGNORECASE)
Axes = dict[str, "list[str] | Range"]


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, or all whole numbers if both ends are whole. Only a search accepts ranges."""

    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_logarithmic(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOGARITHMIC

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


def axes_of(given: Mapping[str, Any] | Sequence[str]) -> Axes:
    """Return a dict from option to its values. `given` is such a mapping, or texts "option=value,value".

    Separate values by semicolons if they contain commas. "1e-4..1e-1" is a `Range`. The command line's shorter names
    count too: "nodes=2,4" is "num_nodes=2,4".

    Raises:
        ArgumentError: a text has another form, an option or value is given twice, or an option has no values.

    >>> axes_of(["H=5,10", "network=wifi;100Mbps,20ms"])
    {'H': ['5', '10'], 'network': ['wifi', '100Mbps,20ms']}
    >>> axes_of({"lr": "1e-4..1e-1", "num_nodes": [2, 4]})
    {'lr': Range(low=0.0001, high=0.1), 'num_nodes': ['2', '4']}
    """
    if isinstance(given, str):
        given = [given]
    pairs: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        for text in given:
            name, equals, values = str(text).partition("=")
            if not equals or not name.strip() or not values.strip():
                raise ArgumentError(f"sweep={text!r} should look like option=value,value, such as H=5,10")
            pairs.append((name, values))
    axes: Axes = {}
    for name, values in pairs:
        name = LONG.get(name.strip(), name.strip())
        if name in axes:
            raise ArgumentError(f"sweep: {name} occurs twice: pass its values once, {name}=A,B")
        axes[name] = _values(name, values)
    return axes


def _values(name: str, given: Any) -> list[str] | Range:
    if isinstance(given, Range):
        return given
    if isinstance(given, str):
        if found := _RANGE.fullmatch(given):
            low, high = (float(end) if re.search("[.e]", end, re.I) else int(end) for end in found.groups())
            if not low < high:
                raise ArgumentError(
                    f"sweep: {name}={given!r} must be a range from a number to a larger number, such as 1e-4..1e-1"
                )
            return Range(low, high)
        given = given.split(";" if ";" in given else ",")
    elif not isinstance(given, Sequence | range):
        raise ArgumentError(f"sweep: {name}={given!r} must be a list of values, such as [5, 10]")
    values = [as_text(value) for value in given]
    if not values or "" in values or len(set(values)) < len(values):
        raise ArgumentError(f"sweep: {name}={','.join(values)!r} must be different values, such as {name}=5,10")
    return values


def check_few(cells: int) -> None:
    """Raise ArgumentError if a sweep has too many cells."""
    if cells > MOST_CELLS:
        raise ArgumentError(
            f"the sweep has {cells:,} cells, but at most {MOST_CELLS:,} are possible: sweep fewer values, or use search"
        )


def as_text(value: Any) -> str:
    """Return a value as text, written as in a strategy's options on the command line.

    >>> as_text(None), as_text(True), as_text(0.001), as_text(" 5 ")
    ('none', 'true', '0.001', '5')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value).strip()


def grid(axes: Axes) -> list[dict[str, str]]:
    """Return all combinations of the options' values. The last option changes fastest.

    Raises:
        ArgumentError: an option has a `Range`, which has too many values.

    >>> grid({"strategy": ["diloco", "fedavg"], "H": ["5", "10"]})[:2]
    [{'strategy': 'diloco', 'H': '5'}, {'strategy': 'diloco', 'H': '10'}]
    """
    lists = {}
    for name, values in axes.items():
        if isinstance(values, Range):
            raise ArgumentError(f"sweep: {name}={values} is a range: list its values, {name}=A,B, or use search")
        lists[name] = values
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def label_of(cell: Mapping[str, str]) -> str:
    """Return a cell's name, which lists its options and values.

    >>> label_of({"strategy": "diloco", "H": "5"})
    'strategy=diloco, H=5'
    """
    return ", ".join(f"{name}={value}" for name, value in cell.items())


def arguments_of(cell: Mapping[str, str], strategy: str) -> tuple[str, dict[str, Any]]:
    """Return a cell's strategy as text, and the cell's other arguments for `compare`.

    `strategy` is the strategy of a cell that does not name a strategy.

    >>> arguments_of({"num_nodes": "4", "H": "5"}, "diloco:outer_lr=0.5")
    ('diloco:outer_lr=0.5:H=5', {'num_nodes': 4})
    """
    text, run = cell.get(STRATEGY, strategy), dict[str, Any]()
    for name, value in cell.items():
        if name in OF_THE_RUN:
            run[name] = _value(name, value)
        elif name != STRATEGY:
            text += f":{name}={value}"
    return text, run


def _value(name: str, text: str) -> Any:
    """Return a run option's value from its text."""
    kind, words = OF_THE_RUN[name], {"true": True, "false": False}
    try:
        return words[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ArgumentError(f"sweep: {name}={text!r} must be {wanted}") from None


def as_number(value: str) -> float | None:
    """Return the number in the text `value`, or None if the text is not a finite number.

    >>> as_number("5"), as_number("diloco")
    (5.0, None)
    """
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
