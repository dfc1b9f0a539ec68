"""The laws under torchrun: the world of processes that it starts gives the bits of one process, stopped or not.

One launch for each number of processes: each trains its strategies and then tries what else is asked of it. Each rank
is a Python that imports torch, so the fast tests have one world, of three, and the others are slow.
"""

import json
import os
import re
import shutil
import signal
import time

import pytest
from battery import AVERAGES, as_json, asked, battery, fingerprint, in_turn, slow, train
from processes import PATIENCE_S, end, launch
from strategies import STRATEGIES

from exogym.callbacks import EvaluateNodes, Every
from exogym.core.saving.checkpoint import list_checkpoints, load

WORLDS = (3, 2, 4)
FAST = ("ddp", "diloco", "sparta", "one node")  # one for each kind of collective; `test_placement` has more strategies
OF_TWO = {"test_a_rank_that_is_killed_ends_the_world", "test_a_run_goes_on_from_torchrun_in_torchrun"}
OF_ALL = "test_the_world_of_torchrun_gives_the_bits_of_one_process"  # each trains the strategies that it is asked for

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

folder, tests = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, tests)
import torch
import battery as b
from strategies import STRATEGIES
from exogym import Placement
from exogym.callbacks import EvaluateNodes, Every
from exogym.errors import ArgumentError

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
seen = {}
if world == 3:  # before the processes have met
    for name, options in {"too many": {"num_nodes": 2}, "another number": {"processes": 2}}.items():
        try:
            b.train(**b.AVERAGES, **options)
        except ArgumentError as error:
            seen[name] = str(error)
for name in NAMES:
    seen[name] = b.battery(name).outcome(max_steps=12, callbacks=())
seen["nodes"] = b.outcome(b.train(**b.AVERAGES, callbacks=[EvaluateNodes()]))
seen["uneven"] = b.outcome(b.train(**b.AVERAGES, num_nodes=5))
if world == 3:
    b.train(**b.AVERAGES, save_dir=folder / "stopped", callbacks=[Every(4, lambda loop: True)])
if world == 2:
    seen["resumed"] = b.outcome(b.train(**b.AVERAGES, save_dir=folder.parent / "3" / "stopped", resume=True))
if world == 3:
    seen["callbacks"] = []
    b.train(**b.AVERAGES, callbacks=[lambda loop: seen["callbacks"].append([loop.step, loop.evaluate(3)])])
    seen["native"] = b.outcome(b.train(STRATEGIES["ddp"].make(), max_steps=3, placement=Placement(reduction="native")))
(folder / f"{rank}.part").write_text(json.dumps(seen))
(folder / f"{rank}.part").rename(folder / f"{rank}.json")
if world == 2:
    b.train(**b.AVERAGES, model=b.Trouble(b.kill_itself if rank == 1 else lambda: None, elsewhere=False))
if world == 3:
    begun = Every(5, lambda loop: (folder / "begun").touch())
    b.train(**b.AVERAGES | {"val_interval": 10_000}, model=b.slow(0.001), save_dir=folder / "saved", max_steps=100_000,
            callbacks=[begun])
