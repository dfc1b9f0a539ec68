"""Folders that an earlier commit wrote: they load, and what was stopped goes on to the end of a run that never stopped.

A folder whose run used an option that was retired since goes on, too, or the error names the option.
"""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from before import (
    ABOUT,
    COMPARE,
    RETIRED,
    RUN_DIR,
    RUNS,
    SAVED,
    STEPS,
    SWEEP,
    Way,
    arithmetic,
    checkpoints,
    fit,
    unpack,
)

from exogym import runs
from exogym.cli import main
from exogym.errors import ExoGymError
from exogym.testing import fingerprint

MEASURED = ("wall_s", "examples_per_s", "device_use", "memory_bytes")

pytestmark = pytest.mark.usefixtures("no_pictures")
# Post-local SGD's rounds began at step 0; they begin at start_step now, so later averages differ. Messages of
# asynchronous nodes now wait until the server's line is free.
MENDED = {"post_local_sgd", "async_diloco"}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    unpack(folder)
    return folder


@pytest.fixture(scope="module")
def same_arithmetic(before: Path) -> bool:
    """Whether this machine and its PyTorch round as those that wrote the folders; elsewhere last bits may differ."""
    return json.loads((before / ABOUT).read_text("utf-8"))["arithmetic"] == arithmetic()


def rows(trainer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in trainer.history]


