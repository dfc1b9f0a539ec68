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
from exogym.study.compare.summary import SINGLE

NO_CHOICE = "?"  # the answer to this value names the choices
IN_TEXT = ("int", "RoundLength", "float", "bool", "str", "Scheduler")  # kinds of options that text can express
_SENTENCE = re.compile(r"^.{8,}?(?=\. |$)|^.*")  # the first; "F. The parts ..." begins with a symbol
_REFERENCE = re.compile(r"(?:[Ss]ee|as) `([\w.]+)`")
Entry = dict[str, Any]


def catalog() -> dict[str, Entry]:
    """Return each strategy's title and options, as JSON values. `single` is one node alone.

    An option has a name, the first sentence of its description as `help`, and choices. Options that text cannot
    express are left out.

    >>> next(o["choices"] for o in catalog()["diloco"]["options"] if o["name"] == "weighting")
    ['uniform', 'examples']
    """
    found = {SINGLE: {"title": "one node alone", "options": _options("ddp")}}
    return found | {name: {"title": STRATEGIES[name].title, "options": _options(name)} for name in sorted(STRATEGIES)}


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


def _options(name: str) -> list[dict[str, Any]]:
    kind = STRATEGIES[name]
    words = {
        **descriptions(kind),
        **{name: text for name, text in descriptions(Averaging).items() if name in averages_of(kind)},
    }
    options = []
    for option in written_options(kind).values():
        parts = {part for part in str(option.annotation).split(" | ") if part in IN_TEXT}
        is_text = isinstance(option.default, str) or not parts.isdisjoint(("str", "Scheduler"))
        if not (parts or is_text) or option.name in ALIASES:
            continue
        choices = _tried(name, option.name) if is_text else ["true", "false"] if parts == {"bool"} else []
        said = _SENTENCE.findall(_described(option.name, words))[0]
        options.append({"name": option.name, "help": said, "choices": choices})
    return options


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