"""


def wait_for(condition, launcher, folder):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until and launcher.poll() is None, (folder / "log").read_text()[-5000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def worlds(request, tmp_path_factory):
    """For each number of processes: what each rank has seen, the folder, and the exit code of the launcher."""
    base, found = tmp_path_factory.mktemp("torchrun"), {}
    tests = {getattr(item, "originalname", "") for item in request.session.items}
    for processes in WORLDS:
        folder = base / str(processes)
        names = [params["name"] for params in asked(request, OF_ALL) if params["processes"] == processes]
        if processes != 3 and not names and not (processes == 2 and OF_TWO & tests):
            continue
        launcher = launch(processes, folder, f"NAMES = {names}\n{SCRIPT}")
        try:
            if processes == 3:  # its last run would go on for minutes: it is told to stop
                wait_for(lambda folder=folder: (folder / "begun").exists(), launcher, folder)
                launcher.send_signal(signal.SIGTERM)
            code = end(launcher)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
        found[processes] = ranks, folder, code, (folder / "log").read_text()
    return found


@pytest.mark.parametrize(("name", "processes"), in_turn(STRATEGIES, WORLDS[:1], slow=WORLDS, fast=FAST))
def test_the_world_of_torchrun_gives_the_bits_of_one_process(name, processes, worlds):
    """And every rank holds the final model, the history and the bytes."""
    wanted = as_json(battery(name).train(max_steps=12, callbacks=()))
    ranks = worlds[processes][0]
    assert len(ranks) == processes
    for rank, seen in enumerate(ranks):
        assert seen[name] == wanted, rank


def test_nodes_may_be_spread_unevenly(worlds):
    wanted = as_json(train(**AVERAGES, num_nodes=5))
    assert all(seen["uneven"] == wanted for ranks, *_ in worlds.values() for seen in ranks)


def test_callbacks_run_in_the_first_process(worlds):
    wanted = as_json(train(**AVERAGES, callbacks=[EvaluateNodes()]))
    assert all(ranks[0]["nodes"] == wanted for ranks, *_ in worlds.values())
    assert all(seen["nodes"][0] == wanted[0] for ranks, *_ in worlds.values() for seen in ranks)
    ranks = worlds[3][0]
    values = []
    train(**AVERAGES, callbacks=[lambda loop: values.append([loop.step, loop.evaluate(3)])])
    assert [seen["callbacks"] for seen in ranks] == [values, [], []]


def test_layouts_that_cannot_be_are_refused_in_every_process(worlds):
    for seen in worlds[3][0]:
        assert seen["too many"].startswith(
            "3 processes for num_nodes=2: every process needs a node, so start at most 2"
        )
        assert seen["another number"].startswith("processes=2 with a script that runs as 3 processes: ")


def test_native_sums_have_their_own_bits(worlds):
    tree = as_json(train(STRATEGIES["ddp"].make(), max_steps=3))
    native = [seen["native"] for seen in worlds[3][0]]
    assert native[0] == native[1] == native[2]
    assert native[0][0] != tree[0]
    losses = [
        [row["val_loss"] for row in history if row["val_loss"] is not None] for _, history, _ in (tree, native[0])
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_from_torchrun_in_torchrun(worlds):
    """Saved by three processes, finished by two."""
    wanted = as_json(train(**AVERAGES))
    for seen in worlds[2][0]:
        assert seen["resumed"] == wanted


def test_a_run_goes_on_from_torchrun_in_forks_and_alone(worlds, tmp_path):
    """Saved by three processes of torchrun at step 4, by two forked ones at step 8, and finished by one."""
    wanted = as_json(train(**AVERAGES))
    saved = tmp_path / "saved"
    (name,) = (path for path in list_checkpoints(worlds[3][1] / "stopped") if load(path).meta["step"] == 4)
    files = sorted(load(name).meta["sha256"])
    assert [file.split("-")[0] for file in files] == ["rows", "rows", "rows", "shared.safetensors"]
    shutil.copytree(name, saved / name.name)
    train(**AVERAGES, save_dir=saved, resume=True, processes=2, callbacks=[Every(8, lambda loop: True)])
    resumed = train(**AVERAGES, save_dir=saved, resume=True)
    assert as_json(resumed) == wanted


def test_sigterm_to_the_launcher_saves_where_each_node_stands(worlds):
    _, folder, code, log = worlds[3]
    assert code != 0
    (path,) = list_checkpoints(folder / "saved")
    assert re.search(
        r"exogym: stopped by SIGTERM after step \d+.*; saved in \S+\. To resume, call the same fit with save_dir=", log
    )
    meta = load(path).meta
    steps = 5 * (meta["step"] // 5 + 3)
    options = AVERAGES | {"val_interval": 10_000, "max_steps": steps}
    resumed = train(**options, model=slow(0), save_dir=folder / "saved", resume=True)
    assert fingerprint(resumed.model) == fingerprint(train(**options, model=slow(0)).model)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_world(worlds):
    """And none of its processes is left, which the fixture has looked at."""
    _, _, code, log = worlds[2]
    assert code != 0 and "SIGKILL" in log
