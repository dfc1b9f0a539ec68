"""How the hosts of a run are: what they report, what the controller makes of it, and what of it is not believed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port, python

from exogym import LocalTrainer
from exogym.core.base.processes import described
from exogym.core.record.observers import StepFile
from exogym.core.record.run_folder import read_status
from exogym.machines.remote import Host, SSHLauncher, health
from exogym.machines.remote.health import Board, read_hosts
from exogym.machines.remote.onhost.health import HostReports
from exogym.machines.remote.orders import HostOrder
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

HERE = {
    "master": {"address": "localhost", "device": "cpu"}, "workers": [{"address": "127.0.0.1", "device": "cpu"}],
    "master_port": free_port(),
}  # fmt: skip
TRAIN = """
import sys, time, torch
from exogym import NetworkTrainer
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = NetworkTrainer(HOSTS, model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(H=4, lr=0.01), max_steps=40, batch_size=8, val_interval=4,
            callbacks=[Every(4, lambda loop: time.sleep(0.2))])
"""


def order(rank: int = 0, slots: int = 1) -> HostOrder:
    return HostOrder(Host("h", "h"), range(rank, rank + slots), ["-c", "pass"], ".")


@pytest.mark.slow
def test_a_run_on_two_hosts_is_told_while_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("HOSTS", repr(HERE)))
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        seen: list[dict[str, Any]] = []
        while process.poll() is None:
            for path in tmp_path.glob(f"runs/*/{health.NAME}"):
                found = read_hosts(path.parent)
                if [host["state"] for host in found["hosts"]] == ["running"] * 2:
                    seen.append(found)
            time.sleep(0.1)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    first = next(iter(seen))["hosts"]  # while it went on
    assert [(host["address"], host["ranks"]) for host in first] == [("localhost", [0]), ("127.0.0.1", [1])]
    (folder,) = tmp_path.glob("runs/*")
    found = read_hosts(folder)
    assert [event["kind"] for event in found["events"] if event["host"] == "localhost"] == [
        "started",
        "running",
        "done",
    ]
    for host in found["hosts"]:
        (told,) = host["processes"]
        assert host["state"] == "done" and host["restarts"] == told["restarts"] == 0 and 0 < told["step"] <= 40
        assert host["cores"] >= 1 and 0 < host["memory_bytes"] <= host["memory_total_bytes"]
        assert host["run_memory_bytes"] > 10_000_000 and 0 <= host["cpu_use"] <= 1 and host["rx_bps"] >= 0
    assert read_status(folder)["state"] == "done" and not (folder / health.TOKEN).exists()


def reported(tmp_path: Path, mirror: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return what a host reports, twice."""
    program = (
        "import json, sys\nfrom exogym.machines.remote.onhost.health import HostReports\n"
        "given, folder = json.load(sys.stdin)\n"
        "reports = HostReports(given, folder, 'lo', list)\n"
        "open(reports.steps + '/1', 'w').write('12 3')\nreports.start()\nreports.close()\n"
    )
    given = {"mark": "m: ", "every_s": 60, "mirror": mirror}
    done = python("-c", program, input=json.dumps([given, str(tmp_path)]))
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("m: ")) for line in done.stdout.splitlines()]


