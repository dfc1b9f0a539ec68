"""The reference, written from the program: signatures and docstrings as Markdown.

A docstring of ours is plain text: paragraphs, names in backticks, lists under `Args:` and the like; what is indented is
an equation or an example. Every public class and function has an example that runs as a test: its own, or one of its
package that uses it.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.ext.autodoc.mock import mock

DOCS = Path(__file__).resolve().parents[1]
# Where a page has what is written here; the quoted lines below are for who reads the page without the site.
MARK = re.compile(r"^<!-- generated: (\w+) ?([\w.:, ]*) -->$(?:\n> .*$)*", re.M)
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
Items = list[tuple[str, str]]


def escaped(prose: str) -> str:
    """Return prose in which nothing but code in backticks means anything to Markdown."""
    parts = re.split(r"(`+[^`]+`+)", " ".join(prose.split()))
    plain = [part if index % 2 else re.sub(r"([\\*_\[\]<>$|#])", r"\\\1", part) for index, part in enumerate(parts)]
    return re.sub(r"^([-+]|\d+[.)])(?= )", r"\\\1", "".join(plain))


def items(lines: list[str]) -> Items:
    """Return (names, meaning) of the lines under `Args:`; what has no name is of the name ""."""
    found: Items = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        named = re.match(r"([\w*][\w*., ]*?): (.*)|([\w*][\w*., ]*?):$", line)
        if named:
            found.append((named[1] or named[3], named[2] or ""))
        elif found and line.startswith(" "):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        elif found and not found[-1][0]:
            found[-1] = ("", f"{found[-1][1]} {line.strip()}")
        else:
            found.append(("", line.strip()))
    return found


def blocks(docstring: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a docstring: ("text", prose), ("code", lines), ("example", lines), (a section, `Items`)."""
    lines = [*inspect.cleandoc(docstring).splitlines(), ""]
    while lines:
        line = lines.pop(0)
        section = line.removesuffix(":")
        if not line.strip():
            continue
        if section in SECTIONS and line.endswith(":"):
            yield section, items(_while(lines, lambda other: other.startswith(" ")))
        elif line.lstrip().startswith(">>>"):
            yield "example", textwrap.dedent("\n".join([line, *_while(lines, lambda other: bool(other.strip()))]))
        elif line.startswith("    "):
            more = _while(lines, lambda other: not other.strip() or other.startswith("    "))
            yield "code", textwrap.dedent("\n".join([line, *more])).rstrip()
        else:
            yield "text", " ".join([line, *_while(lines, lambda other: bool(other.strip()) and other[0] != " ")])


def _while(lines: list[str], holds: Any) -> list[str]:
    taken = []
    while lines and holds(lines[0]):
        taken.append(lines.pop(0))
    return taken


def markdown(docstring: str) -> str:
    """Return a docstring of ours as Markdown."""
    parts = []
    for kind, what in blocks(docstring):
        if kind == "text":
            parts.append(escaped(what))
        elif kind in ("code", "example"):
            parts.append(f"```{'pycon' if kind == 'example' else 'text'}\n{what}\n```")
        else:
            title = {"Args": "Arguments"}.get(kind, kind)
            parts.append(f"**{title}**\n\n" + "\n".join(_item(names, meaning) for names, meaning in what))
    return "\n\n".join(parts)


def _item(names: str, meaning: str) -> str:
    words = [name.strip() for name in names.split(",") if name.strip()]
    return "- " + (", ".join(f"`{word}`" for word in words) + ": " if words else "") + escaped(meaning)


# What is public


def imported(name: str) -> ModuleType:
    """Import a module of ours. What it derives from and is not installed here, as with `[docs]` alone, is stood in for:
    an entry says nothing of it."""
    lacking: list[str] = []
    while True:
        try:
            with mock(lacking):
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package in ("None", "exogym", *lacking):
                raise
            lacking.append(package)


@functools.cache
def opened(package: str) -> ModuleType:
    """Return a module by its name; of a door, the last room that it hands on."""
    module = imported(package)
    rooms = re.findall(r"^ +from ([\w.]+) import \*", Path(module.__file__ or "").read_text("utf-8"), re.M)
    return imported(rooms[-1]) if rooms else module


