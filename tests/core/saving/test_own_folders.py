"""Checkpoints of processes that do not share a folder: three of a world, two see folder `a` and the last sees `b`.

In the first launch the last process is killed when `a` has the checkpoint of step 9 under its name and `b` not yet;
the second launch goes on from copies of what is left.
"""

import functools
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from battery import AVERAGES, as_json, train
from processes import over_gloo, world

from exogym.callbacks import EvaluateNodes
from exogym.core.communicator import barrier
from exogym.core.saving.checkpoint import Snapshot, list_checkpoints, load, load_newest, remove_leftovers, save
from exogym.core.saving.keepers import find_keepers
from exogym.errors import ArgumentError, CheckpointError

OPTIONS = AVERAGES | {"callbacks": [EvaluateNodes()]}  # which are recorded in the main process alone
NEWEST = "step_0000000009"
SHARED = {"run.json", "shared.safetensors"}
ROWS = {"a": {"rows-0-1.safetensors", "rows-2-2.safetensors"}, "b": {"rows-3-3.safetensors"}}

HEAD = """
import json, os, shutil, signal, sys, time
from pathlib import Path

base, tests = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, tests)
import torch
import battery as b
torch.set_num_threads(1)
from exogym.callbacks import EvaluateNodes
from exogym import Placement
from exogym.errors import ExoGymError

NEWEST = "step_0000000009"
SAVED = b.AVERAGES | {"callbacks": [EvaluateNodes()], "checkpoint_interval": 3}

rank = int(os.environ["RANK"])
def own(name, other=False):
    return base / name / "ab"[(rank == 2) != other]
"""
KILL = """
def rename(source, target, rename=os.rename):
    if rank == 2 and str(target).endswith(NEWEST):
        while not (own("killed", other=True) / NEWEST).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.rename = rename
b.train(**SAVED, save_dir=own("killed"))
"""
RESUME = """
seen = {}
def go(name, folder, **options):
    try:
        seen[name] = b.outcome(b.train(**SAVED | options, save_dir=folder))
    except ExoGymError as error:
        seen[name] = f"{type(error).__name__}: {error}"

for name in ("resumed", "torn"):
    go(name, own(name), resume=True, placement=Placement(keep_checkpoints=9))
go("swapped", own("swapped", other=True), resume=True)
go("brought together", own("brought together", other=True), resume=True)
go("one empty", own("one empty"), resume=True)
go("not resumed", own("not resumed"))
go("fresh", own("fresh"), resume=True, checkpoint_interval=1)
go("other run", own("other run"), seed=5)
if rank == 0:
    shutil.copytree(own("fresh"), own("two runs"))
    shutil.copytree(own("other run", other=True), own("two runs", other=True))
torch.distributed.barrier()
go("two runs", own("two runs"), resume=True)
go("shared", base / "shared")

import exogym.core.saving.checkpoint as c
def full(tensors, file, *args, write=c._write):
    if rank == 2 and file.name == "shared.safetensors" and "0009" in str(file):
        raise OSError(28, "No space left on device")
    return write(tensors, file, *args)
c._write = full
go("full disk", own("full disk"))
(base / f"{rank}.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder that holds `a` and `b` of the run that was killed."""
    base = tmp_path_factory.mktemp("own") / "one"
    code, log = world(3, base, HEAD + KILL)
    assert code in (-signal.SIGKILL, 1), log[-5000:]  # whose end is seen first: the killed one's, or another's
    return base / "killed"


@pytest.fixture(scope="module")
def saved(killed):
    """The same, had it been killed a moment later."""
    folder = killed.with_name("saved")
    shutil.copytree(killed, folder)
    (left,) = (folder / "b").glob(".step_*")
    left.rename(folder / "b" / NEWEST)
    return folder


