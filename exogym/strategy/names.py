"""Read the strategies' names from their files, so that a name loads one file and a list of runs needs no torch."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

CONTRIB = "exogym.contrib"  # its list of names is the only place outside contrib that names its methods
# A class, or the line that names it: `name = "ddp"`, or `name, title, ... = "ddp", "DDP", ...`.
_LINE = re.compile(r'^class (\w+)|^    name\b[^=\n]*= \(?\s*"([^"\n]+)"(?:,\s*"([^"\n]+)")?', re.M)


class Home(NamedTuple):
    """The place of a strategy's class: its module and class name."""

    module: str
    kind: str


@functools.cache
def homes() -> dict[str, Home]:
    """Return the home of each of ExoGym's strategy classes that has a `name`, by this name.

    >>> homes()["diloco"]
    Home(module='exogym.strategy.diloco', kind='DiLoCoStrategy')
    """
    return {name: home for name, home, _ in _found()}


@functools.cache
def titles() -> dict[str, str]:
    """Return the title of each of ExoGym's strategies, by `name`.

    >>> titles()["diloco"], titles()["ddp"]
    ('DiLoCo', 'DDP')
    """
    return {name: title or name for name, _, title in _found()}


def _found() -> Iterator[tuple[str, Home, str | None]]:
    listed = importlib.import_module(CONTRIB).__all__
    for package in (__package__, CONTRIB):
        for file in sorted(Path(__file__).parent.with_name(package.rpartition(".")[2]).glob("*.py")):
            kind = ""
            for line in _LINE.finditer(file.read_text("utf-8")):
                kind = line[1] or kind
                if line[2] and (package != CONTRIB or kind in listed):
                    yield line[2], Home(f"{package}.{file.stem}", kind), line[3]


def short_names() -> dict[str, str]:
    """Return the `name` of each of ExoGym's strategy classes that has one, by class name.

    >>> short_names()["DiLoCoStrategy"]
    'diloco'
    """
    return {home.kind: name for name, home in homes().items()}


class ByName(MutableMapping[str, Any]):
    """Strategy classes by `name`. A lookup loads only the file of this strategy; values and items load all files.

    Attributes:
        loaded: the classes that Python has defined so far.

    >>> known = ByName()
    >>> known["mine"] = int
    >>> known["mine"], "mine" in known, "diloco" in known, "dilco" in known
    (<class 'int'>, True, True, False)
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded and name in homes():
            importlib.import_module(homes()[name].module)  # which defines the class, and so enters it
        return self.loaded[name]

    def __setitem__(self, name: str, kind: Any) -> None:
        self.loaded[name] = kind

    def __delitem__(self, name: str) -> None:
        del self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.loaded or name in homes()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*homes(), *self.loaded]))

    def __len__(self) -> int:
        return len({*homes(), *self.loaded})
