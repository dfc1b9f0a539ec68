"""Imports point down only: every import of every file in `exogym` is read and held against the table of floors.

An import inside a function or under `if TYPE_CHECKING:` is knowledge of another module too, so it counts, for floors
and for circles.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from paths import ROOT, TESTS

import exogym

# Three folders hold rooms of their own; every other file or folder of `exogym` is a room.
WINGS = ("core", "machines", "study", "home")
# A door only hands on the names of a room. Users come in by it, and so do tools. The core itself imports the room.
DOORS = {
    *("advise", "clock", "communicator", "compare", "compress", "distributed", "distributed_trainer", "engine"),
    *("files", "fleet", "launch", "options", "progress", "record", "remote", "runs", "streams", "sweep", "tasks"),
    *("models.whisper", "models.language"),
}
TOOLS = ("cli", "clusters", "home", "mesh", "study", "ui")
# Rooms of wings: nothing below them knows that they exist, but by the names in a seam's table.
WING_ROOMS = {
    *("home.discovery", "home.wizard", "home.whisper", "home.language", "home.speech", "home.tasks", "home.commands"),
    *("clusters", "mesh"),
}
# The table. A new room gets its place here.
FLOORS: list[set[str]] = [
    {"core", "machines", "study", "home"},  # their own files, which hold a line of text
    {"errors", "core.base", "core.combinations", "core.progress", "core.refusals"},
    {"core.fleet", "core.communicator", "network", "core.clock", "faults", "balance"},
    {"strategy", "core.compress", "data", "models", "core.engine"},
    {"contrib", "core.compute", "core.record", "core.saving", "core.training", "logger", "callbacks"},
    {"trainer", "testing", "attached"},
    {
        *("study.tasks", "study.cells", "study.compare", "study.advise", "study.runs", "study.notes"),
        *("study.sweep", "machines.distributed", "machines.distributed_trainer", "machines.launch"),
        *("machines.remote", "ui"),
        "integrations",
    },
    {"cli", "__main__", *WING_ROOMS},
    {"__init__", *DOORS},  # `__init__` of exogym itself
]
# The core names no wing, but in a seam: the names for users, and doors. The names in tables and messages are texts.
NAMES_OF_WINGS = {"mesh", "meshes", "stages", "ray", "wizard"}
OUTSIDE_THE_CORE = {"cli", "ui", "__main__", "__init__", *WING_ROOMS, *DOORS}
OF_TORCH = {"device_mesh"}  # an attribute of its DTensor
# Rooms of a floor do not know each other where the floor is listed here; what is listed is the exception.
CLOSED_FLOOR = 3
BESIDE = {("strategy", "core.compress")}

# Circles that stand for now, each as the modules that know each other. The table may only shrink.
CIRCLES: list[set[str]] = []

FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
Sources = dict[str, str]  # path inside the package, "strategy/diloco.py" -> source


def module_of(path: str) -> str:
    """Return the module of a path: "strategy/diloco.py" is "strategy.diloco", "strategy/__init__.py" is "strategy"."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the room of a module: "strategy" for "strategy.diloco", "core.fleet" for "core.fleet.fleet"."""
    if module in DOORS:
        return module
    return ".".join(module.split(".")[: 2 if module.startswith(tuple(f"{wing}." for wing in WINGS)) else 1])


