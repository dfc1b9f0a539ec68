"""Training on hosts that are lost and come back.

The law: such a run has the bits of the simulation with the same outages.
"""

import csv
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Hosts, fixtures
from hosts.fixtures import wait_for
from paths import TESTS

from exogym import LocalTrainer, load_model
from exogym.core.record.run_folder import read_status
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, SPARTAStrategy
from exogym.testing import fingerprint, small_problem

hosts, project = fixtures.hosts, fixtures.project  # where pytest looks for them
COUNT = 3
STEPS = 240
STRATEGIES: dict[str, Any] = {
    "diloco": lambda: DiLoCoStrategy(H=5, lr=0.01),
    "long diloco": lambda: DiLoCoStrategy(H=50, lr=0.01),
    "fedavg": lambda: FedAvgStrategy(H=5, lr=0.01),
    "sparta": lambda: SPARTAStrategy(lr=0.01),
    "ddp": lambda: SimpleReduceStrategy(lr=0.01),
}


class InOrder(torch.utils.data.IterableDataset):
    """The examples of `data` with these positions, in order."""

    def __init__(self, data: Any, first: int = 0, step: int = 1):
        self.data, self.first, self.step = data, first, step

    def __iter__(self) -> Any:
        return (self.data[k] for k in range(self.first, len(self.data), self.step))


DATA: dict[str, Any] = {
    "one for all": InOrder,
    "one for each": lambda data: lambda rank, num_nodes, is_train: InOrder(data, rank, num_nodes),
}
TRAIN = """
import os, sys, time, torch
from exogym import NetworkTrainer, Placement
from exogym.callbacks import Every
from exogym.machines.remote.elastic import recovery
from exogym.core.training.loop import TrainingLoop
from exogym.testing import small_problem
sys.path.insert(0, sys.argv[1])
from machines.remote.test_elastic import DATA, STEPS, STRATEGIES

class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        time.sleep(0.002)
        while os.path.exists("hang" + (rank := os.environ.get("EXOGYM_FIRST_RANK", ""))):
            open("hangs" + rank, "w").close()
            time.sleep(0.01)
        return self.data[i]

def note(loop):
    with open("step.tmp", "w") as file:
        file.write(f"{loop.step} {len(loop.fleet.comm.present)}")
    os.replace("step.tmp", "step")
    if len(loop.fleet.comm.present) < loop.fleet.num_nodes:
        time.sleep(1)  # a busy machine takes its time to start the lost one again

while os.path.exists("away" + os.environ.get("EXOGYM_FIRST_RANK", "")):
    time.sleep(0.05)  # started again, and not back yet

if sys.argv[7] and sys.argv[7] == os.environ.get("EXOGYM_FIRST_RANK"):
    TrainingLoop.end = lambda loop: os.kill(os.getpid(), 9)

ship = recovery.ship

def noted(wire, tensors, source, takers):
    if wire.owner[source] == wire.process:
        open("shipped", "a").write("".join(f"{name}\\n" for name in tensors))
    return ship(wire, tensors, source, takers)

recovery.ship = noted
model, data = small_problem()
model.register_buffer("read_everywhere", torch.arange(4.0), persistent=False)
if not sys.argv[6]:  # a run that saves is another one where this differs
    model.register_buffer("of_this_process", torch.tensor(float(os.getpid())), persistent=False)
train = DATA[sys.argv[10]](Slow(data)) if sys.argv[10:] else Slow(data)
trainer = NetworkTrainer(
    "hosts.json", model, train, data, loss_fn=torch.nn.functional.mse_loss, min_hosts=int(sys.argv[3])
)
trainer.fit(
    STRATEGIES[sys.argv[2]](), max_steps=int(sys.argv[4]), batch_size=8,
    placement=Placement(max_restarts=int(sys.argv[5]), hang_s=10),
    callbacks=[Every(50 if sys.argv[9:10] == ["rare"] else 8, note)], save_dir=sys.argv[6] or None,
    checkpoint_interval=100 if sys.argv[6] else None, resume=sys.argv[8:9] == ["resume"],
    val_interval=1000 if sys.argv[9:10] == ["rare"] else None,
)
print("outages", trainer.outages)
"""


