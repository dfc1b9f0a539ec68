"""Comparisons that are interrupted: only the run under way is lost, and going on gives the undisturbed tables."""

import copy
import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import python

from exogym.cli import main
from exogym.core.record.run_folder import FILES as OF_A_RUN
from exogym.core.record.run_folder import read_status
from exogym.core.saving.checkpoint import list_checkpoints
from exogym.errors import ArgumentError
from exogym.strategy import SimpleReduceStrategy, Strategy
from exogym.study import cells
from exogym.study.compare import ComparisonInterrupted, Standing, compare
from exogym.study.compare.comparison import FILES, SVG_FILES, Comparison
from exogym.study.compare.folder import resume_command

pytestmark = pytest.mark.usefixtures("no_pictures")

OPTIONS: dict[str, Any] = {"max_steps": 20, "seeds": 2, "num_nodes": 2, "device": "cpu"}
STRATEGIES = "single,ddp,diloco:H=5"
OF_THE_CLOCK_HERE = ("wall_s", "examples_per_s", "device_use", "memory_bytes")


def asked(out: Path, **more: Any) -> Comparison:
    return compare("digits", **({"strategies": STRATEGIES, "out": out} | OPTIONS | more))


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file without what depends on the speed of this machine."""
    with open(file, encoding="utf-8") as lines:
        return [{k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK_HERE)} for row in csv.DictReader(lines)]


def tables(folder: Path) -> list[list[dict[str, str]]]:
    return [rows_of(folder / name) for name in ("summary.csv", "metrics.csv")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = asked(tmp_path_factory.mktemp("undisturbed")).folder
    assert folder is not None
    return folder


def after(count: int, stop: Callable[[], None]) -> Callable[[Standing], None]:
    """Return a `watch` that calls `stop` the count-th time."""
    calls = itertools.count(1)

    def watch(at: Standing) -> None:
        if next(calls) == count:
            stop()

    return watch


def crash() -> None:
    raise RuntimeError("out of luck")


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_each_run_is_a_child_of_the_comparison(undisturbed: Path) -> None:
    children = sorted(path.name for path in undisturbed.iterdir() if path.is_dir())
    assert children == sorted(f"{name}-seed-{seed}" for name in ("single", "ddp", "diloco-H-5") for seed in (0, 1))
    for child in children:
        found = {path.name for path in (undisturbed / child).iterdir()}
        assert found == {"history.safetensors", "outcome.json", *OF_A_RUN}
        facts = json.loads((undisturbed / child / "outcome.json").read_text())
        assert read_status(undisturbed / child)["state"] == "done"
        assert facts["state"] == "finished" and facts["strategy"] in STRATEGIES and facts["wall_s"] > 0
    assert json.loads((undisturbed / "run.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(("stop", "at"), [(crash, 17), (ctrl_c, 40)])
def test_stopped_and_gone_on_with(stop: Callable[[], None], at: int, tmp_path: Path, undisturbed: Path) -> None:
    """A run has 11 evaluations here; the 17th is in the second run, the 40th in the fourth."""
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as stopped:
        asked(tmp_path, watch=after(at, stop))
    (folder,) = tmp_path.iterdir()
    ended = sorted(path.parent.name for path in folder.glob("*/outcome.json"))
    assert len(ended) == (at - 1) // 11
    if stop is ctrl_c:
        assert isinstance(stopped.value, ComparisonInterrupted) and stopped.value.result is not None
        assert stopped.value.folder == folder and [row["seeds"] for row in stopped.value.result.rows] == [2, 1, 0]
        assert "1 of 2 runs have ended" in stopped.value.result.to_markdown()
        assert {path.name for path in folder.iterdir() if path.is_file()} == {*FILES, *SVG_FILES}
        assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    before = {name: (folder / name / "outcome.json").stat().st_mtime_ns for name in ended}
    seen: list[Standing] = []
    result = asked(folder, resume=True, watch=seen.append)
    assert result.folder == folder and tables(folder) == tables(undisturbed)
    assert before == {name: (folder / name / "outcome.json").stat().st_mtime_ns for name in ended}
    assert [at.label for at in seen if at.is_last] == STRATEGIES.split(",")
    assert seen[0].step == 20 and seen[0].left_s is None and seen[-1].left_s == 0
    assert not list(folder.glob("*/checkpoints"))


def test_a_long_run_goes_on_from_its_own_checkpoint(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "SAVE_S", 0.0)
    with pytest.raises(RuntimeError):
        asked(tmp_path, watch=after(39, crash))
    (folder,) = tmp_path.iterdir()
    assert "going on" not in capfd.readouterr().err
    assert list_checkpoints(folder / "ddp-seed-1" / "checkpoints")
    asked(folder, resume=True)
    assert "going on from step 8 (" in capfd.readouterr().err
    assert tables(folder) == tables(undisturbed)
    monkeypatch.setattr(cells, "SAVE_S", 60.0)  # and a short one has none
    with pytest.raises(RuntimeError):
        asked(tmp_path / "short", watch=after(39, crash))
    assert not list((tmp_path / "short").glob("*/*/checkpoints/step*"))


def test_strategies_of_ones_own_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(SimpleReduceStrategy):
        def __init__(self) -> None:
            super().__init__("sgd", lr=0.1)
            self.unsaved = object()

    def ask(out: Path, **more: Any) -> Comparison:
        mine: dict[str, str | Strategy] = {"mine": Mine(), "ddp": "ddp"}
        return asked(out, strategies=mine, **more)

    monkeypatch.setattr(cells, "SAVE_S", 0.0)
    with pytest.raises(ComparisonInterrupted):
        ask(tmp_path, watch=after(17, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    (folder,) = tmp_path.iterdir()
    assert not list(folder.glob("*/checkpoints"))
    ask(folder, resume=True)
    assert tables(folder) == tables(ask(tmp_path / "whole").folder or tmp_path)


def test_time_and_failures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"strategies": "ddp,ddp:lr=1e30,diloco:H=5", "seeds": 1, "network": "1Mbps,20ms"}
    monkeypatch.setattr("exogym.study.compare.run.measured_step_s", lambda *given: 0.01)
    whole = asked(tmp_path / "whole", **options).folder
    with pytest.raises(ComparisonInterrupted):
        asked(tmp_path / "stopped", **options, watch=after(20, ctrl_c))
    (folder,) = (tmp_path / "stopped").iterdir()
    assert (
        whole is not None and "nan" in json.loads((folder / "ddp-lr-1e30-seed-0" / "outcome.json").read_text())["error"]
    )
    monkeypatch.setattr("exogym.study.compare.run.measured_step_s", lambda *given: pytest.fail("measured anew"))
    result = asked(folder, **options, resume=True)
    assert "1 of 1 runs failed" in result.rows[1]["notes"]
    assert tables(folder) == tables(whole)


def test_without_a_folder_the_interruption_has_what_was_finished() -> None:
    with pytest.raises(ComparisonInterrupted, match="2 of 6 runs have ended") as stopped:
        compare("digits", STRATEGIES, **OPTIONS, watch=after(25, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    assert stopped.value.folder is None and stopped.value.result is not None
    assert sorted(stopped.value.result.histories) == [("single", 0), ("single", 1)]


def test_what_differs_is_listed(undisturbed: Path, tmp_path: Path) -> None:
    def refuse(message: str, out: Path = undisturbed, **more: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            asked(out, **more, watch=lambda at: pytest.fail("it trained"))

    refuse(
        r"(?s)setting.batch_size: saved 4, now 5\n.*setting.steps: saved 20, now 30",
        resume=True,
        max_steps=30,
        batch_size=5,
    )
    refuse(r"strategies.sparta: saved None", resume=True, strategies="ddp,diloco:H=5,single,sparta")
    refuse(r"timing: saved None", resume=True, network="wifi", step_seconds=1)
    refuse(r"has results: resume them with resume=True \(--resume\), or pass another folder")
    for again in ({}, {"resume": True}):
        refuse("is the folder of a single run: pass another folder", next(undisturbed.glob("ddp-*")), **again)
    refuse(r"contains no comparison to resume: did you mean", undisturbed.parent, resume=True)
    refuse(r"contains no comparison to resume: pass a comparison's folder", tmp_path, resume=True)
    with pytest.raises(ArgumentError, match="pass it as out"):
        compare("digits", "ddp", resume=True)
    again = asked(
        undisturbed, resume=True, processes=2
    )  # what changes no result may differ; here nothing is left to do
    assert again.folder == undisturbed and list(tmp_path.iterdir()) == []


def test_a_default_that_changed_is_noticed_and_a_new_option_is_not(undisturbed: Path, tmp_path: Path) -> None:
    saved = json.loads((undisturbed / "run.json").read_text("utf-8"))
    arguments = saved["all_arguments"]["diloco:H=5"]
    assert arguments["eager"] is False and "eager" not in saved["strategies"]["diloco:H=5"]

    def resumed(change: Callable[[dict[str, Any]], object]) -> Comparison:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(undisturbed, folder)
        found = copy.deepcopy(saved)
        change(found)
        (folder / "run.json").write_text(json.dumps(found), "utf-8")
        return asked(folder, resume=True)

    with pytest.raises(ArgumentError, match=r"all_arguments\.diloco:H=5\.delay: saved 3, now 0"):
        resumed(lambda found: found["all_arguments"]["diloco:H=5"].update(delay=3))
    with pytest.raises(ArgumentError, match=r"all_arguments\.ddp\.inner_rate: saved 0.5, now"):
        resumed(lambda found: found["all_arguments"]["ddp"].update(inner_rate=0.5))
    resumed(lambda found: found["all_arguments"]["diloco:H=5"].pop("eager"))  # saved before this option existed
    resumed(lambda found: found["all_arguments"]["ddp"].update(retired=False))  # saved while this option existed
    resumed(lambda found: found.pop("all_arguments"))  # saved by an earlier ExoGym


def test_labels_that_look_alike_have_folders_of_their_own(tmp_path: Path) -> None:
    strategies: dict[str, str | Strategy] = {"a:b": "ddp", "a-b": "diloco:H=5"}
    folder = asked(tmp_path, strategies=strategies, seeds=1).folder
    assert folder is not None and {path.name for path in folder.iterdir() if path.is_dir()} == {
        "a-b-seed-0",
        "a-b-2-seed-0",
    }


# ---------------------------------------------------------------- the command, as a real process


COMMAND = ["compare", "--strategies", STRATEGIES, "--steps", "20", "--seeds", "2", "--nodes", "2", "--device", "cpu"]
KILLED = """
import os, signal, sys
import exogym.study.compare.live as live
from exogym.cli import main
number, at = signal.Signals[sys.argv[1]], int(sys.argv[2])
update, calls = live.LiveTable.update, []
def counted(self, standing):
    calls.append(standing)
    if len(calls) == at:
        os.kill(os.getpid(), number)
    update(self, standing)
