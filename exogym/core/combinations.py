"""Check a run's features against the table of pairs that cannot be combined (`core.refusals`).

A feature is a property of a run, under the name that a user writes: an option (`privacy`), an option with a value
(`compute="vmap"`), a strategy's behavior ("packed values"), or a missing option ("no network"). Modules, strategies and
`fit`'s options list their features (`features()`). If a run has both features of a row in the table, `check` raises an
error for the first such row. A strategy is checked when it is created, and the whole run before it trains. Features
that become known in between, such as the launcher and properties of the model and the data, are checked as soon as they
are known.

Methods of `exogym.contrib` promise less: one rule refuses any feature in `UNTRIED` that a method's class doesn't list
in `tried`, so no row names such a method.

To refuse another pair, add a row to `REFUSED`; features that are refused for the same reason share a row. An option of
`fit` needs no more, while any other new feature must be returned by the `features()` of its class. A limit between two
numbers is not a pair of features: check it in the code that uses the numbers.

>>> check({"privacy": "privacy", "robust": "robust='krum'"})
Traceback (most recent call last):
...
exogym.errors.ArgumentError: privacy with robust='krum': ...; leave one of them out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from exogym.core.refusals import PAIRS, UNTRIED
from exogym.errors import ArgumentError


def features_of(**options: Any) -> dict[str, str]:
    """Return the options that are set (not None or False) as features, each with its text.

    >>> features_of(delay=3, eager=False, island_H=None)
    {'delay': 'delay=3'}
    """
    return {name: f"{name}={value!r}" for name, value in options.items() if value is not None and value is not False}


def check(features: Mapping[str, str]) -> None:
    """Raise an error if two of a run's features cannot be combined.

    Args:
        features: for each of the run's features, its name in the table and the text that the user wrote, as
            `{"robust": "robust='krum'"}`.

    Raises:
        ArgumentError: `REFUSED` has a row for two of the features, and the message gives the first such row's features,
            reason and alternative; or the strategy is from `exogym.contrib` and doesn't list a feature.

    >>> check({"robust": "robust='krum'", "client_fraction": "client_fraction=0.5"})
    """
    for name in UNTRIED:
        if name in features and (method := features.get(f"not tried with {name}")) is not None:
            given, option = features[name].rstrip("="), name.partition("=")[0].partition(" ")[0]
            raise ArgumentError(
                f"{method} with {given} has not been tried: use a strategy of the core (docs/promises.md), or leave "
                f"{option} out"
            )
    for one, other, row in PAIRS:
        if one in features and other in features:
            what = features[other]
            both = f"needs {what[3:]}" if what.startswith("no ") else f"with {what}"
            raise ArgumentError(f"{features[one]} {both}: {row.reason}; {row.instead}")


def refuse(features: Mapping[str, str]) -> NoReturn:
    """Raise the error of `check` for features that a row of the table refuses."""
    check(features)
    raise AssertionError(f"no row refuses {features}")