def resume(way: Way, saved: Path, tmp_path: Path, exact: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Go on from a copy of a checkpoint, and compare with a run that never stopped."""
    shutil.copytree(saved, tmp_path / "saved")
    whole = fit(way, save_dir=tmp_path / "whole", checkpoint_interval=SAVED)
    capfd.readouterr()
    resumed = fit(way, save_dir=tmp_path / "saved", checkpoint_interval=SAVED, resume=True)
    assert f"going on from step {SAVED} (" in capfd.readouterr().err
    if exact:
        assert fingerprint(resumed.model) == fingerprint(whole.model)
        assert repr(rows(resumed)) == repr(rows(whole))  # nan is like nan
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert resumed.traffic == whole.traffic


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_goes_on_as_if_it_had_never_stopped(
    name: str, before: Path, same_arithmetic: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if name not in MENDED:
        resume(RUNS[name], checkpoints(before, name), tmp_path, same_arithmetic, capfd)
        return
    shutil.copytree(checkpoints(before, name), tmp_path / "saved")
    resumed = fit(RUNS[name], save_dir=tmp_path / "saved", resume=True)
    assert f"going on from step {SAVED} (" in capfd.readouterr().err
    assert all(p.isfinite().all() for p in resumed.model.parameters()) and resumed.history.last["step"] == 12


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "ddp compiled")) for name in RETIRED]
)
def test_what_used_a_retired_option_goes_on_or_names_it(
    name: str, before: Path, same_arithmetic: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    way, option = RETIRED[name]
    try:
        resume(way, checkpoints(before, name), tmp_path, same_arithmetic, capfd)
    except ExoGymError as error:
        assert option in str(error)


@pytest.mark.slow  # compiling takes 16 s the first time
def test_a_compiled_run_goes_on_or_names_its_way_of_computing(before: Path, tmp_path: Path) -> None:
    """The checkpoint says how it computes, also where `fit` is not asked for it."""
    shutil.copytree(checkpoints(before, "ddp compiled"), tmp_path / "saved")
    try:
        resumed = fit(Way("ddp"), save_dir=tmp_path / "saved", resume=True)
    except ExoGymError as error:
        assert "compute" in str(error)
    else:
        assert resumed.description["chosen"]["compute"] == "compiled"


@pytest.mark.parametrize("name", [name for name in RETIRED if name != "ddp compiled"])
def test_a_script_without_the_option_is_told_of_it(name: str, before: Path, tmp_path: Path) -> None:
    """Never another run in silence: the one who deletes the argument learns that the folder had it."""
    way, option = RETIRED[name]
    assert isinstance(way.strategy, str)
    kept = [part for part in way.strategy.split(":") if not part.startswith((option, "min_reports"))]
    shutil.copytree(checkpoints(before, name), tmp_path / "saved")
    with pytest.raises(ExoGymError, match=option):
        fit(Way(":".join(kept), way.fit), save_dir=tmp_path / "saved", resume=True)


@pytest.fixture
def copied(before: Path, tmp_path: Path) -> Path:
    """A copy of all folders but that of checkpoints alone."""
    shutil.copytree(before, tmp_path / "copied", ignore=lambda top, names: ["checkpoints"] * (Path(top) == before))
    return tmp_path / "copied"


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8") as lines:
        return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in csv.DictReader(lines)]


def same(mine: Path, theirs: Path, exact: bool, *names: str) -> None:
    """Compare tables: their cells, or where the last bits differ, that they have the same rows."""
    for name in names:
        found, wanted = rows_of(mine / name), rows_of(theirs / name)
        assert found == wanted if exact else len(found) == len(wanted)


def test_they_are_listed_loaded_and_shown(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {run.name: (run.kind, run.state, run.step) for run in runs.list(before)}
    for name in ("comparison", "retired"):
        assert listed[f"{name}-done"][:2] == ("comparison", "done")
        assert listed[f"{name}-stopped"][:2] == ("comparison", "stopped")
    assert listed["sweep-done"][:2] == ("sweep", "done") and listed["sweep-stopped"][:2] == ("sweep", "stopped")
    assert listed["comparison-done/ddp-seed-0"] == listed["sweep-stopped/H-2-seed-0"] == ("run", "done", 8)
    assert listed["comparison-stopped/diloco-H-3-seed-0"] == listed["sweep-stopped/H-3-seed-0"] == ("run", "stopped", 6)
    assert listed["run-done"] == ("run", "done", STEPS) and listed["run-stopped"] == ("run", "stopped", 9)
    assert len(listed) == 2 + (4 + 3) + (3 + 3) + (3 + 3)
    for name, (kind, _, step) in listed.items():
        if kind == "run":
            run = runs.load(before / name)
            assert run.column("train_loss")[0].tolist() == [*range(1, step + 1)] and run.description["num_nodes"] > 1
        else:
            assert runs.summary(before / name).rows
    assert main(["runs", "list", "--runs", str(before)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(listed)
    assert main(["runs", "show", "run-stopped", "--runs", str(before)]) == 0
    assert "stopped" in capsys.readouterr().out


def test_a_run_folder_goes_on(copied: Path, same_arithmetic: bool, capfd: pytest.CaptureFixture[str]) -> None:
    whole = fit(RUNS["diloco"], run_dir=copied / "whole", **RUN_DIR)
    capfd.readouterr()
    resumed = fit(RUNS["diloco"], run_dir=copied / "run-stopped", resume=True, **RUN_DIR)
    assert "going on from step 9 (" in capfd.readouterr().err
    if same_arithmetic:
        assert fingerprint(resumed.model) == fingerprint(whole.model)
    found, done = (runs.load(copied / name) for name in ("run-stopped", "run-done"))
    assert (found.state, len(found.records)) == ("done", len(done.records))


@pytest.mark.parametrize("kind", ["comparison", "sweep"])
def test_a_study_goes_on(kind: str, copied: Path, same_arithmetic: bool, capfd: pytest.CaptureFixture[str]) -> None:
    words, tables = {"comparison": (COMPARE, ["summary.csv", "metrics.csv"]), "sweep": (SWEEP, ["summary.csv"])}[kind]
    ended = {path: path.stat().st_mtime_ns for path in (copied / f"{kind}-stopped").glob("*/outcome.json")}
    assert len(ended) == 1
    words = words[:1] if kind == "comparison" else words  # a comparison keeps its options in its folder
    assert main([*words, "--resume", "--out", str(copied / f"{kind}-stopped")]) == 0
    assert "going on from step 6 (" in capfd.readouterr().err
    assert ended == {path: path.stat().st_mtime_ns for path in ended}
    same(copied / f"{kind}-stopped", copied / f"{kind}-done", same_arithmetic, *tables)


def test_a_comparison_with_a_retired_option_goes_on_or_names_it(
    copied: Path, same_arithmetic: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["compare", "--resume", "--out", str(copied / "retired-stopped")])
    said = capfd.readouterr().err
    if code == 0:
        same(copied / "retired-stopped", copied / "retired-done", same_arithmetic, "summary.csv", "metrics.csv")
    else:
        assert code == 2 and "tuner" in said and "Traceback" not in said
