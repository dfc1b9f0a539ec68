"""A door hands on the names of its room, and nothing else stands at the root."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from processes import python

import exogym

ROOT = Path(exogym.__path__[0])
DOORS = {
    path.stem: found[-1]
    for path in sorted(ROOT.glob("*.py"))
    if (found := re.findall(r"^ +from ([\w.]+) import \*", path.read_text("utf-8"), re.M))
}

CHOOSING = {  # doors that hand on some names of several rooms, those that they list
    path.stem for path in sorted(ROOT.glob("[!_]*.py")) if "= lazily(__name__)" in path.read_text("utf-8")
} - DOORS.keys()


@pytest.mark.parametrize("name", DOORS)
def test_a_door_hands_on_the_very_names_of_its_room(name: str) -> None:
    door, room = importlib.import_module(f"exogym.{name}"), importlib.import_module(DOORS[name])
    names = getattr(room, "__all__", [key for key in vars(room) if not key.startswith("_")])
    assert names and all(getattr(door, key) is getattr(room, key) for key in names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


def made_in(source: str) -> list[str]:
    """Return the statements of a module that a door does not have: it has a docstring, imports, a list and `lazily`."""
    plain = r"[\'\"]|from [\w.]+ import |__all__ = "
    lazy = (
        r"if TYPE_CHECKING:\n(    from [\w.]+ import [\w, ]+\n)+else:\n    __getattr__, __dir__ = lazily\(__name__\)$"
    )
    return [text for node in ast.parse(source).body if not re.match(f"{plain}|{lazy}", text := ast.unparse(node))]


@pytest.mark.parametrize("name", sorted(CHOOSING))
def test_a_door_that_chooses_lists_names_of_the_core_and_makes_none(name: str) -> None:
    door = importlib.import_module(f"exogym.{name}")
    assert made_in(Path(str(door.__file__)).read_text("utf-8")) == [] and door.__all__
    for key in door.__all__:
        assert getattr(door, key) is not None and key in dir(door)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


def test_what_a_door_makes_is_seen() -> None:
    assert made_in('"""A door."""\nfrom a.b import c\n__all__ = ["c"]\n') == []
    assert made_in("from a import b\nMOST = 3\ndef f(): pass") == ["MOST = 3", "def f():\n    pass"]


def test_names_that_were_promised_have_a_door() -> None:
    assert {"launch", "distributed", "engine", "runs", "sweep", "compare", "distributed_trainer"} <= DOORS.keys()


@pytest.mark.parametrize("name", ["launch", "distributed"])
def test_a_door_runs_as_a_module(name: str) -> None:
    done = python("-m", f"exogym.{name}", "--help")
    assert done.returncode == 0 and f"exogym.{name}" in done.stdout


def test_no_more_than_22_rooms_stand_at_the_root() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len({room for room in rooms if not room.startswith("__")} - DOORS.keys() - CHOOSING) <= 22