def called(node: ast.Call) -> str:
    """Return the name that is called, without those before its dots."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def imports(path: str, source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of the package; a name that is no module belongs to the module it is in."""

    def named(full: str) -> str | None:
        root, _, rest = full.partition(".")
        return (rest or "__init__") if root == "exogym" else None

    folder = ["exogym", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            submodule = {f"{origin}.{alias.name}": alias.name for alias in node.names}
            found = [full if named(full) in modules | FLOOR_OF.keys() else origin for full in submodule]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
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
    if imported in {"__init__", *DOORS} and importer.partition(".")[0] in TOOLS:
        return True
    if above == below == CLOSED_FLOOR:
        return (importer, imported) in BESIDE
    if importer == "core.engine":  # engines know the matrix and the wire, not the science
        return below < CLOSED_FLOOR
    return below <= above


def broken_rules(sources: Sources) -> list[str]:
    """Return one line for each import that points up, and for each part that the table does not know."""
    modules = {module_of(path) for path in sources}
    lines = [
        f"exogym/{part}: not in the table of floors; add it to FLOORS in tests/laws/test_layers.py"
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


def circles(sources: Sources) -> list[set[str]]:
    """Return the sets of modules of which each leads to every other over imports, those that are not one module."""
    modules = {module_of(path) for path in sources}
    edges = {module_of(path): {m for _, m in imports(path, source, modules)} for path, source in sources.items()}
    reach: dict[str, set[str]] = {}
    for module in edges:
        reach[module], left = set(), [module]
        while left:
            new = edges.get(left.pop(), set()) - reach[module]
            reach[module] |= new
            left += new
    found: list[set[str]] = []
    for module in sorted(edges):
        circle = {other for other in reach[module] if module in reach.get(other, ())} - {module}
        if circle and not any(module in earlier for earlier in found):
            found.append(circle | {module})
    return found


def package_sources() -> Sources:
    """Return the sources of the real package."""
    root = Path(exogym.__path__[0])
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}


def with_files(paths: Iterable[str]) -> Sources:
    """Return empty sources: a small package to plant imports in."""
    return dict.fromkeys(paths, "")


TOY = (
    *(
        "__init__.py",
        "errors.py",
        "core/base/rng.py",
        "core/fleet/__init__.py",
        "trainer.py",
        "core/training/loop.py",
        "core/record/history.py",
        "cli/__init__.py",
    ),
    *(
        "strategy/__init__.py",
        "strategy/diloco.py",
        "strategy/optim.py",
        "core/compress/__init__.py",
        "core/compress/topk.py",
    ),
    *("core/engine/__init__.py", "core/engine/local.py", "data/__init__.py", "models/__init__.py"),
)


def test_the_package_is_read() -> None:
    assert {"__init__.py", "errors.py", "core/base/rng.py"} <= package_sources().keys()


def test_imports_point_down() -> None:
    broken = broken_rules(package_sources())
    assert not broken, "\n" + "\n".join(broken)


def test_no_circle_but_those_of_the_table() -> None:
    assert circles(package_sources()) == CIRCLES


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/fleet/__init__.py", "from exogym.trainer import LocalTrainer"),
        ("core/fleet/__init__.py", "import exogym.trainer as t"),
        ("core/fleet/__init__.py", "from exogym import trainer"),
        ("core/fleet/__init__.py", "from ... import trainer"),
        ("core/fleet/__init__.py", "def f():\n    from ...trainer import LocalTrainer"),
        (
            "core/fleet/__init__.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from exogym.trainer import LocalTrainer",
        ),
        ("core/fleet/__init__.py", "import importlib\nimportlib.import_module('exogym.trainer')"),
        ("core/fleet/__init__.py", "import exogym"),
        ("core/fleet/__init__.py", "from exogym import LocalTrainer"),
        ("errors.py", "from exogym.core.fleet import Fleet"),
        ("strategy/diloco.py", "from ..core.training.loop import run"),
        ("strategy/diloco.py", "from exogym.core.engine.local import Local"),
        ("strategy/diloco.py", "from exogym.data import shards"),
        ("core/compress/topk.py", "from exogym.strategy.optim import OptimSpec"),
        ("data/__init__.py", "from exogym.core import compress"),
        ("models/__init__.py", "from .. import strategy"),
        ("core/engine/local.py", "def f():\n    import exogym.strategy.diloco"),
        ("core/engine/local.py", "from exogym.data import shards"),
        ("core/training/loop.py", "from exogym.trainer import LocalTrainer"),
        ("trainer.py", "from exogym.cli import main"),
        ("trainer.py", "from exogym.progress import notice"),
        ("core/training/loop.py", "from exogym import progress"),
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
        (
            "core/fleet/__init__.py",
            "from exogym.errors import ExoGymError\nfrom ..base import rng\nimport torch, exogymnasium",
        ),
        ("strategy/diloco.py", "from exogym.strategy.optim import OptimSpec\nfrom ..core.compress.topk import TopK"),
        ("strategy/__init__.py", "from .diloco import DiLoCoStrategy\nfrom exogym.core.fleet import Fleet"),
        ("core/engine/local.py", "from exogym.core.fleet import Fleet\nfrom . import exogym"),
        (
            "core/training/loop.py",
            "from exogym.core.record.history import History\nfrom exogym.strategy import Strategy\n"
            "import exogym.core.engine",
        ),
        ("cli/__init__.py", "from exogym import trainer\nfrom exogym.progress import notice"),
    ],
)
def test_a_downward_import_is_fine(path: str, source: str) -> None:
    assert broken_rules(with_files(TOY) | {path: source}) == []


def test_an_unknown_part_is_told_where_to_go() -> None:
    (found,) = broken_rules(with_files([*TOY, "attic.py"]))
    assert "exogym/attic" in found
    assert "add it to FLOORS" in found


@pytest.mark.parametrize(
    "loop",
    [
        "from ..record import history",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from exogym.core.record.history import History",
        "class Loop:\n    def f(self):\n        import exogym.core.record.history",
    ],
)
def test_a_circle_is_caught(loop: str) -> None:
    """Of two, also where one import runs late or never; and of three, beside one that stands."""
    two = with_files(TOY) | {
        "core/training/loop.py": loop,
        "core/record/history.py": "from exogym.core.training.loop import x",
    }
    assert circles(two) == [{"core.record.history", "core.training.loop"}]
    package = {"strategy/__init__.py": "from .diloco import D", "strategy/diloco.py": "from .optim import O"}
    assert circles(two | package) == [{"core.record.history", "core.training.loop"}]
    package["strategy/optim.py"] = "from exogym.strategy import S"
    assert circles(two | package) == [
        {"core.record.history", "core.training.loop"},
        {"strategy", "strategy.diloco", "strategy.optim"},
    ]


