"""Two runs on one folder: the second is told who has it; what is dead is taken over, and what lives is left alone."""

import dataclasses
import json
import os
import select
import shutil
import signal
import time
import traceback

import pytest
from checkpoints import RUNS, fit, rows, trainer_of

from exogym import Placement
from exogym.callbacks import Every
from exogym.core.base import locks
from exogym.core.base.locks import LOCK, STALE_S, Holder, acquire, identity, started
from exogym.core.saving.checkpoint import list_checkpoints, remove_leftovers
from exogym.core.saving.keepers import MARK
from exogym.errors import ArgumentError, CheckpointError
from exogym.testing import fingerprint

MAKE, OPTIONS = RUNS["local steps fp16"]
ELSEWHERE = ("another boot pid:[1]", "another system", "another boot")


class Child:
    """A fork of this process that does `body(say)`, where `say` sends a line."""

    def __init__(self, body):
        self.read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                body(lambda text: os.write(write, f"{text}\n".encode()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        self.lines = os.fdopen(self.read)

    def wait(self):
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.lines.close()
        return code


def start(folder):
    """A run of another process, that waits after its checkpoint of step 3."""

    def body(say):
        def wait(loop):
            if loop.step == 6:
                while not list_checkpoints(folder):  # a thread writes the checkpoint behind the steps
                    time.sleep(0.01)
                say("waiting")
                while not (folder.parent / "go").exists():
                    time.sleep(0.01)

        done = fit(MAKE(), folder, checkpoint_interval=3, callbacks=[Every(6, wait)], resume=True, **OPTIONS)
        say(fingerprint(done.model))

    child = Child(body)
    assert child.lines.readline() == "waiting\n"
    return child


def as_if_on(monkeypatch, machine):
    """From here on this process is on another host that sees the same folder."""
    monkeypatch.setattr(locks, "identity", lambda: machine)


def written_by(folder, **changes):
    """Put a lock into `folder` as another run would have left it."""
    holder = dataclasses.replace(Holder("r", "t", *identity(), "host", 1, started(1) or ""), **changes)
    (folder / LOCK).write_text(json.dumps(dataclasses.asdict(holder)))


def silent_for(folder, seconds):
    then = time.time() - seconds
    os.utime(folder / LOCK, (then, then))


def test_a_second_run_is_told_who_has_the_folder_and_the_first_ends_in_its_bits(tmp_path, monkeypatch):
    """On the same host, and from another that shares the folder."""
    folder = tmp_path / "run"
    process = start(folder)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ArgumentError, match=rf"in use by another run, process {process.pid} on this machine. Choose"):
        fit(MAKE(), folder, **OPTIONS)
    with monkeypatch.context() as there:
        as_if_on(there, ELSEWHERE)
        with pytest.raises(ArgumentError, match=rf"process {process.pid} on .*, whose last heartbeat is \d+ s old"):
            fit(MAKE(), folder, resume=True, **OPTIONS)
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before
    (tmp_path / "go").touch()
    mark = process.lines.read().strip()
    whole = fit(MAKE(), callbacks=[Every(6, lambda loop: None)], **OPTIONS)
    assert process.wait() == 0 and mark == fingerprint(whole.model)
    assert not list(folder.glob(".*"))
    again = fit(MAKE(), folder, resume=True, **OPTIONS)  # the folder is free
    assert fingerprint(again.model) == mark


def test_the_folder_of_a_killed_run_is_taken_over_at_once_here_and_in_time_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    process = start(folder)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started(process.pid) is None  # also while nobody has asked for its end
    process.wait()
    shutil.copytree(folder, tmp_path / "other host")
    whole = fit(MAKE(), callbacks=[Every(6, lambda loop: None)], **OPTIONS)
    resumed = fit(MAKE(), folder, resume=True, **OPTIONS)
    assert fingerprint(resumed.model) == fingerprint(whole.model)
    with monkeypatch.context() as there:
        as_if_on(there, ELSEWHERE)
        silent_for(tmp_path / "other host", STALE_S - 60)
        with pytest.raises(ArgumentError, match=rf"If you are sure that it has, remove .*{LOCK}"):
            fit(MAKE(), tmp_path / "other host", resume=True, **OPTIONS)
        silent_for(tmp_path / "other host", STALE_S + 1)
        resumed = fit(MAKE(), tmp_path / "other host", resume=True, **OPTIONS)
    assert fingerprint(resumed.model) == fingerprint(whole.model) and rows(resumed) == rows(whole)


DEAD = {
    "no such process": lambda me: {"pid": 2**22 + 1},
    "its number is another's now": lambda me: {"started": "1"},
    "this process let go of it": lambda me: {"pid": os.getpid(), "started": started(os.getpid())},
    "this machine was started anew": lambda me: {"boot": "earlier", "machine": "earlier", "host": me.host},
}
ALIVE = {
    "a process here": lambda me: {},
    "a container numbers its own": lambda me: {"machine": me.boot + " pid:[7]", "pid": 2**22 + 1},
    "a host of the same image": lambda me: {"boot": "another", "machine": "another", "host": "another"},
    "it says nothing": lambda me: {"machine": "", "boot": "", "system": "", "pid": 0},
}


@pytest.mark.parametrize("name", [*DEAD, *ALIVE])
def test_who_counts_as_dead(name, tmp_path, monkeypatch):
    machine, system, boot = identity()
    monkeypatch.setattr(locks, "identity", lambda: (machine, system or "some", boot))
    me = Holder.here("x")
    written_by(tmp_path, **{"system": me.system} | (DEAD | ALIVE)[name](me))
    if name in ALIVE:
        with pytest.raises(ArgumentError, match="in use by another run"):
            acquire(tmp_path, "mine")
        silent_for(tmp_path, 2 * STALE_S)
        if name == "a process here":  # whatever its beat
            return
    acquire(tmp_path, "mine").release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"pid": "1"}', b"[" * 4000, b"\xff" * 9])
