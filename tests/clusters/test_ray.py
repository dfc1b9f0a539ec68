"""Runs on clusters of Ray's own processes, which end in the bits of the simulation whatever is lost or joins.

A process of Ray's takes seconds to start, so one script holds what the short test looks at; the others are slow.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from raylets import raylets
from torch.nn.functional import mse_loss

from exogym import LocalTrainer, NetworkTrainer, Placement
from exogym.clusters.ray import Ray
from exogym.clusters.ray.cluster import check_versions, looker
from exogym.clusters.ray.engine import _Watch
from exogym.core.engine import EngineOptions
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

if importlib.util.find_spec("ray") is None:  # importing it takes a second of a core
    pytest.skip("needs Ray", allow_module_level=True)

SHORT = "--num_nodes 6 --H 5 --batch_size 4 --block_size 16 --n_layer 1 --n_embd 16 --write 0"
TEXT = "\n\n".join(f"ANN:\nThe {i} bells of number {i * i} ring." for i in range(400))

PROBLEM = """
import os, signal, sys, threading
from pathlib import Path
import torch
from exogym import LocalTrainer, Placement
from averages import TimeAverage
from exogym.callbacks import Every
from exogym.clusters.ray import Ray
from exogym.errors import ArgumentError, ExoGymError
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

def trainer():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return LocalTrainer(torch.nn.Linear(4, 1), data, data, loss_fn=torch.nn.functional.mse_loss)

GIVEN = dict(num_nodes=4, max_steps=20, batch_size=4)

def trained(**more):
    made = trainer()
    made.fit(DiLoCoStrategy(H=4, lr=0.01), **GIVEN, **more)
    return made

def refused(**more):
    try:
        trained(**more)
    except ExoGymError as error:
        return f"{type(error).__name__}: {error}"
"""


def script(folder: Path, source: str, environment: dict[str, str]) -> str:
    """Run a script that begins with PROBLEM in the folder; return what it printed."""
    path = folder / "script.py"
    path.write_text(PROBLEM + source)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    given = environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(path)], cwd=folder, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_cluster_started_here(tmp_path: Path) -> None:
    """The bits of the simulation, also when an actor is killed; what cannot be is refused before anything starts."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
    said = script(tmp_path, LOCAL, environment)
    assert "all is well" in said, said
    assert "starting again from the last checkpoint, if any (1 of 1)" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engine": "rai"}, "did you mean 'ray'"), ({"engine": 3}, "must be 'ray'"),
        ({"cpus_per_process": 2}, "cpus_per_process=2 needs engine"),
        ({"engine": "ray", "cpus_per_process": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_options_that_are_refused(wrong: dict[str, Any], said: str) -> None:
    model, data = small_problem()
    with pytest.raises(ArgumentError, match=said):
        placement = Placement(**wrong)
        LocalTrainer(model, data, loss_fn=mse_loss).fit(DiLoCoStrategy(H=4), num_nodes=2, placement=placement)


def test_hosts_of_a_file_are_not_ray() -> None:
    model, data = small_problem()
    with pytest.raises(ArgumentError, match="leave processes and engine out, or train with LocalTrainer"):
        NetworkTrainer({"master": "localhost"}, model, data).fit(
            DiLoCoStrategy(H=4), max_steps=2, placement=Placement(engine="ray")
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"adress": "auto"}, "did you mean 'address'"), ({"address": ""}, "host:port"), ({"address": 1}, "host:port"),
        ({"placement": "near"}, "is not one of 'pack', 'spread'"), ({"runtime_env": "."}, "must be a dict"),
    ],
)  # fmt: skip
def test_clusters_that_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Ray(**wrong)


@pytest.mark.parametrize(("name", "there"), [("Python", "3.10.1"), ("torch", "2.0.0"), ("exogym", None)])
def test_machines_that_are_not_alike(name: str, there: str | None) -> None:
    """The error names the machine and what it has; alike is no error."""
    here = looker()()
    check_versions({"10.0.0.1": here, "10.0.0.2": here})
    what = f"10.0.0.2 has {name} {there}, but this machine has {here[name]}" if there else f"10.0.0.2 has no {name}"
    with pytest.raises(
        ArgumentError, match=re.escape(f"versions on the Ray cluster differ: {what}. Install the same versions there")
    ):
        check_versions({"10.0.0.1": here, "10.0.0.2": here | {name: there}})


