"""Law 2: stopped anywhere and resumed, a run ends in the same bits. And what becomes of a checkpoint under attack."""

import csv
import functools
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from battery import in_turn
from checkpoints import RUNS, SGD, STEPS, examples, fit, network, rows, small_disk, trainer_of
from processes import start
from torch import nn

from exogym import LocalTrainer, Placement
from exogym.callbacks import EvaluateNodes, Every
from exogym.core.saving.checkpoint import Snapshot, list_checkpoints, load, load_newest, save
from exogym.data.partition import Partitioner
from exogym.errors import ArgumentError, CheckpointError
from exogym.logger import CSVLogger
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy, Strategy
from exogym.testing import fingerprint


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "ats"),
    [
        ("by hand", range(1, STEPS + 1)),
        *in_turn([*RUNS], ((1, STEPS // 2, STEPS),), slow=(range(1, STEPS + 1),), fast={*RUNS} - {"by hand"}),
    ],
    ids=str,
)
def test_stopped_anywhere_and_resumed_nothing_differs(name, ats, tmp_path):
    """Weights, statistics, and every row of the history, from the checkpoint of every step."""
    make, options = RUNS[name]
    every = {"checkpoint_interval": 1, "placement": Placement(keep_checkpoints=99)}
    whole = fit(make(), tmp_path / "whole", callbacks=[EvaluateNodes()], **every, **options)
    assert len(list_checkpoints(tmp_path / "whole")) == STEPS
    for step in ats:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole" / f"step_{step:010d}", folder / f"step_{step:010d}")
        resumed = fit(make(), folder, callbacks=[EvaluateNodes()], resume=True, **every, **options)
        assert fingerprint(resumed.model) == fingerprint(whole.model), step
        assert rows(resumed) == rows(whole), step
    free = fit(make(), callbacks=[EvaluateNodes()], **options)
    assert fingerprint(free.model) == fingerprint(whole.model)  # checkpoints are cut into stretches: no bit changes


@pytest.mark.parametrize("val_interval", [None, 2, 5])
def test_more_steps_may_be_asked_for(tmp_path, val_interval):
    """As if it had been asked at once: also the evaluation at the step where the first run ended."""
    options = {"val_interval": val_interval, "callbacks": [EvaluateNodes()]}
    fit(FedAvgStrategy(SGD, H=5), tmp_path, max_steps=8, **options)
    longer = fit(FedAvgStrategy(SGD, H=5), tmp_path, max_steps=STEPS, resume=True, **options)
    whole = fit(FedAvgStrategy(SGD, H=5), **options)
    assert fingerprint(longer.model) == fingerprint(whole.model)
    assert rows(longer) == rows(whole)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"lr_scheduler": "cosine"}, "lr_scheduler='cosine' now ends at step 12, not at step 8: after step 8 the "
        "learning rate goes from 0.00381 to 0.025. To avoid a jump, start with the whole run's max_steps"),
        ({"lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR}, "lr_scheduler=CosineAnnealingLR now ends at "),
        ({"outer_lr_scheduler": "linear"}, "outer_lr_scheduler='linear' now ends at step 12, not at step 8. To avoid"),
        ({"lr_scheduler": lambda step: 0.9**step, "warmup_steps": 2}, None),
        ({"lr_scheduler": "constant", "outer_lr_scheduler": "constant"}, None),
        ({"lr_scheduler": "cosine", "warmup_steps": 10}, None),
    ],
)  # fmt: skip
def test_more_steps_under_a_schedule_that_ends_are_said(options, said, tmp_path, capsys):
    make = lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, **options)  # noqa: E731
    fit(make(), tmp_path, max_steps=8, val_interval=8)
    fit(make(), tmp_path, max_steps=8, resume=True, val_interval=8)
    assert "now ends at step" not in capsys.readouterr().err
    longer = fit(make(), tmp_path, max_steps=STEPS, resume=True, val_interval=8)
    err = capsys.readouterr().err
    assert "now ends at step" not in err if said is None else err.count(said) == 1
    if said is not None and "0.00381" in said:
        assert [f"{longer.history.column('lr', node=0)[1][k]:.3g}" for k in (7, 8)] == ["0.00381", "0.025"]


