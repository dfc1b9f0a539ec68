"""What the page shows of a run beside its curves: pictures cut to a screen, notes, what repeats it, hosts, going on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.cli import app, main
from exogym.cli.ui import forms_of
from exogym.core.base.processes import described
from exogym.core.record.run_folder import read_object, read_status
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy
from exogym.study import runs
from exogym.study.compare import compare
from exogym.study.notes import Notes, read_notes, write_notes
from exogym.study.sweep import sweep
from exogym.testing import small_problem
from exogym.ui.lines import thinned
from exogym.ui.repeat import command_of, snippet_of
from exogym.ui.shelf import RunShelf
from exogym.ui.starting import CannotStart, Starter
from exogym.ui.views import MOST_COLUMNS, MOST_NODES, MOST_SPANS, grid_of, nodes_of, timeline_of

SHORT = {"num_nodes": 2, "max_steps": 10, "device": "cpu"}


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a clock, a timeline and an absent node; a comparison; a sweep."""
    folder = tmp_path_factory.mktemp("views")
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(
        DiLoCoStrategy(lr=0.02, H=4), num_nodes=3, max_steps=16, batch_size=8, val_interval=4, device="cpu",
        run_dir=folder / "one", network="1Mbps,20ms", step_seconds=[0.01, 0.01, 0.03], timeline=True,
        faults=Faults(absent={1: [(5, 9)]}),
    )  # fmt: skip
    compare("digits", "ddp,diloco:H=5", seeds=1, out=folder, **SHORT)
    sweep("digits", {"H": [2, 5], "lr": [0.001, 0.01]}, seeds=2, out=folder / "grid", **SHORT)
    return folder


def test_nodes_over_steps(top: Path) -> None:
    run = runs.load(top / "one")
    found = nodes_of(run.records, run.events)
    assert found["nodes"] == [0, 1, 2] and found["steps"] == list(range(1, 17))
    absent = [step for step, loss in zip(found["steps"], found["loss"][1], strict=True) if loss is None]
    assert absent == [5, 6, 7, 8] and None not in found["loss"][0]
    assert found["loss"][0] == pytest.approx(run.column("train_loss", 0)[1], rel=1e-3)
    assert found["share_steps"] == [4, 8, 12, 16]
    for node in range(3):
        for k in range(4):
            parts = [found["shares"][part][node][k] for part in found["shares"]]
            if (node, k) == (1, 1):  # it was away, and its clock stood still
                assert parts == [None] * 3
            else:
                assert sum(parts) == pytest.approx(1, abs=1e-3)
    assert found["shares"]["waiting"][0][0] > 0.1 > found["shares"]["waiting"][2][0]  # for the slow one


def test_a_hundred_thousand_records_fit_a_screen() -> None:
    """What goes to the browser is bounded, however long the run: by count, not by time."""
    rows: list[dict[str, Any]] = []
    for step in range(1, 1001):
        rows.append({"step": step, "node": None, "val_loss": 1.0 if step % 10 == 0 else None, "train_loss": 1.0})
        rows += [{"step": step, "node": node, "train_loss": 1.23456789} for node in range(99)]
    assert len(rows) == 100_000
    found = nodes_of(rows, [])
    assert (len(found["nodes"]), found["of"], len(found["steps"])) == (MOST_NODES, 99, MOST_COLUMNS)
    assert len(found["loss"]) == MOST_NODES and {len(row) for row in found["loss"]} == {MOST_COLUMNS}
    assert len(json.dumps(found)) < 200_000
    assert len(thinned(rows, 2000)) <= 2000
    assert nodes_of([], []) == {
        "steps": [],
        "nodes": [],
        "of": 0,
        "loss": [],
        "away": [],
        "share_steps": [],
        "shares": {},
    }


