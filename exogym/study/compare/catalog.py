"""List the strategies that a text can name, with their options, for a form.

Names, types and defaults come from the constructors' signatures, descriptions from the docstrings, and choices from the
constructors' own errors. So nothing is written twice.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from exogym.errors import ALIASES, ArgumentError
from exogym.options import FitOptions, checked_options, descriptions, placed
from exogym.strategy import Averaging
from exogym.strategy.registry import STRATEGIES, averages_of, parse_strategy, written_options
from exogym.strategy.strategy import InnerOptions
from exogym.study.compare.summary import SINGLE

NO_CHOICE = "?"  # the answer to this value names the choices
OF_ALL = ("inner_optim", *InnerOptions.__annotations__)  # options of (almost) every strategy
KINDS = {"int": "int", "RoundLength": "int", "float": "float", "bool": "bool", "str": "str", "Scheduler": "str"}
_REFERENCE = re.compile(r"(?:[Ss]ee|as) `([\w.]+)`")
Entry = dict[str, Any]


def catalog() -> dict[str, Entry]:
    """Return each strategy's title, paper, equation and options, as JSON values. `single` is one node alone.

    An option has a name, a kind (int, float, bool or str), a default and a description as text, and choices. With
    `is_open` other texts than the choices are allowed, too. `of_all` means that (almost) every strategy has this
    option. Options that text cannot express are left out.

    >>> weighting = next(o for o in catalog()["diloco"]["options"] if o["name"] == "weighting")
    >>> weighting["choices"], weighting["default"]
    (['uniform', 'examples'], 'uniform')
    """
    found = {SINGLE: _entry("ddp", title="one node alone", paper="", equation="")}
    return found | {name: _entry(name) for name in sorted(STRATEGIES)}


def choices_of(option: str) -> list[str]:
    """Return the allowed texts of an option of `fit`, or [] if the option has no list of allowed texts.

    >>> choices_of("reduction"), choices_of("max_restarts")
    (['tree', 'native'], [])
    """
    try:
        checked_options(FitOptions(parse_strategy("ddp"), **placed({option: NO_CHOICE})))
    except ArgumentError as error:
        return _choices(option, error)
    return []


def _entry(name: str, **instead: str) -> Entry:
    kind: Any = STRATEGIES[name]
    about = {"title": kind.title, "paper": kind.paper, "equation": kind.equation} | instead
    words = {
        **descriptions(kind),
        **{name: text for name, text in descriptions(Averaging).items() if name in averages_of(kind)},
    }
    options = []
    for option in written_options(kind).values():
        parts = [part for part in str(option.annotation).split(" | ") if part != "None"]
        known = {KINDS[part] for part in parts if part in KINDS} | (
            {"str"} if isinstance(option.default, str) else set()
        )
        if not known or option.name in ALIASES:
            continue
        written = next((one for one in ("str", "int", "float") if one in known), "bool")
        choices = _tried(name, option.name) if written == "str" else []
        options.append({
            "name": option.name, "kind": written, "help": _described(option.name, words), "choices": choices,
            "default": "" if option.default is None else str(option.default), "is_open": len(known) > 1,
            "of_all": option.name in OF_ALL,
        })  # fmt: skip
    return about | {"options": options}


def _tried(name: str, option: str) -> list[str]:
    try:
        parse_strategy(f"{name}:{option}={NO_CHOICE}")
    except ArgumentError as error:
        return _choices(option, error)
    return []


def _choices(option: str, error: BaseException | None) -> list[str]:
    """Return the choices that an error about this option names."""
    while error is not None:
        if isinstance(error, ArgumentError) and error.choices:
            return list(error.choices)
        error = error.__cause__
    return []


def _described(option: str, words: Mapping[str, str], depth: int = 3) -> str:
    """Return an option's description. References to another class's docstring are followed."""
    text = words.get(option, "")
    for name in _REFERENCE.findall(text) if depth else ():
        there = _class_of(name.rpartition(".")[2])
        if there is not None and option in (others := descriptions(there)) and others is not words:
            return _described(option, others, depth - 1)
    return text


def _class_of(name: str) -> type | None:
    """Return the class of this name in the room of strategies."""
    rooms = ("exogym.strategy.", "exogym.contrib.")
    homes = (module for path, module in sorted(sys.modules.items()) if path.startswith(rooms))
    return next((found for home in homes if inspect.isclass(found := vars(home).get(name))), None)
