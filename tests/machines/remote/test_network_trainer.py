"""NetworkTrainer without hosts: what a process of the world does, profiles, results, and what is refused early."""

import ast
import inspect
import json
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from in_order import DATA, InOrder, own
from processes import free_port
from processes import world as in_a_world
from torch import nn

from exogym import LocalTrainer, NodeMesh, Placement
from exogym.cli import main
from exogym.core.engine.equal_start import sum_of
from exogym.core.record.run_folder import FILES, read_status
from exogym.errors import ArgumentError, ExoGymError
from exogym.machines.remote import NetworkTrainer, SSHLauncher, check_hosts, job, network_trainer, results, ssh, watch
from exogym.machines.remote.channel import Logs
from exogym.machines.remote.onhost import probe
from exogym.machines.remote.profile import RunProfile, load_profile
from exogym.machines.remote.world import LaunchedPart
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint, small_problem

TWO_HERE = {
    "master": {"address": "localhost", "device": "cpu"}, "workers": [{"address": "127.0.0.1", "device": "cpu"}],
    "master_port": free_port(),
}  # fmt: skip
FIT = {"num_nodes": 2, "max_steps": 6, "batch_size": 8}
MSE = nn.functional.mse_loss


def simulated(**fit: Any) -> LocalTrainer:
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=MSE)
    trainer.fit(DiLoCoStrategy(H=3, lr=0.01), **FIT | fit)
    return trainer


def remote(hosts: Any = None) -> tuple[NetworkTrainer, nn.Module]:
    model, data = small_problem()
    return NetworkTrainer(hosts or {"master": "localhost"}, model, data, data, loss_fn=MSE), model


def strategy() -> DiLoCoStrategy:
    return DiLoCoStrategy(H=3, lr=0.01)


def test_the_arguments_are_those_of_local_trainer() -> None:
    here, there = (dict(inspect.signature(trainer.fit).parameters) for trainer in (NetworkTrainer, LocalTrainer))
    assert list(here) == list(there)
    unlike = [name for name in here if (here[name].default, here[name].kind) != (there[name].default, there[name].kind)]
    assert unlike == ["num_nodes"] and here["num_nodes"].default is None


# In a process of the world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A world of one process, as the launcher would describe it; fits count from 1."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "EXOGYM_NETWORK": "1", "EXOGYM_PROJECT": str(tmp_path)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network_trainer, "_fits", iter(range(1, 100)))
    return monkeypatch


def await_fit(world: pytest.MonkeyPatch, number: int) -> None:
    """A controller waits for fit `number`; the script starts over."""
    world.setenv("EXOGYM_NETWORK_FIT", str(number))
    world.setenv("EXOGYM_NETWORK_RUN", "run")
    world.setattr(network_trainer, "_fits", iter(range(1, 100)))


