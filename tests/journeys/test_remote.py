"""Runs on real hosts: network namespaces with an sshd each (see `tests/hosts`), started from a machine beside them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Hosts, fixtures
from hosts.fixtures import CONFIG, TASK, said, wait_for

from exogym import LocalTrainer, load_model
from exogym.cli import main
from exogym.errors import ExoGymError
from exogym.machines.remote import SSHLauncher, check_hosts
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.strategy.strategy import Strategy
from exogym.testing import fingerprint, small_problem

hosts, project, tidy = fixtures.hosts, fixtures.project, fixtures.tidy  # where pytest looks for them
pytestmark = pytest.mark.usefixtures("tidy")
COUNT = 13
PYTHON = sys.executable
EXOGYM = str(Path(PYTHON).with_name("exogym"))
FIT = {"max_steps": 12, "batch_size": 8}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "diloco": lambda: DiLoCoStrategy(H=5, lr=0.01),
    "ddp": lambda: SimpleReduceStrategy(lr=0.01),
}


def simulated(strategy: Strategy, num_nodes: int) -> LocalTrainer:
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(strategy, num_nodes=num_nodes, **FIT)
    return trainer


# Training

TRAIN = """
import json, sys, torch
from exogym import NetworkTrainer
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.testing import small_problem

hosts, sync, strategies = sys.argv[1], bool(int(sys.argv[2])), sys.argv[3:]
made = {"diloco": lambda: DiLoCoStrategy(H=5, lr=0.01), "ddp": lambda: SimpleReduceStrategy(lr=0.01)}
for name in strategies:
    model, data = small_problem()
    if len(strategies) == 1 and "EXOGYM_NETWORK" in __import__("os").environ and int(__import__("os").environ["RANK"]):
        torch.nn.init.zeros_(model[0].weight)  # the weights of rank 0 are those that count
    trainer = NetworkTrainer(hosts, model, data, data, loss_fn=torch.nn.functional.mse_loss, sync=sync)
    final = trainer.fit(made[name](), max_steps=12, batch_size=8)
    assert final is model and trainer.folder.is_dir()
    torch.save(model.state_dict(), f"{name}.pt")
    with open(f"{name}.json", "w") as file:
        json.dump([list(trainer.history.column("val_loss")[1]), trainer.traffic, str(trainer.folder)], file)
print("the end")
"""


def results(folder: Path, name: str) -> tuple[torch.nn.Module, list[float], dict[str, Any], Path]:
    model = small_problem()[0]
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    losses, traffic, run = json.loads((folder / f"{name}.json").read_text())
    return model, losses, traffic, Path(run)


@pytest.mark.parametrize("names", [["diloco"], pytest.param(["diloco", "ddp"], marks=pytest.mark.slow)], ids=" ".join)
def test_two_hosts_end_in_the_bits_of_the_simulation(names: list[str], hosts: Hosts, project: Path) -> None:
    """One strategy, or two one after the other in one script, which runs again on the hosts for each."""
    (project / "train.py").write_text(TRAIN)
    hosts_file = hosts.file(project / "hosts.json", count=2)
    done = hosts.controller.run([PYTHON, "train.py", hosts_file.name, "0", *names], cwd=project)
    assert done.returncode == 0, said(done)
    assert done.stdout.splitlines()[-1] == "the end" and done.stdout.count("the end") == 1
    for number, name in enumerate(names, 1):
        expected = simulated(STRATEGIES[name](), 2)
        model, losses, traffic, run = results(project, name)
        assert fingerprint(model) == fingerprint(expected.model)
        assert losses == expected.history.column("val_loss")[1].tolist()
        assert traffic == expected.traffic
        stored = load_model(small_problem()[0], run / f"fit_{number}.model.safetensors")
        assert fingerprint(stored) == fingerprint(model)
        assert (run / f"fit_{number}.history.csv").exists()
    assert {path.name for path in run.iterdir()} >= {"hosts.json", "training_rank_0.log", "training_rank_1.log"}
    other = {"diloco": "ddp", "ddp": "diloco"}[name]
    assert fingerprint(expected.model) != fingerprint(simulated(STRATEGIES[other](), 2).model)  # the control


ISLANDS = """
import sys, torch
from exogym import NetworkTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

