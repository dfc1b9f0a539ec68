"""Real hosts, what takes minutes: every strategy on four of them, and cables that are pulled."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hosts import Hosts, fixtures
from hosts.fixtures import CONFIG, TASK, wait_for
from paths import TESTS
from strategies import STRATEGIES

from exogym import LocalTrainer, load_model
from exogym.machines.remote import SSHLauncher
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem

hosts, project, tidy = fixtures.hosts, fixtures.project, fixtures.tidy  # where pytest looks for them
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tidy")]
COUNT = 4
EXOGYM = str(Path(sys.executable).with_name("exogym"))
FIT = {"max_steps": 24, "batch_size": 8}

EVERY = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from strategies import STRATEGIES
from exogym import NetworkTrainer
from exogym.testing import fingerprint, small_problem
for name in STRATEGIES:
    model, data = small_problem()
    NetworkTrainer("no file", model, data, loss_fn=torch.nn.functional.mse_loss).fit(
        STRATEGIES[name].make(), num_nodes=4, max_steps=24, batch_size=8
    )
    with open(sys.argv[2], "a") as file:
        file.write(f"{name}: {fingerprint(model)}\\n")
"""


@pytest.mark.parametrize("count", [3, 4])
def test_every_strategy_on_hosts_ends_in_the_bits_of_the_simulation(hosts: Hosts, project: Path, count: int) -> None:
    """Four nodes, whatever the number of hosts; some of the strategies say what each of four does."""
    (project / "every.py").write_text(EVERY)
    launcher = SSHLauncher(hosts.config(count=count), project=project, out=project / "runs")
    with hosts.controller.inside():
        assert launcher.launch("every.py", str(TESTS), str(project / "found")) == 0
    found = (project / "found").read_text().splitlines()
    expected = []
    for name in STRATEGIES:
        model, data = small_problem()
        trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(STRATEGIES[name].make(), num_nodes=4, **FIT)
        expected += [f"{name}: {fingerprint(model)}"] * count
    assert sorted(found) == sorted(expected)


def start(hosts: Hosts, project: Path, *words: str) -> subprocess.Popen[str]:
    """Start a run of 200 steps on two hosts; wait for the first checkpoint that it writes."""

    def checkpoints() -> set[str]:
        return {path.name for path in (project / "checkpoints").glob("step_*")}

    before = checkpoints()
    (project / "mytask.py").write_text(TASK)
    (project / "config.ini").write_text(CONFIG.replace("steps = 80", "steps = 200"))
    hosts.file(project / "hosts.json", count=2)
    with open(project / "said", "a") as file:
        run = hosts.controller.start(
            [EXOGYM, "distributed-train", "small", *words], cwd=project, stdout=file, stderr=file
        )
    wait_for(lambda: checkpoints() - before, run)
    return run


def is_undisturbed(project: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether the last run ended in the bits of the simulation."""
    monkeypatch.syspath_prepend(project)
    sys.modules.pop("mytask", None)
    import mytask  # type: ignore[import-not-found]

    task = mytask.problem()
    undisturbed = LocalTrainer(task.make_model(), task.train, task.val)
    undisturbed.fit(DiLoCoStrategy(H=10, lr=0.01), num_nodes=2, max_steps=200, batch_size=8)
    last = max((project / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    model = load_model(task.make_model(), last / "fit_1.model.safetensors")
    return fingerprint(model) == fingerprint(undisturbed.model)


def test_a_cable_pulled_for_20_seconds_costs_nothing(
    hosts: Hosts, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(hosts, project)
    hosts.cut(hosts[1])
    time.sleep(20)
    hosts.restore(hosts[1])
    assert run.wait(240) == 0, (project / "said").read_text()
    assert "starting again" not in (project / "said").read_text()
    assert is_undisturbed(project, monkeypatch)


def test_a_cable_pulled_for_good_ends_the_run_which_can_be_resumed(
    hosts: Hosts, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that is cut off ends its part by itself; then the controller is killed and started once more."""
    run = start(hosts, project)
    hosts.cut(hosts[1])
    try:
        assert run.wait(300) != 0
        assert f"the connection to {hosts[1].address}" in (project / "said").read_text()
        assert hosts.left_over(within_s=90) == {}
    finally:
        hosts.restore(hosts[1])
    run = start(hosts, project, "--resume")
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert hosts.left_over() == {}
    assert start(hosts, project, "--resume").wait(240) == 0, (project / "said").read_text()
    assert is_undisturbed(project, monkeypatch)