def test_the_timeline_is_kept_and_cut(top: Path, tmp_path: Path) -> None:
    found = timeline_of(top / "one")
    assert found["nodes"] == [0, 1, 2] and found["until_s"] == found["whole_s"] > 0.3
    assert {span[1] for span in found["spans"]} >= {"compute", "send", "wait"}
    assert sum(found["shares"].values()) == pytest.approx(1)
    many = [[0, "compute", float(k), float(k + 1), ""] for k in range(3 * MOST_SPANS)]
    odd = [["x"], [0, "compute", "<b>", 2.0, ""], [0, "compute", 1.0, None, ""], [False, "send", 0.0, 1.0, ""], 7]
    (tmp_path / "timeline.json").write_text(json.dumps({"spans": [*odd, *many], "shares": {"compute": "x"}}))
    cut = timeline_of(tmp_path)
    assert len(cut["spans"]) == MOST_SPANS and cut["until_s"] == MOST_SPANS < cut["whole_s"] and cut["shares"] == {}
    assert {span[1] for span in cut["spans"]} == {"compute"}  # False is no node
    (tmp_path / "timeline.json").write_text('{"spans"')
    with pytest.raises(ArgumentError, match=r"timeline\.json is not complete JSON"):
        timeline_of(tmp_path)
    (tmp_path / "timeline.json").unlink()
    assert timeline_of(tmp_path) == {}


