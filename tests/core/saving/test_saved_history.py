"""The history in checkpoints: each has it whole, up to where it stands, and no run gets another's rows."""

import json
import os
import shutil

import pytest
from checkpoints import RUNS, fit, rows

from exogym import Placement
from exogym.callbacks import Every
from exogym.core.record.history import History
from exogym.core.saving.checkpoint import list_checkpoints, load
from exogym.testing import fingerprint

MAKE, OPTIONS = RUNS["local steps fp16"]


def read(path):
    found = load(path)
    arrays = {k.removeprefix("history."): x.numpy() for k, x in found.shared.items() if k.startswith("history.")}
    evaluations = json.loads(arrays.pop("evaluations").tobytes())
    return list(History.from_state(found.meta["history"] | arrays | {"evaluations": evaluations}))


@pytest.mark.parametrize("name", ["local steps fp16", "pieces"])
def test_from_an_earlier_checkpoint_later_records_are_dropped(name, tmp_path):
    """Two runs go on from one checkpoint in copies of a folder, one of them made of hard links, with other steps."""
    make, options = RUNS[name]
    options = options | {"checkpoint_interval": 2, "placement": Placement(keep_checkpoints=9)}
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

    options = OPTIONS | {
        "checkpoint_interval": 1,
        "placement": Placement(keep_checkpoints=99),
        "callbacks": [Every(1, note)],
    }
    fit(MAKE(), tmp_path, **options)
    for path in list_checkpoints(tmp_path):
        (row,) = (row for row in read(path) if row["step"] == 1 and row["node"] is None)
        assert row["seen"] == load(path).meta["step"]