def test_a_number_that_a_module_keeps_comes_back_as_it_was(tmp_path):
    """In float32 0.1 becomes a little more, and a tenth of ten clients two."""
    options = {"num_nodes": 10, "batch_size": 2}
    make = functools.partial(FedAvgStrategy, SGD, H=2, client_fraction=0.1)
    whole = fit(make(), **options)
    fit(make(), tmp_path, max_steps=6, **options)
    resumed = fit(make(), tmp_path, resume=True, **options)
    assert fingerprint(resumed.model) == fingerprint(whole.model)
    assert rows(resumed) == rows(whole)
    two = fit(FedAvgStrategy(SGD, H=2, client_fraction=0.11), **options)  # the control
    assert fingerprint(two.model) != fingerprint(whole.model)


def test_a_finished_run_resumed_gives_the_model_and_history_again(tmp_path):
    first = fit(DiLoCoStrategy(lr=0.02, H=5), tmp_path)
    marks = fingerprint(first.model), rows(first)
    again = fit(DiLoCoStrategy(lr=0.02, H=5), tmp_path, resume=True)
    assert (fingerprint(again.model), rows(again)) == marks
    with pytest.raises(CheckpointError, match="is at step 12, past the 7 steps"):
        fit(DiLoCoStrategy(lr=0.02, H=5), tmp_path, resume=True, max_steps=7)


def test_a_run_ended_by_a_callback_has_a_checkpoint_there(tmp_path):
    fit(SimpleReduceStrategy(SGD), tmp_path, callbacks=[Every(5, lambda loop: True)])
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_0000000005"]
    resumed = fit(SimpleReduceStrategy(SGD), tmp_path, resume=True)
    assert fingerprint(resumed.model) == fingerprint(fit(SimpleReduceStrategy(SGD)).model)


