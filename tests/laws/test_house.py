"""What is done in one place stays there: each rule is looked for in the sources of the package, and planted once."""

import ast
import functools
from pathlib import Path

import pytest

import exogym

Sources = dict[str, str]  # path inside the package -> source


def sources() -> Sources:
    root = Path(exogym.__path__[0])
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}


nodes = functools.cache(lambda source: list(ast.walk(ast.parse(source))))  # of the package, a second each time


@functools.cache
def written(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of each attribute or item that is assigned to."""
    found = []
    for node in nodes(source):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                found.append((node.lineno, ast.unparse(part)))
    return found


def who_is_present(found: Sources) -> list[str]:
    """Return the places where it is said who takes part in communication."""
    return [
        f"{path}:{line}"
        for path, source in found.items()
        for line, target in written(source)
        if target.endswith("comm.present")
    ]


def strangers_in_the_loop(found: Sources) -> list[str]:
    """Return the places outside the loop where its attributes are written, `loop.x` or `self.loop.x`."""
    return [
        f"{path}:{line}: {target}"
        for path, source in found.items()
        if path != "core/training/loop.py"
        for line, target in written(source)
        if target.startswith(("loop.", "self.loop."))
    ]


def asked_for_their_class(found: Sources) -> list[str]:
    """Return the places outside `strategy/` where something is asked whether it is a strategy of some kind.

    Whether it is one at all may be asked.
    """
    places = []
    for path, source in found.items():
        if path.startswith("strategy/"):
            continue
        for node in nodes(source):
            kinds: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                kinds = node.args[1:]
            elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
                kinds = node.comparators
            words = {name.id for kind in kinds for name in ast.walk(kind) if isinstance(name, ast.Name)}
            if any(word.endswith("Strategy") and word != "Strategy" for word in words):
                places.append(f"{path}:{node.lineno}")
    return places


def test_who_is_present_is_said_in_one_place() -> None:
    (place,) = who_is_present(sources())
    assert place.startswith("core/training/driver.py")


def test_the_loop_writes_its_own_attributes() -> None:
    assert strangers_in_the_loop(sources()) == []


def test_no_strategy_is_asked_for_its_class() -> None:
    assert asked_for_their_class(sources()) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (who_is_present, "def f(fleet):\n    fleet.comm.present = [0]"),
        (who_is_present, "class A:\n    def f(self):\n        self.comm.present, x = [0], 1"),
        (strangers_in_the_loop, "def f(loop):\n    loop.step = 3"),
        (strangers_in_the_loop, "def f(self):\n    self.loop.plan.folder, x = 3, 4"),
        (strangers_in_the_loop, "def f(loop):\n    loop.endings += [3]"),
        (asked_for_their_class, "def f(x):\n    return isinstance(x, DiLoCoStrategy)"),
        (asked_for_their_class, "def f(x):\n    return isinstance(x, (int, SPARTAStrategy))"),
        (asked_for_their_class, "def f(x):\n    return type(x) is strategy.DeMoStrategy or type(x) is DeMoStrategy"),
    ],
)
def test_a_breach_is_found(rule, source: str) -> None:
    assert len(rule({"remote/some.py": source})) == 1
    assert rule({"remote/some.py": "def f(x):\n    return isinstance(x, Strategy) and x.comm.present == [0]"}) == []
