"""Parameter groups of an optimizer: which parameters a pattern matches, and which parameters Muon trains."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from exogym.errors import ArgumentError

Pattern = str | Callable[[str, nn.Parameter], bool]
Groups = Sequence[tuple[Pattern, dict[str, Any]]]


def check_groups(groups: Any) -> None:
    """Raise ArgumentError unless `groups` are pairs of a pattern and options."""
    for pair in groups:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], dict)):
            raise ArgumentError(f"groups: {pair!r} is not a (pattern, options) pair such as ('*.bias', {{'lr': 0.1}})")
        if not (isinstance(pair[0], str) or callable(pair[0])):
            raise ArgumentError(f"groups: {pair[0]!r} is neither text nor a function of name and parameter")
        rate = pair[1].get("lr", 0)
        if not (isinstance(rate, int | float) and rate >= 0):
            raise ArgumentError(f"groups: lr={rate!r} of {name_of(pair[0])} must be a number of at least 0")


def grouped(
    groups: Groups, named: Mapping[str, nn.Parameter], flag: str, hidden: Collection[str]
) -> list[dict[str, Any]]:
    """Return the parameter groups, in the order of their first parameters.

    Args:
        flag: the option that assigns a group to Muon, or ""; set by default for the `hidden` matrices.

    Raises:
        ArgumentError: a pattern is no parameter's first match, or no parameter is left for Muon.
    """
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, p in named.items():
        number = next((k for k, (pattern, _) in enumerate(groups) if _matches(pattern, name, p)), -1)
        options = groups[number][1] if number >= 0 else {}
        if flag:
            options = {flag: name in hidden} | options
        group = found.setdefault((number, options.get(flag, False)), {"params": [], **options})
        group["params"].append(p)
    used = {number for number, _ in found}
    for number, (pattern, _) in enumerate(groups):
        if number in used:
            continue
        if any(_matches(pattern, name, p) for name, p in named.items()):
            raise ArgumentError(
                f"groups: {name_of(pattern)} comes too late: earlier patterns match all its parameters, and the "
                "first match counts; put it before them"
            )
        raise ArgumentError(f"groups: {name_of(pattern)} matches no parameter; {_near(pattern, list(named))}")
    if flag and not any(group[flag] for group in found.values()):
        name = flag.removeprefix("use_")
        named_ones = f", or name the matrices: OptimSpec({name!r}, groups=[('*.weight', {{{flag!r}: True}})])"
        raise ArgumentError(
            f"{name} finds no hidden matrix in this model (a two-dimensional weight that is neither embedding nor "
            f"head). A strategy with stacked = True cannot use {name}, because its tensors have a row axis. Take "
            f"'adamw'{named_ones if name == 'muon' else ' in another strategy'}"
        )
    return list(found.values())


def _matches(pattern: Pattern, name: str, p: nn.Parameter) -> bool:
    return fnmatch.fnmatchcase(name, pattern) if isinstance(pattern, str) else bool(pattern(name, p))


def _near(pattern: Pattern, names: list[str]) -> str:
    """Return the parameters whose names resemble a pattern's text, or the first parameters if none does."""
    if isinstance(pattern, str):
        text = pattern.strip("*.?")
        close = [n for n in names if difflib.get_close_matches(text, [n, *n.split("."), n.rpartition(".")[0]], n=1)]
        if close:
            return f"near: {', '.join(close[:4])}"
    return f"there are: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def name_of(pattern: str | Callable[..., Any]) -> str:
    return repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__qualname__", type(pattern).__name__)