def public(module: ModuleType) -> list[str]:
    """Return the public names of a module: those it lists, or else the classes and functions it defines."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        own = [
            (name, value) for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        listed = [name for name, value in own if callable(value)]
    return [name for name in listed if not name.startswith("_")]


def members(kind: type) -> list[tuple[str, Any]]:
    """Return the public methods and properties of a class with a docstring: its own, and those of parents that have no
    entry of their own."""
    found: dict[str, Any] = {}
    for parent in kind.__mro__:
        package = parent.__module__.rpartition(".")[0]
        hidden = parent.__name__ not in getattr(sys.modules.get(package), "__all__", [parent.__name__])
        if parent is kind or (package.startswith("exogym") and (hidden or parent.__name__.startswith("_"))):
            for name, value in vars(parent).items():
                inner = (
                    getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
                )
                if not name.startswith("_") and inspect.isfunction(inner) and inner.__doc__:
                    found.setdefault(name, value)
    return list(found.items())


def own_docstrings(thing: Any) -> list[str]:
    """Return the docstring of a function, or of a class and its members."""
    if not inspect.isclass(thing):
        return [inspect.getdoc(thing) or ""]
    more = [inspect.getdoc(getattr(thing, name)) or "" for name, _ in members(thing)]
    return [vars(thing).get("__doc__") or "", (getattr(thing.__init__, "__doc__", "") or ""), *more]


def examples(docstring: str) -> list[str]:
    return [what for kind, what in blocks(docstring) if kind == "example"]


@functools.cache
def package_examples(package: str) -> list[tuple[str, str]]:
    """Return (where, example) of a package: of its docstring, its public names, and the modules these come from."""
    module = opened(package)
    found = [(package, module.__doc__ or "")]
    for name in public(module):
        thing = getattr(module, name)
        if callable(thing):
            found += [(f"{package}.{name}", text) for text in own_docstrings(thing)]
            home = inspect.getmodule(thing)
            if home is not None and home is not module and home.__name__.startswith("exogym"):
                found.append((home.__name__, home.__doc__ or ""))
    return list(dict.fromkeys((where, example) for where, text in found for example in examples(text)))


@functools.cache
def page_imports() -> list[tuple[Path, ast.ImportFrom]]:
    """Return (page, import) of the Python on all pages, which a test runs."""
    pages = {
        page: re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S) for page in DOCS.rglob("*.md")
    }
    return [
        (page, node)
        for page, snippets in sorted(pages.items())
        for snippet in snippets
        for node in ast.walk(ast.parse(snippet))
        if isinstance(node, ast.ImportFrom)
    ]


def example_for(package: str, name: str) -> str | None:
    """Return the example of the entry of a public name: "" where its docstrings have one, else one that uses it.

    That is one of its package's docstrings, shown, or one on a page, linked; None: there is neither.
    """
    thing = getattr(opened(package), name)
    if any(examples(text) for text in own_docstrings(thing)):
        return ""
    for where, example in package_examples(package):
        called = "".join(line for line in example.splitlines(keepends=True) if line.startswith((">>>", "...")))
        if re.search(rf"(?<![\w]){name}\b", called):
            return f"Example, of `{where}`:\n\n```pycon\n{example}\n```"
    for page, node in page_imports():
        if node.module == package and name in (alias.name for alias in node.names):
            title = page.read_text("utf-8").partition("\n")[0].lstrip("# ")
            return f"Example: on the page [{title}](/{page.relative_to(DOCS).as_posix()})."
    return None


# Entries


def signature(thing: Any) -> str:
    """Return the signature as text, types and defaults as they would be written; "" where there is none to be known."""
    try:
        found = inspect.signature(thing)
    except (ValueError, TypeError):
        return ""
    parts, star, plain = [], False, [*found.parameters.values()]
    for at, parameter in enumerate(plain):
        if at == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {_shown(parameter.default)}"
        parts.append(f"{prefix}{parameter.name}{_typed(parameter.annotation)}{default}")
    gives = _typed(found.return_annotation).removeprefix(": ")
    return f"({', '.join(parts)})" + (f" -> {gives}" if gives and not inspect.isclass(thing) else "")


def _typed(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))
    return f": {text}"


def _shown(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    text = getattr(default, "__name__", None) or repr(default)
    return text if len(text) < 90 and "<" not in text else "..."


def entry(package: str, name: str) -> str:
    """Return the entry of a public name, a directive of Sphinx's Python domain in Markdown."""
    thing = getattr(opened(package), name)
    module = f":module: {package}"
    if not callable(thing):
        value = repr(thing)
        shown = f"\n:value: {value}" if len(value) < 90 and "<" not in value else ""
        return f"``````{{py:data}} {name}\n{module}{shown}\n\n{escaped(comment(package, name))}\n``````"
    home = inspect.getmodule(thing)
    body = [markdown(vars(thing).get("__doc__") or "" if inspect.isclass(thing) else inspect.getdoc(thing) or "")]
    borrowed = example_for(package, name)
    if inspect.isclass(thing):
        above = [parent.__name__ for parent in thing.__bases__ if parent.__module__.startswith("exogym")]
        if above:
            body.insert(0, "A kind of " + ", ".join(f"`{parent}`" for parent in above) + ".")
        if getattr(thing, "paper", None) and home is not None:
            body.append(f"From `{home.__name__}`:\n\n{markdown(home.__doc__ or '')}")
        body += [method(name, found) for name, found in members(thing)]
    body.append(borrowed or "")
    word = "function"
    if inspect.isclass(thing):
        word = "exception" if issubclass(thing, BaseException) else "class"
    text = "\n\n".join(part for part in body if part)
    return f"``````{{py:{word}}} {name}{signature(thing)}\n{module}\n\n{text}\n``````"


