"""The runs that `exogym advise` ships are rows of the tables here."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from exogym.errors import ExoGymError
from exogym.study.advise.beliefs import KNOWN, known, known_skews, task_of
from research.atlas.places import KINDS
from research.benchmark import Results
from research.reproduce import Page
from research.shipped import text


def test_tasks_of_places_are_those_of_the_atlas() -> None:
    for kind, place in KINDS.items():
        same = {"by_speaker": "characters", "strokes": "pictures"}.get(place.task, place.task)
        assert task_of(f"{kind}-4") == same


def test_the_shipped_runs_are_those_of_the_atlas() -> None:
    assert KNOWN.read_text("utf-8") == text(), "run python -m research.shipped"
    assert known()["digits-4"]["ddp"] > 1 and math.inf in known()["pictures-4"].values()
    assert known_skews().keys() == known().keys() and known_skews()["pictures-4"] == 0.6


@pytest.mark.parametrize("read", [Results, lambda path: Page(path.with_suffix(".md"))], ids=["benchmark", "reproduce"])
def test_a_pipe_is_no_file_of_results(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ExoGymError, match="must be a regular file"):
        read(tmp_path / "a.json")