def test_the_cells_of_a_sweep_are_those_of_its_table(top: Path) -> None:
    listed = {row["name"]: row for row in RunShelf(top).all()}
    found = grid_of(top / "grid", listed)
    table = [line.split(",") for line in (top / "grid" / "summary.csv").read_text().splitlines()]
    loss, spread = table[0].index("val_loss"), table[0].index("val_loss_std")
    assert len(found["cells"]) == len(table) - 1 == 4 and found["is_grid"]
    losses = sorted((cell["loss"], cell["loss_std"]) for cell in found["cells"])
    for mine, theirs in zip(losses, sorted((float(row[loss]), float(row[spread])) for row in _cells(top)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    best = min(found["cells"], key=lambda cell: cell["loss"])
    assert found["best"] == best["cell"] and best["options"].keys() == found["axes"].keys() == {"H", "lr"}
    assert grid_of(top / "one", listed) == {}
    listed.pop(f"grid/{(top / 'grid' / 'H-2-lr-0.001-seed-1').name}")
    assert min(cell["seeds"] for cell in grid_of(top / "grid", listed)["cells"]) == 1


def _cells(top: Path) -> list[list[str]]:
    import csv

    with open(top / "grid" / "summary.csv", newline="") as file:
        return list(csv.reader(file))[1:]


def test_a_snippet_has_the_options_that_runs_were_passed(tmp_path: Path) -> None:
    """Where they are text; no snippet names an object, such as faults."""
    small: dict[str, Any] = {"max_steps": 3, "num_nodes": 2, "device": "cpu", "seeds": 1, "gradient_accumulation": 2}
    small |= {"placement": Placement(reduction="native", max_restarts=1, client_state_memory=1e6)}  # two need a folder
    for study, what in ((compare, "ddp"), (sweep, {"shuffle": [False], "strategy": ["ddp"]})):
        for name, faults in (("a", None), ("b", Faults(drop_rate=0.1))):
            out = tmp_path / study.__name__ / name
            folder = study("digits", what, out=out, val_size=9, faults=faults, **small).folder
            assert folder is not None
            (path,) = folder.glob("*-seed-0")
            found = snippet_of(path, read_object(path / "run.json"))
            if faults is not None:
                assert found == ""
                continue
            assert ("shuffle=False" in found) is (study is sweep) and "hang_s" not in found
            named: dict[str, Any] = {}
            exec(found, named)
            assert named["result"].rows[0]["val_loss"] == runs.load(path).summary["val_loss"]


def test_a_snippet_repeats_the_run(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a comparison and of a sweep it comes to the same loss."""
    (parent,) = top.glob("digits-*")
    for path in (parent / "diloco-H-5-seed-0", top / "grid" / "H-5-lr-0.01-seed-1"):
        wanted = runs.load(path).summary["val_loss"]
        named: dict[str, Any] = {}
        exec(snippet_of(path, read_object(path / "run.json")), named)
        assert named["result"].rows[0]["val_loss"] == wanted, path


SCRIPT = """
import os, signal, sys
import torch
from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem
model, data = small_problem()
stop = Every(4, lambda loop: os.kill(os.getpid(), signal.SIGTERM) if loop.step == 8 and "stop" in sys.argv else None)
LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss).fit(
    DiLoCoStrategy(lr=0.02, H=4), num_nodes=2, max_steps=16, batch_size=8, val_interval=4, device="cpu",
    run_dir=os.environ.get("WHERE", "runs/mine"), checkpoint_interval=4, callbacks=[stop],
)
print(fingerprint(model))
"""


def ran(folder: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300, **more)


@pytest.mark.slow
def test_a_script_that_was_stopped_is_gone_on_with_and_repeated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "runs" / "mine"
    assert ran(tmp_path, "train.py", "stop").returncode == 143 and read_status(folder)["state"] == "stopped"
    about = read_object(folder / "run.json")
    assert command_of(about) == "python train.py stop"
    own = Starter(tmp_path / "runs", dict)
    with pytest.raises(CannotStart, match="--allow-code"):
        own.resume(folder)
    own.allow_code = True
    # The script's words are those of before, so that it would stop at step 8 again; from there it is past that.
    own.resume(folder)
    (started,) = own._started
    assert started[2].wait(120) == 0, started[1].read_text()
    assert read_status(folder)["state"] == "done" and "going on from step 8" in started[1].read_text()
    whole = ran(tmp_path, "train.py", env={**_environment(), "WHERE": "runs/whole"})
    assert started[1].read_text().splitlines()[-1] == whole.stdout.splitlines()[-1]  # the same bits
    with pytest.raises(ArgumentError, match="has trained all its steps"):
        own.resume(folder)
    again = ran(tmp_path, "-c", snippet_of(folder, about).replace("'stop'", "'whole'"),
                env={**_environment(), "WHERE": "runs/again"})  # fmt: skip
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1], again.stderr


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def test_what_a_folder_names_is_no_reason_to_run_it(tmp_path: Path) -> None:
    """A run folder may come from elsewhere: what is no script of a folder that is there goes on nowhere."""
    own = Starter(tmp_path, dict, allow_code=True)
    state = {"state": "stopped", "process": described() | {"started": "1"}, "heartbeat_s": 1.0}
    cases: list[Any] = [
        {"command": ["-c"], "folder": str(tmp_path)}, {"command": ["/bin/sh", "-c", "x"], "folder": str(tmp_path)},
        {"command": ["none.py"], "folder": str(tmp_path)}, {"command": "train.py", "folder": str(tmp_path)},
        {"command": ["train.py"]}, {"command": ["train.py"], "folder": 7}, {"command": [7], "folder": str(tmp_path)},
        {},
    ]  # fmt: skip
    for number, about in enumerate(cases):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps(state))
        (folder / "run.json").write_text(json.dumps(about))
        with pytest.raises(ArgumentError, match="has no script to start"):
            own.resume(folder)
        assert snippet_of(folder, about) == "" or about["command"] == ["none.py"]
    assert own.started() == []


def test_the_page_goes_on_with_the_options_that_a_study_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a switch that was turned off: the words that it starts are a command that goes on."""
    begun: list[list[str]] = []
    monkeypatch.setattr(Starter, "_begin", lambda self, name, words: begun.append(words[2:]) or 1)
    monkeypatch.setattr("exogym.ui.starting._is_running", lambda path: False)  # their process is this one
    forms = forms_of(typer.main.get_command(app).make_context("exogym", [], resilient_parsing=True))
    assert {"--no-shuffle", "--precision"} <= {option["flag"] for option in forms["compare"]}
    given: dict[str, Any] = {"shuffle": False, "gradient_accumulation": 2, "max_steps": 3, "num_nodes": 2, "seeds": 1}
    compared = compare("digits", "ddp", out=tmp_path, device="cpu", **given).folder
    swept = sweep("digits", {"H": [2]}, out=tmp_path / "sweep", device="cpu", processes=1, **given).folder
    for folder in (compared, swept):
        assert folder is not None and Starter(tmp_path, lambda: forms).resume(folder) == 1
        assert "--no-shuffle" in begun[-1] and "--gradient-accumulation=2" in begun[-1]
        assert "--no-final-sync" not in begun[-1] and main(begun[-1]) == 0
    assert Starter(tmp_path, lambda: forms).arguments("compare", {"shuffle": True}) == ["--no-shuffle"]


def test_going_on_is_for_the_run_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(name: str, **more: Any) -> LocalTrainer:
        model, data = small_problem()
        trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(
            DiLoCoStrategy(lr=0.02, H=4), num_nodes=2, max_steps=8, batch_size=8, device="cpu", run_dir=tmp_path / name,
            checkpoint_interval=4, **more,
        )  # fmt: skip
        return trainer

    stop = Every(4, lambda loop: True)
    for name in ("one", "other"):
        train(name, callbacks=[stop])
    monkeypatch.setenv("EXOGYM_RESUME", str(tmp_path / "other" / ".." / "one"))
    assert train("one").history.column("step")[0][-1] == 8
    with pytest.raises(ArgumentError, match="already contains a run"):
        train("other")


@pytest.mark.parametrize(
    "wrong", [{"tags": ["a,b"]}, {"tags": ["x" * 41]}, {"tags": [""]}, {"tags": ["\x1b[2J"]}, {"tags": "abc"},
              {"tags": [7]}, {"tags": [str(k) for k in range(21)]}, {"note": "x" * 4001}, {"note": "\x1b[2J"},
              {"note": 7}, {"title": "x" * 121}, {"title": "a\nb"}, {"title": 7}]
)  # fmt: skip
def test_notes_that_nobody_should_read(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        Notes(**wrong)
    (tmp_path / "notes.json").write_text(json.dumps(wrong))
    assert read_notes(tmp_path) == Notes()


def test_notes_are_kept_listed_and_found(top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    where = tmp_path / "runs"
    shutil.copytree(top, where)
    note = ["runs", "note", "--runs", str(where)]
    assert main([*note, "one", "--tag", "slow", "--tag", "<b>", "--text", "first\nsecond"]) == 0
    assert capsys.readouterr().out.splitlines() == ["tags  <b>, slow", "note  first", "note  second"]
    assert main([*note, "grid", "--tag", "slow"]) == 0
    assert main([*note, "one", "--untag", "<b>"]) == 0
    assert (
        main([*note, "one", "--untag", "none"]) == 2 and "--untag='none' is not a tag of one" in capsys.readouterr().err
    )
    assert main([*note, "../runs/one", "--tag", "x"]) == 2 and main([*note, "one", "--tag", "a,b"]) == 2
    assert read_notes(where / "one") == Notes(["slow"], "first\nsecond")
    capsys.readouterr()
    assert main(["runs", "list", "--runs", str(where), "--tag", "slow"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["tags", "note"] and {line.split()[0] for line in lines} == {"one", "grid"}
    assert main([*note, "one", "--untag", "slow", "--text", ""]) == 0 and not (where / "one" / "notes.json").exists()
    write_notes(where / "one", Notes(["x"]))
    assert {run.name: run.tags for run in runs.list(where)}["one"] == ("x",)
    before = json.loads((where / "one" / "run.json").read_text())
    assert before == json.loads((top / "one" / "run.json").read_text())  # the run itself is as it was