live.LiveTable.update = counted
sys.exit(main(sys.argv[3:]))
"""


def command(tmp_path: Path, number: str, at: int) -> subprocess.CompletedProcess[str]:
    return python("-c", KILLED, number, at, *COMMAND, cwd=tmp_path)


def test_ctrl_c_shows_what_is_finished_and_the_command_that_goes_on_does(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = command(tmp_path, "SIGINT", 40)
    assert done.returncode == 130
    (folder,) = (tmp_path / "runs").iterdir()
    lines = done.stderr.splitlines()
    assert lines[-2:] == [
        f"exogym: to continue: exogym compare --resume --out runs/{folder.name}",
        "exogym: interrupted",
    ]
    assert "Traceback" not in done.stderr
    assert (
        "| ddp " in done.stdout
        and "1 of 2 runs have ended" in done.stdout
        and f"written to runs/{folder.name}/" in done.stdout
    )
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--out", f"runs/{folder.name}", *COMMAND[1:]]) == 2
    assert "has results" in capsys.readouterr().err
    assert main(["compare", "--resume", "--out", f"runs/{folder.name}", "--steps", "30"]) == 2
    assert "setting.steps: saved 20, now 30" in capsys.readouterr().err
    assert main(["compare", "--resume", "--out", f"runs/{folder.name}"]) == 0  # the rest of the options are as before
    assert tables(folder) == tables(undisturbed)
    assert main(["compare", "--resume"]) == 2
    assert "pass --out, for example" in capsys.readouterr().err


def test_kill_9_loses_only_the_run_under_way(tmp_path: Path, undisturbed: Path) -> None:
    done = command(tmp_path, "SIGKILL", 40)
    assert done.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("*/history.safetensors"))) == 3
    assert json.loads((folder / "run.json").read_text())["state"] == "running"
    asked(folder, resume=True)
    assert tables(folder) == tables(undisturbed)


def test_a_run_under_way_is_not_removed_by_another_comparison(tmp_path: Path) -> None:
    """A strategy that no checkpoint holds starts again in an empty folder, which must not be a living run's."""

    class Mine(SimpleReduceStrategy):
        pass

    def ask(out: Path, **more: Any) -> Comparison:
        return asked(out, strategies={"mine": Mine("sgd", lr=0.1)}, seeds=1, **more)

    refused: list[str] = []

    def look(at: Standing) -> None:
        if at.label == "mine" and not refused:
            with pytest.raises(ArgumentError, match="in use by another run") as error:
                ask(next(tmp_path.iterdir()), resume=True)
            refused.append(str(error.value))

    folder = ask(tmp_path, watch=look).folder
    assert refused and folder is not None and read_status(folder / "mine-seed-0")["state"] == "done"
    assert refused[0].startswith(f"out={str(folder)!r} is in use")  # the comparison's own folder, before any run's


