"""Sweeps: a cell is the run that a comparison trains, a kill loses only what is under way, a search repeats itself."""

import csv
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import Started

from exogym.cli import main
from exogym.errors import ArgumentError, WorkerError
from exogym.strategy.registry import parse_strategy
from exogym.study import cells, runs
from exogym.study.compare import compare
from exogym.study.sweep import SweepInterrupted, Swept, axes, sweep
from exogym.study.sweep.search import BATCH, propose
from exogym.study.tasks import load_task

SMALL: dict[str, Any] = {"max_steps": 10, "num_nodes": 2, "device": "cpu"}
GRID = {"H": [2, 5], "strategy": ["diloco", "fedavg"]}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the table without what depends on the speed of this machine."""
    with open(folder / "summary.csv", encoding="utf-8") as lines:
        return [{k: v for k, v in row.items() if "per_s" not in k} for row in csv.DictReader(lines)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    return sweep("digits", GRID, seeds=2, processes=2, out=tmp_path_factory.mktemp("sweeps") / "whole", **SMALL)


def test_a_cell_is_what_a_comparison_trains(undisturbed: Swept) -> None:
    compared = compare("digits", "diloco:H=2,fedavg:H=5", seeds=2, **SMALL)
    cells = {row["cell"]: row for row in undisturbed.rows}
    for row, name in zip(compared.rows, ("H=2, strategy=diloco", "H=5, strategy=fedavg"), strict=True):
        for measure in ("val_loss", "val_loss_std", "val_accuracy", "tx_bytes", "seeds"):
            assert cells[name][measure] == row[measure]
    assert list(cells) == [f"H={h}, strategy={s}" for h in (2, 5) for s in ("diloco", "fedavg")]
    best = min(cells.values(), key=lambda row: row["val_loss"])
    assert undisturbed.best == best and undisturbed.finding.startswith("Training starts at a validation loss of ")
    assert f"The lowest final loss is undecided between {best['cell']} (" in undisturbed.finding
    assert best["cell"] != max(cells.values(), key=lambda row: row["val_loss"])["cell"]


def test_its_folder_and_its_table(undisturbed: Swept) -> None:
    folder = undisturbed.folder
    assert folder is not None and [path.name for path in undisturbed.paths] == [
        "sweep.json",
        "summary.csv",
        "sweep.png",
    ]
    assert (folder / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    about = json.loads((folder / "sweep.json").read_text())
    assert about["state"] == "finished" and about["best"] == undisturbed.best["cell"] and len(about["runs"]) == 8
    parent, *children = runs.list(folder.parent)
    assert (parent.kind, parent.state, parent.task, parent.step) == ("sweep", "done", "digits", 8)
    assert len(children) == 8 and {run.state for run in children} == {"done"}
    frame = undisturbed.to_pandas()
    assert frame["H"].tolist() == [2.0, 2.0, 5.0, 5.0] and frame.shape[0] == len(rows_of(folder)) == 4
    lines = undisturbed.to_markdown().splitlines()
    assert "4 cells of H, strategy, 2 nodes, 10 steps" in lines[0] and len(lines) == 2 + 2 + 4 + 2
    assert "±" in lines[6] and lines[2] == undisturbed.finding and str(undisturbed) == undisturbed.to_markdown()
    assert len(undisturbed.plot().axes) == 2 and undisturbed.plot()._repr_png_()[:4] == b"\x89PNG"  # type: ignore[attr-defined]
    assert repr(undisturbed).startswith("<Swept: 4 cells of H, strategy: Training starts")
    assert undisturbed._repr_html_().count("<tr>") == 5


def test_options_of_the_run_are_swept_too() -> None:
    result = sweep(
        "digits", ["nodes=2,3", "lr=0.001,0.01"], strategy="ddp", max_steps=5, seeds=1, processes=1, device="cpu"
    )
    assert [(row["strategy"], row["num_nodes"], row["lr"]) for row in result.rows] == [
        ("ddp", "2", "0.001"), ("ddp", "2", "0.01"), ("ddp", "3", "0.001"), ("ddp", "3", "0.01")
    ]  # fmt: skip
    sent = [row["tx_bytes"] for row in result.rows]
    assert sent[0] == sent[1] < sent[2] == sent[3] and len({row["val_loss"] for row in result.rows}) == 4
    timed = sweep("digits", {"network": ["wifi", "1Mbps,20ms"]}, step_seconds="1ms", seeds=1, processes=1, **SMALL)
    assert timed.rows[0]["time_s"] < timed.rows[1]["time_s"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"K": [1]}, "cell K=1: strategy 'diloco:K=1': diloco has no option 'K'"),
        ({"num_nodes": ["two"]}, "num_nodes='two' must be a whole number"),
        (["H"], "should look like option=value,value"),
        (["H=1,1"], "must be different values"),
        (["H=1", "H=2"], "H occurs twice"),
        ({"H": "1..9"}, "is a range: list its values"),
        ({"H": "9..1"}, "must be a range from a number to a larger number"),
        ({"H": 5}, "must be a list of values"),
    ],
)
def test_what_will_not_do_is_said_before_training(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as error:
        sweep("digits", given, out=tmp_path / "sweep", **SMALL)
    assert message in str(error.value) and not (tmp_path / "sweep").exists()


def test_a_folder_of_something_else_is_left_alone(undisturbed: Swept, tmp_path: Path) -> None:
    folder = undisturbed.folder
    assert folder is not None
    with pytest.raises(ArgumentError, match="already contains files: resume it there"):
        sweep("digits", GRID, seeds=2, out=folder, **SMALL)
    with pytest.raises(ArgumentError, match=r"other options[\s\S]*nodes"):
        sweep("digits", GRID, seeds=2, out=folder, resume=True, **(SMALL | {"num_nodes": 3}))
    with pytest.raises(ArgumentError, match="contains no sweep"):
        sweep("digits", GRID, out=tmp_path, resume=True, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/outcome.json")}
    again = sweep("digits", GRID, seeds=2, out=folder, resume=True, **SMALL)
    assert again.rows == undisturbed.rows
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/outcome.json")}


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_sweep_in_the_folder_is_refused_while_the_first_runs(resume: bool, tmp_path: Path) -> None:
    said = []

    def start_another(ended: object) -> None:
        with pytest.raises(ArgumentError) as error:
            sweep("digits", {"H": [2, 5]}, seeds=1, out=tmp_path / "sweep", resume=resume, **SMALL)
        said.append(str(error.value))

    result = sweep("digits", {"H": [2, 5]}, seeds=1, out=tmp_path / "sweep", watch=start_another, **SMALL)
    assert len(result.rows) == len(said) == 2
    assert all("is in use by another run, process" in text and "Choose another folder" in text for text in said)
    sweep("digits", {"H": [2, 5]}, seeds=1, out=tmp_path / "sweep", resume=True, **SMALL)  # it is free again


HOLD = """
import sys, time
from pathlib import Path
from exogym.core.training.loop import TrainingLoop