def comment(package: str, name: str) -> str:
    """Return what is said of a value where it is defined: the comment behind it, or the one above."""
    module = opened(package)
    source = Path(module.__file__ or "").read_text("utf-8")
    found = re.search(rf"((?:^# .*\n)*)^{name}\b[^=\n]*=.*?(?:  # (.*))?$", source, re.M)
    if found:
        return found[2] or " ".join(line[2:] for line in found[1].splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return comment(node.module or "", name)
    return ""


def method(name: str, found: Any) -> str:
    if isinstance(found, property) or hasattr(found, "func"):
        inner = getattr(found, "fget", None) or found.func
        return f"`````{{py:property}} {name}\n\n{markdown(inner.__doc__)}\n`````"
    inner = getattr(found, "__func__", found)
    kind = {staticmethod: "\n:staticmethod:", classmethod: "\n:classmethod:"}.get(type(found), "")
    return f"`````{{py:method}} {name}{signature(inner)}{kind}\n\n{markdown(inner.__doc__)}\n`````"


def api(*packages: str) -> str:
    """Return the entries of packages, each given as `package` or as `package:Name,Name`.

    What two packages have is at the one with the shorter path.
    """
    parts = []
    for package, names in map(_asked, packages):
        module = opened(package)
        told = markdown(module.__doc__ or "")
        told = f"Import names with `from {package} import ...`; the examples assume it.\n\n{told}"
        parts.append(f"## {package}\n\n```{{py:module}} {package}\n```\n\n{told}")
        for name in names:
            first = first_home(package, name)
            parts.append(entry(package, name) if first == package else f"`{name}`: see {{py:mod}}`{first}`.")
    return said_once("\n\n".join(parts))


def said_once(page: str) -> str:
    """Return a page on which an example that stood before is named instead of shown again."""
    seen: set[str] = set()

    def once(found: re.Match[str]) -> str:
        if found[3] not in seen:
            seen.add(found[3])
            return found[0]
        return f"Example: see {{py:obj}}`{found[2]}`, above." if found[1] else found[0]

    return re.sub(r"(Example, of `([\w.]+)`:\n\n)?```pycon\n(.*?)\n```", once, page, flags=re.S)


def _asked(text: str) -> tuple[str, list[str]]:
    package, _, names = text.partition(":")
    return package, names.split(",") if names else public(opened(package))


def first_home(package: str, name: str) -> str:
    """Return the package with the shortest path that offers this very thing as public."""
    thing = getattr(opened(package), name)
    if not callable(thing):
        return package
    homes = [package]
    for other, names in packages_on_pages().items():
        if name in names and getattr(opened(other), name) is thing:
            homes.append(other)
    return min(homes, key=lambda home: (home.count("."), home))


@functools.cache
def packages_on_pages() -> dict[str, list[str]]:
    """Return the packages and modules that the pages describe, and which names of them."""
    marks = [mark for page in sorted(DOCS.rglob("*.md")) for mark in MARK.findall(page.read_text("utf-8"))]
    return dict(_asked(text) for kind, packages in marks if kind == "api" for text in packages.split())


def options() -> str:
    """Return every option of `LocalTrainer.fit` and of `Placement`: its type, its default, and what it does."""
    from exogym import LocalTrainer, Placement

    return f"{_options(LocalTrainer.fit)}\n\n## Options of a Placement\n\n{_options(Placement)}"


def _options(taken: Any) -> str:
    fit = inspect.signature(taken).parameters
    (section,) = (what for kind, what in blocks(taken.__doc__ or "") if kind == "Args")
    parts = []
    for names, meaning in section:
        heads = []
        for name in (word.strip() for word in names.split(",")):
            default = fit[name].default
            written = "" if default is inspect.Parameter.empty else f" = {_shown(default)}"
            heads.append(f"`{name}{_typed(fit[name].annotation)}{written}`")
        parts.append(f"{', '.join(heads)}\n: {escaped(meaning)}")
    return "\n\n".join(parts)
