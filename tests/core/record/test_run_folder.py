"""The run folder: it holds what happened, in whole lines at every moment, and tells a killed run from a living one."""

import contextlib
import csv
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import small_disk
from processes import Started, apart, ended

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.base.locks import LOCK
from exogym.core.base.processes import described
from exogym.core.record.observers import Observer
from exogym.core.record.run_folder import FILES, RunFolder, read_status
from exogym.core.saving.checkpoint import differences
from exogym.core.training.standing import SIGN_PAUSE_S
from exogym.errors import ArgumentError, TrainingError
from exogym.faults import Faults
from exogym.logger import CSVLogger, in_json
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem


def train(run_dir, model=None, **fit):
    known, data = small_problem()
    trainer = LocalTrainer(known if model is None else model, data, data, loss_fn=torch.nn.functional.mse_loss)
    options = {"num_nodes": 3, "max_steps": 12, "batch_size": 8, "device": "cpu", "val_interval": 6} | fit
    strategy = DiLoCoStrategy(lr=0.02, H=4)
    try:
        trainer.fit(strategy, run_dir=run_dir, **options)
    except BaseException as error:
        trainer.ended = error
    else:
        trainer.ended = None
    return trainer


def lines(path: Path) -> list[dict]:
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def known(rows) -> list[dict]:
    """Rows without what is missing in them: a column may come later than they did."""
    return [{name: x for name, x in row.items() if x is not None} for row in rows]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in lines(folder / "events.jsonl") if event["kind"] == kind]


def test_it_holds_what_the_trainer_has_and_changes_no_bit(tmp_path):
    folder = tmp_path / "runs" / "first"
    trainer = train(folder)
    assert trainer.ended is None
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert known(lines(folder / "records.jsonl")) == known(trainer.history)
    status, about = read_status(folder), json.loads((folder / "run.json").read_text())
    assert (status["state"], status["step"], status["total_steps"], status["process"]["pid"]) == (
        "done", 12, 12, os.getpid(),
    )  # fmt: skip
    assert about["description"] == json.loads(json.dumps(trainer.description))
    assert about["versions"]["torch"] == torch.__version__ and about["command"] == sys.argv
    sent = sum(event["tx_bytes"] for event in events(folder, "communication") if "buffers" not in event["collective"])
    assert sent == pytest.approx(sum(row["tx_bytes"] for name, row in trainer.traffic.items() if "buffers" not in name))
    assert [event["step"] for event in events(folder, "evaluation")] == [0, 6, 12]
    assert json.loads((folder / "summary.json").read_text())["val_loss"] == trainer.history.column("val_loss")[1][-1]
    assert fingerprint(trainer.model) == fingerprint(train(None).model)


def test_with_several_processes_it_is_the_same_but_for_times(tmp_path):
    train(tmp_path / "one")
    train(tmp_path / "two", processes=2)
    measured = ("wall_s", "examples_per_s", "device_use", "memory_bytes")

    def records(name):
        return [{k: v for k, v in row.items() if k not in measured} for row in lines(tmp_path / name / "records.jsonl")]

    assert records("one") == records("two")


def test_nodes_that_go_and_come_back_are_events(tmp_path):
    train(tmp_path, faults=Faults(absent={1: [(5, 9)]}))
    assert [(e["kind"], e["nodes"]) for e in lines(tmp_path / "events.jsonl") if e["kind"] in ("away", "back")] == [
        ("away", [1]), ("back", [1]),
    ]  # fmt: skip