def test_a_process_trains_leaves_the_results_and_ends(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    await_fit(world, 1)
    trainer, model = remote("no such hosts file")  # a process on a host needs none
    with pytest.raises(SystemExit) as ended:
        trainer.fit(strategy(), **FIT)
    assert ended.value.code == 0
    expected = simulated()
    assert fingerprint(model) == fingerprint(expected.model)
    model = small_problem()[0]
    found = results.read(tmp_path / "runs" / "run", 1, model)
    assert fingerprint(model) == fingerprint(expected.model)
    assert found.traffic == expected.traffic and found.description == trainer.description
    assert [row["train_loss"] for row in found.history] == [row["train_loss"] for row in expected.history]


def told(folder: Path) -> list[tuple[int, float]]:
    """Step and training loss of the records of a run folder."""
    rows = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [(row["step"], row["train_loss"]) for row in rows]


def test_a_run_on_hosts_is_told_in_its_folder(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each fit of the script has one; a start that begins anew puts what was told before aside."""
    folder, wanted = tmp_path / "runs" / "run", [(row["step"], row["train_loss"]) for row in simulated().history]
    await_fit(world, 1)
    with pytest.raises(SystemExit):
        remote()[0].fit(strategy(), **FIT)
    assert told(folder) == wanted
    await_fit(world, 2)
    trainer, _ = remote()
    trainer.fit(strategy(), **FIT)
    with pytest.raises(SystemExit):
        trainer.fit(strategy(), **FIT)
    for there in (folder, folder / "fit_2"):
        status = read_status(there)
        assert (status["state"], status["step"], status["total_steps"]) == ("done", 6, 6)
        assert all((there / name).is_file() for name in FILES)
    await_fit(world, 1)
    world.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(SystemExit):
        remote()[0].fit(strategy(), **FIT | {"max_steps": 3})
    assert told(folder / "start_1") == wanted and told(folder) == wanted[: len(told(folder))] and told(folder)


def test_a_run_whose_folder_is_named_is_told_there_alone(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    await_fit(world, 1)
    with pytest.raises(SystemExit):
        remote()[0].fit(strategy(), **FIT, run_dir=tmp_path / "named")
    assert read_status(tmp_path / "named")["state"] == "done" and read_status(tmp_path / "runs" / "run") == {}


def test_an_earlier_fit_gives_what_it_gave(world: pytest.MonkeyPatch) -> None:
    """A script with two fits runs twice: for the second, the first is not trained again, and its result is there."""
    await_fit(world, 1)
    trainer, _ = remote()
    with pytest.raises(SystemExit):
        trainer.fit(strategy(), **FIT)
    await_fit(world, 2)
    trainer, model = remote()
    assert trainer.fit(strategy(), **FIT | {"max_steps": 10**9}) is model  # and so not trained
    once = simulated()
    assert fingerprint(model) == fingerprint(once.model)
    assert trainer.history.column("val_loss")[1].tolist() == once.history.column("val_loss")[1].tolist()
    with pytest.raises(SystemExit):
        trainer.fit(SimpleReduceStrategy(lr=0.01), **FIT)
    once.fit(SimpleReduceStrategy(lr=0.01), **FIT)
    assert fingerprint(model) == fingerprint(once.model)


def test_where_nobody_waits_the_script_goes_on(world: pytest.MonkeyPatch) -> None:
    trainer, model = remote()
    assert trainer.fit(strategy(), **FIT) is model
    assert fingerprint(model) == fingerprint(simulated().model)


def test_under_torchrun_it_is_a_local_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    trainer, model = remote("no such hosts file")
    trainer.fit(strategy(), **FIT)
    assert fingerprint(model) == fingerprint(simulated().model)
    assert LaunchedPart.of_this_process() is None


def test_a_restarted_process_goes_on(world: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    folder = {"save_dir": tmp_path / "checkpoints", "checkpoint_interval": 3}
    remote()[0].fit(strategy(), **FIT | folder | {"max_steps": 3})
    with pytest.raises(ArgumentError, match="already contains checkpoints"):  # the control
        remote()[0].fit(strategy(), **FIT | folder)
    world.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    trainer, model = remote()
    trainer.fit(strategy(), **FIT | folder)
    assert fingerprint(model) == fingerprint(simulated().model)


def test_the_device_is_the_hosts(world: pytest.MonkeyPatch) -> None:
    world.setenv("EXOGYM_DEVICE", "meta")
    with pytest.raises(ArgumentError, match="device='meta': torch sees no meta device here"):
        remote()[0].fit(strategy(), **FIT)
    remote()[0].fit(strategy(), **FIT | {"device": "cpu"})


# On the controller


def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"master": "10.0.0.1", "workers": ["10.0.0.2"]}
    monkeypatch.setattr(network_trainer.SSHLauncher, "launch", lambda *a, **k: pytest.fail("started"))
    for given, message in (
        ({"num_nodes": 1}, "num_nodes=1, but the hosts file has 2 slots"),
        ({"processes": 4}, "processes=4 with a hosts file of 2 slots"),
        ({"placement": Placement(max_restarts=1)}, "max_restarts=1 needs save_dir"),
        ({"max_step": 1}, "did you mean 'max_steps'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            remote(hosts)[0].fit(strategy(), **given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="there is no field 'mastr'"):
        remote({"mastr": 1})


def test_slots_that_make_no_whole_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_trainer.SSHLauncher, "launch", lambda *a, **k: pytest.fail("started"))

    def slots(*each: int) -> dict[str, Any]:
        named = [{"address": f"10.0.0.{k}", "slots": count} for k, count in enumerate(each, 1)]
        return {"master": named[0], "workers": named[1:]}

    for hosts, per_host, given, message in (
        (slots(2, 3), 2, {}, "nodes_per_host=2, but the hosts have 2, 3 slots"),
        (slots(2, 4), 1, {"node": NodeMesh(shard=2)}, "with nodes_per_host=1 the nodes have 2, 4 slots"),
        (slots(2, 4), 1, {"node": [NodeMesh(shard=4), NodeMesh(shard=2)]}, r"nodes of \[4, 2\] devices"),
        (slots(1, 2), None, {"node": [NodeMesh(shard=2), NodeMesh()]}, "a node would span two hosts"),
        (slots(3, 3), 2, {}, "nodes_per_host=2, but the hosts have 3, 3 slots"),
        (
            slots(4, 4),
            1,
            {"node": NodeMesh(shard=2)},
            "node=shard=2 is 2 devices, but with nodes_per_host=1 the nodes have 4, 4 slots",
        ),
        (slots(3, 3), None, {"node": NodeMesh(shard=2)}, "a node would span two hosts"),
        (slots(2, 2), 1, {"num_nodes": 1}, "4 processes run this script, and a node of shard=2"),
    ):
        model, data = small_problem()
        trainer = NetworkTrainer(hosts, model, data, loss_fn=MSE, nodes_per_host=per_host)
        with pytest.raises(ArgumentError, match=message):
            trainer.fit(strategy(), batch_size=8, **given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="nodes_per_host=0 must be"):
        NetworkTrainer(slots(2), nn.Linear(1, 1), [], nodes_per_host=0)
    model, data = small_problem()
    trainer = NetworkTrainer(slots(2, 2), model, data, loss_fn=MSE, nodes_per_host=1, min_hosts=1)
    with pytest.raises(ArgumentError, match="min_hosts with node=: the remaining hosts"):
        trainer.fit(strategy(), batch_size=8)


def test_a_notebook_is_told_what_to_do() -> None:
    code = "from exogym.machines.remote.network_trainer import calling_script; calling_script()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "write the training into a file and run python train.py" in done.stderr


def test_the_script_that_is_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import types

    script = tmp_path / "train.py"
    script.write_text("")
    ran = types.ModuleType("__main__")
    ran.__spec__, ran.__file__ = None, str(script)
    monkeypatch.setitem(sys.modules, "__main__", ran)
    assert network_trainer.calling_script() == (str(script), False)
    ran.__spec__ = types.SimpleNamespace(name="mine.__main__")  # type: ignore[assignment]
    assert network_trainer.calling_script() == ("mine", True)


def test_damaged_results_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    results.write(tmp_path, 1, LocalTrainer(model, [torch.ones(2)]))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(results.names(1))
    (tmp_path / results.names(1)[1]).write_bytes(b"torn")
    with pytest.raises(ExoGymError, match="cannot be read"):
        results.read(tmp_path, 1, model)
    with pytest.raises(ExoGymError, match="cannot be read"):
        results.read(tmp_path, 2, model)


def test_localhost_needs_no_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two agents on this machine; the first exit code that is not 0 is that of the run."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no ssh in it
    monkeypatch.setattr(watch, "FOLLOW_S", 0.5)
    script = "import os, sys\nprint('hello', sys.argv[1:], flush=True)\nsys.exit(3 * (os.environ['RANK'] == '1'))\n"
    (tmp_path / "say.py").write_text(script)
    launcher = SSHLauncher(TWO_HERE, project=tmp_path, out=tmp_path / "runs")
    words = ["a b", "it's", "$(touch pwned)", "x\ny", ""]
    assert launcher.launch("say.py", *words) == 3
    assert launcher.folder is not None and launcher.folder.parent == tmp_path / "runs"
    said = f"hello {words}\n"
    assert all((launcher.folder / f"training_rank_{rank}.log").read_text().startswith(said) for rank in (0, 1))
    printed = capsys.readouterr()
    assert f"[localhost] [rank 0] {said}" in printed.out and f"[127.0.0.1] [rank 1] {said}" in printed.out
    assert "127.0.0.1 ended with exit code 3" in printed.err


@pytest.mark.slow
def test_the_host_of_the_rank_that_failed_first_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The master's host ends first, of a connection that was cut: not its fault."""
    script = """
    import os, signal, sys, time
    rank, marks = int(os.environ["RANK"]), ("", "second", "third")
    def come(rank):
        while not os.path.exists(marks[rank]):
            time.sleep(0.01)
    if rank == 0:
        come(1)
        raise RuntimeError("Connection closed by peer")
    if rank == 1:
        come(2)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), os._exit(0)))  # keeps its launcher waiting
    open(marks[rank], "w").close()
    time.sleep(600 if rank == 2 else 0)
    sys.exit(7)
    """
    (tmp_path / "fail.py").write_text(textwrap.dedent(script))
    hosts = TWO_HERE | {"workers": [{"address": "127.0.0.1", "device": "cpu", "slots": 2}]}
    launcher = SSHLauncher(hosts, project=tmp_path, out=tmp_path / "runs")
    assert launcher.launch("fail.py") == 7
    err = capsys.readouterr().err
    assert launcher.first_failure == "rank 1 of 3 ended with exit code 7: SystemExit: 7"
    assert "127.0.0.1 ended with exit code 7" in err and "exogym: localhost ended" not in err
    assert "[localhost] exogym: rank 0 of 3 lost its connection to another rank, which failed first" in err
    assert "starting 3 processes on 2 hosts; logs in " in err and "Traceback" not in err


BLOCK = """\
[W1121 17:00:00.0 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=4, addr=[h]:1): Failed to recv
Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:697 (most recent call first):
frame #0: c10::Error::Error() + 0x98 (0x7f in /lib/libc10.so)
<omitting python frames>
frame #1: <unknown function> + 0x5ba (0x7f in /lib/libtorch_cpu.so)

"""


def test_torchs_farewell_is_left_out_on_the_terminal_and_kept_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = Logs(tmp_path)
    for line in ["before", *BLOCK.splitlines(), "", "after"]:
        logs.take(0, "h", line, sys.stderr)
        logs.take(1, "i", f"[rank 1] {line}", sys.stderr)
    first, *rest = BLOCK.splitlines()
    for line in [first, "[rank 0] mine", rest[0], "an error", *rest[1:]]:  # what is no part of a block ends it
        logs.take(0, "h", line, sys.stderr)
    logs.close()
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if line.startswith("[i]")] == [
        "[i] [rank 1] before",
        "[i] [rank 1] ",
        "[i] [rank 1] after",
    ]
    here = [line for line in shown if line.startswith("[h]")]
    assert here == [
        "[h] before",
        "[h] ",
        "[h] after",
        "[h] [rank 0] mine",
        "[h] an error",
        *(f"[h] {x}" for x in rest[1:]),
    ]
    assert (tmp_path / "host_0.log").read_text().startswith(f"before\n{BLOCK}\nafter\n")


FITS = """
import os, sys, time, torch
from exogym import NetworkTrainer
from exogym.errors import ModelError
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

steps, end = int(sys.argv[1]), sys.argv[2]
calls = 0
def loss_fn(x, y):
    global calls
    calls += 1
    if end == "model" and os.environ.get("RANK") == "1" and calls > 8:
        raise ModelError("no good")
    if end == "slow":
        time.sleep(0.05)
    return torch.nn.functional.mse_loss(x, y)

hosts = {
    "master": {"address": "localhost", "device": "cpu"}, "workers": [{"address": "127.0.0.1", "device": "cpu"}],
    "master_port": int(sys.argv[3]),
}
model, data = small_problem()
NetworkTrainer(hosts, model, data, loss_fn=loss_fn).fit(
    DiLoCoStrategy(H=2, lr=0.01), max_steps=steps, batch_size=8, save_dir="checkpoints", checkpoint_interval=4,
    resume=steps > 4,
)
"""


@pytest.mark.slow
def test_what_a_run_says_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    """From the start to the end, on the way on from a checkpoint, of an error, and after Ctrl-C."""
    (tmp_path / "train.py").write_text(FITS)

    def start(steps: int, end: str) -> subprocess.Popen[str]:
        words = [sys.executable, "train.py", str(steps), end, str(free_port())]
        return subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    err = start(4, "well").communicate(timeout=300)[1].splitlines()
    folder = f"runs/{next((tmp_path / 'runs').iterdir()).name}"
    assert err[0] == f"exogym: the hosts are ready; starting 2 processes on 2 hosts; logs in {folder}"
    assert err[-1] == f"exogym: finished: step 4; model, history and logs in {folder}"
    assert not [line for line in err if "frame #" in line or "going on from" in line]

    run = start(12, "model")
    err = run.communicate(timeout=300)[1].splitlines()
    assert "[localhost] [rank 0] exogym: going on from step 4 (checkpoints/step_0000000004)" in err
    assert "[127.0.0.1] [rank 1] ModelError: no good" in err and run.returncode == 1
    named = "rank 1 of 2 ended with exit code 1: ModelError: no good; the logs of all ranks are in "
    assert err[-1].startswith(f"exogym.errors.WorkerError: {named}")
    assert "resume=True" not in err[-1]  # which was given

    run = start(10**6, "slow")
    assert run.stderr is not None
    seen = []
    while "going on from" not in "".join(seen):
        seen.append(run.stderr.readline())
        assert seen[-1], seen
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=300)[1].splitlines()
    assert err[-1] == "KeyboardInterrupt: stopped; the processes on all hosts have ended"
    trace = "\n".join(err[len(err) - 1 - err[::-1].index("Traceback (most recent call last):") :])
    assert "queue.py" not in trace and "threading.py" not in trace and ").fit(" in trace


