"""Checkpoints that a thread writes while nodes compute: the bytes of those that nodes wait for; kills, full disks."""

import contextlib
import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from checkpoints import RUNS, SGD, STEPS, examples, fit, rows, small_disk
from processes import apart, over_gloo
from torch import nn

from exogym import LocalTrainer, Placement
from exogym.callbacks import EvaluateNodes, Every
from exogym.core.base import pulse
from exogym.core.base.devices import Device
from exogym.core.communicator import Wire
from exogym.core.saving import behind, checkpoint
from exogym.core.saving.checkpoint import Snapshot, list_checkpoints, load, save
from exogym.errors import CheckpointError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy
from exogym.testing import fingerprint

THREAD = "exogym checkpoint"
SAVED = {"checkpoint_interval": 4, "placement": Placement(keep_checkpoints=9)}


def under_way():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


class Gate:
    """Holds the thread back until training has gone on by a step, or until somebody opens the gate for good."""

    def __init__(self, monkeypatch, error=None):
        self.open, self.wrote_in, self.error = threading.Event(), [], error
        self.write, self.start, self.run = checkpoint.save_file, behind.Writer.start, behind.Writer._run
        monkeypatch.setattr(checkpoint, "save_file", self._write)
        monkeypatch.setattr(behind.Writer, "start", lambda writer, snapshot: self._start(writer, snapshot))
        monkeypatch.setattr(behind.Writer, "_run", lambda writer, snapshot: self._run(writer, snapshot))

    def _start(self, writer, snapshot):
        self.open.clear()
        return self.start(writer, snapshot)

    def _run(self, writer, snapshot):
        assert self.open.wait(60)
        self.run(writer, snapshot)

    def _write(self, tensors, file, told=None):
        self.wrote_in.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        self.write(tensors, file, told)

    def opened(self):
        """Return a callback that opens the gate at steps without a checkpoint."""
        return Every(1, lambda loop: self.open.set() if loop.step % SAVED["checkpoint_interval"] else None)


def also_waited_for(monkeypatch, folder):
    """Write each snapshot in the old way too, into `folder`, before the thread gets it."""
    start = behind.Writer.start

    def write_and_start(writer, snapshot):
        save(folder, snapshot, 9, writer.wire)
        return start(writer, snapshot)

    monkeypatch.setattr(behind.Writer, "start", write_and_start)


def files(folder, steps=(4, 8)):
    names = [f"step_{step:010d}" for step in steps]
    return {f"{name}/{path.name}": path.read_bytes() for name in names for path in (folder / name).iterdir()}


@pytest.mark.parametrize(
    "name", ["diloco bf16", "by hand", *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS)]
)
def test_its_files_have_the_bytes_of_a_checkpoint_that_is_waited_for(name, tmp_path, monkeypatch):
    """While the thread writes, nodes change every tensor that it has copied."""
    make, options = RUNS[name]
    gate = Gate(monkeypatch)
    also_waited_for(monkeypatch, tmp_path / "waited for")
    run = fit(make(), tmp_path / "behind", callbacks=[EvaluateNodes(), gate.opened()], **SAVED, **options)
    assert gate.wrote_in.count(THREAD) == 4  # rows and shared state of steps 4 and 8
    assert files(tmp_path / "behind") == files(tmp_path / "waited for")
    monkeypatch.undo()
    waiting = SAVED | {"placement": Placement(keep_checkpoints=9, overlap=False)}
    waits = fit(make(), tmp_path / "waits", callbacks=[EvaluateNodes()], **waiting, **options)
    assert fingerprint(waits.model) == fingerprint(run.model) and rows(waits) == rows(run)


def test_without_the_copy_the_bytes_would_differ(tmp_path, monkeypatch):
    """The control: the law above sees a thread that reads tensors which nodes change."""
    gate = Gate(monkeypatch)
    also_waited_for(monkeypatch, tmp_path / "waited for")
    monkeypatch.setattr(Snapshot, "copied", lambda self: dataclasses.replace(self))
    fit(RUNS["diloco bf16"][0](), tmp_path / "behind", callbacks=[gate.opened()], **SAVED)
    ours, theirs = files(tmp_path / "behind"), files(tmp_path / "waited for")
    unlike = {name.partition("/")[2] for name in ours if ours[name] != theirs[name]}
    assert ours.keys() == theirs.keys() and {"rows-0-2.safetensors", "run.json"} <= unlike


def test_sampled_clients_have_the_same_bytes(tmp_path, monkeypatch):
    also_waited_for(monkeypatch, tmp_path / "waited for")
    trainer = LocalTrainer(Wide(20), examples(), loss_fn=F.cross_entropy)
    strategy = FedAvgStrategy(OptimSpec("sgd", lr=0.1, momentum=0.9), H=3, client_fraction=0.1, keep_inner_state=True)
    fit(strategy, tmp_path / "behind", trainer, **SAVED, num_nodes=20, batch_size=2)
    ours = files(tmp_path / "behind")
    assert ours == files(tmp_path / "waited for") and len(ours) == 2 * 3


