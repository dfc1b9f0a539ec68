"""Run folders as others see them: listed at any moment, loaded, exported, drawn, removed."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from exogym import LocalTrainer
from exogym.cli import main
from exogym.core.base.processes import described
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy
from exogym.study import runs
from exogym.study.compare import compare
from exogym.study.sweep import sweep
from exogym.testing import small_problem

GONE = {"started": "1"}  # no process began at that moment


def train(folder: Path) -> LocalTrainer:
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(
        DiLoCoStrategy(lr=0.02, H=4), num_nodes=2, max_steps=8, batch_size=8, val_interval=4, device="cpu",
        run_dir=folder, network="wifi", step_seconds="10ms",
    )  # fmt: skip
    return trainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a comparison."""
    folder = tmp_path_factory.mktemp("made")
    train(folder / "one")
    compare("digits", "ddp,diloco:H=5", num_nodes=2, max_steps=10, seeds=1, device="cpu", out=folder)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def written(folder: Path, state: str = "running", **more) -> Path:
    """Write the folder of a run by hand."""
    folder.mkdir(parents=True)
    status = {"state": state, "step": 3, "total_steps": 9, "process": described() | GONE, "heartbeat_s": 2e9}
    (folder / "status.json").write_text(json.dumps(status | more))
    (folder / "run.json").write_text(json.dumps({"description": {"strategy": {"name": "X"}}, "started_s": 1e9}))
    return folder


def by_name(folder: Path) -> dict[str, runs.Listed]:
    return {run.name: run for run in runs.list(folder)}


def test_a_comparison_stands_before_its_runs(made: Path) -> None:
    names = [run.name for run in runs.list(made)]
    (parent,) = made.glob("digits-*")
    assert names == [
        parent.name,
        f"{parent.name}/ddp-seed-0",
        f"{parent.name}/diloco-H-5-seed-0",
        "one",
    ]  # newest first
    found = by_name(made)
    above, one = found[parent.name], found["one"]
    assert (above.kind, above.state, above.task, above.strategy) == ("comparison", "done", "digits", "ddp,diloco:H=5")
    below = found[f"{parent.name}/ddp-seed-0"]
    assert (below.state, below.task, below.strategy, below.step) == ("done", "digits", "ddp", 10)
    assert above.loss == min(run.loss for run in found.values() if "/" in run.name)
    assert (one.kind, one.state, one.task, one.step, one.total_steps) == ("run", "done", None, 8, 8)
    assert one.tx_bytes > 0 and one.wall_s > 0 and one.time_s > 0.08


def test_one_node_alone_is_not_called_ddp(tmp_path: Path) -> None:
    """Whose strategy it has; of a comparison of one node too, where all have one."""
    small: dict[str, Any] = {"max_steps": 3, "seeds": 1, "device": "cpu"}
    for nodes in (1, 2):
        compare("digits", "single, ddp,single:lr=0.1", num_nodes=nodes, out=tmp_path, **small)
    sweep("digits", {"strategy": ["ddp", "single"]}, processes=1, out=tmp_path / "a", num_nodes=2, **small)
    sweep("digits", {"lr": [0.1]}, strategy="single", processes=1, out=tmp_path / "b", num_nodes=2, **small)
    found = [run for run in runs.list(tmp_path) if run.kind == "run"]
    assert len(found) == 2 * 3 + 3
    for run in found:
        alone = "single" in run.path.name or run.path.parent.name == "b"
        assert run.strategy == ("single" if alone else "ddp"), run


def test_what_studies_write_can_be_read(tmp_path: Path) -> None:
    """Seeds as a range, labels longer than a file's name; what is too much for readers is refused before training."""
    small: dict[str, Any] = {"max_steps": 3, "num_nodes": 2, "device": "cpu"}
    long: dict[str, Any] = {"x" * 300: "ddp", "x" * 300 + "y": "ddp"}
    folder = compare("digits", long, seeds=range(2), out=tmp_path, **small).folder
    sweep("digits", {"lr": [0.1]}, strategy="ddp", seeds=range(2), processes=1, out=tmp_path / "sweep", **small)
    found = runs.list(tmp_path)
    assert len(found) == 1 + 4 + 1 + 2 and {run.state for run in found} == {"done"}
    assert folder is not None
    assert compare("digits", long, seeds=range(2), out=folder, resume=True, **small).folder == folder
    for study, what in ((compare, {"x" * 1001: "ddp"}), (sweep, {"lr": ["1" * 1001]})):
        with pytest.raises(ArgumentError, match=r"each of at most 1000 characters"):
            study("digits", what, out=tmp_path / "not", **small)
    with pytest.raises(ArgumentError, match="the sweep has 5,001 cells, but at most 5,000 are possible"):
        sweep("digits", {"lr": [k + 1 for k in range(5001)]}, out=tmp_path / "not", **small)
    assert not (tmp_path / "not").exists()


