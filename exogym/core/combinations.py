"""What cannot be combined: one table of pairs of features, each with its reason and what to do instead.

A feature is something that a run has, under the name a user writes: an option (`privacy`), an option with a value
(`compute="vmap"`), what a strategy does ("packed values"), or what was left out ("no network"). Modules, strategies
and the options of `fit` say which features they have (`features()`), and `check` raises for the first row of the table
whose two features a run has. A strategy is checked when it is made, the whole run before it trains. Features that show
later (who started the process, what the model and the data are like) are checked where they are seen, still before
training.

To refuse another pair, add a row to its group in `GROUPS`, and, if its feature is new, a line to `FEATURES` and to the
`features()` of what has it. A number too large for another one is no pair: it is checked where the numbers are.

>>> check({"privacy": "privacy", "robust": "robust='krum'"})
Traceback (most recent call last):
...
exogym.errors.ArgumentError: privacy with robust='krum': ...; leave one of them out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from exogym.core.refusals import FEATURES, GROUPS, REFUSED, Refused
from exogym.errors import ArgumentError

__all__ = ["FEATURES", "GROUPS", "REFUSED", "Refused", "check", "features_of", "refuse"]


def features_of(**options: Any) -> dict[str, str]:
    """Return the options that were given, as features; None and False were not.

    >>> features_of(delay=3, eager=False, island_H=None)
    {'delay': 'delay=3'}
    """
    return {name: f"{name}={value!r}" for name, value in options.items() if value is not None and value is not False}


def check(features: Mapping[str, str]) -> None:
    """Refuse features that cannot be combined.

    Args:
        features: name in `FEATURES` to what was given, as `{"robust": "robust='krum'"}`.

    Raises:
        ArgumentError: the first row of `REFUSED` whose two features are among them: what was given, why, what to do.

    >>> check({"robust": "robust='krum'", "client_fraction": "client_fraction=0.5"})
    """
    for row in REFUSED:
        if row.one in features and row.other in features:
            one, other = features[row.one], features[row.other]
            both = f"{one} needs {other[3:]}" if other.startswith("no ") else f"{one} with {other}"
            raise ArgumentError(f"{both}: {row.reason}; {row.instead}")


def refuse(features: Mapping[str, str]) -> NoReturn:
    """Raise as `check` does, for features of which a row refuses two."""
    check(features)
    raise AssertionError(f"no row refuses {features}")
