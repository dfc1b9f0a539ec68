"""A process that hangs is found by its pulse, named with where it stands, and lost like one that died."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from battery import AVERAGES, Trouble, fingerprint, outcome, plain_model, train
from paths import TESTS
from processes import descriptors, family, python, world
from torch import nn

import exogym
from exogym import NodeMesh, Placement
from exogym.callbacks import Every
from exogym.core.engine import hangs
from exogym.core.engine.forks import run_forked
from exogym.core.saving import checkpoint
from exogym.errors import ArgumentError, WorkerError

HANG_S = 2.0
LIMITED = Placement(hang_s=HANG_S)
LIMIT_S = 240  # for what must not wait for ever; a busy machine starts torch in half a minute


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def spin_for_ever():
    while True:
        pass


def sleep_in_c():
    time.sleep(10_000)


class Late(nn.Module):
    """The plain model; its training steps, or else its first one or its evaluations, take their time."""

    shared_attributes = ("calls",)

    def __init__(self, step_s=0.0, first_s=0.0, evaluation_s=0.0):
        super().__init__()
        self.inner, self.home, self.calls = plain_model(), os.getpid(), 0
        self.step_s, self.first_s, self.evaluation_s = step_s, first_s, evaluation_s

    def forward(self, x):
        if self.training:
            self.calls += 1
            first = self.calls == 1  # that of the trial is undone, so the first of training is another first
            time.sleep((self.first_s if first else self.step_s) if os.getpid() != self.home else 0)
        else:
            time.sleep(self.evaluation_s)
        return self.inner(x)


@pytest.fixture(autouse=True)
def limit():
    """What waits for ever ends with an error."""

    def late(number, frame):
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


HANGS = {"stopped": stop_itself, "endless loop": spin_for_ever, "asleep in C": sleep_in_c}


@pytest.mark.parametrize("name", HANGS)
def test_a_worker_that_hangs_is_named_with_where_it_stands(name):
    before, handler = family(), signal.getsignal(hangs.SIGNAL)
    pipes = descriptors()
    with pytest.raises(WorkerError, match=r"worker process 1 \(nodes 2 to 3\) hangs: no progress") as caught:
        train(**AVERAGES, model=Trouble(HANGS[name]), processes=2, placement=LIMITED)
    text = str(caught.value)
    assert f"for 2 s in a training step{', stopped by a signal (SIGSTOP)' * (name == 'stopped')} (hang_s=2" in text
    assert (f"in {HANGS[name].__name__}" in text and "in forward" in text) is (name != "stopped")
    assert (family(), signal.getsignal(hangs.SIGNAL)) == (before, handler) and descriptors() <= pipes


def fails(wire):
    raise LookupError("it has gone")


def dies(wire):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [(fails, LookupError, "gone"), (dies, WorkerError, "killed by SIGKILL")],
    ids=["error", "killed"],
)
def test_what_ended_a_worker_is_told_while_a_process_of_its_own_runs_on(tmp_path, monkeypatch, end, kind, text):
    """That process, such as a DataLoader's, holds copies of the worker's connections."""
    left = tmp_path / "pid"

    def body(wire):
        if not wire.is_main:
            if (pid := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            left.write_text(str(pid))
            end(wire)
        wire.agree(False)

    monkeypatch.setattr(hangs, "PATIENCE", 1)
    try:
        with pytest.raises(kind, match=text):
            run_forked([[0], [1]], body, hang_s=1.0)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_disk_that_does_not_answer_is_a_hang(tmp_path, monkeypatch):
    home, write = os.getpid(), checkpoint.save_file

    def stall(tensors, file, told=None):
        if os.getpid() != home:
            time.sleep(1000)
        write(tensors, file, told)

    monkeypatch.setattr(checkpoint, "save_file", stall)
    monkeypatch.setattr(hangs, "PATIENCE", 1)
    with pytest.raises(WorkerError, match=r"worker process 1 \(nodes 2 to 3\) hangs: no progress for 2 s") as caught:
        train(**AVERAGES, processes=2, placement=LIMITED, save_dir=tmp_path, checkpoint_interval=4)
    assert "in stall" in str(caught.value) and "s outside a step (start, data," in str(caught.value)


def test_without_a_limit_it_is_waited_for(tmp_path):
    """The control: what was before. A test of its own ends it."""

    def act():
        if not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            stop_itself()

    class Impatient(Exception):
        pass

    def give_up(number, frame):
        raise Impatient

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(3)
    with pytest.raises(Impatient):
        train(**AVERAGES, model=Trouble(act), processes=2, placement=Placement(hang_s=None))


def test_a_run_whose_process_hangs_starts_again_from_the_last_checkpoint(tmp_path, capfd):
    def act():
        if not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            stop_itself()

    placement = Placement(hang_s=HANG_S, max_restarts=1)
    options = {"processes": 2, "placement": placement, "checkpoint_interval": 3}
    trainer = train(**AVERAGES, model=Trouble(act), save_dir=tmp_path / "run", **options)
    quiet = train(**AVERAGES, model=Trouble(lambda: None), save_dir=tmp_path / "quiet", **options)
    assert outcome(trainer) == outcome(quiet)
    assert (
        "hangs" in (err := capfd.readouterr().err) and "starting again from the last checkpoint, if any (1 of 1)" in err
    )


SLOW = {  # each takes longer than the limit in all, and no part of it does
    "steps": (lambda: Late(step_s=0.15), {}),
    "first step": (lambda: Late(first_s=2.5), {}),
    "evaluation": (lambda: Late(evaluation_s=2.2), {}),
    "callback": (lambda: Late(), {"callbacks": [Every(10, lambda loop: time.sleep(2.5))]}),
    "callback that beats": (
        lambda: Late(),
        {"callbacks": [Every(10, lambda loop: [(time.sleep(0.7), loop.beat()) for _ in range(20)] and None)]},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "beats" in name else []) for name in SLOW]
)
def test_what_is_slow_but_honest_is_left_alone(name):
    make, options = SLOW[name]
    trainer = train(
        **AVERAGES | {"max_steps": 11, "val_interval": 11} | options,
        model=make(),
        processes=2,
        placement=LIMITED,
    )
    assert trainer.history.column("train_loss")[0][-1] == 11


def test_a_run_that_is_stopped_as_a_whole_goes_on(tmp_path):
    """As by Ctrl-Z: nobody has looked on meanwhile."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            callbacks = [Every(3, lambda loop: (tmp_path / "begun").touch())]
            train(**AVERAGES, model=Late(step_s=0.1), processes=2, placement=LIMITED, callbacks=callbacks)
            code = 0
        finally:
            os._exit(code)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(2.5 * HANG_S)
    os.killpg(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("hang_s", [0, -1, "10", float("inf"), True])
def test_limits_that_cannot_be(hang_s):
    with pytest.raises(ArgumentError, match="hang_s="):
        train(**AVERAGES, placement=Placement(hang_s=hang_s))


# Worlds that torchrun, or the launcher, starts

SLEEPY = [Every(10, lambda loop: [(time.sleep(0.9), loop.beat()) for _ in range(14)] and None)]

WORLD = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from core.engine import test_hang as t

torch.set_num_threads(1)
mark, name = Path("once"), sys.argv[2]

def act():
    if os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        t.HANGS[name]()

options = {"save_dir": "saved", "checkpoint_interval": 3, "resume": True} if sys.argv[3:] else {}
trouble = t.Trouble(act, elsewhere=False)
trainer = t.train(**t.AVERAGES, model=trouble, placement=t.LIMITED, callbacks=t.SLEEPY, **options)
if os.environ["RANK"] == "0":
    print("ended in", t.fingerprint(trainer.model))
"""


def in_a_world(module, folder, *words):
    """Run `WORLD` in two processes; return the exit status and what was said."""
    (folder / "script.py").write_text(WORLD)
    command = ["-m", *module, "--nproc_per_node", "2", "script.py", TESTS, *words]
    done = python(*command, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [{}, {"num_nodes": 1, "node": NodeMesh(shard=2)}], ids=["nodes", "devices"])
def test_a_rank_of_a_world_that_hangs_is_killed(options, tmp_path):
    """Also one of a node's devices; another one, which waits for it inside its step, may be found first."""
    script = WORLD.replace("sys.argv[1])", "sys.argv[2])").replace("sys.argv[2]\n", "'endless loop'\n")
    script = script.replace("import torch\n", "import torch\nfrom exogym import NodeMesh\n")
    code, said = world(2, tmp_path, script.replace("if sys.argv[3:] else {}", f"if False else {options}"))
    who = "rank [01] or another device of its node" if options else "rank 1"
    assert code and re.search(f"exogym: {who} hangs: no progress for 2 s in a training step", said), said
    assert "ended in" not in said and (options or "in spin_for_ever" in said)


WATCHED = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from exogym.core.base import pulse
from exogym.core.engine import hangs
assert hangs.__file__.startswith(sys.argv[1])
with hangs.watched(0.5, 0), pulse.at(pulse.WORKING):
    time.sleep(60)
"""


def test_a_watcher_runs_wherever_the_package_lies(tmp_path):
    """Also in a folder that PYTHONPATH cannot name, and beside a file that has a standard module's name."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "exogym").symlink_to(Path(exogym.__file__).parent)
    (folder / "signal.py").write_text("raise ImportError('not the standard one')")
    done = subprocess.run([sys.executable, "-P", "-c", WATCHED, folder], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "rank 0 hangs: no progress for 0.5 s in a training step" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless loop", "stopped"])
def test_under_torchrun_a_rank_that_hangs_is_killed(name, tmp_path):
    code, said = in_a_world(["torch.distributed.run", "--standalone"], tmp_path, name)
    assert code == 1 and "exogym: rank 1 hangs: no progress for 2 s in a training step" in said, said
    assert ("in spin_for_ever" in said) is (name == "endless loop")
    assert "exitcode  : -9" in said and "ended in" not in said


@pytest.mark.slow
def test_under_the_launcher_a_rank_that_hangs_is_started_again(tmp_path):
    """And one that waits for others does not hang: here for a callback longer than anything may take by itself."""
    code, said = in_a_world(["exogym.launch", "--max_restarts", "1"], tmp_path, "stopped", "save")
    assert code == 0, said
    line = "rank 1 was killed by signal 9 (SIGKILL): WorkerError: rank 1 hangs: no progress for 2 s in a training step"
    assert line in said and "starting again (restart 1 of 1)" in said
    assert f"ended in {fingerprint(train(**AVERAGES, model=Trouble(lambda: None)).model)}" in said
