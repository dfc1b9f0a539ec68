"""The file that predictions start from, measured by real processes: what is in it, and that predictions take it."""

import json
import re

import pytest
from processes import world
from typer.testing import CliRunner

from exogym.cli import app
from exogym.errors import ArgumentError, ExoGymError
from exogym.machines.distributed.__main__ import main as self_test_command
from exogym.machines.remote.measuring import measure_hosts
from exogym.network import Network

HOSTS = {"master": {"address": "localhost", "device": "cpu", "slots": 2}}
KINDS = {"all_reduce", "exact all_reduce", "broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter"}


FORKS = """
import sys
from exogym.machines.distributed.__main__ import main
sys.argv[1:] = ["--json", "m.json", "--task", "digits", "--sizes_bytes", "4096", "400000"]
assert main() == 0
"""


@pytest.fixture(scope="module", params=["forks", pytest.param("hosts", marks=pytest.mark.slow)])
def measured(request, tmp_path_factory):
    """What two processes of this machine measure: by the command of each, or started as the hosts of a file."""
    folder = tmp_path_factory.mktemp("measured")
    if request.param == "hosts":
        network = measure_hosts(HOSTS, folder / "m.json", task="digits", sizes_bytes=[4096, 400_000], project=folder)
    else:
        status, log = world(2, folder, FORKS)
        assert status == 0, log
        network = Network.of(str(folder / "m.json"))
    return request.param, network, json.loads((folder / "m.json").read_text())


def test_the_file_has_every_collective_pair_and_step(measured):
    way, network, fields = measured
    assert set(fields) == {
        "num_nodes", "hosts", "pairs", "collectives", "first", "message_s", "step_s", "evaluation_s", "versions",
        "date",
    }  # fmt: skip
    assert fields["num_nodes"] == network.num_nodes == len(fields["hosts"]) == 2
    assert way == "forks" or fields["hosts"] == ["localhost"] * 2
    assert fields["versions"]["task"] == "digits" and re.match(r"\d{4}-\d\d-\d\dT", fields["date"])
    assert set(fields["collectives"]) == KINDS | {"all_to_all"}
    assert set(fields["first"]) == {"all_reduce", "exact all_reduce", "broadcast", "all_gather"}
    assert 0 < fields["message_s"] < 1
    for kind, table in fields["collectives"].items():
        of_parts = kind in ("gather", "all_gather")
        assert list(map(int, table)) == ([4, 2048, 200_000] if of_parts else [8, 4096, 400_000])
        assert list(table.values()) == sorted(table.values()) and min(table.values()) > 0
        assert fields["first"].get(kind, 1) >= table[max(table, key=int)]
    for i, j in ((0, 1), (1, 0)):
        assert network.link(i, j) == tuple(fields["pairs"][i][j])
    for name in ("step_s", "evaluation_s"):
        assert len(fields[name]) == 2 and min(fields[name]) > 0 and getattr(network.measurement, name) == fields[name]


def test_a_prediction_takes_what_was_measured(measured):
    _, network, fields = measured
    table = fields["collectives"]["all_reduce"]
    assert network.cost("all_reduce", 400_000, 2).seconds == pytest.approx(table["400000"])
    exact = fields["collectives"]["exact all_reduce"]
    assert network.cost("all_reduce", 400_000, 2, "exact").seconds == pytest.approx(exact["400000"])
    assert network.set_up_s("all_reduce") == pytest.approx(fields["first"]["all_reduce"] - table["400000"])
    assert Network.of(fields).describe() == network.describe()


@pytest.mark.slow
def test_a_failure_on_the_hosts_is_said(tmp_path):
    with pytest.raises(ExoGymError, match=r"self-test failed on the hosts.*there is no module 'absent'"):
        measure_hosts(HOSTS, tmp_path / "m.json", task="absent:make", project=tmp_path)
    assert not (tmp_path / "m.json").exists()


def test_what_only_measuring_needs_is_refused_without(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["self-test", "--task", "digits"])
    assert self_test_command() == 2 and "--task needs --json" in capsys.readouterr().err
    result = CliRunner().invoke(app, ["doctor", "--hosts", "none.json", "--out", "m.json"])
    assert isinstance(result.exception, ArgumentError) and "--out needs --measure" in str(result.exception)