def test_a_log_goes_on_without_gap_or_repetition(tmp_path):
    def kill(loop):
        if not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            raise Killed

    def kill_at_the_end(loop):
        if loop.step == 15:
            raise Killed

    log = tmp_path / "log.csv"
    with pytest.raises(Killed):
        fit(FedAvgStrategy(SGD, H=5), tmp_path / "run", checkpoint_interval=4, logger=CSVLogger(log),
            callbacks=[Every(7, kill)])  # fmt: skip
    fit(FedAvgStrategy(SGD, H=5), tmp_path / "run", checkpoint_interval=4, logger=CSVLogger(log), resume=True,
        callbacks=[Every(7, kill)])  # fmt: skip
    with pytest.raises(Killed):  # in the last evaluation, after the last checkpoint
        fit(FedAvgStrategy(SGD, H=5), tmp_path / "run", max_steps=15, logger=CSVLogger(log), resume=True,
            callbacks=[kill_at_the_end])  # fmt: skip
    assert list_checkpoints(tmp_path / "run")[-1].name == "step_0000000015"
    fit(FedAvgStrategy(SGD, H=5), tmp_path / "run", max_steps=15, logger=CSVLogger(log), resume=True)
    steps = [line.split(",")[0] for line in log.read_text().splitlines()[1:]]
    assert steps == [str(s) for s in [0, *np.repeat(np.arange(1, 16), 4)]]
    with open(log) as file:
        evaluated = [int(row["step"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert evaluated == [0, 4, 8, 12, 15]


def test_nothing_to_resume_is_a_fresh_start(tmp_path):
    trainer = fit(SimpleReduceStrategy(SGD), tmp_path / "new" / "folder", resume=True)
    assert trainer.history[0]["step"] == 0
    assert len(list_checkpoints(tmp_path / "new" / "folder")) == 1


# What a checkpoint does not fit


class Tuned(Strategy):
    def __init__(self, tau, **kwargs):
        super().__init__(**kwargs)
        self.tau = tau

    def step(self):
        self.update_parameters()
        super().step()


class ByRows(Partitioner):
    """Neighbors, as many for each node as whole batches need."""

    def split(self, dataset, num_nodes, seed):
        return np.array_split(np.arange(len(dataset) // (4 * num_nodes) * 4 * num_nodes), num_nodes)


STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
DIFFERENT = {
    "num_nodes": ({}, {"num_nodes": 4}, ["num_nodes: saved 3, now 4", "Give num_nodes=3"]),
    "two of them": ({}, {"seed": 1, "batch_size": 5}, ["seed: saved 0, now 1", "batch_size: saved 4, now 5"]),
    "precision": ({}, {"precision": "bf16"}, ["precision: saved 'fp32', now 'bf16'"]),
    "strategy": ({}, {"strategy": SimpleReduceStrategy(SGD)}, ["strategy.name"]),
    "its option": ({}, {"strategy": FedAvgStrategy(SGD, H=6)}, ["strategy.H: saved 5, now 6"]),
    "its optimizer's": ({}, {"strategy": FedAvgStrategy(OptimSpec("sgd", lr=0.2), H=5)}, ["strategy.inner_optim"]),
    "own option": ({"strategy": Tuned(0.1)}, {"strategy": Tuned(0.2)}, ["strategy.tau: saved 0.1, now 0.2"]),
    "partial": (
        {"strategy": Tuned(0.1, lr_scheduler=STEP_LR)},
        {"strategy": Tuned(0.1, lr_scheduler=functools.partial(STEP_LR, gamma=0.5))},
        ["lr_scheduler.gamma"],
    ),
    "partitioner": ({}, {"partitioner": ByRows()}, ["partitioner"]),
    "model": ({}, {"trainer": lambda: trainer_of(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2)))}, ["model: saved"]),
    "data": ({}, {"trainer": lambda: LocalTrainer(network(), examples(44), examples(20, 1), loss_fn=F.cross_entropy)},
             ["data.examples: saved 40, now 44"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_run_is_not_resumed_and_what_differs_is_listed(name, tmp_path):
    first, second, lines = DIFFERENT[name]
    first, second = dict(first), dict(second)
    fit(first.pop("strategy", FedAvgStrategy(SGD, H=5)), tmp_path, max_steps=6, **first)
    strategy = second.pop("strategy", FedAvgStrategy(SGD, H=5))
    trainer = second.pop("trainer", trainer_of)()
    before = fingerprint(trainer.model)
    with pytest.raises(CheckpointError, match="only max_steps and num_epochs may differ") as error:
        fit(strategy, tmp_path, trainer, resume=True, **second)
    for line in lines:
        assert line in str(error.value)
    assert fingerprint(trainer.model) == before


class Constant(nn.Module):
    """A random frozen base, which checkpoints do not hold."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.out = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.base(x))


def test_another_frozen_base_is_another_run(tmp_path):
    fit(FedAvgStrategy(SGD, H=5), tmp_path, trainer_of(Constant(1)), max_steps=6)
    with pytest.raises(CheckpointError, match="shared: saved"):
        fit(FedAvgStrategy(SGD, H=5), tmp_path, trainer_of(Constant(2)), resume=True)
    fit(FedAvgStrategy(SGD, H=5), tmp_path, trainer_of(Constant(1)), resume=True)


def test_checkpoints_are_not_written_over(tmp_path):
    fit(FedAvgStrategy(SGD, H=5), tmp_path, max_steps=6)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(ArgumentError, match="already contains checkpoints: pass resume=True"):
        fit(FedAvgStrategy(SGD, H=5), tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_are_kept(tmp_path, keep):
    fit(
        SimpleReduceStrategy(SGD),
        tmp_path,
        checkpoint_interval=2,
        placement=Placement(keep_checkpoints=keep),
        max_steps=9,
    )
    steps = [int(p.name[5:]) for p in list_checkpoints(tmp_path)]
    assert steps == [4, 6, 8, 9][-keep:] and len(list(tmp_path.iterdir())) == keep


# Damage


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


DAMAGES = {
    "altered rows": lambda folder: flip(next(folder.glob("rows-*"))),
    "altered shared": lambda folder: flip(folder / "shared.safetensors"),
    "torn rows": lambda folder: os.truncate(next(folder.glob("rows-*")), 100),
    "missing rows": lambda folder: next(folder.glob("rows-*")).unlink(),
    "missing description": lambda folder: (folder / "run.json").unlink(),
    "torn description": lambda folder: os.truncate(folder / "run.json", 50),
    "empty description": lambda folder: (folder / "run.json").write_text(""),
    "a list": lambda folder: (folder / "run.json").write_text("[]"),
    "no sums": lambda folder: (folder / "run.json").write_text('{"format": 1, "sha256_of_this": 3}'),
    "bytes": lambda folder: (folder / "run.json").write_bytes(bytes(range(128, 256))),
    "altered step": lambda folder: (folder / "run.json").write_text(
        (folder / "run.json").read_text().replace('"step": 12', '"step": 11')
    ),
    "all gone": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_notice(name, tmp_path, capsys):
    whole = fit(FedAvgStrategy(SGD, H=5), tmp_path, checkpoint_interval=8)
    mark = fingerprint(whole.model)
    DAMAGES[name](tmp_path / "step_0000000012")
    resumed = fit(FedAvgStrategy(SGD, H=5), tmp_path, checkpoint_interval=8, resume=True)
    assert fingerprint(resumed.model) == mark
    notice = capsys.readouterr().err
    assert "step_0000000012" in notice and "using the checkpoint before" in notice
    load(list_checkpoints(tmp_path)[-1])  # written anew, whole

    for path in list_checkpoints(tmp_path):
        for rows_file in path.glob("rows-*"):
            rows_file.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        fit(FedAvgStrategy(SGD, H=5), tmp_path, resume=True)


def test_a_later_torn_checkpoint_does_not_push_out_the_good_ones(tmp_path):
    """Keeping one, and going on from before a torn one: the one just written is the one to keep."""
    for step in (3, 9):
        save(tmp_path, Snapshot({0: {"x": torch.ones(2)}}, {"y": torch.ones(1)}, {"step": step}), keep=5)
    next((tmp_path / "step_0000000009").glob("rows-*")).unlink()
    save(tmp_path, Snapshot({0: {"x": torch.ones(2)}}, {"y": torch.ones(1)}, {"step": 4}), keep=1)
    found, complaints = load_newest(tmp_path)
    assert found is not None and found.meta["step"] == 4 and len(complaints) == 1


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("exogym.core.saving.checkpoint.FORMAT", 99)
    path = save(tmp_path, Snapshot({0: {"x": torch.ones(2)}}, {"y": torch.ones(1)}, {"step": 1}), keep=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 99, and this version reads format 5"):
        load(path)


def test_nothing_is_ever_unpickled(tmp_path, monkeypatch):
    import pickle

    path = save(tmp_path, Snapshot({0: {"x": torch.ones(2)}}, {"y": torch.ones(1)}, {"step": 1}), keep=1)
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("unpickled"))
    monkeypatch.setattr(pickle, "loads", lambda *a, **k: pytest.fail("unpickled"))
    assert load(path).rows[0]["x"].tolist() == [1, 1]


# Killed while it writes


WRITER = """
import sys, torch
from exogym.core.saving.checkpoint import Snapshot, save
torch.set_num_threads(1)
step = int(sys.argv[2])
while True:
    step += 1
    rows = {r: {f"p{k}": torch.full((2000,), float(step + r)) for k in range(5)} for r in range(3)}
    save(sys.argv[1], Snapshot(rows, {"y": torch.ones(1) * step}, {"step": step}), keep=2)
    print(step, flush=True)
"""


def test_every_checkpoint_by_its_name_is_whole_after_kill_9(tmp_path):
    """Also while old ones are removed. What is half done bears another name and goes at the next start."""
    last, loaded = 0, 0
    for delay_s in (0.0, 0.007, 0.017, 0.029):
        ours, theirs = os.pipe()
        writer = start(["-c", WRITER, tmp_path, last], files=(None, theirs, 2))
        os.close(theirs)
        with open(ours) as said:
            for _ in range(3):
                said.readline()
            time.sleep(delay_s)
            os.kill(writer, signal.SIGKILL)
            rest = said.read()
        os.waitpid(writer, 0)
        paths = list_checkpoints(tmp_path)
        assert len(paths) >= 2
        for path in paths:
            snapshot = load(path)
            step = snapshot.meta["step"]
            assert all(bool((x == step + r).all()) for r, state in snapshot.rows.items() for x in state.values())
            loaded += 1
        last = step
        assert last >= max(map(int, rest.split()), default=0)
    assert loaded >= 8
    (tmp_path / ".step_0000000001.1.tmp").mkdir(exist_ok=True)
    (tmp_path / ".step_0000000001.1.tmp" / "shared.safetensors").write_text("half")
    for path in list_checkpoints(tmp_path):
        shutil.rmtree(path)
    fit(SimpleReduceStrategy(SGD), tmp_path, resume=True, max_steps=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_0000000002"]


# A full disk


def big_snapshot(step, count=50_000):
    return Snapshot({0: {"x": torch.full((count,), float(step))}}, {"y": torch.ones(1)}, {"step": step})


def test_a_full_disk_is_said_and_earlier_checkpoints_stand(tmp_path):
    """Each checkpoint has 200 kB; two fit on the disk, and a third does not."""
    folder = tmp_path / "disk"
    with small_disk(folder, 520_000):
        for step in (1, 2):
            save(folder, big_snapshot(step), keep=9)
        with pytest.raises(CheckpointError, match=r"step 3 could not be written .* Earlier checkpoints\s+remain"):
            save(folder, big_snapshot(3), keep=9)
        assert sorted(p.name for p in folder.iterdir()) == ["step_0000000001", "step_0000000002"]
        assert load_newest(folder)[0].meta["step"] == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_disk_that_fills_up_ends_the_run_but_keeps_model_and_history(overlap, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def fill(loop):
        if loop.step == 6:
            for writer in [thread for thread in threading.enumerate() if thread.name == "exogym checkpoint"]:
                writer.join()
            monkeypatch.setattr("exogym.core.saving.checkpoint.save_file", full)

    trainer = trainer_of()
    start = fingerprint(trainer.model)
    with pytest.raises(CheckpointError, match=r"step 8 could not be written.*No space left"):
        fit(SimpleReduceStrategy(SGD), tmp_path, trainer, checkpoint_interval=4, callbacks=[Every(6, fill)],
            placement=Placement(overlap=overlap))  # fmt: skip
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_0000000004"]
    assert fingerprint(trainer.model) != start
    assert 8 <= trainer.history[-1]["step"] <= (STEPS if overlap else 8)  # at the next step, or at the next checkpoint
    resumed = fit(SimpleReduceStrategy(SGD), tmp_path, checkpoint_interval=4, resume=True)
    assert fingerprint(resumed.model) == fingerprint(fit(SimpleReduceStrategy(SGD)).model)


def test_the_description_beside_the_results_is_json(tmp_path):
    trainer = fit(SimpleReduceStrategy(SGD), tmp_path, max_steps=2)
    meta = json.loads((tmp_path / "step_0000000002" / "run.json").read_text())
    assert meta["description"] == trainer.description
