"""Import a package's names at their first use (PEP 562), so that importing the package is fast.

A package writes its imports once, where type checkers and editors read them:

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
from typing import Any

from exogym.core.base.retired import retired


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's or module's `__getattr__` and `__dir__`, for the names it imports under `TYPE_CHECKING`.

    The package's modules are also imported at their first use: `exogym.errors` works after `import exogym`.

    >>> getattr_, dir_ = lazily("exogym")
    >>> getattr_("load_model").__module__, "LocalTrainer" in dir_()
    ('exogym.core.saving.export', True)
    >>> getattr_("LocalTrainr")
    Traceback (most recent call last):
    ...
    AttributeError: module 'exogym' has no attribute 'LocalTrainr'
    """
    module = sys.modules[package]
    homes = {
        alias.asname or alias.name: (statement.module, alias.name)
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def has_module(name: str) -> bool:
        return hasattr(module, "__path__") and importlib.util.find_spec(f"{package}.{name}") is not None

    def get(name: str) -> Any:
        if name in homes:
            home, own = homes[name]
            value = getattr(importlib.import_module(home), own)
        elif name.startswith("_") or "." in name or not has_module(name):
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_more(name, package)}")
        else:
            value = importlib.import_module(f"{package}.{name}")
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes})


def door(room: str, *wings: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` for a module that only re-exports the names of the module `room`.

    `wings` are modules whose names the door also re-exports. They are loaded only for a name that the room lacks.

    >>> getattr_, dir_ = door("exogym.core.progress")
    >>> getattr_("readable_bytes").__module__, "warn" in dir_()
    ('exogym.core.progress', True)
    """

    def get(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"the module that re-exports {room} has no {name}")
        homes = [room, *wings]
        while len(homes) > 1 and not hasattr(importlib.import_module(homes[0]), name):
            del homes[0]
        home = importlib.import_module(homes[0])
        if not hasattr(home, name):
            raise AttributeError(f"module {room!r} has no attribute {name!r}{_more(name, room)}")
        return getattr(home, name)

    return get, lambda: sorted(n for n in dir(importlib.import_module(room)) if not n.startswith("_"))


def _more(name: str, package: str) -> str:
    instead = retired(name, package)
    return "" if instead is None else f": {instead}"