def test_an_error_is_told_and_is_not_taken_for_a_running_one(tmp_path):
    class Bad(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * float("inf")

    trainer = train(tmp_path, model=Bad(6, 2))
    assert isinstance(trainer.ended, TrainingError)
    assert read_status(tmp_path)["state"] == "failed"
    (event,) = events(tmp_path, "error")
    assert event["error"] == "TrainingError" and event["why"] == str(trainer.ended)


def test_a_stopped_run_goes_on_in_its_folder(tmp_path):
    whole = train(tmp_path / "whole")
    stop = Every(4, lambda loop: os.kill(os.getpid(), signal.SIGINT) if loop.step == 8 else None)
    stopped = train(tmp_path / "run", checkpoint_interval=4, callbacks=[stop])
    assert isinstance(stopped.ended, KeyboardInterrupt)
    assert read_status(tmp_path / "run")["state"] == "stopped"
    summary, ended = tmp_path / "run" / "summary.json", []
    look = Every(4, lambda loop: ended.append(summary.exists()))
    assert summary.exists()
    resumed = train(tmp_path / "run", checkpoint_interval=4, resume=True, callbacks=[look])
    assert summary.exists() and not any(ended) and ended
    assert fingerprint(resumed.model) == fingerprint(whole.model)
    steps = [(row["step"], row["node"]) for row in lines(tmp_path / "run" / "records.jsonl")]
    assert steps == [(row["step"], row["node"]) for row in whole.history]  # none twice, none missing
    kinds = [event["kind"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert [kind for kind in kinds if kind in ("start", "stopped", "done")] == ["start", "stopped", "start", "done"]
    assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_sigterm_stops_says_so_and_its_records_are_whole(processes, tmp_path):
    """What Stop on the page sends, to a run that saves nothing."""
    stop = Every(4, lambda loop: os.kill(os.getpid(), signal.SIGTERM) if loop.step == 8 else None)

    def body():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer = train(tmp_path / "run", callbacks=[stop], processes=processes)
        (tmp_path / "history").write_text("".join(f"{json.dumps(in_json(row))}\n" for row in trainer.history))
        raise trainer.ended

    assert ended(apart(body)) == 143
    assert read_status(tmp_path / "run")["state"] == "stopped"
    assert [event["why"] for event in events(tmp_path / "run", "stopped")] == ["SIGTERM after step 8"]
    kept = known(lines(tmp_path / "history"))
    assert known(lines(tmp_path / "run" / "records.jsonl")) == kept and kept[-1]["step"] == 8
    assert (tmp_path / "run" / "summary.json").exists()


MEASURED = ("wall_s", "examples_per_s", "device_use", "memory_bytes")


def told(path: Path) -> list[dict]:
    """The records of a file, without what is measured and what is missing."""
    return [{name: x for name, x in row.items() if name not in MEASURED} for row in known(lines(path))]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """(the records of a run that nobody stopped, the folder of the same run stopped after step 8, with a log)."""
    top = tmp_path_factory.mktemp("halfway")
    train(top / "whole")
    stop = Every(4, lambda loop: os.kill(os.getpid(), signal.SIGINT) if loop.step == 8 else None)
    train(top / "run", checkpoint_interval=4, callbacks=[stop], logger=CSVLogger(top / "run" / "log.csv"))
    return told(top / "whole" / "records.jsonl"), top / "run"


def records_after_going_on(halfway: Path, folder: Path, file: str, content: bytes) -> Path:
    """Go on in a copy of the folder, of which one file holds only this content; return the records of that file."""
    shutil.copytree(halfway, folder)
    (folder / file).write_bytes(content)
    ended = train(folder, checkpoint_interval=4, resume=True, logger=CSVLogger(folder / "log.csv")).ended
    assert ended is None, ended
    return folder / file


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_records_that_the_disk_has_lost_are_written_again(every, halfway, tmp_path):
    """A checkpoint is on the disk when it is there, a record is not: a power cut may take any number of last bytes."""
    wanted, run = halfway
    whole = (run / "records.jsonl").read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for cut in {0, ends[-9], *range(ends[-3], len(whole), every)}:
        path = records_after_going_on(run, tmp_path / str(cut), "records.jsonl", whole[:cut])
        assert told(path) == wanted, cut
        shutil.rmtree(tmp_path / str(cut))


def test_records_that_are_unreadable_or_gone_are_written_again(halfway, tmp_path):
    wanted, run = halfway
    whole = (run / "records.jsonl").read_bytes()
    hole = whole[:900] + bytes(300) + whole[1200:]  # as a file system leaves blocks that it had not written
    assert told(records_after_going_on(run, tmp_path / "hole", "records.jsonl", hole)) == wanted
    shutil.copytree(run, tmp_path / "gone")
    (tmp_path / "gone" / "records.jsonl").unlink()
    assert train(tmp_path / "gone", checkpoint_interval=4, resume=True).ended is None
    assert told(tmp_path / "gone" / "records.jsonl") == wanted


def test_a_log_that_the_disk_has_cut_is_whole_again(halfway, tmp_path):
    wanted, run = halfway
    whole = (run / "log.csv").read_bytes()
    for cut in (0, len(whole) // 2, len(whole) - 3):
        path = records_after_going_on(run, tmp_path / str(cut), "log.csv", whole[:cut])
        rows = [(int(row["step"]), row["node"]) for row in csv.DictReader(path.read_text().splitlines())]
        assert rows == [(row["step"], str(row.get("node", ""))) for row in wanted], cut


def test_a_folder_of_another_run_is_refused(tmp_path):
    train(tmp_path)
    again = train(tmp_path)
    assert isinstance(again.ended, ArgumentError) and "already contains a run" in str(again.ended)


def test_a_folder_of_a_living_run_is_refused_and_that_of_a_dead_one_is_taken_over(tmp_path):
    with Started("-c", ENDLESS, tmp_path) as process:
        try:
            while read_status(tmp_path).get("step", 0) == 0:
                assert process.poll() is None
                time.sleep(0.05)
            assert read_status(tmp_path)["state"] == "running"
            shared = train(tmp_path, save_dir=tmp_path / "another", resume=True)
        finally:
            process.kill()
    assert read_status(tmp_path)["state"] == "lost" and len(lines(tmp_path / "records.jsonl")) > 3  # whole lines
    assert isinstance(shared.ended, ArgumentError) and f"run_dir={str(tmp_path)!r} is in use" in str(shared.ended)
    assert f"process {process.pid} on this machine" in str(shared.ended)
    assert train(tmp_path, resume=True, batch_size=32, val_interval=None).ended is None
    assert read_status(tmp_path)["state"] == "done" and not (tmp_path / LOCK).exists()


def test_of_two_that_begin_at_once_one_has_the_folder(tmp_path):
    """Both see an empty folder; one of them begins while the other one is still put together."""
    process, about = described(), {"strategy": "x"}
    first, second = RunFolder(tmp_path, 10, resume=False), RunFolder(tmp_path, 10, resume=False)
    first.start(about)
    with pytest.raises(ArgumentError, match=f"in use by another run, process {process['pid']}"):
        second.start(about)
    first.finish({})
    with pytest.raises(ArgumentError, match="already contains a run"):
        second.start(about)
    assert len(events(tmp_path, "start")) == 1 and not (tmp_path / LOCK).exists()


def test_the_records_of_another_run_are_not_replaced(tmp_path):
    train(tmp_path, checkpoint_interval=6, save_dir=tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    other = train(tmp_path, seed=1, resume=True, save_dir=tmp_path / "none")  # no checkpoint there: it starts anew
    assert isinstance(other.ended, ArgumentError)
    assert "contains another run" in str(other.ended) and "seed: 0, now 1" in str(other.ended)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert train(tmp_path, max_steps=16, resume=True, save_dir=tmp_path / "saved").ended is None


STEP_TIMES = [(20, "20s"), ("20", "20s"), ([80, 0.5], ["80s", 0.5])]


@pytest.mark.parametrize(("saved", "now"), [*STEP_TIMES, ({"seconds": 20, "seed": 1}, {"seconds": "20s", "seed": 1})])
def test_a_step_time_that_was_saved_without_a_unit_is_the_one_with_it(saved, now, tmp_path):
    """A whole number of 10 or more is refused now, so a run that began with it goes on with the unit."""
    (tmp_path / "run.json").write_text(json.dumps({"description": {"step_seconds": saved}}))
    folder = RunFolder(tmp_path, 10, resume=True)
    folder._check_same({"step_seconds": now})
    assert not differences({"step_seconds": saved}, {"step_seconds": now})
    with pytest.raises(ArgumentError, match="contains another run"):
        folder._check_same({"step_seconds": "20ms"})
    assert differences({"step_seconds": saved}, {"step_seconds": "20ms"})


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("resume", [False, True])
def test_what_is_no_plain_file_is_neither_waited_for_nor_written_through(name, resume, tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    for make in (os.mkfifo, lambda path: path.symlink_to(elsewhere)):
        make(folder / name)
        assert read_status(folder) == {}
        trainer = train(folder, resume=resume)
        assert isinstance(trainer.ended, ArgumentError) and f"{name} is a link, a folder, a pipe" in str(trainer.ended)
        (folder / name).unlink()
    assert not elsewhere.exists()


NO_STATUS = {
    "list": "[]", "deep": "[" * 100_000, "nothing": '{"state": "running"}', "number": '{"process": 5}', "nul": "\0",
    "text": '{"state": "running", "process": {"pid": "x"}, "heartbeat_s": 1}',
    "silent": '{"state": "running", "process": {"pid": 1, "host": "h"}}',
}  # fmt: skip


@pytest.mark.parametrize("name", NO_STATUS)
def test_a_status_that_says_nothing_is_none(name, tmp_path):
    (tmp_path / "status.json").write_text(NO_STATUS[name])
    assert read_status(tmp_path) == {}
    assert train(tmp_path, resume=True).ended is None


def test_on_a_full_disk_the_training_goes_on_and_says_so(tmp_path, capsys):
    whole = fingerprint(train(None, max_steps=40).model)
    with small_disk(tmp_path / "disk", 256 * 1024):
        folder, big = tmp_path / "disk" / "run", tmp_path / "disk" / "big"

        def fill(loop):
            with open(big, "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        trainer = train(folder, max_steps=40, callbacks=[Every(8, fill), Every(40, lambda loop: big.unlink())])
        assert trainer.ended is None and fingerprint(trainer.model) == whole
        status = read_status(folder)
        assert status["state"] == "done" and "No space left on device" in status["trouble"]
        for name in ("events.jsonl", "records.jsonl"):
            assert all(line["step"] < 40 for line in lines(folder / name))
        assert not (folder / LOCK).exists()
    said = [line for line in capsys.readouterr().err.splitlines() if "no longer written" in line]
    assert len([line for line in said if f"{folder} is" in line]) == 1


def test_a_folder_that_is_taken_away_stays_away(tmp_path, capsys):
    folder = tmp_path / "run"
    trainer = train(folder, callbacks=[Every(4, lambda loop: shutil.rmtree(folder, ignore_errors=True))])
    assert trainer.ended is None and trainer.history[-1]["step"] == 12
    assert not folder.exists() and "no longer written" in capsys.readouterr().err


def test_a_whole_run_is_not_written_over_for_want_of_a_checkpoint(tmp_path, capsys):
    train(tmp_path)
    records = (tmp_path / "records.jsonl").read_text()
    again = train(tmp_path, resume=True)
    assert isinstance(again.ended, ArgumentError) and "without a checkpoint, so it would" in str(again.ended)
    assert (tmp_path / "records.jsonl").read_text() == records and read_status(tmp_path)["state"] == "done"
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"state": "failed"}))
    assert train(tmp_path, resume=True).ended is None and "starting at step 0" in capsys.readouterr().err


def test_going_on_by_the_environment_writes_over_no_records(tmp_path, monkeypatch):
    """As from the page, whose button says nothing of a new beginning."""
    train(tmp_path / "one")
    status = json.loads((tmp_path / "one" / "status.json").read_text())
    (tmp_path / "one" / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    records = (tmp_path / "one" / "records.jsonl").read_text()
    monkeypatch.setenv("EXOGYM_RESUME", str(tmp_path / "one"))
    again = train(tmp_path / "one")
    assert isinstance(again.ended, ArgumentError) and "without a checkpoint" in str(again.ended)
    assert (tmp_path / "one" / "records.jsonl").read_text() == records
    assert train(tmp_path / "other").ended is None  # another fit of the same script


def test_an_empty_path_is_no_folder():
    for name in ("run_dir", "save_dir"):
        ended = train(None, save_dir="").ended if name == "save_dir" else train("").ended
        assert isinstance(ended, ArgumentError) and f"{name}=''" in str(ended)


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = train(tmp_path / "file" / "run")
    assert isinstance(trainer.ended, ArgumentError) and "cannot be written" in str(trainer.ended)
    assert len(trainer.history) == 0


ENDLESS = """
import sys, torch
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(lr=0.02, H=4), num_nodes=3, max_steps=10**7, device="cpu", run_dir=sys.argv[1])
"""


def test_a_torn_line_of_events_is_cut(tmp_path):
    train(tmp_path, checkpoint_interval=6, max_steps=6)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"kind": "evalu')
    train(tmp_path, checkpoint_interval=6, max_steps=12, resume=True)
    broken = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if not line.endswith("}")]
    assert not broken


def test_a_run_elsewhere_is_lost_after_a_minute_of_silence(tmp_path):
    train(tmp_path)
    status = read_status(tmp_path) | {"state": "running"}
    process = status["process"] | {"host": "elsewhere", "machine": "another"}
    for silence_s, state in ((5, "running"), (3600, "lost")):
        heard = {"process": process, "heartbeat_s": time.time() - silence_s}
        (tmp_path / "status.json").write_text(json.dumps(status | heard))
        assert read_status(tmp_path)["state"] == state


def test_observers_hear_of_the_run_in_a_stretch_now_and_then():
    """Each step asks whether to stop, and small steps are many."""
    heard, counts = [], []

    class Ear(Observer):
        def beat(self, step, figures):
            heard.append(step)

    def look(loop):
        reports = loop.standing.reports
        reports.observers.all.append(Ear())
        ask = reports.between_steps(lambda: False, lambda: loop.step)
        for _ in range(1000):
            ask()
        counts.append(len(heard))
        time.sleep(1.5 * SIGN_PAUSE_S)
        ask()
        counts.append(len(heard))

    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(DiLoCoStrategy(lr=0.02, H=4), max_steps=4, batch_size=8, device="cpu", callbacks=[Every(4, look)])
    assert 1 <= counts[0] < 1000 and counts[1] > counts[0]
    assert set(heard[: counts[1]]) == {4}
