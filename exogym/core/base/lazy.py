"""Import a package's names at their first use (PEP 562), so that importing the package is fast.

A package lists its imports once, where type checkers and editors read them:

    if TYPE_CHECKING:
        from exogym.trainer import LocalTrainer
    else:
        __getattr__, __dir__ = lazily(__name__)
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from exogym.core.base.retired import retired


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's or module's `__getattr__` and `__dir__`, for the names it imports under `TYPE_CHECKING`.

    The package's modules are also imported at their first use, so `exogym.errors` works after `import exogym`. If the
    module imports `*` from several packages, it has all their names; the last package is searched first.

    >>> getattr_, dir_ = lazily("exogym")
    >>> getattr_("load_model").__module__, "LocalTrainer" in dir_()
    ('exogym.core.saving.export', True)
    >>> getattr_("LocalTrainr")
    Traceback (most recent call last):
    ...
    AttributeError: module 'exogym' has no attribute 'LocalTrainr'
    >>> import exogym.progress
    >>> exogym.progress.readable_bytes.__module__, "warn" in dir(exogym.progress)
    ('exogym.core.progress', True)

    A retired name raises ImportError: see `absent`.
    """
    module = sys.modules[package]
    imports = [
        (alias.asname or alias.name, statement.module, alias.name)
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    ]
    rooms = [home for name, home, _ in reversed(imports) if name == "*"]
    homes = {name: (home, own) for name, home, own in imports if name != "*"}

    def has_module(name: str) -> bool:
        return hasattr(module, "__path__") and importlib.util.find_spec(f"{package}.{name}") is not None

    def get(name: str) -> Any:
        if name in homes:
            home, own = homes[name]
            value = getattr(importlib.import_module(home), own)
            setattr(module, name, value)
            return value
        for room in rooms if name == "__all__" or not name.startswith("__") else ():
            if hasattr(importlib.import_module(room), name):
                return getattr(sys.modules[room], name)
        if name.startswith("_") or "." in name or not has_module(name):
            absent(package, name)
        return importlib.import_module(f"{package}.{name}")

    def known() -> list[str]:
        if rooms:
            return [name for name in dir(importlib.import_module(rooms[0])) if not name.startswith("_")]
        return sorted({*vars(module), *homes})

    return get, known


def absent(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module doesn't have. A module's `__getattr__` calls this function.

    Raises:
        ImportError: the name is retired, and the message says what to use instead. (Python would replace an
            AttributeError's message if the name was imported from the module.)
        AttributeError: the module never had the name.
    """
    if not name.startswith("__") and (instead := retired(name, module)) is not None:  # Python asks for __path__
        raise ImportError(f"cannot import {name!r}: {instead}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