@pytest.fixture(scope="module")
def resumed(killed, saved):
    """The folder, what each rank has seen there, and what was printed."""
    base = killed.parent.parent / "two"
    base.mkdir()
    for name in ("resumed", "torn"):
        shutil.copytree(killed, base / name)
    for name in ("swapped", "brought together", "one empty", "not resumed"):
        shutil.copytree(saved, base / name)
    shutil.rmtree(*(base / "torn" / "b").glob(".step_*"))
    for here, there in ("ab", "ba"):
        for path in list_checkpoints(saved / there):
            shutil.copytree(path, base / "brought together" / here / path.name, dirs_exist_ok=True)
    shutil.rmtree(base / "one empty" / "b")
    shutil.rmtree(base / "not resumed" / "a")
    code, log = world(3, base, HEAD + RESUME)
    assert code == 0, log[-5000:]
    return base, [json.loads((base / f"{rank}.json").read_text()) for rank in range(3)], log


@functools.cache
def undisturbed():
    return as_json(train(**OPTIONS))


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_none_is_removed_before_all_have_the_new_one(killed):
    """Two are kept; step 3 would have been removed after step 9."""
    assert names(killed / "a") == ["step_0000000003", "step_0000000006", NEWEST]
    assert names(killed / "b") == ["step_0000000003", "step_0000000006"]


def test_each_folder_holds_its_own_rows_and_what_is_shared(saved):
    for name, rows in ROWS.items():
        for path in list_checkpoints(saved / name):
            files = {file.name for file in path.iterdir()}
            assert files == rows | SHARED
            assert load(path, [0, 1, 2] if name == "a" else [3]).meta["sha256"].keys() == (
                ROWS["a"] | ROWS["b"] | {"shared.safetensors"}
            )
    for file in SHARED:
        assert (saved / "a" / NEWEST / file).read_bytes() == (saved / "b" / NEWEST / file).read_bytes()


@pytest.mark.parametrize("name", ["resumed", "torn", "brought together"])
def test_a_killed_run_goes_on_from_folders_of_its_own(name, resumed):
    base, ranks, log = resumed
    assert ranks[0][name] == undisturbed()
    assert all(seen[name][0] == undisturbed()[0] for seen in ranks)
    taken = f"there is no {NEWEST} in .*/torn/b; using the checkpoint before"
    assert len(re.findall(taken, log)) == (1 if name == "torn" else log.count("/torn/b; using"))
    newest = names(base / name / "a")[-1]
    assert newest == names(base / name / "b")[-1] == "step_0000000014"


def test_only_the_torn_one_was_passed_over(resumed):
    base, _, log = resumed
    assert log.count("using the checkpoint before") == 1
    assert NEWEST in names(base / "resumed" / "b")
    left = [path for path in base.rglob(".*") if path.name.startswith((".step", ".seen", ".writable"))]
    assert left == []


def test_a_torn_one_does_not_block_its_step(resumed):
    base, _, _ = resumed
    wanted = ["step_0000000003", "step_0000000006", f"{NEWEST}_1", "step_0000000012", "step_0000000014"]
    assert names(base / "torn" / "b") == wanted
    assert names(base / "torn" / "a") == sorted([*wanted, NEWEST])


def test_every_host_removes_older_ones(resumed):
    base, _, _ = resumed
    assert names(base / "fresh" / "a") == names(base / "fresh" / "b") == ["step_0000000013", "step_0000000014"]


def test_rows_on_another_host_are_named_with_what_to_do(resumed):
    _, ranks, _ = resumed
    for seen in ranks:
        text = seen["swapped"]
        assert text.startswith("CheckpointError: no checkpoint in ") and NEWEST in text
        assert re.search(r"lacks rows-0-1\.safetensors", text)
        assert re.search(r"rows-0-1\.safetensors is in \S+:\S+/swapped/a", text)
        assert text.endswith(f"rsync -a OTHER_HOST:FOLDER/{NEWEST}/ FOLDER/{NEWEST}/")
    assert len({seen["swapped"].replace("/b", "/a") for seen in ranks}) == 1