def test_a_run_is_loaded_as_the_trainer_has_it(tmp_path: Path) -> None:
    trainer = train(tmp_path / "one")
    run = runs.load(tmp_path / "one")
    assert run.description == json.loads(json.dumps(trainer.description)) and run.state == "done"
    for node in (None, 1):
        for name in ("train_loss", "tx_bytes"):
            for mine, theirs in zip(run.column(name, node), trainer.history.column(name, node), strict=True):
                assert mine.tolist() == theirs.tolist()
    assert run.to_pandas().shape == (len(trainer.history), len(run.columns))
    with pytest.raises(ArgumentError, match="did you mean 'val_loss'"):
        run.column("valloss")


def test_it_is_exported(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas

    assert main(["runs", "export", "one", "--runs", str(made), "--to", str(tmp_path / "one.csv")]) == 0
    run, frame = runs.load(made / "one"), pandas.read_csv(tmp_path / "one.csv")
    assert list(frame.columns) == run.columns and len(frame) == len(run.records)
    assert frame["val_loss"].dropna().tolist() == pytest.approx([
        row["val_loss"] for row in run.records if row.get("val_loss") is not None
    ])  # fmt: skip
    assert main(["runs", "export", "one", "--runs", str(made), "--to", "one.xls"]) == 2
    assert "must end in .csv" in capsys.readouterr().err


def test_a_comparison_is_exported_with_all_its_runs(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas

    (parent,) = [run for run in runs.list(made) if run.kind == "comparison"]
    children = [run for run in runs.list(made) if run.name.startswith(f"{parent.name}/")]
    assert main(["runs", "export", parent.name, "--runs", str(made), "--to", str(tmp_path / "all.csv")]) == 0
    frame = pandas.read_csv(tmp_path / "all.csv")
    assert f"{len(frame)} records of {len(children)} runs written" in capsys.readouterr().out
    assert frame.columns[0] == "run" and len(children) > 1
    for child in children:
        rows = frame[frame["run"] == child.path.name]
        records = runs.load(child.path).records
        assert rows["step"].tolist() == [row["step"] for row in records] and len(rows)


def test_who_was_killed_is_lost(tmp_path: Path) -> None:
    written(tmp_path / "lives", process=described())
    written(tmp_path / "killed")
    written(tmp_path / "failed", state="failed")
    written(tmp_path / "begun" / "not").joinpath("status.json").unlink()  # run.json is the first that is written
    (tmp_path / "begun" / "not").rename(tmp_path / "early")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"description": {"strat')
    (tmp_path / "file").write_text("")
    states = {run.name: run.state for run in runs.list(tmp_path)}
    assert states.pop("torn") == "unreadable"
    assert states == {"lives": "running", "killed": "lost", "failed": "failed", "early": "lost"}


def test_a_comparison_that_was_killed_is_lost(copied: Path) -> None:
    (about,) = copied.glob("digits-*/run.json")
    text = json.loads(about.read_text()) | {"state": "running"}
    about.write_text(json.dumps(text | {"process": described()}))
    assert by_name(copied)[about.parent.name].state == "running"
    about.write_text(json.dumps(text | {"process": described() | GONE}))
    assert by_name(copied)[about.parent.name].state == "lost"


def test_the_newest_values_of_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = written(tmp_path / "on", process=described())
    rows = [{"step": 1, "node": None, "val_loss": 2.0, "tx_bytes": 10.0}, {"step": 2, "node": None, "tx_bytes": 20.0},
            {"step": 2, "node": 0, "tx_bytes": 20.0, "val_loss": 9.0}]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "records.jsonl").write_text(text + '{"step": 3, "node": null, "val_lo')
    (run,) = runs.list(tmp_path)
    assert (run.loss, run.tx_bytes) == (2.0, 20.0)
    assert [row["step"] for row in runs.load(folder).records] == [1, 2, 2]
    (folder / "records.jsonl").write_text('{"step": 1, "val_loss": "NaN"}\nnonsense\n[1]\n{"step": 2}\n')
    assert [row["step"] for row in runs.load(folder).records] == [1, 2]
    assert runs.load(folder).records[0]["val_loss"] != runs.load(folder).records[0]["val_loss"]


def test_folders_that_are_removed_while_they_are_read(made: Path, tmp_path: Path) -> None:
    for k in range(60):
        shutil.copytree(made / "one", tmp_path / f"run-{k}")
    stop = threading.Event()

    def take_away() -> None:
        for k in range(60):
            shutil.rmtree(tmp_path / f"run-{k}")
        stop.set()

    thread = threading.Thread(target=take_away)
    thread.start()
    counts = []
    while not stop.is_set() or not counts:
        counts.append(len(runs.list(tmp_path)))
    thread.join()
    assert all(count <= 60 for count in counts) and runs.list(tmp_path) == []


def test_a_comparison_and_a_sweep_are_loaded_as_their_tables(made: Path, tmp_path: Path) -> None:
    (parent,) = made.glob("digits-*")
    loaded = runs.load(parent)
    assert isinstance(loaded, runs.Summary) and loaded.verdict
    frame = loaded.to_pandas()
    assert frame["strategy"].tolist() == ["ddp", "diloco:H=5"] and frame["tx_bytes"].dtype == float
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": {}, "state": "running"}))
    with pytest.raises(ArgumentError, match="no completed run yet"):
        runs.load(tmp_path)


def test_links_are_not_followed(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in ("run.json", "status.json", "records.jsonl"):
        (folder / name).symlink_to(made / "one" / name)
    assert runs.list(tmp_path) == []


def test_any_runs_are_drawn_over_each_other(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (parent,) = made.glob("digits-*")
    out = tmp_path / "pictures"
    assert main(["runs", "compare", "one", parent.name, "--runs", str(made), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"loss_vs_steps.png", "loss_vs_bytes.png"}  # not all are timed
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == [
        "one", f"{parent.name}/ddp-seed-0", f"{parent.name}/diloco-H-5-seed-0"
    ]  # fmt: skip
    assert main(["runs", "compare", "one", "--runs", str(made), "--out", str(out)]) == 0
    assert (out / "loss_vs_time.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["runs", "compare", "two", "--runs", str(made), "--out", str(out)]) == 2


def test_the_list_and_one_run_on_the_command_line(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--runs", str(made)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "strategy", "task", "step", "loss", "sent/node", "time", "age"]
    assert lines[-1].split()[:4] == ["one", "done", "diloco:H=4:lr=0.02", "8/8"]
    assert main(["runs", "list", "--runs", str(made), "--state", "lost"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["runs", "list", "--runs", str(made), "--tag", "nobody's"]) == 0
    assert f"no such runs in {made}" in capsys.readouterr().err
    assert main(["runs", "list", "--runs", str(made), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)][-1] == "one"
    assert main(["runs", "show", "one", "--runs", str(made)]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["num_nodes"] == "2" and shown["state"] == "done" and shown["strategy"].startswith('diloco {"H": 4')
    (parent,) = made.glob("digits-*")
    assert main(["runs", "show", parent.name, "--runs", str(made)]) == 2
    assert "pass one of its runs, ddp-seed-0, diloco-H-5-seed-0" in capsys.readouterr().err
    assert main(["runs", "list", "--runs", str(made / "nowhere")]) == 2


def test_what_would_steer_the_terminal_is_not_printed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run folder may come from another machine."""
    (run,) = [run for run in runs.list(copied) if run.kind == "run"][:1]
    about = json.loads((run.path / "run.json").read_text())
    about["description"]["strategy"]["name"] = "gone\x1b[2J"
    (run.path / "run.json").write_text(json.dumps(about))
    for words in (["list"], ["show", run.name]):
        assert main(["runs", *words, "--runs", str(copied)]) == 0
        out = capsys.readouterr().out
        assert "gone" in out and "\x1b" not in out


def test_what_is_running_is_not_removed(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(copied / "lives", process=described())
    remove = ["runs", "remove", "--runs", str(copied)]
    assert main([*remove, "lives", "--yes"]) == 2 and (copied / "lives").exists()
    assert main([*remove, "../made", "--yes"]) == 2
    assert main([*remove, "one"]) == 2 and "pass --yes" in capsys.readouterr().err
    (parent,) = copied.glob("digits-*")
    assert main([*remove, "one", parent.name, f"{parent.name}/ddp-seed-0", "--yes"]) == 0
    assert [run.name for run in runs.list(copied)] == ["lives"]


MANY = """
import sys, time
from exogym import runs
runs.list(sys.argv[1])
begun = time.process_time()
assert len(runs.list(sys.argv[1])) == 5000
print(time.process_time() - begun)
"""


@pytest.mark.slow
def test_five_thousand_are_listed_within_two_seconds(made: Path, tmp_path: Path) -> None:
    files = [(path.name, path.read_bytes()) for path in (made / "one").iterdir()]
    for k in range(5000):
        (tmp_path / f"run-{k}").mkdir()
        for name, content in files:
            (tmp_path / f"run-{k}" / name).write_bytes(content)
    done = subprocess.run([sys.executable, "-c", MANY, tmp_path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0


@pytest.mark.parametrize("value", [1e305, -1e305, float("inf")])
def test_whatever_number_a_run_writes_can_be_read(value: float, tmp_path: Path) -> None:
    """In float64 a loss, or a metric of the user's, may grow to 1e308 before it is infinite."""
    model, data = small_problem()
    trainer = LocalTrainer(
        model, data, data, loss_fn=torch.nn.functional.mse_loss, metrics={"size": lambda *given: value}
    )
    trainer.fit(
        DiLoCoStrategy(lr=0.02, H=2), num_nodes=2, max_steps=2, batch_size=8, device="cpu", run_dir=tmp_path / "one"
    )
    (found,) = runs.list(tmp_path)
    assert (found.state, found.reason) == ("done", None)
    assert set(runs.load(tmp_path / "one").column("val_size")[1].tolist()) == {value}