LOCAL = """
class Falls:
    '''Ends its process the hard way, once.'''
    def __call__(self, loop):
        mark = Path("fell")
        if loop.step == 12 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

def torn(loop):
    raise ExoGymError("torn on purpose")

expected, mean = (TimeAverage(0.5) for _ in range(2))
simulated = trained(callbacks=[expected])
kept = dict(save_dir="kept", checkpoint_interval=4)
away = trained(placement=Placement(engine="ray", max_restarts=1), callbacks=[Every(4, Falls()), mean], **kept)
assert Path("fell").exists()
assert fingerprint(away.model) == fingerprint(simulated.model)
assert away.traffic == simulated.traffic
for name, x in expected.state().items():
    assert mean.state()[name].equal(x), name
losses = simulated.history.column("train_loss")[1]
assert away.history.column("train_loss")[1].tolist() == losses.tolist()

import ray, subprocess
assert ray.util.get_node_ip_address() == "127.0.0.1"
listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout
own = [line for line in listening.splitlines() if "ray" in line or "gcs_server" in line]
assert own and all("127.0.0.1" in line.split()[3] for line in own), listening

found = refused(placement=Placement(engine="ray", cpus_per_process=64), processes=4)
assert "no room for 4 processes of 64 CPU each" in found, found
found = refused(placement=Placement(engine="ray"), callbacks=[lambda loop, lock=threading.Lock(): None])
assert "cannot be pickled" in found, found
found = refused(placement=Placement(engine="ray"), callbacks=[Every(4, torn)])
assert found == "ExoGymError: torn on purpose", found
found = refused(placement=Placement(engine=Ray("127.0.0.1:1")))
assert "Ray is connected already" in found, found
print("all is well")
"""


def nanogpt(folder: Path, environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
    """Begin the example, cut short."""
    (folder / "tinyshakespeare.txt").write_text(TEXT, encoding="utf-8")
    words = [sys.executable, str(ROOT / "run" / "nanogpt_diloco.py"), *SHORT.split(), "--data", str(folder), *more]
    given = environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(run: subprocess.Popen[str]) -> str:
    """Return what a run that has gone well said on stderr."""
    out, err = run.communicate()
    assert run.returncode == 0, out + err
    return err


def wait_for_checkpoint(folder: Path, run: subprocess.Popen[str]) -> None:
    while not list(folder.glob("step_*/run.json")):
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)


@pytest.mark.parametrize(("process", "name"), [(0, "node 0"), (1, "nodes 1 to 3")])
def test_the_error_of_a_lost_process_names_its_nodes(process: int, name: str) -> None:
    watch = _Watch([], [], EngineOptions(4, 2, torch.device("cpu"), placement=[[0], [1, 2, 3]]), {})
    watch.ended = {process: ("gone", "the worker died")}
    assert str(watch._cause()).startswith(f"worker process {process} ({name}) is lost: the worker died")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "an actor is killed", "a raylet is killed", "a raylet joins"])
def test_the_example_on_three_raylets(tmp_path: Path, what: str) -> None:
    steps = ["--max_steps", "40" if what == "nothing" else "1500"]
    ended(nanogpt(tmp_path, dict(os.environ), *steps, "--save", "simulated.safetensors"))
    with raylets(2 if what == "a raylet joins" else 3) as cluster:
        more = ["--engine", "ray", "--checkpoints", "kept", "--save", "away.safetensors"]
        run = nanogpt(tmp_path, cluster.environment, *steps, *more)
        if what != "nothing":
            wait_for_checkpoint(tmp_path / "kept", run)
        if what == "an actor is killed":
            os.kill(cluster.actors()[-1], signal.SIGKILL)
        elif what == "a raylet is killed":
            cluster.say("kill")
        elif what == "a raylet joins":
            cluster.say("add")
        said = ended(run)
    expected = {
        "nothing": "",
        "an actor is killed": "is lost",
        "a raylet is killed": "starting again from the last checkpoint, if any (1 of 3)",
        "a raylet joins": "there is room for 3 processes instead of 2",
    }
    assert expected[what] in said, said
    simulated, away = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("simulated", "away"))
    assert simulated == away