def test_a_lock_that_nobody_can_read_goes_by_its_beat(content, tmp_path):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(ArgumentError, match="in use by another run, another process"):
        acquire(tmp_path, "mine")
    silent_for(tmp_path, STALE_S + 1)
    acquire(tmp_path, "mine").release()
    os.mkfifo(tmp_path / LOCK)  # reading it would wait for ever
    with pytest.raises(ArgumentError, match="in use"):
        acquire(tmp_path, "mine")


def test_the_same_run_may_have_another_keeper(tmp_path):
    written_by(tmp_path, run="mine")
    lock = acquire(tmp_path, "mine")
    lock.check()
    lock.release()


def test_of_many_that_want_a_folder_one_gets_it(tmp_path):
    """Where the holder is dead, and all of them see that at once."""
    (read, write), (done_read, done_write) = os.pipe(), os.pipe()

    def body(say):
        os.close(write)
        os.close(done_write)
        os.read(read, 1)  # until all are there
        try:
            acquire(tmp_path, str(os.getpid()))
            say("got it")
            os.read(done_read, 1)
        except ArgumentError:
            say("refused")

    written_by(tmp_path, pid=2**22 + 1)
    many = [Child(body) for _ in range(8)]
    os.close(write)
    said = sorted(process.lines.readline() for process in many)
    os.close(done_write)
    assert [process.wait() for process in many] == [0] * 8
    for pipe in (read, done_read):
        os.close(pipe)
    assert said == ["got it\n"] + ["refused\n"] * 7


def test_a_slow_process_does_not_take_the_place_of_the_one_after_it(tmp_path, monkeypatch):
    """It has read that the holder is dead. Before it clears that file, a second process comes, and in between a third.
    They wait for their turn; without turns, all three would have the folder."""
    clear, rename, others = locks._clear, os.rename, []

    def another():
        def body(say):
            monkeypatch.undo()
            try:
                acquire(tmp_path, str(os.getpid()))
                say("got it")
                time.sleep(1)  # so that a process that comes later finds this one alive
            except ArgumentError:
                say("refused")

        others.append(Child(body))
        select.select([others[-1].read], [], [], 0.5)

    def slow_clear(*given):
        monkeypatch.setattr(locks, "_clear", clear)
        another()
        clear(*given)

    def slow_rename(old, new):
        rename(old, new)
        another()

    monkeypatch.setattr(locks, "_clear", slow_clear)
    monkeypatch.setattr(os, "rename", slow_rename)
    written_by(tmp_path, pid=2**22 + 1)
    lock = acquire(tmp_path, "the slow one")
    said = [process.lines.readline() for process in others]
    assert said == ["refused\n"] * 2
    lock.check()
    assert [process.wait() for process in others] == [0, 0]
    lock.release()