def test_one_at_a_time_and_the_oldest_go(tmp_path, monkeypatch):
    seen, write = [], checkpoint.save_file

    def slow(tensors, file, told=None):
        seen.append(len(under_way()))
        time.sleep(0.01)
        write(tensors, file, told)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    strategy = SimpleReduceStrategy(SGD)
    fit(
        strategy,
        tmp_path / "run" / "saved",
        checkpoint_interval=1,
        placement=Placement(keep_checkpoints=2),
        run_dir=tmp_path / "run",
    )
    assert seen == [1] * 2 * (STEPS - 1) + [0, 0]  # nodes wait for the last one
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "saved")] == [
        "step_0000000011",
        "step_0000000012",
    ]
    events = [line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"checkpoint"' in line]
    assert [f'"step": {step},' in line for step, line in enumerate(events, 1)] == [True] * STEPS


@pytest.mark.parametrize("way", ["overlap=False", "memory", "loop.save()", "processes"])
def test_when_nodes_wait(way, tmp_path, monkeypatch):
    gate, options = Gate(monkeypatch), {"checkpoint_interval": 4}
    if way == "overlap=False":
        options["placement"] = Placement(overlap=False)
    elif way == "processes":
        options["processes"] = 2
    elif way == "memory":
        monkeypatch.setattr(behind, "MOST", 0.0)
    else:
        options = {"callbacks": [Every(4, lambda loop: loop.save())]}
    fit(SimpleReduceStrategy(SGD), tmp_path, **options)
    assert THREAD not in gate.wrote_in and len(list_checkpoints(tmp_path)) == 2


def test_who_waits_for_the_thread_shows_the_threads_pulse(tmp_path):
    """Otherwise the watcher killed processes that only waited for a slower disk of another process."""
    seen = tmp_path / "seen"

    def until(happened):
        end = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < end
            time.sleep(0.01)

    def body(wire, x):
        memory = bytearray(pulse.BYTES)
        words = pulse.words_in(memory)

        def write(snapshot, line):
            for _ in range(3):
                before = words[0]
                line.agree(False)
                if wire.process == 0:
                    until(lambda before=before: seen.exists() and words[0] > before)
            return tmp_path

        def look():
            until(lambda: words[1] == pulse.WAITING)
            seen.touch()

        with pulse.kept_in(memory), behind.Writer(wire, write, lambda step, path: None) as writer:
            assert writer.start(Snapshot({}, {}, {"step": 4}))
            if wire.process == 1:
                threading.Thread(target=look).start()
            writer.finish()
            assert words[1] == pulse.BETWEEN and words[0] > 3
        wire.leave()

    over_gloo(2, 2, tmp_path, body)


@pytest.mark.parametrize("room", [4.2, 3.8])  # of a process's state; the copies of both may take half
def test_the_copies_of_all_processes_of_a_machine_must_fit(room, tmp_path, monkeypatch):
    """Ray sets no LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(Device, "free_bytes", lambda self: room * x.nbytes)
    x = torch.zeros(1000)

    def body(wire, _):
        with behind.Writer(wire, lambda snapshot, line: tmp_path, lambda step, path: None) as writer:
            assert writer.start(Snapshot({}, {"x": x}, {"step": 4})) is (room > 4)
        wire.leave()

    over_gloo(2, 2, tmp_path, body)


def test_a_wire_that_has_no_second_line_has_none():
    wire = Wire([0])
    assert wire.aside() is wire
    wire.placement = [[0], [1]]  # as a wire between processes that does not say otherwise
    assert wire.aside() is None


# Failures


class Wide(nn.Sequential):
    def __init__(self, width):
        torch.manual_seed(2)
        super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_ends_the_run_with_its_reason(processes, tmp_path):
    """A checkpoint has 260 to 300 kB: two fit on the disk."""
    with small_disk(tmp_path / "disk", 760_000):
        trainer = LocalTrainer(Wide(1000), examples(), loss_fn=F.cross_entropy)
        with pytest.raises(CheckpointError, match=r"step 6 could not be written .* Earlier checkpoints\s+remain"):
            saved = SAVED | {"checkpoint_interval": 2}
            fit(DiLoCoStrategy(SGD, H=3), tmp_path / "disk", trainer, **saved, processes=processes)
        assert trainer.history.last["step"] <= 8  # at the next checkpoint at the latest
        assert {path.name for path in (tmp_path / "disk").iterdir()} == {"step_0000000002", "step_0000000004"}
        assert not under_way()


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device")], ids=str)
def test_an_error_of_the_run_waits_for_the_checkpoint_under_way(error, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, error)

    def fail(loop):
        assert under_way()
        threading.Timer(0.05, gate.open.set).start()
        raise ValueError("here it fails")

    with pytest.raises(ValueError, match="here it fails") as raised:
        fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, callbacks=[Every(5, fail)])
    assert not under_way()
    assert [path.name for path in tmp_path.iterdir()] == ([] if error else ["step_0000000004"])
    notes = getattr(raised.value, "__notes__", [])
    assert ["step 4 could not be written" in note and "No space left" in note for note in notes] == [True] * bool(error)


def test_ctrl_c_and_the_end_wait_for_the_checkpoint_under_way(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def interrupt(loop):
        assert under_way()
        threading.Timer(0.05, gate.open.set).start()
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, callbacks=[Every(5, interrupt)])
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_0000000004", "step_0000000005"]
    resumed = fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, resume=True)
    assert fingerprint(resumed.model) == fingerprint(fit(SimpleReduceStrategy(SGD)).model)


def test_a_second_ctrl_c_does_not_wait_and_its_thread_disturbs_no_later_run(tmp_path, monkeypatch):
    stalled, open_, write = threading.Event(), threading.Event(), checkpoint.save_file
    left = []

    def stall(tensors, file, told=None):
        if not stalled.is_set():
            stalled.set()
            assert open_.wait(60)
        elif left:  # in the later run's checkpoint of the same step
            open_.set()
            left.pop().join(60)
        write(tensors, file, told)

    def interrupt(loop):
        assert stalled.wait(60)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "save_file", stall)
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, callbacks=[Every(5, interrupt)])
    assert raised.value.__notes__ == ["the checkpoint of step 4 was not complete"]
    left += under_way()
    assert left
    resumed = fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, resume=True)
    assert not left and fingerprint(resumed.model) == fingerprint(fit(SimpleReduceStrategy(SGD)).model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000008", "step_0000000012"]


TWICE = """
import os, sys, signal, time
from exogym import LocalTrainer
from exogym.core.saving import checkpoint
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

checkpoint.save_file = lambda *words: time.sleep(1000)
model, data = small_problem()
calls = []

def loss(x, y):
    calls.append(0)
    if len(calls) == 5:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    return (x - y).square().mean()

LocalTrainer(model, data, loss_fn=loss).fit(
    DiLoCoStrategy(H=2), num_nodes=1, max_steps=9, device="cpu", save_dir="saved", checkpoint_interval=2
)
"""


@pytest.mark.slow
def test_after_a_second_ctrl_c_python_ends(tmp_path):
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\nthe checkpoint of step 2 was not complete\n")


def test_ctrl_c_while_a_failed_run_waits_does_not_wait_on(tmp_path, monkeypatch):
    stalled, open_, write = threading.Event(), threading.Event(), checkpoint.save_file
    left, registered = [], []

    def stall(tensors, file, told=None):
        stalled.set()
        assert open_.wait(60)
        write(tensors, file, told)

    def fail(loop):
        assert stalled.wait(60)
        raise ValueError("here it fails")

    def interrupt(done, words, most_s=math.inf):
        if not left:
            left.extend(under_way())
            raise KeyboardInterrupt
        return wait(done, words, most_s)

    wait = pulse.wait_for
    monkeypatch.setattr(checkpoint, "save_file", stall)
    monkeypatch.setattr(behind.pulse, "wait_for", interrupt)
    monkeypatch.setattr(behind.atexit, "register", lambda *words: registered.append(words))
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, callbacks=[Every(5, fail)])
    assert raised.value.__notes__ == ["the checkpoint of step 4 was not complete"]
    assert [words[0] for words in registered] == [behind._end_without]  # or Python would abort
    open_.set()
    left[0].join(60)


# Kills


def long_run(folder, steps, processes=1, resume=True):
    trainer = LocalTrainer(Wide(20_000), examples(), loss_fn=F.cross_entropy)
    fit(DiLoCoStrategy("adamw", lr=0.01, H=3), folder, trainer, checkpoint_interval=2, resume=resume, max_steps=steps,
        processes=processes, progress=False)  # fmt: skip
    return fingerprint(trainer.model)


def kill_in_mid_write(pid, folder, delay_s, count=2):
    """Kill the run `delay_s` seconds after the beginning of its second checkpoint. Return whether one was torn."""
    seen = set()
    while len(seen) < count and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        with contextlib.suppress(FileNotFoundError):
            seen |= {path.name for path in folder.glob(".step_*.tmp") if ".old." not in path.name}
    time.sleep(delay_s)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return bool(list(folder.glob(".step_*.tmp")))


@pytest.mark.parametrize(
    ("kills", "processes"),
    [(2, 1), (2, 2), pytest.param(40, 1, marks=pytest.mark.slow), pytest.param(40, 2, marks=pytest.mark.slow)],
)
def test_killed_while_it_writes_the_run_resumes_with_its_bits(kills, processes, tmp_path):
    """What bears a checkpoint's name is whole, and the run goes on from it."""
    draw, torn, folder, steps = random.Random(kills), 0, tmp_path / "run", 6 * kills + 4
    for _ in range(kills):
        pid = apart(lambda: long_run(folder, steps, processes))
        torn += kill_in_mid_write(pid, folder, draw.uniform(0, 0.02))
        for path in list_checkpoints(folder):
            assert load(path).meta["step"] % 2 == 0
    assert torn or kills < 10  # the control: kills hit half-written ones
    assert long_run(folder, steps, processes) == long_run(tmp_path / "whole", steps, resume=False)
    assert not list(folder.glob(".*"))
