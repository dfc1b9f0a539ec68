"""A door hands on the names of its room, and nothing else stands at the root."""

import importlib
import re
from pathlib import Path

import pytest
from processes import python

import exogym

ROOT = Path(exogym.__path__[0])
DOORS = {
    path.stem: found[1]
    for path in sorted(ROOT.glob("*.py"))
    if (found := re.search(r'= door\("([\w.]+)"', path.read_text("utf-8")))
}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_hands_on_the_very_names_of_its_room(name: str) -> None:
    door, room = importlib.import_module(f"exogym.{name}"), importlib.import_module(DOORS[name])
    names = getattr(room, "__all__", [key for key in vars(room) if not key.startswith("_")])
    assert names and all(getattr(door, key) is getattr(room, key) for key in names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


def test_names_that_were_promised_have_a_door() -> None:
    assert {"launch", "distributed", "engine", "runs", "sweep", "compare", "distributed_trainer"} <= DOORS.keys()


@pytest.mark.parametrize("name", ["launch", "distributed"])
def test_a_door_runs_as_a_module(name: str) -> None:
    done = python("-m", f"exogym.{name}", "--help")
    assert done.returncode == 0 and f"exogym.{name}" in done.stdout


def test_no_more_than_22_rooms_stand_at_the_root() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len({room for room in rooms if not room.startswith("__")} - DOORS.keys()) <= 22