# The core knows no wing


def words(name: str) -> set[str]:
    """Return the words of a name: "node", "mesh" and "of" for "NodeMesh_of"."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of all that a source names or imports; texts, comments and docstrings do not count."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def names_of_wings(sources: Sources) -> list[str]:
    """Return one line for each place of the core that names a wing."""
    return [
        f"exogym/{path}:{line}: names a wing, {name}; reach it over a seam of docs/design.md"
        for path, source in sources.items()
        if (room := part_of(module_of(path))) not in OUTSIDE_THE_CORE and not room.startswith("study.")
        for line, name in identifiers(source)
        if name not in OF_TORCH and words(name) & NAMES_OF_WINGS
    ]


def test_the_core_names_no_wing() -> None:
    assert names_of_wings(package_sources()) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(mesh): ...",
        "f(stages=2)",
        "class NodeMesh: ...",
        "options.meshes",
        "from exogym.mesh import value",
        "from exogym.clusters import Ray as Cluster",
        "import ray",
        "run_wizard()",
    ],
)
def test_a_wing_that_the_core_names_is_found(source: str) -> None:
    (found,) = names_of_wings({"core/training/loop.py": source, "mesh/wire.py": source, "cli/__init__.py": source})
    assert found.startswith("exogym/core/training/loop.py:1: names a wing")


@pytest.mark.parametrize(
    "source",
    [
        '"""In stages, by Ray."""',
        "raise ValueError('give NodeMesh(stages=2)')",
        "x.device_mesh",
        "array, meshgrid = 1, 2",
    ],
)
def test_prose_and_other_words_name_no_wing(source: str) -> None:
    assert names_of_wings({"core/training/loop.py": source}) == []


# The tests themselves


def imported_tests(source: str, own: str) -> set[str]:
    """Return the test files, other than `own`, that a source imports, or a script in one of its texts."""
    tree = ast.parse(source)
    names = set(re.findall(r"^\s*(?:from|import) (?:\w+\.)*(?:\w+ import )?(test_\w+)", source, re.M))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__", "importorskip"):
            names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    return {last for name in names if (last := name.split(".")[-1]).startswith("test_")} - {own}


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_what_tests_share_lies_in_rooms(path: Path) -> None:
    """A test file that another one imports is a room that does not say so."""
    assert imported_tests(path.read_text("utf-8"), path.stem) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from test_laws import STRATEGIES", {"test_laws"}),
        ("def f():\n    import test_laws as t", {"test_laws"}),
        ("SCRIPT = '''\nimport sys\nfrom test_laws import STRATEGIES\n'''", {"test_laws"}),
        ("import importlib\nimportlib.import_module('test_laws')", {"test_laws"}),
        ("SCRIPT = '''\nfrom core.fleet import test_laws as t\n'''", {"test_laws"}),
        ("from core.fleet import test_laws", {"test_laws"}),
        ("import core.fleet.test_laws", {"test_laws"}),
        ("SCRIPT = '''\nfrom core.test_this import run\n'''", set()),
        ("import battery\nfrom problems import same", set()),
    ],
)
def test_a_test_that_is_imported_is_caught(source: str, found: set[str]) -> None:
    assert imported_tests(source, "test_this") == found


# What tests, scripts and benchmarks import of the package


def strangers(source: str) -> set[str]:
    """Return what a source imports of `exogym` that its files here do not have, whatever else is installed."""
    top, found = Path(exogym.__path__[0]), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "exogym":
            folder = top.joinpath(*str(node.module).split(".")[1:])
            file = folder / "__init__.py" if (folder / "__init__.py").exists() else folder.with_suffix(".py")
            text = file.read_text("utf-8") if file.exists() else ""
            for room in re.findall(r"^    from exogym\.(.*) import \*", text, re.M):  # a door: its rooms have the names
                folder = top.joinpath(*room.split("."))
                file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
                text += file.read_text("utf-8")
            if node.module == "exogym.strategy":  # which hands on the methods of contrib
                text += (top / "contrib" / "__init__.py").read_text("utf-8")
            for name in (alias.name for alias in node.names):
                is_module = (folder / name / "__init__.py").exists() or (folder / f"{name}.py").exists()
                if not is_module and not re.search(rf"\b{name}\b", text):
                    found.add(f"{node.module}.{name}")
    return found


@pytest.mark.parametrize("folder", ["tests", "run", "benchmarks"])
def test_what_is_imported_of_the_package_is_there(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {file.name: names for file in files if (names := strangers(file.read_text("utf-8")))}
    assert files and not found


def test_an_import_of_a_room_that_was_left_is_found():
    assert strangers("from exogym import LocalTrainer\nfrom exogym.core.training import loop") == set()
    assert strangers("def f():\n    from exogym import LocalTrainer, keepers") == {"exogym.keepers"}
    assert strangers("from exogym.keepers import Keeper") == {"exogym.keepers.Keeper"}