def test_a_turn_that_does_not_come_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TURN_S", 0.05)
    with locks._turn(tmp_path), pytest.raises(ArgumentError, match="several runs tried to lock this folder"):
        acquire(tmp_path, "mine")
    acquire(tmp_path, "mine").release()
    assert not list(tmp_path.iterdir())


def test_a_run_that_lost_its_folder_ends_before_it_writes(tmp_path):
    """It was silent so long that another took over; that one's lock and checkpoints stay as they are."""

    def lose(loop):
        if loop.step == 6:
            (tmp_path / LOCK).unlink()
            written_by(tmp_path, run="another")

    trainer = trainer_of()
    with pytest.raises(CheckpointError, match=r"step 6 could not be written.*this run has lost its folder"):
        fit(
            MAKE(),
            tmp_path,
            trainer,
            checkpoint_interval=3,
            placement=Placement(overlap=False),
            callbacks=[Every(3, lose)],
            **OPTIONS,
        )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_0000000003"]
    assert json.loads((tmp_path / LOCK).read_text())["run"] == "another"
    assert trainer.history[-1]["step"] == 6


def test_the_beat_is_that_of_the_training_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.0)
    monkeypatch.setattr("exogym.core.training.standing.SIGN_PAUSE_S", 0.0)
    seen = []

    def look(loop):
        seen.append(time.time() - (tmp_path / LOCK).stat().st_mtime < 100)
        silent_for(tmp_path, 1000)

    fit(MAKE(), tmp_path, callbacks=[Every(2, look)], **OPTIONS)
    assert seen == [True] * 6
    lock = acquire(tmp_path, "mine")
    (tmp_path / LOCK).unlink()
    written_by(tmp_path)
    silent_for(tmp_path, 1000)
    lock.beat()  # not for another's
    assert time.time() - (tmp_path / LOCK).stat().st_mtime > 900


def test_marks_of_a_run_that_is_just_beginning_are_left_alone(tmp_path):
    from exogym.core.communicator import Wire
    from exogym.core.saving.keepers import find_keepers, holding

    keepers = holding(tmp_path, Wire([0]), find_keepers(tmp_path, Wire([0])))
    for name in ("new", "old"):
        (tmp_path / f"{MARK}{name}").touch()
    then = time.time() - 2 * STALE_S
    os.utime(tmp_path / f"{MARK}old", (then, then))
    remove_leftovers(tmp_path, Wire([0]), keepers)
    keepers.release()
    assert [path.name for path in tmp_path.iterdir()] == [f"{MARK}new"]


def test_without_hard_links_a_folder_is_held_too(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    lock = acquire(tmp_path, "one")
    with pytest.raises(ArgumentError, match="in use by another run"):
        acquire(tmp_path, "other")
    lock.release()
    acquire(tmp_path, "other").release()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    """It takes up room; training goes on, and the newer ones stand."""
    rename = os.rename

    def refuse(source, target):
        if ".old.tmp" in str(target):
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(UserWarning, match="could not be removed .*Permission denied") as seen:
        trainer = fit(MAKE(), tmp_path, checkpoint_interval=4, placement=Placement(keep_checkpoints=1), **OPTIONS)
    assert {str(one.message).split()[0][-2:] for one in seen} == {"04", "08"}
    assert trainer.history[-1]["step"] == 12
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["04", "08", "12"]
    monkeypatch.undo()
    longer = fit(MAKE(), tmp_path, resume=True, max_steps=13, placement=Placement(keep_checkpoints=1), **OPTIONS)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["13"]
    assert longer.history[-1]["step"] == 13
