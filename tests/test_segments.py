"""The history in pieces: what is written grows with the steps, not their square, and no run gets another's rows."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from checkpoints import RUNS, fit, rows, sign, trainer_of

from exogym.callbacks import Every
from exogym.core.record.history import History
from exogym.core.saving.checkpoint import Snapshot, list_checkpoints, load, save
from exogym.core.saving.segments import Segments
from exogym.errors import CheckpointError
from exogym.testing import fingerprint

MAKE, OPTIONS = RUNS["local steps fp16"]


def grow(history, first, last):
    for step in range(first, last + 1):
        history.add_stretch(
            [step], [0], [[float(step)], [np.nan]], lr=[0.1], nodes=[0, 1], payload_bytes=0.0, tx_bytes=0.0,
            rx_bytes=0.0, final_bytes=(1.0, 2.0, 3.0), wall_s=(step, step + 1.0),
        )  # fmt: skip
        if step % 5 == 0:
            history.add_evaluation(step, 0, {"val_loss": 1.0 / step, "mine": "text"})


def write(folder, segments, step, keep=2):
    row = {"x": torch.ones(2)}
    return save(folder, Snapshot({0: row}, {"y": torch.ones(1)}, {"step": step}, segments=segments), keep)


def read(path):
    found = load(path)
    arrays = {k.removeprefix("history."): x.numpy() for k, x in found.shared.items() if k.startswith("history.")}
    return list(History.from_state(found.meta["history"] | arrays))


def pieces(path):
    return {file.name: file.stat() for file in path.glob("history-*")}


def test_a_checkpoint_reads_as_the_history_was_and_few_bytes_are_written(tmp_path):
    """128 checkpoints: the whole history each time would be 64 times its size; in pieces it is under log2 times."""
    history = History()
    segments, written, seen = Segments(history), 0, set()
    for step in range(1, 129):
        grow(history, step, step)
        path = write(tmp_path, segments, step)
        now = {(info.st_ino, info.st_mtime_ns): info.st_size for info in pieces(path).values()}
        written += sum(size for file, size in now.items() if file not in seen)
        seen |= now.keys()
        assert len(now) <= 8
        if step in (1, 2, 37, 127, 128):
            assert read(path) == list(history)
    (whole,) = pieces(path).values()
    assert written < 8 * whole.st_size + 128 * 3000  # each file has 2 to 3 kB of names


def test_what_changed_late_is_written_again_and_older_checkpoints_keep_what_they_had(tmp_path):
    history = History()
    segments = Segments(history)
    grow(history, 1, 20)
    first, before = write(tmp_path, segments, 20, keep=9), list(history)
    grow(history, 21, 23)
    second = write(tmp_path, segments, 23, keep=9)
    assert pieces(second).keys() == {"history-0-19.safetensors", "history-20-22.safetensors"}
    history.add_evaluation(3, 0, {"late": 1.0})
    history.add_evaluation(22, 0, {"late": 2.0})
    third = write(tmp_path, segments, 24, keep=9)
    assert read(third) == list(history) != before == read(first)
    assert {info.st_ino for info in pieces(third).values()}.isdisjoint(info.st_ino for info in pieces(second).values())


def test_a_piece_that_was_touched_or_cannot_be_linked_is_written_again(tmp_path, monkeypatch):
    history = History()
    segments = Segments(history)
    grow(history, 1, 8)
    first = write(tmp_path, segments, 8, keep=9)
    grow(history, 9, 9)
    second = write(tmp_path, segments, 9, keep=9)
    same = "history-0-7.safetensors"
    assert pieces(second)[same].st_ino == pieces(first)[same].st_ino
    (second / same).write_bytes(b"torn")
    grow(history, 10, 10)
    assert read(write(tmp_path, segments, 10, keep=9)) == list(history)
    shutil.rmtree(list_checkpoints(tmp_path)[-1])
    assert read(write(tmp_path, segments, 11, keep=9)) == list(history)

    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    last = write(tmp_path, segments, 12, keep=9)
    assert read(last) == list(history) and all(info.st_nlink == 1 for info in pieces(last).values())


@pytest.mark.parametrize("name", ["local steps fp16", "pieces"])
def test_from_an_earlier_checkpoint_later_records_are_dropped(name, tmp_path):
    """Two runs go on from one checkpoint in copies of a folder, one of them made of hard links, with other steps."""
    make, options = RUNS[name]
    options = options | {"checkpoint_interval": 2, "keep_checkpoints": 9}
    whole = fit(make(), tmp_path / "whole", **options)
    for fork, copy in (("one", shutil.copy2), ("other", os.link)):
        shutil.copytree(tmp_path / "whole", tmp_path / fork, copy_function=copy)
        for path in list_checkpoints(tmp_path / fork)[2:]:
            shutil.rmtree(path)
    shorter = fit(make(), tmp_path / "one", resume=True, max_steps=9, **options)
    again = fit(make(), tmp_path / "other", resume=True, **options)
    assert fingerprint(again.model) == fingerprint(whole.model) and rows(again) == rows(whole)
    assert fingerprint(shorter.model) == fingerprint(fit(make(), max_steps=9, **options | {"checkpoint_interval": None})
                                                     .model)  # fmt: skip
    for fork in ("whole", "one", "other"):
        for path in list_checkpoints(tmp_path / fork):
            step = load(path).meta["step"]
            last = max(row["step"] for row in read(path))
            assert step - 3 < last <= step == load(path).meta["history"]["last_step"]


def test_a_history_that_a_callback_changes_is_saved_as_it_is(tmp_path):
    def note(loop):
        loop.history.add_evaluation(1, 0, {"seen": float(loop.step)})

    options = OPTIONS | {"checkpoint_interval": 1, "keep_checkpoints": 99, "callbacks": [Every(1, note)]}
    fit(MAKE(), tmp_path, **options)
    for path in list_checkpoints(tmp_path):
        (row,) = (row for row in read(path) if row["step"] == 1 and row["node"] is None)
        assert row["seen"] == load(path).meta["step"]


def test_a_checkpoint_of_another_format_is_one_clear_error(tmp_path):
    fit(MAKE(), tmp_path, **OPTIONS)
    for path in list_checkpoints(tmp_path):
        meta = json.loads((path / "run.json").read_text())
        sign(path, meta | {"format": meta["format"] - 1})
    with pytest.raises(CheckpointError, match=r"is of format 3, and this version reads 4: go on with the version"):
        fit(MAKE(), tmp_path, trainer_of(), resume=True, **OPTIONS)
