"""The page on islands: its example is one run in both places, and its times are measured."""

import json
import subprocess
import sys

import processes
import pytest
import splits
import torch
from battery import each
from paths import ROOT
from processes import python
from torch import nn
from torch.utils.data import DataLoader

from exogym import DistributedTrainer

SIZE = 796_928  # parameters of the model whose steps are measured
SCRIPT = f"""
import runpy, sys
sys.argv = ["islands.py", "--steps", "4", "--H", "2", *%r]
runpy.run_path({str(ROOT / "run" / "islands.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize("words", each(["", "--model gpt2", "--model llama --split tensor"], fast=[""]))
def test_islands_in_one_process_and_in_four(tmp_path, words):
    """Of ours and of Hugging Face's models: one loss and the same bytes between islands."""
    given = words.split()
    alone = python("-W", "error", ROOT / "run" / "islands.py", "--steps", "4", "--H", "2", *given, cwd=tmp_path)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout.startswith("2 islands of 2 devices, 4 steps: validation loss ")
    code, log = processes.world(4, tmp_path / "world", SCRIPT % given)
    assert code == 0 and alone.stdout in log, log


DEVICES = """
import pytest
from torch.utils.data import DataLoader
from exogym import DistributedTrainer
from exogym.errors import ArgumentError

made = trainer()
sgd = torch.optim.SGD(made.model.parameters(), lr=0.1)
with pytest.raises(ArgumentError, match="2 processes run this script, and a node of shard=3 needs 3"):
    DistributedTrainer(made.model, sgd, num_gpus=3)
with pytest.raises(ArgumentError, match="but the processes here use gloo"):
    DistributedTrainer(made.model, sgd, backend="nccl")
devices = DistributedTrainer(made.model, sgd, backend="gloo", loss_fn=nn.functional.cross_entropy)
devices.train(DataLoader(made.subject.train_dataset, batch_size=8), epochs=1)
keep([made.model.state_dict(), devices.history.last["inside_bytes"]])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is so without a GPU")
def test_a_trainer_of_devices_has_a_process_for_each(tmp_path, capsys):
    """As many as run the script, if nothing is said; the result is that of one process, which says that it is one."""
    found, inside = splits.split(tmp_path, 2, DEVICES)
    made = splits.trainer()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    devices = DistributedTrainer(made.model, optimizer, 2, loss_fn=nn.functional.cross_entropy)
    devices.train(DataLoader(made.subject.train_dataset, batch_size=8))
    assert "one process simulates 2 devices" in capsys.readouterr().err
    whole = made.model.state_dict()
    assert max(float((found[name] - whole[name]).abs().max()) for name in whole) <= splits.SGD
    assert inside > 0 and "inside_bytes" not in devices.history.last


@pytest.mark.slow
def test_times_between_islands_are_measured_and_predicted(tmp_path):
    """The short version of `benchmarks/islands.py`; how far predictions are off is not judged."""
    rows = tmp_path / "rows.json"
    script = ROOT / "benchmarks" / "islands.py"
    quick = ["--rounds", "1", "--segments", "1", "--steps", "2", "--sleep", "0"]
    words = [*quick, "--rates", "50mbit", "--strategies", "ddp,diloco:H=4"]
    command = [sys.executable, str(script), *words, "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(json.loads(rows.read_text()).values())
    assert [(row["split"], row["strategy"], row["rate"]) for row in found] == [
        ("shard=2", text, "50mbit") for text in ("ddp", "diloco:H=4")
    ]
    for row, every in zip(found, (1, 4), strict=True):
        sent_bytes = 4 * SIZE / every  # of two islands each sends one model
        assert row["recorded"] == pytest.approx(sent_bytes)
        assert 1 < row["sent"] / sent_bytes < 1.05
        least_s = 8 * sent_bytes / 50e6
        assert least_s < row["predicted_s"] and 0.45 * least_s < row["measured_s"]
    assert found[0]["predicted_s"] > 2 * found[1]["predicted_s"]