def test_a_host_without_its_folder_is_named(resumed):
    _, ranks, _ = resumed
    for seen in ranks:
        assert re.search(rf"there is no {NEWEST} in \S+/one empty/b; there is no step_0000000006 in", seen["one empty"])
        assert "rsync -a" in seen["one empty"]
    assert all(
        "/not resumed/b) already contains checkpoints: pass resume=True" in seen["not resumed"] for seen in ranks
    )


def test_folders_laid_together_are_a_checkpoint_for_every_layout(saved, tmp_path):
    """And what is shared is whole in each: the history that only the main process had, too."""
    alone = tmp_path / "alone"
    shutil.copytree(saved / "b", alone)
    with pytest.raises(CheckpointError, match=r"lacks rows-0-1.safetensors, rows-2-2(?s:.*)rsync -a OTHER_HOST"):
        train(**OPTIONS, save_dir=alone, resume=True)
    for name in ROWS["a"]:
        shutil.copy(saved / "a" / NEWEST / name, alone / NEWEST)
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
        assert re.search(
            r"step_0000000014 belongs to different runs in \S+/two runs/a and \S+/two runs/b", seen["two runs"]
        )


def save_cut(folder, cuts):
    """Save step 1 in two processes with a folder each, process k cut off as `cuts[k]` says; then what a start finds.

    A cut is (number of the agreement, whether the other one still hears of it).
    """

    def body(wire, x):
        here = wire.placement.index(wire.ranks)
        own = folder / str(here)
        own.mkdir(exist_ok=True)
        keepers, agree, calls = find_keepers(own, wire), wire.agree, []
        assert keepers.of == (0, 1)

        def cut(flag):
            calls.append(flag)
            number, is_heard = cuts[here]
            if len(calls) >= number:
                if is_heard and len(calls) == number:
                    agree(flag)
                raise RuntimeError("Connection closed by peer")
            return agree(flag)

        wire.agree = cut
        with pytest.raises(RuntimeError, match="closed by peer"):
            save(own, Snapshot({here: {"x": x[0]}}, {"y": torch.ones(1)}, {"step": 1}), 1, wire, keepers)
        wire.agree = agree
        remove_leftovers(own, wire, keepers)
        found, complaints = load_newest(own, wire, keepers)
        assert complaints == [] and len(list(own.iterdir())) == (found is not None)
        if found is not None:
            assert torch.equal(found.rows[here]["x"], x[0])
        (folder / f"found {here}").write_text(str(found is not None))

    over_gloo(2, 2, folder, body)
    return [(folder / f"found {k}").read_text() == "True" for k in range(2)]


WRITTEN, RENAMED = 3, 4  # the agreements that follow


def test_a_host_that_is_cut_off_follows_the_one_that_renamed(tmp_path):
    assert save_cut(tmp_path, [(WRITTEN, True), (RENAMED, False)]) == [True, True]


def test_hosts_that_are_all_cut_off_before_leave_nothing(tmp_path):
    assert save_cut(tmp_path, [(WRITTEN, True), (WRITTEN, True)]) == [False, False]


def test_who_keeps_which_folder(tmp_path, monkeypatch):
    """Processes 0 and 2 see one folder; and one that sees a folder half is refused by all."""
    exists = Path.exists

    def body(wire, x):
        here = wire.placement.index(wire.ranks)
        own = tmp_path / "ab"[here % 2]
        own.mkdir(exist_ok=True)
        keepers = find_keepers(own, wire)
        assert keepers.of == (0, 1, 0) and keepers.is_keeper == (here < 2) and not keepers.are_one
        assert keepers.places[1].endswith(f":{tmp_path / 'b'}")
        assert find_keepers(tmp_path, wire).are_one
        if here == 2:
            monkeypatch.setattr(Path, "exists", lambda path: not path.name.endswith("-0") and exists(path))
        with pytest.raises(ArgumentError, match=r"process 2 .* sees the files of process 1 .*, but 1 does not see all"):
            find_keepers(tmp_path, wire)
        barrier(wire)
        assert list(tmp_path.glob("**/.seen*")) == []

    over_gloo(3, 3, tmp_path, body)