def test_scripts_are_looked_for_in_the_project(tmp_path: Path) -> None:
    launcher = SSHLauncher({"master": "localhost"}, project=tmp_path)
    with pytest.raises(ArgumentError, match="does not exist: pass the path"):
        launcher.launch("none.py")
    with pytest.raises(ArgumentError, match="is outside the project's folder"):
        launcher.launch(__file__)


def test_what_is_sent_to_hosts_runs_on_an_older_python() -> None:
    """A host with an old Python is to say so, not to stumble over a word it does not know."""
    folder = Path(ssh.__file__).parent / "onhost"
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 7))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        strange = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
        assert strange <= {
            "exogym.machines.remote.onhost.interfaces",
            "exogym.machines.remote.onhost.health",
            "exogym.core.base.devices",
            "torch",
        }  # the last two: only to ask for devices


def test_a_folder_too_large_for_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.py").write_text("")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "env" / "c.py").write_text("")
    assert list(probe.source_sums(str(tmp_path))) == ["a.py"]
    monkeypatch.setattr(probe, "MOST_FILES", 0)
    with pytest.raises(ArgumentError, match="use the project's own folder"):
        SSHLauncher({"master": "localhost"}, project=tmp_path).check()


# Profiles

CONFIG = """
[medium]
task = digits
steps = 40
seed = 3
colour = blue

[distributed:fast]
base_profile = medium
strategy = diloco:outer_lr=0.5
communication_interval = 20
hosts_config = hosts.json
lr = 0.01

[distributed:medium]
base_profile = medium
steps = 50

[distributed:round]
base_profile = other
[other]
base_profile = round

[distributed:misspelt]
task = digits
stpes = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.ini"
    path.write_text(CONFIG)
    return path


def test_a_profile_with_its_base(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = load_profile(config, "fast")
    assert (profile.task, profile.steps, profile.seed, profile.lr) == ("digits", 40, 3, 0.01)
    assert profile.hosts_config == str(config.parent / "hosts.json")
    assert profile.make_strategy(None).given_arguments == {"H": 20, "outer_lr": 0.5, "lr": 0.01}
    assert "[medium] in config.ini: unused fields: colour" in capsys.readouterr().err
    assert load_profile(config, "distributed:medium").steps == 50  # over a base of the same name
    assert load_profile(config, "medium").steps == 50
    config.write_text(CONFIG.replace("[distributed:medium]", "[distributed:other]"))
    assert load_profile(config, "medium").steps == 40  # a base alone, as in the founding plan


def test_a_task_brings_its_settings() -> None:
    task = RunProfile("digits", "diloco", task_options="hidden=8").load()
    assert "64-8-10" in task.description
    given = RunProfile("digits", "diloco", communication_interval=7).make_strategy(task).given_arguments
    assert (given["H"], given["lr"], given["outer_lr"]) == (7, task.lr, task.outer_lr)


def test_what_is_wrong_with_a_profile_is_named(config: Path) -> None:
    def wrong(message: str, text: str = "", name: str = "x", base: str = "task = digits\n") -> None:
        config.write_text(CONFIG + f"\n[distributed:x]\n{base}{text}\n")
        with pytest.raises(ArgumentError) as caught:
            load_profile(config, name)
        assert message in str(caught.value)

    wrong("has no profile 'fats': did you mean 'fast'?", name="fats")
    wrong("[distributed:misspelt] has no field 'stpes': did you mean 'steps'?", name="misspelt")
    wrong("form a circle", name="round")
    wrong("base_profile = nobody: there is no such section", "base_profile = nobody")
    wrong("[distributed:x] steps = 'many'; expected a whole number", "steps = many")
    wrong("[distributed:x] lr = 'high'; expected a number", "lr = high")
    wrong("[distributed:x] lr=-1.0 must be a finite number above 0", "lr = -1")
    wrong("[distributed:x] steps=0 must be", "steps = 0")
    wrong("[distributed:x] data is empty", "data =")
    wrong("max_restarts=1 needs save_dir", "max_restarts = 1")
    wrong("unknown strategy 'dilco': did you mean 'diloco'?", "strategy = dilco")
    wrong("both set H", "strategy = diloco:H=3\ncommunication_interval = 4")
    wrong("ddp communicates at every step; leave", "strategy = ddp\ncommunication_interval = 4")
    wrong("balance='step' is not one of 'nodes', 'batch', 'steps'", "balance = step")
    wrong("has no task", base="steps = 4")
    with pytest.raises(ArgumentError, match="pass one with --config"):
        load_profile(config.parent / "none.ini", "x")
    config.write_text("no section")
    with pytest.raises(ArgumentError, match="no section headers"):
        load_profile(config, "x")


def test_what_the_hosts_run_for_a_profile(
    world: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await_fit(world, 1)
    profile = RunProfile("digits", "diloco", communication_interval=2, steps=4, nodes=2, batch_size=4, balance="steps")
    with pytest.raises(SystemExit) as ended:
        job.main([json.dumps(asdict(profile))])
    assert ended.value.code == 0
    assert "balance='steps' changes nothing: one process holds all nodes" in capsys.readouterr().err
    history = results.facts_of(tmp_path / "runs" / "run", 1).history
    assert history.column("val_loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_bad_input_is_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    for words, message in (
        (["doctor", "--hosts", "none.json"], "the hosts file 'none.json' cannot be read"),
        (["distributed-train", "medium"], "no hosts file: pass --hosts FILE"),
        (["distributed-train", "fast"], "cannot be read"),
        (["distributed-train", "slow", "--config", "config.ini"], "has no profile 'slow'"),
    ):
        assert main(words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "unused fields" not in line]
        assert line.startswith("exogym: error: ") and message in line


TWICE = """
import sys, torch
from exogym import NetworkTrainer, Placement
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
import os
steps, dies = int(sys.argv[1]), sys.argv[2]