def test_what_a_run_writes_on_another_host_comes_here(tmp_path: Path) -> None:
    """Whole lines and parts of them, and a file that begins anew; into no folder that the host has itself."""
    there, here = tmp_path / "there" / "runs" / "run", tmp_path / "here" / "run"
    there.mkdir(parents=True)
    board = Board(here, here, "runs/run")
    mirror = board.asked_of(order())["mirror"]  # type: ignore[index]
    rows = "".join(json.dumps({"step": k, "text": "ü" * 300}) + "\n" for k in range(20))
    (there / "records.jsonl").write_text(rows + '{"step": 20')
    (there / "status.json").write_text('{"state": "running"}')
    said = reported(tmp_path / "there", mirror)
    for line in said:
        board.take(order(), json.dumps(line))
    assert all(len(json.dumps(line)) < 4096 for line in said if "file" in line) and len(said) > 5  # in one piece
    for name in ("records.jsonl", "status.json"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    board.take(order(), json.dumps({"file": "records.jsonl", "at": 0, "text": '{"step": 0}\n', "whole": True}))
    assert (here / "records.jsonl").read_text() == '{"step": 0}\n'
    (there / health.TOKEN).write_text(board.mark)  # the same folder
    assert not [line for line in reported(tmp_path / "there", mirror) if "file" in line]
    assert reported(tmp_path, None)[-1]["health"]["steps"]["1"][:2] == [12, 3]


@pytest.mark.parametrize(
    "line",
    [
        {"file": "../outside", "at": 0, "text": "x", "whole": True},
        {"file": "checkpoints/x", "at": 0, "text": "x", "whole": True},
        {"file": "hosts.json", "at": 0, "text": "x", "whole": True},
        {"file": "records.jsonl", "at": 5, "text": "x"},
        {"file": "records.jsonl", "at": 0, "text": "\u0448"},
        {"file": "run.json", "at": "0", "text": "x", "whole": True},
        {"file": "run.json", "at": 0, "text": 7, "whole": True},
        {"file": "run.json", "at": 0, "text": "x" * 10, "whole": False},
        [], "x", None,
    ],
)  # fmt: skip
def test_a_host_writes_nothing_but_the_files_of_its_run(line: Any, tmp_path: Path) -> None:
    board = Board(tmp_path / "runs", tmp_path / "runs" / "fit_2", "runs/fit_2")
    board.started(order())
    before = sorted(path for path in tmp_path.rglob("*"))
    board.take(order(), json.dumps(line))
    board.take(order(1), json.dumps({"file": "run.json", "at": 0, "text": "{}", "whole": True}))  # not rank 0's host
    board.take(order(), "{" * 100_000)
    found = {path for path in tmp_path.rglob("*") if not path.name.startswith(".") and path.stat().st_size}
    assert found <= set(before)


def test_only_numbers_of_known_names_are_believed(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.started(order())
    said = {
        "cpu_use": 0.5, "tx_bps": "<script>", "state": "done", "address": "evil", "rx_bps": float("inf"),
        "gpus": [{"name": "H\x1b[2J", "use": 0.25, "more": 1}, "x"],
        "steps": {"0": [3, 0, 0.1], "7": [1, 1, 1], "1": "x"},
    }  # fmt: skip
    board.take(order(), json.dumps({"health": said}))
    (host,) = read_hosts(tmp_path)["hosts"]
    assert (host["state"], host["address"], host["cpu_use"]) == ("running", "h", 0.5)
    assert not {"tx_bps", "rx_bps"} & host.keys()
    assert host["gpus"] == [{"name": "H[2J", "use": 0.25}]
    assert host["processes"] == [{"rank": 0, "step": 3, "restarts": 0, "quiet_s": 0.1}]


def test_who_says_nothing_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_hosts(tmp_path) == {}
    board = Board(tmp_path)
    board.started(order())
    board.take(order(), '{"health": {}}')
    assert [host["state"] for host in read_hosts(tmp_path)["hosts"]] == ["running"]
    monkeypatch.setattr(health, "SILENT_S", -1.0)
    assert [host["state"] for host in read_hosts(tmp_path)["hosts"]] == ["silent"]
    path = tmp_path / health.NAME
    gone = json.loads(path.read_text()) | {"process": described() | {"started": "1"}}  # the controller was killed
    path.write_text(json.dumps(gone))
    assert [host["state"] for host in read_hosts(tmp_path)["hosts"]] == ["unknown"]
    board.close()
    assert [host["state"] for host in read_hosts(tmp_path)["hosts"]] == ["stopped"]


def test_a_full_disk_here_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.write_text("no folder")
    board = Board(folder)
    board.started(order())
    board.ended(order(), "done")
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_report_in_the_middle_of_a_line_breaks_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank prints may come in pieces, and a report between two of them."""
    said = "import os, time\nfor piece in (b'[rank 0] one ', b'two\\n'):\n    os.write(1, piece); time.sleep(0.4)\n"
    (tmp_path / "say.py").write_text("")
    launcher = SSHLauncher({"master": "localhost"}, project=tmp_path, out=tmp_path / "runs")
    board_s, health.EVERY_S = health.EVERY_S, 0.05
    try:
        from exogym.machines.remote.channel import Channel, Logs

        logs, board, ended = Logs(tmp_path), Board(tmp_path), []
        part = HostOrder(launcher.config.master, range(1), ["-c", said], str(tmp_path))
        channel = Channel(0, part, logs, board, ended.append)
        assert channel.join(60)
        while not ended:
            time.sleep(0.01)
        logs.close()
    finally:
        health.EVERY_S = board_s
    assert channel.status == 0 and (tmp_path / "training_rank_0.log").read_text() == "one two\n"
    assert "exogym-" not in capsys.readouterr().out and read_hosts(tmp_path)["hosts"][0]["heard_s"] is not None


def test_a_process_says_how_far_it_is_where_somebody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(DiLoCoStrategy(H=1, lr=0.01), max_steps=1, batch_size=8)
    assert not (tmp_path / "2").exists()
    monkeypatch.setenv("EXOGYM_STEPS", str(tmp_path))
    trainer.fit(DiLoCoStrategy(H=1, lr=0.01), max_steps=1, batch_size=8)
    assert (tmp_path / "2").read_text().endswith(" 1\n")
    steps = StepFile(tmp_path)
    steps.beat(7, {})
    steps.beat(8, {})  # less than a second later
    assert (tmp_path / "2").read_text() == "7 1\n"
    reports = HostReports({"mark": "m", "every_s": 1.0}, str(tmp_path), "lo", list)
    (Path(reports.steps) / "2").write_text("7 1\n")
    (Path(reports.steps) / "torn").write_text("7")
    assert {name: row[:2] for name, row in reports.sample()["steps"].items()} == {"2": [7, 1]}
    reports.close()
    assert not Path(reports.steps).exists()


def test_gpus_as_their_own_program_tells_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of nvidia-smi with --format=csv,noheader,nounits; what it does not tell is left out."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for said, found in (
        ("echo 'NVIDIA H200, 37, 1024, 143771'; echo 'NVIDIA H200, 0, 0, 143771'", [0.37, 0.0]),
        ("echo 'NVIDIA H200, [N/A], 1, 2'", None),
        ("exit 9", []),
    ):
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
        reports = HostReports({"mark": "m", "every_s": 1.0}, str(tmp_path), "lo", list)
        gpus = reports.sample().get("gpus")
        reports.close()
        assert (gpus if gpus is None else [gpu["use"] for gpu in gpus]) == found
        if gpus:
            assert gpus[0]["name"] == "NVIDIA H200" and gpus[0]["memory_bytes"] == 2**30