# ---------------------------------------------------------------- a folder from a stranger


def strange(folder: Path, **arguments: Any) -> Path:
    """Write the least that a comparison's folder holds."""
    folder.mkdir()
    found = {"arguments": {"problem": "digits", "strategies": "ddp"} | arguments, "strategies": {}, "state": "stopped"}
    (folder / "run.json").write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("problem", "--dataset", "trap:make"),
        ("data", "--data", "elsewhere.npz"),
        ("network", "--network", "elsewhere.json"),
    ],
)
def test_what_a_folder_names_is_neither_imported_nor_opened(
    name: str, option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "trap.py").write_text("open('sprung', 'w').close()\n")
    os.mkfifo(tmp_path / "elsewhere.json")  # opening it would never end
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = strange(tmp_path / "folder", **{name: value})
    assert main(["compare", "--resume", "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"pass {option} {value} again" in said and said.count("\n") == 1
    if name != "network":
        assert main(["compare", "--resume", "--out", str(folder), f"{option}=mine:make"]) == 2
        assert f"had {option} {value}: pass the same value" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists() and "trap" not in sys.modules


def test_processes_of_before_are_named_and_another_number_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = strange(tmp_path / "folder", processes="auto")
    assert main(["compare", "--resume", "--out", str(folder)]) == 2
    assert "processes='auto': it is retired: pass a number" in capsys.readouterr().err
    assert main(["compare", "--resume", "--out", str(folder), "--processes", "2"]) == 2  # the folder is a made-up one
    assert "contains a comparison with other options" in capsys.readouterr().err


def test_a_task_of_ones_own_is_resumed_when_it_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_task.py").write_text(
        "from exogym.tasks import digits_task\n\ndef make():\n    return digits_task()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = compare("my_own_task:make", "ddp", out="runs", max_steps=2, seeds=1, num_nodes=2, device="cpu")
    assert resume_command("runs/x", done.description["arguments"]).endswith(" --dataset my_own_task:make")
    again = ["compare", "--resume", "--out", str(done.folder)]
    assert main(again) == 2 and "uses code outside the folder" in capsys.readouterr().err
    assert main([*again, "--dataset", "my_own_task:make"]) == 0
    assert main([*again, "--dataset", "digits"]) == 2 and "had --dataset my_own_task:make" in capsys.readouterr().err
    ours = compare("digits", "ddp", out="runs", max_steps=2, seeds=1, num_nodes=2, device="cpu")
    assert main(["compare", "--resume", "--out", str(ours.folder)]) == 0  # ExoGym's own task needs no name
    capsys.readouterr()
    assert main(["compare", "--resume", "--out", str(ours.folder), "--dataset", "my_own_task:make"]) == 2
    assert "had --dataset digits: pass the same value" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["ddp-seed-0", "ddp-seed-0/checkpoints", "run.json"])
def test_a_link_in_a_folder_is_not_followed(place: str, tmp_path: Path, undisturbed: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    shutil.copytree(undisturbed, folder)
    if (folder / place).exists():
        shutil.move(folder / place, outside)
    else:
        outside.mkdir()
    (folder / place).symlink_to(outside)
    with pytest.raises(ArgumentError, match=r"is a link|not a plain file"):
        asked(folder, resume=True)


def test_numbers_that_json_lacks_are_the_same_when_it_is_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": 1, "max_steps": 2, "num_nodes": 2, "device": "cpu", "out": tmp_path}
    folder = compare("digits", "ddp:max_norm=inf", **options).folder
    result = compare("digits", "ddp:max_norm=inf", **options | {"out": folder}, resume=True)
    assert len(result.rows) == 1