def die(loop):
    if dies and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), 9)

model, data = small_problem()
hosts = {"master": {"address": "localhost", "device": "cpu"}}
trainer = NetworkTrainer(hosts, model, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(
    DiLoCoStrategy(H=3, lr=0.01), max_steps=steps, batch_size=8, save_dir="checkpoints", checkpoint_interval=3,
    placement=Placement(max_restarts=1), callbacks=[Every(6, die)],
)
print("done", len(trainer.history.column("train_loss")[0]))
"""


@pytest.mark.slow
def test_a_new_start_goes_on_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    """The first run dies and goes on from what it saved; a second one, which is not asked to resume, is refused."""
    (tmp_path / "train.py").write_text(TWICE)

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "train.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    first = train("12", "dies")
    assert first.returncode == 0 and "done 12" in first.stdout, first.stderr
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step*"))
    second = train("15", "")
    assert second.returncode != 0 and "already contains checkpoints: pass resume=True" in second.stdout + second.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step*")) == saved


def test_a_key_that_is_not_there_is_refused_before_ssh_does_without_it(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"ssh_key_path='.*nokey' \(for 10.0.0.9\) does not exist"):
        check_hosts({"master": "10.0.0.9", "ssh_key_path": str(tmp_path / "nokey")})


SAME_START = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from torch import nn
from exogym.machines.distributed import destroy_process_group, get_rank, init_process_group
from exogym.core.engine import equal_start
from exogym.machines.remote.world import own_wire

sent = []
ship = equal_start.ship
equal_start.ship = lambda wire, tensors, source: sent.extend(tensors) or ship(wire, tensors, source)
init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
with torch.no_grad():
    if get_rank() == 1:
        model[1].bias += 1
        model[2].num_batches_tracked += 2
equal_start.start_equal(model, own_wire())
numbers = [float(x.double().sum()) for x in (*model.parameters(), *model.buffers())]
print(f"rank {get_rank()} sent {sent} has {numbers}", flush=True)
destroy_process_group()
"""


def test_sparse_buffers_are_compared_at_the_start() -> None:
    one, same, other = torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()
    assert sum_of(one) == sum_of(same) != sum_of(other)


def test_only_numbers_that_differ_are_sent_at_the_start(tmp_path: Path) -> None:
    """Pretrained weights that each host has read are not; those of any rank that differ are, to all."""
    code, log = in_a_world(2, tmp_path / "world", SAME_START)
    assert code == 0, log
    first, second = sorted(line.removeprefix("rank ")[2:] for line in log.splitlines() if line.startswith("rank "))
    assert first == second and first.startswith("sent ['1.bias', '2.num_batches_tracked'] has ")


IN_ORDER = """
import sys, torch
sys.path[:0] = {paths!r}
from in_order import DATA, InOrder, WithState, own
from exogym import NetworkTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

for folder, data in (("one", InOrder(None, 0, DATA)), ("state", WithState(None, 0, DATA)), ("own", own)):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
    trainer = NetworkTrainer({{"master": "localhost"}}, model, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(
        DiLoCoStrategy(H=4, lr=0.01), num_nodes=3, max_steps={steps}, batch_size=4, save_dir=f"{folder}/{{folder}}",
        resume=True, device="cpu",
    )
    print(f"<{{folder}} {{fingerprint(trainer.model)}}>", flush=True)
"""


def test_iterables_in_a_world_have_the_bits_of_the_simulation_also_in_another_world(tmp_path: Path) -> None:
    """An iterable for all nodes, with a state and without, and an iterable for each; resumed in a world of 3."""
    found = []
    for size, steps in ((2, 7), (3, 11)):
        script = IN_ORDER.format(paths=sys.path, steps=steps, folder=tmp_path)
        code, log = in_a_world(size, tmp_path / f"world{size}", script)
        assert code == 0, log
        found.append({line for line in re.findall(r"<(\w+ \w+)>", log)})
    for folder, data in (("one", InOrder(None, 0, DATA)), ("state", InOrder(None, 0, DATA)), ("own", own)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))
        trainer = LocalTrainer(model, data, loss_fn=MSE)
        for steps, printed in zip((7, 11), found, strict=True):
            trainer.fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=3, max_steps=steps, batch_size=4, device="cpu",
                        save_dir=tmp_path / "here" / folder, resume=True)  # fmt: skip
            assert f"{folder} {fingerprint(trainer.model)}" in printed
    assert all(len(printed) == 3 for printed in found)
