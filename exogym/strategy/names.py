"""The strategies' names, read from their files: for who shows runs and must not wait for torch."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def short_names() -> dict[str, str]:
    """Return the name of each class of this package that has one, by the name of the class.

    >>> short_names()["DiLoCoStrategy"]
    'diloco'
    """
    found = {}
    for file in Path(__file__).parent.glob("*.py"):
        for kind in ast.parse(file.read_text("utf-8")).body:
            for line in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(line, ast.Assign) and (name := _name(line.targets[0], line.value)) is not None:
                    found[kind.name] = name
    return found


def _name(target: ast.expr, value: ast.expr) -> str | None:
    """Return the text that `name = ...` gives, or `name, title, ... = ..., ...`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        target, value = target.elts[0], value.elts[0]
    is_name = isinstance(target, ast.Name) and target.id == "name" and isinstance(value, ast.Constant)
    return value.value if is_name and isinstance(value.value, str) else None
