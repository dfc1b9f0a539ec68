"""Imports point down only: every import of every file in `exogym` is read and held against the table of floors.

An import inside a function or under `if TYPE_CHECKING:` is knowledge of another floor too, so it counts. Cycles are
looked for among the imports that run when a module is loaded.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import exogym

# The table. A new top-level file or folder of `exogym` gets its place here.
FLOORS: list[set[str]] = [
    {"errors", "rng", "layout", "devices", "files"},
    {"fleet", "communicator", "network", "clock", "faults", "balance"},
    {"strategy", "compress", "data", "models", "engine"},
    {
        "gradients",
        "train_node",
        "loop",
        "metrics",
        "logger",
        "history",
        "checkpoint",
        "keepers",
        "progress",
        "outputs",
        "worker",
        "meeting",
        "stacked_driver",
        "node_driver",
        "async_driver",
        "async_schedule",
        "object_state",
        "memory",
        "callbacks",
        "options",
        "assembly",
        "interrupt",
        "export",
        "timing",
        "snapshots",
        "buckets",
        "placement",
        "speeds",
        "finite",
        "attributes",
    },
    {
        "trainer",
        "tasks",
        "compare",
        "comparison",
        "plots",
        "sweep",
        "testing",
        "distributed",
        "launch",
        "advise",
        "remote",
    },
    {"cli", "wizard", "dashboard", "__main__"},
    {"__init__"},  # of exogym itself
]
# Rooms of a floor do not know each other where the floor is listed here; what is listed is the exception.
CLOSED_FLOOR = 2
DOORS = {("strategy", "compress")}

FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
Sources = dict[str, str]  # path inside the package, "strategy/diloco.py" -> source


def module_of(path: str) -> str:
    """Return the module of a path: "strategy/diloco.py" is "strategy.diloco", "strategy/__init__.py" is "strategy"."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the top-level part that a module belongs to: "strategy" for "strategy.diloco"."""
    return module.partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    """Say whether `node` is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(tree: ast.AST, at_load_only: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, with `at_load_only` only those that run when the module is loaded."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if at_load_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_load_only and isinstance(node, ast.If) and is_type_checking(node):
            for other in node.orelse:
                yield other
                yield from walk(other, at_load_only)
            continue
        yield from walk(node, at_load_only)


def imports(path: str, source: str, modules: set[str], at_load_only: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of the package; a name that is no module belongs to the module it is in."""

    def named(full: str) -> str | None:
        root, _, rest = full.partition(".")
        return (rest or "__init__") if root == "exogym" else None

    folder = ["exogym", *path.split("/")[:-1]]
    for node in walk(ast.parse(source), at_load_only):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            submodule = {f"{origin}.{alias.name}": alias.name for alias in node.names}
            found = [full if named(full) in modules | FLOOR_OF.keys() else origin for full in submodule]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for full in dict.fromkeys(found):
            module = named(full)
            if module is not None:
                yield node.lineno, module  # type: ignore[attr-defined]


def may_import(importer: str, imported: str) -> bool:
    """Say whether the part `importer` may import from the part `imported`."""
    if importer == imported:
        return True
    above, below = FLOOR_OF[importer], FLOOR_OF[imported]
    if above == below == CLOSED_FLOOR:
        return (importer, imported) in DOORS
    if importer == "engine":  # engines know the matrix and the wire, not the science
        return below < CLOSED_FLOOR
    return below <= above


def broken_rules(sources: Sources) -> list[str]:
    """Return one line for each import that points up, and for each part that the table does not know."""
    modules = {module_of(path) for path in sources}
    lines = [
        f"exogym/{part}: not in the table of floors; add it to FLOORS in tests/test_layers.py"
        for part in sorted({part_of(module) for module in modules} - FLOOR_OF.keys())
    ]
    for path, source in sources.items():
        importer = part_of(module_of(path))
        for line, module in imports(path, source, modules):
            imported = part_of(module)
            where = f"exogym/{path}:{line}"
            if imported not in FLOOR_OF:
                lines.append(f"{where}: imports exogym.{imported}, which is not in the table of floors")
            elif importer in FLOOR_OF and not may_import(importer, imported):
                lines.append(
                    f"{where}: {importer} (floor {FLOOR_OF[importer]}) must not import "
                    f"{imported} (floor {FLOOR_OF[imported]})"
                )
    return lines


def cycle(sources: Sources) -> list[str]:
    """Return the modules of one import cycle at load time, the first one again at the end; [] where there is none."""
    modules = {module_of(path) for path in sources}
    edges = {
        module_of(path): {m for _, m in imports(path, source, modules, at_load_only=True)}
        for path, source in sources.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(edges.get(module, ())):
            if found := visit(imported, [*trail, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(edges) if (found := visit(module, []))), [])


def package_sources() -> Sources:
    """Return the sources of the real package."""
    root = Path(exogym.__path__[0])
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}