@pytest.mark.slow
def test_the_page_word_for_word(tmp_path: Path) -> None:
    """Its commands on a cluster started here; the example is cut short."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", page.split("## Ray\n")[1].split("## SLURM\n")[0], re.S)
    install, example, sweep = "".join(blocks).splitlines()
    assert install == "pip install 'exogym[ray]'"
    assert example.startswith("python run/nanogpt_diloco.py ") and sweep.startswith("exogym sweep ")
    environment = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
    ended(nanogpt(tmp_path, environment, "--max_steps", "10", *example.split()[2:]))
    assert list((tmp_path / "runs" / "gpt").glob("step_*"))
    given = environment | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "exogym", *sweep.split()[1:]]
    subprocess.run(words, cwd=tmp_path, env=given, check=True, capture_output=True)
    assert len(list((tmp_path / "runs" / "on_ray").glob("*/outcome.json"))) == 6


@pytest.mark.slow
def test_what_a_cluster_lacks(tmp_path: Path) -> None:
    """Other sources of ExoGym, code that is not there, no room, an address that does not answer."""
    (tmp_path / "other" / "exogym").mkdir(parents=True)
    (tmp_path / "other" / "exogym" / "__init__.py").write_text("__version__ = '0.0.9'")
    (tmp_path / "newer" / "torch-9.9.9.dist-info").mkdir(parents=True)
    (tmp_path / "newer" / "torch-9.9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    with raylets(2) as cluster:
        said = script(tmp_path, LACKING, cluster.environment)
    assert "all is well" in said, said


LACKING = """
import csv
import ray

address = os.environ["RAY_ADDRESS"]
found = refused(placement=Placement(engine=Ray("127.0.0.1:1")))
assert "no Ray cluster answers at address='127.0.0.1:1'" in found, found
found = refused(placement=Placement(engine=Ray("ray://127.0.0.1:1")))
assert "Ray's client" in found, found
found = refused(placement=Placement(engine=Ray("nonsense")))
assert "no Ray cluster answers at address='nonsense'" in found, found
def at(path):
    return Ray(address, runtime_env={"env_vars": {"PYTHONPATH": os.path.abspath(path)}})

found = refused(placement=Placement(engine=at("other")))
assert "versions on the Ray cluster differ" in found and "has exogym" in found, found
ray.shutdown()
found = refused(placement=Placement(engine=at("newer")))
assert "versions on the Ray cluster differ" in found and "has torch 9.9.9, here is " in found, found
ray.shutdown()
found = refused(placement=Placement(engine="ray"), processes=3)
assert "no room for 3 processes of 1 CPU each" in found and "2 machines (1 CPU; 1 CPU)" in found, found
found = refused(placement=Placement(engine="ray"), device="cuda")
assert "no room for 1 process of 1 CPU, 1 GPU each" in found, found
found = refused(placement=Placement(engine="ray"), device="cpu", processes=5)
assert "every process needs a node" in found, found
assert fingerprint(trained(placement=Placement(engine=Ray(placement="spread"))).model) == fingerprint(trained().model)

from exogym.cli import main
from exogym.study.sweep import sweep

def files(folder):
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}

def figures(folder):
    with open(Path(folder) / "summary.csv") as file:
        rows = list(csv.DictReader(file))
    return [[row[name] for name in ("cell", "val_loss", "val_accuracy_std", "tx_bytes")] for row in rows]

asked = dict(max_steps=10, seeds=2, num_nodes=2)
here, there = sweep("digits", {"H": [2, 5]}, out="here", **asked), "there"
words = ["sweep", "--dataset", "digits", "--sweep", "H=2,5", "--steps", "10", "--seeds", "2", "--nodes", "2"]
assert main([*words, "--engine", "ray", "--out", there]) == 0
assert figures("there") == figures("here") and len(figures("there")) == 2
assert files("there") == files("here"), files("there") ^ files("here")
print("all is well")
"""
