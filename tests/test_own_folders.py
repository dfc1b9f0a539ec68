"""Checkpoints of processes that do not share a folder: three under torchrun, two see folder `a` and the last sees `b`.

The first launch is killed after the checkpoints of steps 3, 6 and 9; the second goes on from copies of what is left.
"""

import functools
import json
import re
import shutil

import pytest
from test_placement import AVERAGES, outcome, train  # noqa: F401 - for the script
from test_torchrun import as_json, end, launch

from exogym.callbacks import EvaluateNodes
from exogym.checkpoint import list_checkpoints, load
from exogym.errors import CheckpointError

KILLED_AT = 10
OPTIONS = AVERAGES | {"callbacks": [EvaluateNodes()]}  # which are recorded in the main process alone
SAVED = OPTIONS | {"checkpoint_interval": 3}
NEWEST = "step_0000000009"
SHARED = {"run.json", "shared.safetensors"}
ROWS = {"a": {"rows-0-1.safetensors", "rows-2-2.safetensors"}, "b": {"rows-3-3.safetensors"}}

HEAD = """
import json, os, signal, sys
from pathlib import Path

base, tests = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, tests)
import torch
import test_own_folders as t
torch.set_num_threads(1)
from exogym.callbacks import Every
from exogym.errors import ExoGymError

rank = int(os.environ["RANK"])
def own(name, other=False):
    return base / name / "ab"[(rank == 2) != other]
"""
KILL = """
def kill(loop):
    os.kill(os.getpid(), signal.SIGKILL)
t.train(**t.SAVED | {"callbacks": [*t.OPTIONS["callbacks"], Every(t.KILLED_AT, kill)]}, save_dir=own("killed"))
"""
RESUME = """
seen = {}
def go(name, folder, **options):
    try:
        seen[name] = t.outcome(t.train(**t.SAVED | options, save_dir=folder))
    except ExoGymError as error:
        seen[name] = f"{type(error).__name__}: {error}"

go("resumed", own("resumed"), resume=True)
for name in ("renamed late", "torn"):
    go(name, own(name), resume=True, keep_checkpoints=9)
go("swapped", own("swapped", other=True), resume=True)
go("brought together", own("brought together", other=True), resume=True)
go("one empty", own("one empty"), resume=True)
go("not resumed", own("not resumed"))
go("fresh", own("fresh"), resume=True, checkpoint_interval=1)
go("other run", own("other run"), seed=5)
if rank == 0:
    t.shutil.copytree(own("fresh"), own("two runs"))
    t.shutil.copytree(own("other run", other=True), own("two runs", other=True))
torch.distributed.barrier()
go("two runs", own("two runs"), resume=True)
go("shared", base / "shared")

import exogym.checkpoint as c
def full(tensors, file, write=c._write):
    if rank == 2 and file.name == "shared.safetensors" and "0009" in str(file):
        raise OSError(28, "No space left on device")
    return write(tensors, file)
c._write = full
go("full disk", own("full disk"))
(base / f"{rank}.json").write_text(json.dumps(seen))
"""


