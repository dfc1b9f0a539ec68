"""No files of the package but the core's and the mesh's `torch_private.py` use private parts of torch, or of others.

Private is what torch's own rule calls so: an underscore anywhere in the path of a name, or a name that its module does
not list in `__all__`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import exogym

ROOT = Path(exogym.__path__[0])
ROOMS = ("core/base/torch_private.py", "mesh/torch_private.py")
DOCUMENTED = {"os._exit", "_fields", "_fields_"}  # of Python, underscore or not


def has_underscore(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def is_private(module: str, names: list[str]) -> bool:
    """Tell whether `names`, a path of attributes that starts at a module of torch, leads over a private one."""
    if has_underscore(".".join([module, *names])):
        return True
    at = importlib.import_module(module)
    for name in names:
        value = getattr(at, name, None)
        if not isinstance(
            value, ModuleType
        ):  # of what is no function or class, such as torch.strided, no list is whole
            return callable(value) and name not in getattr(at, "__all__", [name])
        at = value
    return False


def chain(node: ast.AST) -> list[str]:
    """Return ["a", "b", "c"] for `a.b.c`; [] for what begins with more than a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


nodes_of = functools.cache(lambda source: list(ast.walk(ast.parse(source))))


@functools.cache
def defined(source: str) -> set[str]:
    """Return the names with an underscore that a source gives to something itself."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and chain(node)[:1] == ["self"]:
            found.add(node.attr)
    return {name for name in found if has_underscore(name)}


def private_names(source: str, of_package: set[str]) -> set[str]:
    """Return what a source uses of others' private parts.

    Args:
        of_package: names with an underscore that other files of the package define, and torch does not have.
    """
    nodes, own = nodes_of(source), defined(source) | of_package
    roots: dict[str, tuple[str, list[str]]] = {}  # a name here -> the module of torch, and the path inside
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    roots[alias.asname or "torch"] = (alias.name if alias.asname else "torch", [])
                    found |= {alias.name} if is_private(alias.name, []) else set()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                roots[alias.asname or alias.name] = (str(node.module), [alias.name])
                found |= {f"{node.module}.{alias.name}"} if is_private(str(node.module), [alias.name]) else set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name, *rest = chain(node) or [""]
            if name in roots:
                module, path = roots[name]
                full = ".".join([module, *path, *rest])
                found |= {full} if is_private(module, [*path, *rest]) else set()
            elif (
                has_underscore(node.attr)
                and node.attr not in own
                and not DOCUMENTED & {node.attr, ".".join([name, *rest])}
            ):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            value = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found |= {value} if has_underscore(value) and value not in own | DOCUMENTED else set()
    return found


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


def of_torch() -> set[str]:
    """Return the names with an underscore that what the package takes of torch has."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    things = [torch, torch.distributed, torch.zeros(1), nn.Module(), optimizer, iter(DataLoader([1])), Dataset, Sampler]
    return {name for thing in things for name in {*dir(thing), *getattr(thing, "__dict__", ())} if has_underscore(name)}


def test_private_parts_are_used_in_two_files() -> None:
    package = sources()
    of_package = set().union(*(defined(source) for source in package.values())) - of_torch()
    found = {path: private_names(source, of_package) for path, source in package.items()}
    of_rooms = set().union(*map(found.pop, ROOMS))
    assert {"torch._foreach_mul_", "_buffers", "_local_tensor"} <= of_rooms
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", "torch._foreach_add_"),
        ("import torch\nf = torch._C._nn.gelu", "torch._C._nn.gelu"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._dynamo as d", "torch._dynamo"),
        ("from torch._utils import x", "torch._utils.x"),
        ("from torch.nn import _reduction", "torch.nn._reduction"),
        (
            "from torch.optim.optimizer import _use_grad_for_differentiable",
            "torch.optim.optimizer._use_grad_for_different",
        ),
        ("from torch.optim.optimizer import overload", "torch.optim.optimizer.overload"),  # not in its __all__
        ("def f():\n    from torch import nn\n    nn.functional._verify_batch_size(x)", "torch.nn.functional._verify"),
        ("import torch.distributed as dist\ndist._all_gather_base(a, b)", "torch.distributed._all_gather_base"),
        ("def f(m):\n    m._modules.clear()", "_modules"),
        ("def f(m):\n    return m.layers[0]()._grad", "_grad"),
        ("class A:\n    def f(self):\n        self._parameters.clear()", "_parameters"),
        ("def f(x):\n    return getattr(x, '_backward_hooks', None)", "_backward_hooks"),
    ],
)
def test_a_private_part_is_found(source: str, private: str) -> None:
    assert any(name.startswith(private) for name in private_names(source, {"_meet"}))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.func.vmap(torch.zeros(1).add_)\ntorch.distributed.elastic.multiprocessing.start_processes",
        "from torch import nn\nnn.Module.__init__",
        "from torch.nn.parameter import is_lazy",
        "import os\nos._exit(1)",
        "def f(t):\n    return type(t)(*t) if hasattr(t, '_fields') else t._fields",
        "class A:\n    def _buffers(self):\n        return self._kept\n    def __init__(self):\n        self._kept = 1",
        "def f(strategy):\n    strategy._meet()",
    ],
)
def test_what_is_public_or_ones_own_is_fine(source: str) -> None:
    assert private_names(source, {"_meet"}) == set()


# Classes that take a private name of torch's by inheriting it


def overridden(cls: type) -> set[str]:
    """Return the names with an underscore that a class gives anew though a base of torch has them."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "torch"]
    if not bases:
        return set()
    theirs = {name for base in bases for name in dir(base)} | (
        vars(nn.Module()).keys() if nn.Module in bases else set()
    )
    try:
        own = vars(cls).keys() | defined(inspect.getsource(cls).strip())
    except (OSError, IndentationError):
        own = set(vars(cls))
    return {name for name in own & theirs if has_underscore(name)} - {"_abc_impl"}  # which Python puts there


def classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(exogym.__path__, "exogym."):
        if not module.name.endswith("__main__"):
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and value.__module__ == module.name:
                    yield value


def test_no_class_overrides_a_private_part() -> None:
    found = {cls.__qualname__: names for cls in classes() if (names := overridden(cls))}
    assert found == {"FusedSGD": {"_init_group"}}


def test_an_override_is_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules = {}

    class Plain(nn.Module):
        def _own(self) -> None: ...

    class Batches(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    assert overridden(Model) == {"_modules"} and not overridden(Plain) and not overridden(Batches)
