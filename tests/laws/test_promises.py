"""The page of promises and the package say the same: each strategy has one place, and the core names no other one's.

What is read are names in code and names of imports, not prose.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from paths import ROOT

import exogym
from exogym import contrib
from exogym.core.training.options import FitOptions, Placement
from exogym.core.training.written import descriptions
from exogym.strategy.registry import CONTRIB, STRATEGIES

PACKAGE = Path(exogym.__path__[0])
PAGE = ROOT / "docs" / "promises.md"
LONGEST = 44  # lines of the page
OURS = {name: kind for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")}
METHODS = {name: kind for name, kind in OURS.items() if kind.__module__.startswith(f"{CONTRIB}.")}
SEAMS = {"core/base/retired.py": "the old paths of modules that moved"}  # which may name a method's module


def core_of(page: str) -> list[str]:
    """Return the names of the strategies that the page lists under core.

    >>> core_of("- Two strategies: `ddp`, `diloco`; [your own](strategies/own.md), and `check_strategy`.")
    ['ddp', 'diloco']
    """
    (listed,) = re.findall(r"^- \w+ strategies: (.*?);", page, re.M | re.S)
    return re.findall(r"`(\w+)`", listed)


def misplaced(page: str, kinds: dict[str, type], names: Collection[str]) -> list[str]:
    """Return what is wrong with the places of strategies.

    Args:
        kinds: the registered classes, by name.
        names: those that `exogym.contrib` lists, by class.
    """
    core, wrong = core_of(page), []
    wrong += [f"{name}: twice on the page" for name in {*core} if core.count(name) > 1]
    wrong += [f"{name}: on the page, and not registered" for name in core if name not in kinds]
    for name, kind in kinds.items():
        places = [name in core, kind.__name__ in names]
        wrong += [] if places.count(True) == 1 else [f"{name}: of core and contrib it is in {places.count(True)}"]
        is_there = kind.__module__.startswith(f"{CONTRIB}.")
        wrong += [] if places[1] == is_there else [f"{name}: its module is {kind.__module__}"]
    return wrong + [f"{name}: is not registered" for name in {*names} - {kind.__name__ for kind in kinds.values()}]


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the names in code: identifiers, attributes, imports, and texts that are one dotted path."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            parts = [alias.name for alias in node.names]
            parts += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for part in parts:
                yield from ((node.lineno, word) for word in part.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield from ((node.lineno, word) for word in node.value.split("."))


def named_elsewhere(sources: dict[str, str], kinds: Collection[type]) -> list[str]:
    """Return the places outside of `contrib/` where a method's class or module is named."""
    words = {kind.__name__ for kind in kinds} | {kind.__module__.rpartition(".")[2] for kind in kinds}
    return [
        f"{path}:{line}: {name}"
        for path, source in sources.items()
        if not path.startswith("contrib/") and path not in SEAMS
        for line, name in names_in(source)
        if name in words
    ]


@functools.cache
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def undescribed(kind: type) -> list[str]:
    """Return the arguments of a class that no docstring of it or of its bases describes."""
    return [name for name in inspect.signature(kind).parameters if name not in descriptions(kind)]


def test_each_strategy_has_one_place() -> None:
    page = PAGE.read_text("utf-8")
    assert misplaced(page, OURS, [name for name in contrib.__all__ if name.endswith("Strategy")]) == []
    assert len(core_of(page)) == 20 and len(OURS) == 20 + len(METHODS)


def test_the_page_of_promises_is_short() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    assert len(lines) <= LONGEST, "a new promise retires another one"


def test_nothing_outside_of_contrib_names_a_method() -> None:
    assert named_elsewhere(sources(), METHODS.values()) == []
    assert set(sources()) >= set(SEAMS)


def test_each_option_is_described_where_the_page_of_options_reads_it() -> None:
    assert "<!-- generated: options -->" in (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
    assert undescribed(FitOptions) == undescribed(Placement) == []
    core = [kind for kind in OURS.values() if kind not in METHODS.values()]
    assert {kind.__name__: missing for kind in core if (missing := undescribed(kind))} == {}


# Controls

SAYS = "- Two strategies: `one`, `two`; [your own](own.md).\n"


def planted(name: str, module: str) -> type:
    return type(name, (), {"__module__": module})


@pytest.mark.parametrize(
    ("page", "kinds", "names", "wrong"),
    [
        (SAYS, {}, [], ["one: on the page, and not registered", "two: on the page, and not registered"]),
        (SAYS, {"three": ("Three", "exogym.strategy.three")}, [], ["three: of core and contrib it is in 0"]),
        (SAYS, {"three": ("Three", "exogym.contrib.three")}, [], ["three: of core and contrib it is in 0"]),
        (SAYS, {"one": ("One", "exogym.contrib.one")}, ["One"], ["one: of core and contrib it is in 2"]),
        (SAYS, {"one": ("One", "exogym.contrib.one")}, [], ["one: its module is exogym.contrib.one"]),
        (SAYS, {"three": ("Three", "exogym.strategy.three")}, ["Three"], ["three: its module is"]),
        (SAYS, {}, ["Four"], ["Four: is not registered"]),
        (SAYS.replace("two", "one"), {}, [], ["one: twice on the page"]),
    ],
)
def test_a_strategy_in_a_wrong_place_is_found(
    page: str, kinds: dict[str, tuple[str, str]], names: list[str], wrong: list[str]
) -> None:
    sound = {"one": planted("One", "exogym.strategy.one"), "two": planted("Two", "exogym.strategy.two")}
    assert misplaced(SAYS, sound, []) == []
    found = misplaced(page, {name: planted(*kind) for name, kind in kinds.items()}, names)
    assert all(any(line.startswith(words) for line in found) for words in wrong), found


@pytest.mark.parametrize(
    "source",
    [
        "from exogym.contrib.some import x",
        "from exogym.contrib import some",
        "from exogym.strategy import SomeStrategy",
        "import exogym.contrib.some",
        "importlib.import_module('exogym.contrib.some')",
        "KINDS = {'SomeStrategy': 3}",
        "ORDER = ('ddp', 'some')",
        "isinstance(x, strategy.SomeStrategy)",
    ],
)
def test_a_file_that_names_a_method_is_found(source: str) -> None:
    some = planted("SomeStrategy", "exogym.contrib.some")
    assert named_elsewhere({"core/x.py": source}, [some]) != []
    assert named_elsewhere({"contrib/x.py": source, "core/base/retired.py": source}, [some]) == []
    assert named_elsewhere({"core/x.py": "'Some text about SomeStrategy.'  # and some"}, [some]) == []


def test_an_option_without_a_description_is_found() -> None:
    class Described:
        """A class.

        Args:
            one, two: numbers.
            three: a number.
        """

        def __init__(self, one: int, two: int, three: int, four: int = 4):
            pass

    assert undescribed(Described) == ["four"]