def run(folder, script):
    launcher = launch(3, folder, HEAD + script)
    try:
        return end(launcher)
    finally:
        launcher.kill()
        launcher.wait()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder that holds `a` and `b` of the run that was killed."""
    base = tmp_path_factory.mktemp("own") / "one"
    assert run(base, KILL) != 0
    return base / "killed"


@pytest.fixture(scope="module")
def resumed(killed):
    """The folder, what each rank has seen there, and what was printed."""
    base = killed.parent.parent / "two"
    base.mkdir()
    for name in ("resumed", "torn", "renamed late", "swapped", "brought together", "one empty", "not resumed"):
        shutil.copytree(killed, base / name)
    shutil.rmtree(base / "torn" / "b" / NEWEST)
    (base / "renamed late" / "b" / NEWEST).rename(base / "renamed late" / "b" / f".{NEWEST}.77.tmp")
    for here, there in ("ab", "ba"):
        for path in list_checkpoints(killed / there):
            shutil.copytree(path, base / "brought together" / here / path.name, dirs_exist_ok=True)
    shutil.rmtree(base / "one empty" / "b")
    shutil.rmtree(base / "not resumed" / "a")
    code = run(base, RESUME)
    log = (base / "log").read_text()
    assert code == 0, log[-5000:]
    return base, [json.loads((base / f"{rank}.json").read_text()) for rank in range(3)], log


@functools.cache
def undisturbed():
    return as_json(train(**OPTIONS))


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_each_folder_holds_its_own_rows_and_what_is_shared(killed):
    for name, rows in ROWS.items():
        assert names(killed / name) == ["step_0000000006", NEWEST]
        for path in list_checkpoints(killed / name):
            assert {file.name for file in path.iterdir()} == rows | SHARED
            assert load(path, [0, 1, 2] if name == "a" else [3]).meta["sha256"].keys() == (
                ROWS["a"] | ROWS["b"] | {"shared.safetensors"}
            )
    for file in SHARED:
        assert (killed / "a" / NEWEST / file).read_bytes() == (killed / "b" / NEWEST / file).read_bytes()


@pytest.mark.parametrize("name", ["resumed", "torn", "renamed late", "brought together"])
def test_a_killed_run_goes_on_from_folders_of_its_own(name, resumed):
    base, ranks, log = resumed
    assert ranks[0][name] == undisturbed()
    assert all(seen[name][0] == undisturbed()[0] for seen in ranks)
    taken = f"there is no {NEWEST} in .*/torn/b; using the one before"
    assert len(re.findall(taken, log)) == (1 if name == "torn" else log.count("/torn/b; using"))
    newest = names(base / name / "a")[-1]
    assert newest == names(base / name / "b")[-1] == "step_0000000014"


def test_only_the_torn_one_was_passed_over(resumed):
    base, _, log = resumed
    assert log.count("using the one before") == 1
    assert NEWEST in names(base / "renamed late" / "b")
    left = [path for path in base.rglob(".*") if path.name.startswith((".step", ".seen", ".writable"))]
    assert left == []


def test_a_torn_one_does_not_block_its_step(resumed):
    base, _, _ = resumed
    wanted = ["step_0000000006", f"{NEWEST}_1", "step_0000000012", "step_0000000014"]
    assert names(base / "torn" / "b") == wanted
    assert names(base / "torn" / "a") == sorted([*wanted, NEWEST])


def test_every_host_removes_older_ones(resumed):
    base, _, _ = resumed
    assert names(base / "fresh" / "a") == names(base / "fresh" / "b") == ["step_0000000013", "step_0000000014"]


def test_rows_on_another_host_are_named_with_what_to_do(resumed):
    base, ranks, _ = resumed
    for seen in ranks:
        text = seen["swapped"]
        assert text.startswith("CheckpointError: no checkpoint of ") and NEWEST in text
        assert re.search(r"lacks rows-0-1\.safetensors", text)
        assert re.search(r"rows-0-1\.safetensors is in \S+:\S+/swapped/a", text)
        source, target = (rf"{base}/swapped/{name}/{NEWEST}/" for name in "ab")
        assert re.search(rf"on \S+: rsync -a \S+:{source} {target}(\n|$)", text)
        assert re.search(rf"on \S+: rsync -a \S+:{target} {source}(\n|$)", text)
    assert len({seen["swapped"].replace("/b", "/a") for seen in ranks}) == 1


def test_a_host_without_its_folder_is_named(resumed):
    _, ranks, _ = resumed
    for seen in ranks:
        assert re.search(rf"there is no {NEWEST} in \S+/one empty/b; there is no step_0000000006 in", seen["one empty"])
        assert "rsync -a" in seen["one empty"]
    assert all("/not resumed/b) already holds checkpoints: pass resume=True" in seen["not resumed"] for seen in ranks)


def test_folders_laid_together_are_a_checkpoint_for_every_layout(killed, tmp_path):
    """And what is shared is whole in each: the history that only the main process had, too."""
    alone = tmp_path / "alone"
    shutil.copytree(killed / "b", alone)
    with pytest.raises(CheckpointError, match=r"lacks rows-0-1.safetensors, rows-2-2(?s:.*)rsync -a OTHER_HOST"):
        train(**OPTIONS, save_dir=alone, resume=True)
    for name in ROWS["a"]:
        shutil.copy(killed / "a" / NEWEST / name, alone / NEWEST)
    shutil.copytree(alone, tmp_path / "three")
    assert as_json(train(**OPTIONS, save_dir=alone, resume=True)) == undisturbed()
    assert as_json(train(**OPTIONS, save_dir=tmp_path / "three", resume=True, processes=3)) == undisturbed()


def test_a_shared_folder_holds_one_set_of_files(resumed):
    base, ranks, _ = resumed
    assert ranks[0]["shared"] == undisturbed()
    assert sorted(path.name for path in (base / "shared").iterdir()) == ["step_0000000012", "step_0000000014"]
    for path in (base / "shared").iterdir():
        assert {file.name for file in path.iterdir()} == ROWS["a"] | ROWS["b"] | SHARED


def test_where_one_disk_is_full_no_host_has_the_checkpoint(resumed):
    base, ranks, _ = resumed
    assert all("CheckpointError: the checkpoint of step 9 could not be written" in seen["full disk"] for seen in ranks)
    assert "No space left" in ranks[2]["full disk"] and "another process failed" in ranks[0]["full disk"]
    for name in ROWS:
        files = sorted(path.name for path in (base / "full disk" / name).iterdir())
        assert files == ["step_0000000003", "step_0000000006"]


def test_checkpoints_of_two_runs_do_not_mix(resumed):
    _, ranks, _ = resumed
    for seen in ranks:
        assert re.search(r"step_0000000014 is not of one run in \S+/two runs/a and \S+/two runs/b", seen["two runs"])