folder, least, stretch = Path(sys.argv.pop(1)), int(sys.argv.pop(1)), TrainingLoop._take_stretch

def hold(loop):
    if len(list(folder.glob("*/outcome.json"))) >= least:
        folder.with_name("held").touch()
        time.sleep(1000)
    return stretch(loop)

TrainingLoop._take_stretch = hold
"""
KILLED = f"""{HOLD}
from exogym.study.sweep import sweep
grid = {{"H": [2, 5], "strategy": ["diloco", "fedavg"]}}
sweep("digits", grid, seeds=2, processes=2, out=folder, max_steps=10, num_nodes=2, device="cpu")
"""


def test_killed_and_gone_on_with(undisturbed: Swept, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with Started("-c", KILLED, folder, 3) as process:
        while not (tmp_path / "held").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    ended = {path: path.stat().st_mtime_ns for path in folder.glob("*/outcome.json")}
    assert 3 <= len(ended) < 8 and not (folder / "summary.csv").exists()
    until = time.monotonic() + 20
    while "running" in (states := {run.state for run in runs.list(tmp_path)}):  # its processes die with it
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "lost" in states and states <= {"lost", "done"}
    result = sweep("digits", GRID, seeds=2, processes=2, out=folder, resume=True, **SMALL)
    assert undisturbed.folder is not None and rows_of(folder) == rows_of(undisturbed.folder)
    assert result.finding == undisturbed.finding
    assert ended == {path: path.stat().st_mtime_ns for path in ended}


def test_interrupted_it_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(ended: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for processes in (1, 2):
        folder = tmp_path / str(processes)
        with pytest.raises(SweepInterrupted, match="resume=True") as stopped:
            sweep("digits", GRID, seeds=1, processes=processes, out=folder, watch=stop, **SMALL)
        assert stopped.value.folder == folder
        about = json.loads((folder / "sweep.json").read_text())
        assert about["state"] == "interrupted" and 1 <= len(about["runs"]) < 4
        assert "running" not in {run.state for run in runs.list(tmp_path)}


def test_a_run_whose_process_is_killed_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = cells.Cell.settle

    def unlucky(cell: cells.Cell) -> Any:
        if cell.label == "H=2":
            os.kill(os.getpid(), signal.SIGKILL)
        return settle(cell)

    with monkeypatch.context() as patched, pytest.raises(WorkerError) as error:
        patched.setattr(cells.Cell, "settle", unlucky)
        sweep("digits", {"H": [2, 5, 10]}, seeds=1, processes=2, out=tmp_path / "sweep", **SMALL)
    assert "1 of 3 runs ended without a result: H=2, seed 0 (killed by SIGKILL" in str(error.value)
    assert len(list((tmp_path / "sweep").glob("*/outcome.json"))) == 2
    assert len(sweep("digits", {"H": [2, 5, 10]}, seeds=1, out=tmp_path / "sweep", resume=True, **SMALL).histories) == 3


@pytest.mark.parametrize(("free_bytes", "overlap"), [(0, False), (1 << 60, True)])
def test_without_memory_for_another_run_they_follow_one_another(
    free_bytes: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(free_bytes=lambda: free_bytes)  # for the pool alone, not for the runs
    monkeypatch.setattr("exogym.core.engine.children.Device", lambda place: fake)
    sweep("digits", {"H": [2, 5]}, seeds=1, processes=2, out=tmp_path / "sweep", **(SMALL | {"max_steps": 200}))
    spans = sorted((run.started_s, run.heard_s) for run in runs.list(tmp_path) if run.kind == "run")
    assert (spans[0][1] > spans[1][0]) is overlap


def test_a_run_that_diverges_is_left_out() -> None:
    result = sweep("digits", {"lr": [0.01, 1e30]}, strategy="ddp:inner_optim=sgd", seeds=1, processes=1, **SMALL)
    assert [row["seeds"] for row in result.rows] == [1, 0] and "1 of 1 runs failed" in result.rows[1]["notes"]
    assert result.best["lr"] == "0.01"


SPACE = {"H": "2..10", "lr": "1e-3..1e-1", "strategy": ["diloco", "fedavg"]}


def test_a_search_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seeds": 1, **SMALL}
    whole = sweep("digits", SPACE, search=6, out=tmp_path / "whole", processes=2, **given)
    assert len(whole.rows) == 6
    for row in whole.rows:
        assert 2 <= int(row["H"]) <= 10 and 1e-3 <= float(row["lr"]) <= 1e-1 and row["strategy"] in SPACE["strategy"]
    sweep("digits", SPACE, search=5, out=tmp_path / "less", processes=1, **given)
    sweep("digits", SPACE, search=6, out=tmp_path / "less", resume=True, **given)
    assert rows_of(tmp_path / "less") == rows_of(tmp_path / "whole")


def test_a_search_comes_nearer_than_chance() -> None:
    """On a bowl with its bottom at x = 3: the mean of what is proposed late lies below that of the first batch."""
    space = axes.axes_of({"x": "-10.0..10.0"})
    tried: list[tuple[dict[str, str], float | None]] = []
    while len(tried) < 40:
        tried += [(cell, (float(cell["x"]) - 3) ** 2) for cell in propose(space, tried, BATCH)]
    losses = [loss for _, loss in tried if loss is not None]
    assert sum(losses[-8:]) / 8 < 0.3 * sum(losses[:8]) / 8
    assert propose(space, tried[:8], BATCH) == [cell for cell, _ in tried[8:12]]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--sweep", "H=2,5", "--seeds", "1", "--steps", "10", "--nodes", "2", "--device", "cpu"]
    words += ["--processes", "1", "--out", str(tmp_path / "sweep")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "One seed shows no spread" in printed.out and printed.out.splitlines()[-1].endswith(
        "sweep.json, summary.csv, sweep.png"
    )
    assert len(printed.err.splitlines()) == 2 and "2 of 2 runs: H=5, seed 0: validation loss" in printed.err
    assert main(words) == 2 and "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0


def test_a_cell_knows_its_steps() -> None:
    """Its progress, and when it saves, depend on them."""
    for steps in (None, 0, "5"):
        with pytest.raises(ArgumentError, match="max_steps="):
            cells.Cell(load_task("digits"), parse_strategy("ddp"), options={"max_steps": steps})


def test_each_cell_has_its_own_folder(tmp_path: Path) -> None:
    """A cell would otherwise take another one's outcome for its own."""
    task = load_task("digits")
    several = [cells.Cell(task, parse_strategy("ddp"), seed, tmp_path / "one", {"max_steps": 1}) for seed in (0, 1)]
    with pytest.raises(ArgumentError, match="2 cells have the folder "):
        cells.train(several)
    with pytest.raises(ArgumentError, match="2 cells have no folder"):
        cells.train([replace(cell, folder=None) for cell in several], processes=2)
    assert not any(tmp_path.iterdir())


def test_the_engine_of_the_command_is_that_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of each run's placement."""
    seen = list[dict[str, Any]]()
    monkeypatch.setattr("exogym.cli.sweep.estimate_of_sweep", lambda **given: seen.append(given))
    assert main(["sweep", "--sweep", "H=2,5", "--out", "sweep", "--engine", "ray", "--estimate"]) == 0
    assert seen[0]["engine"] == "ray" and seen[0]["axes"] == ["H=2,5"] and seen[0]["placement"].engine is None
