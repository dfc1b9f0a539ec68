"""A host that sends without end: what it may fill on the controller's disk, and in its memory, is bounded."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exogym.errors import ExoGymError
from exogym.machines.remote import Host, channel, fetching, health, inquiry
from exogym.machines.remote.budget import Quota
from exogym.machines.remote.channel import Logs
from exogym.machines.remote.fetching import fetch
from exogym.machines.remote.health import Board, read_hosts
from exogym.machines.remote.onhost.probe import MARK
from exogym.machines.remote.orders import HostOrder

HOST = Host("h", "h")
SENDS = """
import sys
out = sys.stdout.buffer
out.write(sys.argv[1].encode())
out.flush()
try:
    while True:
        out.write(sys.argv[2].encode() * 1000)
except OSError:
    pass
"""


def order(rank: int = 0) -> HostOrder:
    return HostOrder(HOST, range(rank, rank + 1), ["-c", "pass"], ".")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("says", "sends", "refused"),
    [
        ({"size": 1000, "sha256": hashlib.sha256(b"x" * 1000).hexdigest()}, "x", None),
        ({"size": 1000, "sha256": "0"}, "x", "damaged on the way"),
        ({"size": 10**15, "sha256": "0"}, "x", "free some space here"),
        ({"size": "many", "sha256": "0"}, "x", "cannot be fetched"),
        ({"size": -1, "sha256": "0"}, "x", "cannot be fetched"),
        ({"size": 10, "sha256": None}, "x", "cannot be fetched"),
        ([], "x", "cannot be fetched"),
        (None, "x\n", "cannot be fetched"),
        (None, "x", "cannot be fetched"),
    ],
    ids=range(9),
)
def test_a_file_is_no_larger_than_was_said_and_than_may_be(
    says: Any, sends: str, refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> "subprocess.Popen[bytes]":
        head = "" if says is None else f"{MARK}{json.dumps(says)}\n"
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", SENDS, head, sends], stdin=pipe, stdout=pipe, stderr=pipe)

    monkeypatch.setattr(inquiry.ssh, "start", start)
    monkeypatch.setattr(fetching, "END_S", 0.1)
    monkeypatch.setattr(inquiry, "MOST_BYTES", 1000)
    budget = Quota(10_000)
    if refused is None:
        fetch(HOST, ".", "model", tmp_path / "model", budget)
        assert (tmp_path / "model").read_bytes() == b"x" * 1000 and budget.left == 9000
    else:
        with pytest.raises(ExoGymError, match=refused):
            fetch(HOST, ".", "model", tmp_path / "model", budget)
        assert list(tmp_path.iterdir()) == []


def test_what_a_host_prints_is_kept_up_to_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PRINTED_BYTES", 1000)
    logs = Logs(tmp_path)
    shown = io.StringIO()
    for _ in range(50):
        logs.take(0, "a", "x" * 99, shown, range(1))
        logs.take(1, "b", "[rank 1] short", shown, range(1, 2))
    for rank in (0, 7, 10**8):
        logs.take(1, "b", f"[rank {rank}] of another host", shown, range(1, 2))
    logs.close()
    assert {path.name for path in tmp_path.iterdir()} == {"host_0.log", "host_1.log", "training_rank_1.log"}
    assert size_of(tmp_path) < 2500 and "its later output is not saved" in (tmp_path / "host_0.log").read_text()
    assert (tmp_path / "training_rank_1.log").read_text() == "short\n" * 50  # the other has its own share
    assert len(shown.getvalue().splitlines()) == 103  # all of it is shown
    assert capsys.readouterr().err.count("a has printed 1 kB: its later output is not saved") == 1


def test_what_a_host_tells_of_its_run_is_kept_up_to_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TOLD_BYTES", 5000)
    board = Board(tmp_path, tmp_path / "run", "runs/run")
    board.started(order())
    for k in range(100):
        for name in ("records.jsonl", "events.jsonl"):
            board.take(order(), json.dumps({"file": name, "at": 100 * k, "text": "x" * 99 + "\n"}))
        board.take(order(), json.dumps({"file": "run.json", "at": 100 * k, "text": "x" * 100, "whole": False}))
    assert 4000 < size_of(tmp_path / "run") < 5100  # with the controller's own mark
    assert capsys.readouterr().err.count("are copied at the end of the run") == 1
    board.take(order(), json.dumps({"file": "records.jsonl", "at": 0, "text": '{"step": 0}\n'}))  # begun anew
    assert (tmp_path / "run" / "records.jsonl").read_text() == '{"step": 0}\n'


def test_a_number_that_is_none_does_not_end_the_reports(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.started(order())
    said = {"cpu_use": 10**400, "cores": 2, "steps": {"0": [10**400, 0, 0.1]}, "gpus": [{"use": 10**400}]}
    board.take(order(), json.dumps({"health": said}))
    (host,) = read_hosts(tmp_path)["hosts"]
    assert host["cores"] == 2 and "cpu_use" not in host and host["processes"] == [] and host["state"] == "running"
