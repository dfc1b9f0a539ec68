"""`exogym advise` from a measurement: the network, the steps and the hosts of a file, and a task of one's own."""

import json
import sys

import pytest

from exogym.advise import advise
from exogym.cli import main
from exogym.network import Network

OWN = """
import torch
from exogym.study.tasks import Task
from exogym.models import MLP

def make():
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    sizes = dict(num_nodes=2, batch_size=4, max_steps=20, lr=0.01, H=5)
    return Task("own", "mine", "here", data, data, lambda: MLP([8, 4, 2]), **sizes)
"""
MEASURED = {
    "num_nodes": 2, "hosts": ["a", "b"], "step_s": [0.5, 1.0], "versions": {"task": "own_task_of_advice:make"},
    "collectives": {"all_reduce": {"100": 1.0, "100000": 1.0}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "own_task_of_advice.py").write_text(OWN)
    (tmp_path / "m.json").write_text(json.dumps(MEASURED))
    (tmp_path / "hosts.json").write_text(json.dumps({"master": "a", "workers": ["b"]}))
    (tmp_path / "others.json").write_text(json.dumps({"master": "a", "workers": ["c"]}))
    return tmp_path


def told(capsys, *words):
    assert main(["advise", *words, "--strategies", "ddp", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("hosts", [(), ("--hosts", "hosts.json")])
def test_advice_starts_from_a_measurement(folder, capsys, hosts):
    """The slow host takes 1 s, an all-reduce of 46 parameters in fp32 another: 2 x 0.5 s over 2 s is no speed-up."""
    advice = told(capsys, "--network", "m.json", "--task", "own_task_of_advice:make", *hosts)
    (row,) = advice["rows"]
    assert row["seconds_per_step"] == pytest.approx(2.0) and row["speedup"] == pytest.approx(0.5)
    assert row["speedup_range"] == pytest.approx([1 / 2.1, 1 / 1.9])
    assert any(line.startswith("measured: all_reduce") for line in advice["assumptions"])


def test_a_step_that_was_measured_of_another_model_is_not_used(folder, capsys):
    """The model is here, so its step is measured here: far under the second of the other one."""
    advice = told(capsys, "--network", "m.json", "--dataset", "digits")
    assert 1.0 < advice["rows"][0]["seconds_per_step"] < 1.5


def test_what_was_reckoned_may_be_too_fast_or_a_little_too_slow(capsys):
    words = ("--network", "1Gbps", "--parameters", "1e6", "--nodes", "2", "--step-seconds", "0.032")
    (row,) = told(capsys, *words)["rows"]  # 0.032 s on the wire, or 0.9 to 1.7 times as long
    assert row["speedup"] == pytest.approx(1.0)
    assert row["speedup_range"] == pytest.approx([0.064 / (0.032 * 2.7), 0.064 / (0.032 * 1.9)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--network", "m.json", "--hosts", "others.json"), "the measurement is for a, b, but the hosts are a, c"),
        (("--network", "wifi", "--hosts", "hosts.json"), "was not measured on the hosts"),
        (("--network", "m.json", "--nodes", "4"), "network is for 2 nodes, but num_nodes=4"),
        (("--network", "m.json", "--task", "digits"), "must be module:function"),
        (("--network", "m.json", "--task", "own_task_of_advice:make", "--dataset", "digits"), "both name a task"),
        (("--network", "m.json", "--task", "own_task_of_advice:absent"), "has no function 'absent'"),
    ],
)
def test_a_measurement_that_does_not_fit_is_refused(folder, capsys, words, message):
    assert main(["advise", *words, *([] if "--task" in words else ["--parameters", "1e6"])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "missing: the model's size (--parameters 124M) or a task (--dataset NAME); a step's time"),
        (("--parameters", "1e6"), "missing: a step's time"),
        (("--parameters", "many", "--flops", "1e9"), "--parameters='many'"),
        (("--parameters", "1e6", "--step-seconds", "1", "--nodes", "3"), "expected 3 nodes, but --hosts has 2"),
        (("--parameters", "1e6", "--step-seconds", "1", "--speeds", "1,1,1"), "expected 3 nodes, but --hosts has 2"),
        (("--parameters", "1e6", "--step-seconds", "soon"), "'soon'"),
        (("--parameters", "1e6", "--step-seconds", "1", "--strategies", "dilcoo"), "dilcoo"),
        (("--dataset", "digits", "--data", "absent"), "data='absent'"),
        (("--dataset", "digits", "--pilot", "0.1"), "unknown option --pilot: it is retired: "),
        (("--dataset", "digits", "--strategies", "diloco:H=0"), "H=0"),
    ],
)
def test_what_is_wrong_is_said_before_hosts_are_measured(folder, capsys, words, message):
    assert main(["advise", "--hosts", "hosts.json", *words]) == 2
    assert message in capsys.readouterr().err


def test_hosts_are_measured_if_nothing_is_wrong(folder, capsys):
    """The control: these hosts do not exist, so it is the measurement that fails."""
    assert main(["advise", "--hosts", "hosts.json", "--dataset", "digits"]) == 1
    assert "the hosts are not ready" in capsys.readouterr().err


@pytest.mark.parametrize(("strategy", "every", "agreements"), [("ddp", 1, 3), ("diloco:H=10", 10, 2), ("sparta", 1, 2)])
def test_nodes_that_average_gradients_agree_once_more(strategy, every, agreements):
    def step_s(message_s):
        network = Network.of({"num_nodes": 2, "collectives": {"all_reduce": {"400": 1.0}}, "message_s": message_s})
        found = advise(parameters=100, num_nodes=2, network=network, step_seconds=0.1, strategies=[strategy])
        return found.rows[0].seconds_per_step

    assert step_s(0.03) - step_s(0.01) == pytest.approx(0.02 * agreements / every)