model, data = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)), small_problem()[1]
for p in model.parameters():
    torch.nn.init.constant_(p, 0.1)
trainer = NetworkTrainer(sys.argv[1], model, data, data, loss_fn=torch.nn.functional.mse_loss, nodes_per_host=1)
trainer.fit(DiLoCoStrategy("sgd", H=5, lr=0.01), max_steps=12, batch_size=8)
torch.save([model.state_dict(), trainer.traffic, trainer.description["num_nodes"]], "islands.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(2, 2), (1, 2)])
def test_a_host_of_several_slots_is_one_node_of_as_many_devices(
    slots: tuple[int, int], hosts: Hosts, project: Path
) -> None:
    (project / "train.py").write_text(ISLANDS)
    config = hosts.config(count=2)
    for entry, count in zip((config["master"], *config["workers"]), slots, strict=True):
        entry["slots"] = count
    (project / "hosts.json").write_text(json.dumps(config))
    done = hosts.controller.run([PYTHON, "train.py", "hosts.json"], cwd=project)
    assert done.returncode == 0, said(done)
    state, traffic, nodes = torch.load(project / "islands.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.1)
    dense = LocalTrainer(model, small_problem()[1], loss_fn=torch.nn.functional.mse_loss)
    dense.fit(DiLoCoStrategy("sgd", H=5, lr=0.01), num_nodes=2, **FIT)
    assert nodes == 2 and traffic == dense.traffic
    assert max(float((state[name] - x).abs().max()) for name, x in dense.model.state_dict().items()) < 1e-6


@pytest.mark.slow
def test_three_hosts_with_folders_of_their_own_get_a_copy(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    """The copy goes through rsync into a folder whose name would hurt an unquoted shell; rank 0's weights count."""
    (project / "train.py").write_text(TRAIN)
    (project / ".git").mkdir()
    (project / ".git" / "config").write_text("left out")
    config = hosts.config(count=3)
    folders = [tmp_path / "a $(touch pwned); it's", tmp_path / "b", tmp_path / "b" / "deeper"]
    for entry, folder in zip([config["master"], *config["workers"]], folders, strict=True):
        entry["path"] = str(folder)
    (project / "hosts.json").write_text(json.dumps(config))
    done = hosts.controller.run([PYTHON, "train.py", "hosts.json", "1", "diloco"], cwd=project)
    assert done.returncode == 0, said(done)
    model, losses, _, _ = results(project, "diloco")
    expected = simulated(STRATEGIES["diloco"](), 3)
    assert fingerprint(model) == fingerprint(expected.model)
    assert losses == expected.history.column("val_loss")[1].tolist()
    assert all((folder / "train.py").exists() and not (folder / ".git").exists() for folder in folders)
    assert not list(tmp_path.rglob("pwned")) and not (Path.home() / "pwned").exists()


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(
    hosts: Hosts, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exogym distributed-train`: a worker is killed once checkpoints are there; all start again from the last one.

    The hosts share no folder: each keeps the rows of its own node. `test_remote_slow` has hosts with one.
    """
    (project / "mytask.py").write_text(TASK)
    (project / "config.ini").write_text(CONFIG)
    config, places = hosts.config(count=2), [project, tmp_path / "apart"]
    shutil.copytree(project, places[1])
    config["workers"][0]["path"] = str(places[1])
    (project / "hosts.json").write_text(json.dumps(config))
    with open(project / "said", "w") as said_file:
        run = hosts.controller.start(
            [EXOGYM, "distributed-train", "small"], cwd=project, stdout=said_file, stderr=said_file
        )
    wait_for(lambda: all(list((place / "checkpoints").glob("step_*")) for place in places), run)
    workers = [pid for pid, line in hosts[1].processes().items() if "launch/runner.py" in line]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    assert run.wait(300) == 0, (project / "said").read_text()
    text = (project / "said").read_text()
    assert "was killed by signal 9 (SIGKILL); starting again (restart 1 of 1)" in text
    assert "unused fields: unknown_to_us" in text and "validation loss" in text
    assert text.splitlines()[-1].startswith("    model = load_model(load_task('mytask:problem')")

    monkeypatch.syspath_prepend(project)
    import mytask  # type: ignore[import-not-found]

    task = mytask.problem()
    undisturbed = LocalTrainer(task.make_model(), task.train, task.val)
    undisturbed.fit(DiLoCoStrategy(H=10, lr=0.01), num_nodes=2, max_steps=80, batch_size=8)
    (run_folder,) = (project / "runs").iterdir()
    ended = load_model(task.make_model(), run_folder / "fit_1.model.safetensors")
    assert fingerprint(ended) == fingerprint(undisturbed.model)
    rows = [{file.name for file in place.glob("checkpoints/step_*/rows-*")} for place in places]
    assert rows == [{"rows-0-0.safetensors"}, {"rows-1-1.safetensors"}]
    assert "no checkpoint" not in text and (project / "checkpoints" / "step_0000000080").is_dir()


# Ends

SLEEP = """
import subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 1001; sleep 1002"])
print("asleep", flush=True)
time.sleep(1000)
"""


def start_sleep(hosts: Hosts, project: Path, count: int) -> subprocess.Popen[str]:
    """Start on `count` hosts a script that sleeps, with children in sessions of their own; wait until it does."""
    (project / "sleep.py").write_text(SLEEP)
    hosts.file(project / "hosts.json", count=count)
    code = "import sys; from exogym.remote import SSHLauncher; sys.exit(SSHLauncher('hosts.json').launch('sleep.py'))"
    with open(project / "said", "w") as file:
        run = hosts.controller.start([PYTHON, "-c", code], cwd=project, stdout=file, stderr=file)
    wait_for(lambda: (project / "said").read_text().count("asleep") == count, run)
    for host in hosts.machines[:count]:
        assert sum("sleep 100" in line for line in host.processes().values()) >= 2
    return run


def test_a_dead_controller_leaves_nothing_behind(hosts: Hosts, project: Path) -> None:
    run = start_sleep(hosts, project, 2)
    run.kill()
    run.wait()
    assert hosts.left_over() == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_controller_waits_for_the_hosts(hosts: Hosts, project: Path, number: signal.Signals) -> None:
    run = start_sleep(hosts, project, 1)
    run.send_signal(number)
    status = run.wait(90)
    assert hosts.left_over(within_s=0) == {}  # by the time it ends, they have
    output = (project / "said").read_text()
    assert status == -number, output
    assert "the controller stopped the run or is lost: ending this host's processes" in output


@pytest.mark.slow
def test_a_dead_guard_leaves_nothing_behind(hosts: Hosts, project: Path) -> None:
    """What watches on the host is killed itself: torch's agent ends the ranks, and the controller says so."""
    (project / "wait.py").write_text("import time; open('asleep', 'w').close(); time.sleep(1000)")
    launcher = SSHLauncher(hosts.config(count=1), project=project, out=project / "runs")
    with hosts.controller.inside(), ThreadPoolExecutor(1) as pool:
        status = pool.submit(launcher.launch, "wait.py")
        wait_for((project / "asleep").exists)
        (guard,) = [pid for pid, line in hosts[0].processes().items() if f"{PYTHON} -u -c import sys,json" in line]
        os.kill(guard, signal.SIGKILL)
        assert status.result(90) == 255
    assert hosts.left_over() == {}


# Before anything is started


def odd_python(folder: Path, **files: str) -> str:
    """Write a Python that finds `files` before everything else; return its path."""
    packages = folder / "packages"
    for name, text in files.items():
        path = packages / name.replace("__SLASH__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec {PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@contextlib.contextmanager
def taken(hosts: Hosts, number: int, port: int) -> Iterator[None]:
    """Something listens on `port` of a host."""
    code = f"import socket; s = socket.create_server(('', {port})); print('listening', flush=True); s.accept()"
    process = hosts[number].start([PYTHON, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_every_failure_is_named_with_a_remedy(
    hosts: Hosts, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One look at many hosts, on each of which something else is wrong."""
    (project / "train.py").write_text("pass\n")
    other = tmp_path / "other"
    shutil.copytree(project, other)
    (other / "train.py").write_text("pass # changed\n")
    metadata = "Metadata-Version: 2.1\nName: {}\nVersion: 0.0.1\n"
    old = odd_python(
        tmp_path / "old",
        **{
            "exogym-0.0.1.dist-info__SLASH__METADATA": metadata.format("exogym"),
            "torch-0.0.1.dist-info__SLASH__METADATA": metadata.format("torch"),
            "exogym__SLASH____init__.py": "",
        },
    )
    late = odd_python(
        tmp_path / "late",
        **{"sitecustomize.py": "import sys, time\nnow = time.time\ntime.time = lambda: now() + 3600\n"},
    )
    ancient = odd_python(tmp_path / "ancient", **{"sitecustomize.py": "import sys\nsys.version_info = (3, 9, 1)\n"})
    config = hosts.config()
    entries = [config["master"], *config["workers"]]
    wrong: list[tuple[str, str, str, str]] = []  # address, check, seen, remedy

    def expect(number: int, check: str, seen: str, remedy: str, **fields: Any) -> None:
        entries[number].update(fields)
        wrong.append((entries[number]["address"], check, seen, remedy))

    expect(
        0,
        "port",
        "29500: Address already in use",
        "end the program that uses port 29500 on the master, or use another",
    )
    expect(1, "login", "Permission denied (publickey)", "ssh-copy-id")
    expect(2, "host key", "Host key verification failed", "compare the fingerprint")
    expect(3, "host key", "Host key verification failed", "ssh-keygen -R 10.77.0.13")
    expect(
        4,
        "python",
        "/nowhere/it's $(touch pwned)/python",
        "to a Python 3.11",
        python="/nowhere/it's $(touch pwned)/python",
    )
    expect(5, "exogym", "0.0.1 (code ", "install this machine's version", python=old)
    expect(5, "torch", "0.0.1; this machine has", "pip install torch==")
    expect(6, "clock", "+3600.", "network time", python=late)
    expect(7, "python", "3.9.1", "install Python 3.11 or later", python=ancient)
    expect(8, "project", "train.py (changed)", "copy the project to the host", path=str(other))
    expect(8, "way to the others", "10.77.0.21", "firewall")  # whose answers do not come back
    expect(9, "reachable", "Connection refused", "start the ssh server")
    expect(10, "address", "no interface of the host has the address 10.77.0.200; the host has", "workers[9].address",
           address="10.77.0.200", ssh_host=hosts[10].address)  # fmt: skip
    expect(11, "way to the others", "10.77.0.18", "firewall")
    expect(12, "device", "cuda:1; torch sees cpu", "workers[11].device", device="cuda:1")
    config["workers"].append({"address": "10.77.0.99", "device": "cpu"})
    wrong.append(("10.77.0.99", "reachable", "", "check that the host is on"))
    (project / "hosts.json").write_text(json.dumps(config))

    known, allowed = hosts.known_hosts.read_text(), hosts[1].authorized_keys.read_text()
    hosts[1].authorized_keys.write_text("")
    hosts.known_hosts.write_text(
        "".join(
            hosts[4].known_as(host.address) if number == 3 else host.known_as()
            for number, host in enumerate(hosts.machines)
            if number != 2
        )
    )
    assert hosts[9].sshd is not None
    hosts[9].sshd.kill()
    hosts[9].sshd.wait()
    block = ["ip", "route", "{}", "blackhole", f"{hosts[8].address}/32"]
    assert hosts[11].run([word.format("add") for word in block]).returncode == 0
    try:
        monkeypatch.chdir(project)
        with taken(hosts, 0, 29500), hosts.controller.inside():
            status = main(["doctor", "--hosts", "hosts.json"])
    finally:
        hosts[11].run([word.format("del") for word in block])
        hosts.known_hosts.write_text(known)
        hosts[1].authorized_keys.write_text(allowed)
        (hosts[9].folder / "sshd.pid").unlink()
        hosts[9].serve()
    printed = capsys.readouterr()
    assert status == 1 and printed.err == "", printed.out
    table, remedies = {}, {}
    at, last = "", ("", "")
    for line in printed.out.splitlines():
        if found := re.fullmatch(r"(\S+), ([\w ]+?): (.+)", line.strip()):
            remedies[found[1], found[2]] = found[3]
        elif found := re.match(r"(\S*)\s+(\w[\w ]*?)\s+(ok|FAILED)\s+(.*)", line):
            at = found[1] or at
            last = (at, found[2])
            if found[3] == "FAILED":
                table[last] = found[4].strip()
        elif re.match(" {30}", line) and last in table:  # a long cell goes on
            table[last] += " " + line.strip()
    assert table.keys() == remedies.keys() == {(address, check) for address, check, _, _ in wrong}, printed.out
    for address, check, seen, remedy in wrong:
        assert seen in table[address, check] and remedy in remedies[address, check], printed.out
    assert not list(tmp_path.rglob("pwned")) and not (Path.home() / "pwned").exists()


@pytest.mark.slow
def test_good_hosts_pass_and_it_is_said_whether_they_share_a_folder(
    hosts: Hosts, project: Path, tmp_path: Path
) -> None:
    """One that cannot be written fails."""
    (tmp_path / "other").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "checkpoints").write_text("a file, and no folder")
    config = hosts.config(count=2)
    with hosts.controller.inside():
        checks = check_hosts(config, project=project, save_dir="checkpoints")
        config["workers"][0]["path"] = str(tmp_path / "other")
        apart = check_hosts(config, project=project, save_dir="checkpoints", code=False)
        config["workers"][0]["path"] = str(tmp_path / "full")
        wrong = check_hosts(config, project=project, save_dir="checkpoints", code=False)
    assert all(check.ok and not check.remedy for check in checks)
    assert {check.check for check in checks} == {
        "login", "python", "clock", "torch", "exogym", "project", "disk", "device", "address", "port", "save_dir",
        "way to the others",
    }  # fmt: skip
    seen = [{check.host: check.seen for check in found if check.check == "save_dir"} for found in (checks, apart)]
    assert [here[hosts[0].address] for here in seen] == ["checkpoints can be written"] * 2
    assert seen[0][hosts[1].address] == "checkpoints is shared with the master"
    assert seen[1][hosts[1].address].startswith(
        "checkpoints is not shared with the master: this host keeps its own nodes' rows"
    )
    assert all(check.ok for check in apart)
    (failed,) = [check for check in wrong if not check.ok]
    assert (failed.host, failed.check) == (hosts[1].address, "save_dir") and "use a save_dir that" in failed.remedy
    assert not list(tmp_path.rglob(".shared*")) and not list(tmp_path.rglob(".writable*"))


def test_hosts_that_are_not_ready_start_nothing(hosts: Hosts, project: Path) -> None:
    (project / "train.py").write_text(TRAIN)
    launcher = SSHLauncher(hosts.config(count=2, python_env="/nowhere/python"), project=project, out=project / "runs")
    with hosts.controller.inside(), pytest.raises(ExoGymError, match="the hosts are not ready") as caught:
        launcher.launch("train.py")
    assert f"{hosts[1].address}: python: /nowhere/python" in str(caught.value) and not (project / "runs").exists()