def with_files(paths: Iterable[str]) -> Sources:
    """Return empty sources: a small package to plant imports in."""
    return dict.fromkeys(paths, "")


TOY = (
    *("__init__.py", "errors.py", "rng.py", "fleet.py", "trainer.py", "loop.py", "history.py", "cli/__init__.py"),
    *("strategy/__init__.py", "strategy/diloco.py", "strategy/optim.py", "compress/__init__.py", "compress/topk.py"),
    *("engine/__init__.py", "engine/local.py", "data/__init__.py", "models/__init__.py"),
)


def test_the_package_is_read() -> None:
    assert {"__init__.py", "errors.py", "rng.py"} <= package_sources().keys()


def test_imports_point_down() -> None:
    broken = broken_rules(package_sources())
    assert not broken, "\n" + "\n".join(broken)


def test_no_import_cycle() -> None:
    assert cycle(package_sources()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fleet.py", "from exogym.trainer import LocalTrainer"),
        ("fleet.py", "import exogym.trainer as t"),
        ("fleet.py", "from exogym import trainer"),
        ("fleet.py", "from . import trainer"),
        ("fleet.py", "def f():\n    from .trainer import LocalTrainer"),
        (
            "fleet.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from exogym.trainer import LocalTrainer",
        ),
        ("fleet.py", "import importlib\nimportlib.import_module('exogym.trainer')"),
        ("fleet.py", "import exogym"),
        ("fleet.py", "from exogym import LocalTrainer"),
        ("errors.py", "from exogym.fleet import Fleet"),
        ("strategy/diloco.py", "from ..loop import run"),
        ("strategy/diloco.py", "from exogym.engine.local import Local"),
        ("strategy/diloco.py", "from exogym.data import shards"),
        ("compress/topk.py", "from exogym.strategy.optim import OptimSpec"),
        ("data/__init__.py", "from exogym import compress"),
        ("models/__init__.py", "from .. import strategy"),
        ("engine/local.py", "def f():\n    import exogym.strategy.diloco"),
        ("engine/local.py", "from exogym.data import shards"),
        ("loop.py", "from exogym.trainer import LocalTrainer"),
        ("trainer.py", "from exogym.cli import main"),
    ],
)
def test_an_upward_import_is_caught(path: str, source: str) -> None:
    found = broken_rules(with_files(TOY) | {path: source})
    assert len(found) == 1
    assert found[0].startswith(f"exogym/{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from exogym.cli import main\nfrom .trainer import LocalTrainer"),
        ("fleet.py", "from exogym.errors import ExoGymError\nfrom . import rng\nimport torch, exogymnasium"),
        ("strategy/diloco.py", "from exogym.strategy.optim import OptimSpec\nfrom ..compress.topk import TopK"),
        ("strategy/__init__.py", "from .diloco import DiLoCoStrategy\nfrom exogym.fleet import Fleet"),
        ("engine/local.py", "from exogym.fleet import Fleet\nfrom . import exogym"),
        ("loop.py", "from exogym.history import History\nfrom exogym.strategy import Strategy\nimport exogym.engine"),
        ("cli/__init__.py", "from exogym import trainer"),
    ],
)
def test_a_downward_import_is_fine(path: str, source: str) -> None:
    assert broken_rules(with_files(TOY) | {path: source}) == []


def test_an_unknown_part_is_told_where_to_go() -> None:
    (found,) = broken_rules(with_files([*TOY, "attic.py"]))
    assert "exogym/attic" in found
    assert "add it to FLOORS" in found


def test_a_cycle_is_caught() -> None:
    history, loop = "from exogym.loop import x", "from . import history"
    assert cycle(with_files(TOY) | {"loop.py": loop, "history.py": history}) == ["history", "loop", "history"]
    package = {"strategy/__init__.py": "from .diloco import D", "strategy/diloco.py": "from exogym.strategy import S"}
    assert cycle(with_files(TOY) | package) == ["strategy", "strategy.diloco", "strategy"]


def test_an_import_that_does_not_run_at_load_makes_no_cycle() -> None:
    loop = "if TYPE_CHECKING:\n    from exogym import history\nelse:\n    import exogym.rng"
    history = "class History:\n    def f(self):\n        from exogym.loop import x"
    assert cycle(with_files(TOY) | {"loop.py": loop, "history.py": history}) == []
    in_class = "class History:\n    from exogym.loop import x"
    assert cycle(with_files(TOY) | {"loop.py": "import exogym.history", "history.py": in_class}) != []