def start(
    hosts: Hosts, project: Path, name: str, min_hosts: int, steps: int = STEPS, restarts: int = 1, save_dir: str = "",
    dies: str = "", more: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Start the training; return the process once it has trained 50 steps."""
    (project / "train.py").write_text(TRAIN)
    hosts.file(project / "hosts.json")
    with open(project / "said", "w") as file:
        options = [name, str(min_hosts), str(steps), str(restarts), save_dir, dies, *more]
        words = ["train.py", str(TESTS), *options]
        run = hosts.controller.start([sys.executable, *words], cwd=project, stdout=file, stderr=file)
    wait_for(lambda: progress(project)[0] >= 50, run)
    return run


def progress(project: Path) -> tuple[int, int]:
    """Return (step, nodes that are there), as rank 0 saw them last."""
    path = project / "step"
    step, present = path.read_text().split() if path.exists() else ("0", "0")
    return int(step), int(present)


def kill_worker(hosts: Hosts, number: int) -> None:
    (worker,) = [pid for pid, line in hosts[number].processes().items() if "runner.py" in line]
    os.kill(worker, signal.SIGKILL)


def is_the_simulation(project: Path, name: str, steps: int = STEPS, kind: str = "") -> dict[int, Any]:
    """Hold the run's model and losses against the simulation with the run's own outages; return these."""
    (folder,) = (project / "runs").iterdir()
    facts = json.loads((folder / "fit_1.facts.json").read_text())
    away = {int(k): [tuple(x) for x in v] for k, v in facts["description"]["outages"].items()}
    found = fingerprint(load_model(small_problem()[0], folder / "fit_1.model.safetensors"))
    for faults, same in ((Faults(absent=away, forget=True), True), (Faults(absent=away), False), (None, False)):
        model, data = small_problem()
        train = DATA[kind](data) if kind else data
        trainer = LocalTrainer(model, train, data, loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(STRATEGIES[name](), num_nodes=COUNT, max_steps=steps, batch_size=8, faults=faults)
        returned = any(last is not None for spans in away.values() for _, last in spans)
        if same or (away and faults is None) or (returned and name != "ddp"):
            assert (fingerprint(model) == found) is same, (faults and faults.given_arguments, away)
        if same:
            assert trainer.traffic == facts["traffic"]
    is_told_without_a_gap(folder, steps, away)
    return away


def is_told_without_a_gap(folder: Path, steps: int, away: dict[int, Any]) -> None:
    """Hold the run folder of rank 0 against what happened: each step of each node that was there for it, once."""
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("done", steps)
    rows = list(map(json.loads, (folder / "records.jsonl").read_text().splitlines()))
    for node in range(COUNT):
        gone = {step for first, last in away.get(node, []) for step in range(first, (last or steps + 1))}
        told = [row["step"] for row in rows if row["node"] == node]
        assert told == [step for step in range(1, steps + 1) if step not in gone], node
    history = csv.DictReader((folder / "fit_1.history.csv").read_text().splitlines())
    losses = [float(row["train_loss"]) for row in history if row["train_loss"]]
    assert losses == [row["train_loss"] for row in rows if row.get("train_loss") is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("diloco", 1), ("sparta", 0)])
def test_a_killed_worker_is_done_without_and_comes_back(hosts: Hosts, project: Path, name: str, number: int) -> None:
    """The first rank's too: then another one is the first meanwhile."""
    run = start(hosts, project, name, min_hosts=1)
    kill_worker(hosts, number)
    assert run.wait(300) == 0, (project / "said").read_text()
    away = is_the_simulation(project, name)
    ((first, last),) = away[number]
    assert set(away) == {number} and last is not None and 1 < first < last <= STEPS, away
    assert hosts.left_over() == {}
    shipped = [name for name in (project / "shipped").read_text().split("\n") if name.startswith("constant")]
    assert shipped == ["constant of_this_process"], "who comes back is sent only what it has otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
def test_a_killed_worker_goes_on_at_its_place_in_an_iterable(hosts: Hosts, project: Path, kind: str) -> None:
    run = start(hosts, project, "diloco", min_hosts=1, more=["", "", kind])
    kill_worker(hosts, 1)
    assert run.wait(300) == 0, said_by(project)
    away = is_the_simulation(project, "diloco", kind=kind)
    ((_, last),) = away[1]
    assert set(away) == {1} and last is not None


@pytest.mark.slow
def test_a_killed_worker_that_comes_back_when_all_is_done_is_told_so(hosts: Hosts, project: Path) -> None:
    run = start(hosts, project, "diloco", min_hosts=1, steps=100)
    (project / "away1").touch()
    kill_worker(hosts, 1)
    wait_for(lambda: any((path / "fit_1.facts.json").exists() for path in (project / "runs").iterdir()), run)
    time.sleep(2.0)  # the others have ended
    (project / "away1").unlink()
    assert run.wait(100) == 0, said_by(project)
    away = is_the_simulation(project, "diloco", 100)
    ((_, last),) = away[1]
    assert set(away) == {1} and last is None
    assert "the run has already finished" in said_by(project) and "trying again" not in said_by(project)
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_a_worker_that_hangs_is_done_without_and_comes_back(hosts: Hosts, project: Path) -> None:
    """In an endless loop, while its thread goes on to tell the membership server that it is there."""
    run = start(hosts, project, "diloco", min_hosts=1)
    (project / "hang1").touch()
    wait_for(lambda: "rank 1 hangs" in said_by(project), run)
    assert "in __getitem__" in said_by(project)
    (project / "hang1").unlink()
    assert run.wait(300) == 0, said_by(project)
    away = is_the_simulation(project, "diloco")
    assert set(away) == {1} and "rank 1 was killed by signal 9 (SIGKILL): WorkerError: rank 1 hangs" in said_by(project)
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_who_dies_when_all_is_done_takes_nothing_along(hosts: Hosts, project: Path) -> None:
    """The first rank, after the last meeting and before it writes: another host has the results."""
    run = start(hosts, project, "fedavg", min_hosts=1, steps=150, restarts=0, dies="0")
    assert run.wait(300) == 0, said_by(project)
    assert "rank 0 was killed by signal 9" in said_by(project)
    assert is_the_simulation(project, "fedavg", 150) == {}
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_with_min_hosts_lost_the_run_ends_and_says_why(hosts: Hosts, project: Path) -> None:
    run = start(hosts, project, "diloco", min_hosts=3, restarts=0)
    kill_worker(hosts, 2)
    assert run.wait(300) != 0
    text = (project / "said").read_text()
    assert "2 hosts are left, but min_hosts=3" in text and "rank 2 was killed by signal 9" in text
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_stopped_in_the_middle_of_a_stretch_without_one_it_comes_back_at_the_end_of_that(
    hosts: Hosts, project: Path
) -> None:
    """Ctrl-C while a host is away; the resumed run has all hosts again, and takes up the stretch where it stood."""
    run = start(hosts, project, "long diloco", min_hosts=1, restarts=0, save_dir="checkpoints", more=["", "rare"])
    kill_worker(hosts, 1)
    wait_for(lambda: "2 of 3 ranks continue" in said_by(project), run)
    wait_for(lambda: progress(project) >= (100, 0) and progress(project)[1] == 2, run)
    (project / "hang0").touch()
    wait_for((project / "hangs0").exists, run)  # in its first step
    run.send_signal(signal.SIGINT)
    wait_for(lambda: "[10.77.0.10] exogym: the controller stopped the run" in said_by(project), run)
    time.sleep(0.5)
    (project / "hang0").unlink()
    assert run.wait(300) != 0
    assert "local steps per node" in said_by(project), said_by(project)
    shutil.rmtree(project / "runs")
    (project / "step").unlink()
    run = start(hosts, project, "long diloco", min_hosts=1, save_dir="checkpoints", more=["resume", "rare"])
    assert run.wait(300) == 0, said_by(project)
    away = is_the_simulation(project, "long diloco")
    ((first, last),) = away[1]
    assert set(away) == {1} and first <= 101 < last and last % 50 == 1, away
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_when_all_are_lost_they_go_on_from_a_checkpoint_that_lacks_the_rows_of_one(hosts: Hosts, project: Path) -> None:
    run = start(hosts, project, "diloco", min_hosts=1, restarts=2, save_dir="checkpoints")
    (project / "away1").touch()
    kill_worker(hosts, 1)
    wait_for(lambda: (project / "checkpoints" / "step_0000000100").exists(), run)
    rows = {path.name for path in (project / "checkpoints" / "step_0000000100").glob("rows*")}
    kill_worker(hosts, 0)
    kill_worker(hosts, 2)
    (project / "away1").unlink()
    assert run.wait(300) == 0, said_by(project)
    away = is_the_simulation(project, "diloco")
    assert rows == {"rows-0-0.safetensors", "rows-2-2.safetensors"} and away[1][0][1] >= 101, (rows, away)
    assert hosts.left_over() == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ddp"])
def test_a_host_that_is_cut_off_for_minutes_is_done_without_and_comes_back(
    hosts: Hosts, project: Path, name: str
) -> None:
    """After a minute the others go on; the host ends its part by itself; the controller starts it again."""
    steps = 3000
    run = start(hosts, project, name, min_hosts=1, steps=steps, restarts=0)
    hosts.cut(hosts[1])
    try:
        wait_for(lambda: progress(project)[1] == 2, run, within_s=100)
    finally:
        hosts.restore(hosts[1])
    wait_for(lambda: progress(project)[1] == 3, run, within_s=150)
    assert run.wait(600) == 0, (project / "said").read_text()
    away = is_the_simulation(project, name, steps)
    assert set(away) == {1} and len(away[1]) == 1
    assert "trying again in 5 s" in said_by(project)
    assert hosts.left_over() == {}


def said_by(project: Path) -> str:
    return (project / "said").read_text()
