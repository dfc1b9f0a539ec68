"""The form of a run that is there: what its folder says, and a note about the rest."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from exogym.cli import app
from exogym.cli.ui import forms_of
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy
from exogym.study.compare import compare
from exogym.study.sweep import sweep
from exogym.study.tasks import load_task
from exogym.ui.starting import Starter


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    forms = forms_of(typer.main.get_command(app).make_context("exogym", [], resilient_parsing=True))
    starter = Starter(Path("none"), lambda: forms)
    yield starter
    starter.close()


def studied(path: Path, file: str = "run.json", **about: Any) -> Path:
    path.mkdir(parents=True)
    (path / file).write_text(json.dumps({"task": "digits", "state": "finished"} | about))
    return path


def test_a_form_of_a_comparison_starts_the_same_comparison(tmp_path: Path, starter: Starter) -> None:
    """The options that are given are in the form, and no other; checked, they have no error."""
    given: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "seeds": 1, "shuffle": False, "precision": "bf16"}
    timed = {"network": "wifi", "step_seconds": "10ms", "speeds": [1.0, 0.5]}
    path = compare("digits", ["ddp", "diloco:H=2"], out=tmp_path, **given, **timed).folder
    assert path is not None
    found = starter.again(path)
    assert found["command"] == "compare" and found["note"] == ""
    own = {"strategies": "ddp,diloco:H=2", "shuffle": True, "speeds": "1.0,0.5"}  # the switch is --no-shuffle
    assert found["options"] == given | timed | own
    assert starter.check(found["command"], found["options"])["error"] == ""
    child = starter.again(path / "diloco-H-2-seed-0")
    assert child["options"] == found["options"] | {"strategies": "diloco:H=2"}


def test_what_python_gave_is_told(tmp_path: Path, starter: Starter) -> None:
    strategies = {"mine": DiLoCoStrategy(H=2, lr=0.01), "other": FedAvgStrategy(H=3)}
    path = compare(load_task("digits"), strategies, out=tmp_path, num_nodes=2, max_steps=3, seeds=[3, 5]).folder
    assert path is not None
    found = starter.again(path)
    assert found["options"]["strategies"] == "diloco:H=2:lr=0.01,fedavg:H=3" and found["options"]["seeds"] == 2
    assert "dataset" not in found["options"]
    assert "seeds 3, 5" in found["note"] and "choose a task" in found["note"]


def test_a_form_of_a_sweep_and_of_its_cell(tmp_path: Path, starter: Starter) -> None:
    axes = {"H": [2, 3], "network": ["wifi", "1Gbps,1ms"]}
    given: dict[str, Any] = {
        "num_nodes": 2,
        "max_steps": 4,
        "seeds": 1,
        "step_seconds": "1ms",
        "strategy": "diloco:lr=0.01",
    }
    path = sweep("digits", axes, out=tmp_path / "sweep", processes=1, **given).folder
    assert path is not None
    found = starter.again(path)
    assert found["command"] == "sweep" and found["options"]["axes"] == ["H=2,3", "network=wifi;1Gbps,1ms"]
    assert starter.check("sweep", found["options"])["error"] == ""
    name = next(child.name for child in path.iterdir() if child.name.startswith("H-3") and "wifi" in child.name)
    cell = starter.again(path / name)
    assert cell["command"] == "compare" and cell["options"]["strategies"] == "diloco:lr=0.01:H=3"
    assert cell["options"]["network"] == "wifi" and starter.check("compare", cell["options"])["error"] == ""


@pytest.mark.parametrize(
    "arguments",
    [{"axes": "x"}, {"strategies": [1, 2], "seeds": {}}, {"strategies": {"a": []}}, {"problem": []}, {"seeds": "9"}],
)
def test_forged_arguments_are_refused_or_left_out(arguments: dict[str, Any], tmp_path: Path, starter: Starter) -> None:
    for file in ("run.json", "sweep.json"):
        more = (
            {"strategies": {"ddp": {}}} if file == "run.json" else {"cells": {"H=5": {"H": "5"}}, "axes": {"H": ["5"]}}
        )
        path = studied(tmp_path / file.partition(".")[0], file, arguments=arguments, **more)
        try:
            found = starter.again(path)
        except ArgumentError:
            continue
        assert all(isinstance(x, str | int | float | bool | list) for x in found["options"].values())


def test_options_that_are_lists_are_named(tmp_path: Path, starter: Starter) -> None:
    described = {"strategy": {"name": "Unheard", "H": 5}, "step_seconds": [0.1, 0.2], "num_nodes": 2, "seed": 4}
    path = studied(tmp_path / "script", description=described)
    found = starter.again(path)
    assert found["options"] == {"num_nodes": 2, "seeds": 1}
    assert found["note"].endswith("these options: step_seconds, strategies.")
