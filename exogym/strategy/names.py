"""Reads the strategies' names from their files, so that commands that only show runs need not import torch."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def short_names() -> dict[str, str]:
    """Return a dict from class name to `name`, for ExoGym's strategy classes that have a `name`.

    >>> short_names()["DiLoCoStrategy"]
    'diloco'
    """
    found = {}
    here = Path(__file__).parent
    for file in [*here.glob("*.py"), *here.with_name("contrib").glob("*.py")]:
        classes = [kind for kind in ast.parse(file.read_text("utf-8")).body if isinstance(kind, ast.ClassDef)]
        for kind in classes:
            for line in kind.body:
                if isinstance(line, ast.Assign) and (name := _name(line.targets[0], line.value)) is not None:
                    found[kind.name] = name
    return found


def _name(target: ast.expr, value: ast.expr) -> str | None:
    """Return the text that `name = ...` or `name, title, ... = ..., ...` assigns to the name."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        target, value = target.elts[0], value.elts[0]
    if not isinstance(target, ast.Name) or target.id != "name" or not isinstance(value, ast.Constant):
        return None
    return value.value if isinstance(value.value, str) else None
