"""Strangers at the ports of a run, who know neither a key nor its secret: nothing executes, no bit changes, none ends.

The stranger is a host of the same network that is in no hosts file. It is told each port that can be reached from
outside as soon as it opens (from /proc, so it is better off than a real one), speaks to it as a store does and plants
pickles in whatever it finds, floods it with garbage, and keeps idle connections. The ports of gloo are left alone until
all processes have met: before that they ask nobody who he is, which `docs/security.md` says.
"""

import base64
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Hosts, Machine, fixtures
from paths import ROOT

from exogym import LocalTrainer, load_model
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem

hosts = fixtures.hosts  # where pytest looks for it
COUNT = 3
STEPS = 120
PAGE = ROOT / "docs" / "security.md"
IDLE = 300
BEFORE = "check of the hosts"  # it listens for a moment only, before the run
FIT: dict[str, Any] = {"max_steps": STEPS, "batch_size": 8}

TRAIN = """
import os, sys, time, torch
from exogym import LocalTrainer, NetworkTrainer
from exogym.callbacks import Every
from exogym.core.saving.export import save_model
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        time.sleep(0.002)
        return self.data[i]

def note(loop):
    with open("step.tmp", "w") as file: file.write(str(loop.step))
    os.replace("step.tmp", "step")

kind = sys.argv[1]
model, data = small_problem()
loss_fn = torch.nn.functional.mse_loss
if kind == "local":
    trainer = LocalTrainer(model, Slow(data), loss_fn=loss_fn)
else:
    least = 1 if kind == "min_hosts" else None
    trainer = NetworkTrainer("hosts.json", model, Slow(data), loss_fn=loss_fn, min_hosts=least)
trainer.fit(DiLoCoStrategy(H=5, lr=0.01), num_nodes=2, callbacks=[Every(5, note)], max_steps=STEPS, batch_size=8)
if os.environ.get("RANK", "0") == "0":
    save_model(model, "model.safetensors")
""".replace("STEPS", str(STEPS))

# Both are given a file that names the ports, {"speak": [[address, port], ...], "flood": [...]}, and go on for ever.
SPEAKER = """
import json, sys, time
from datetime import timedelta
import torch.distributed as dist

ports, payload = sys.argv[1], sys.argv[2].encode()
stores, tried = [], {}
print("ready", flush=True)
while True:
    for address, port in json.load(open(ports))["speak"]:
        if tried.get((address, port), 0) < 3:
            tried[address, port] = tried.get((address, port), 0) + 1
            try:
                limit = timedelta(seconds=1)
                stores.append(dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False))
                print("a store answered", address, port, flush=True)
            except Exception as error:
                pass
    for store in stores:
        try:
            for key in store.list_keys():
                store.set(key.removeprefix("/"), payload)
        except Exception:
            pass
    time.sleep(0.2)
"""
FLOOD = """
import json, os, random, socket, sys, time

ports, idle = sys.argv[1], int(sys.argv[2])
silent = []
garbage = b"", b"\\0" * 64, os.urandom(64), os.urandom(3000), b"GET / HTTP/1.0\\r\\n\\r\\n", b"[" * 5000 + b"\\n"
print("ready", flush=True)
while True:
    for place in json.load(open(ports))["flood"]:
        for words in garbage:
            try:
                stranger = socket.create_connection(tuple(place), timeout=0.05)
                stranger.settimeout(0.05)
                stranger.sendall(words)
                silent.append(stranger)
            except OSError:
                pass
    while len(silent) > idle:
        silent.pop(0).close()
    time.sleep(0.05)
"""


@dataclass
class Attack:
    """What came of a run under attack.

    Attributes:
        listened: (what listened, address) of all listeners that were seen.
    """

    status: int
    output: str
    pwned: bool
    weights: str | None
    listened: set[tuple[str, str]] = field(default_factory=set)
    outside: set[tuple[str, str]] = field(default_factory=set)
    stores: str = ""


def listeners(machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Yield (what, address, port) of all that listens on a machine, its sshd left out."""
    with machine.inside():
        texts = [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()]
    inodes = {
        line[9]: (address_of(line[1].partition(":")[0]), int(line[1].rpartition(":")[2], 16))
        for line in lines
        if line[3] == "0A"
    }
    for pid, command in machine.processes().items():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                    if found and found[1] in inodes:
                        yield what(command), *inodes[found[1]]


def address_of(text: str) -> str:
    """Return an address as /proc writes it, in words of four bytes of this machine's order."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    if not any(raw):
        return "everywhere"
    return ".".join(map(str, raw[-4:])) if len(raw) == 4 or raw[:12] == bytes(10) + b"\xff\xff" else raw.hex()


def what(command: str) -> str:
    signs = {
        "launch/runner.py": "process",
        "elastic.membership": "membership server",
        "exogym.launch": "launcher",
        "json.loads(": BEFORE,
    }
    return next((name for sign, name in signs.items() if sign in command), command)


def payload(path: Path) -> str:
    """Return what torch's c10d rendezvous reads, made to leave a file."""
    import pickle

    class Planted:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path}",)

    return base64.b64encode(pickle.dumps(Planted())).decode()


def attacked(hosts: Hosts, kind: str, folder: Path) -> Attack:
    """Run a training of this kind while the last host attacks all of it."""
    stranger, used = hosts[COUNT - 1], hosts.machines[:1] if kind == "local" else hosts.machines[: COUNT - 1]
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    hosts.file(folder / "hosts.json", count=COUNT - 1)
    ports = folder / "ports.json"
    ports.write_text('{"speak": [], "flood": []}')
    python, pwned = sys.executable, folder / "pwned"
    attackers = []
    with open(folder / "said", "w") as said, open(folder / "answered", "w") as answered:
        for code, *given in ((SPEAKER, payload(pwned)), (FLOOD, str(IDLE))):
            words = [python, "-c", code, str(ports), *given]
            attackers.append(stranger.start(words, stdout=answered, stderr=said))
        fixtures.wait_for(lambda: (folder / "answered").read_text().count("ready") == 2, attackers[0])
        words = ["-m", "exogym.launch", "--nproc_per_node=2"] if kind == "local" else []
        start = used[0] if kind == "local" else hosts.controller
        run = start.start([python, *words, "train.py", kind], cwd=folder, stdout=said, stderr=said)
        seen: set[tuple[str, str]] = set()
        outside: set[tuple[str, str]] = set()
        deadline = time.monotonic() + 300
        while run.poll() is None and time.monotonic() < deadline:
            trains = (folder / "step").exists()
            reached: list[tuple[str, int]] = []
            for machine in used:
                for name, address, port in listeners(machine):
                    seen.add((name, {"127.0.0.1": "loopback", machine.address: "its address"}.get(address, address)))
                    if address != "127.0.0.1" and (trains or name != "process"):
                        reached.append((machine.address, port))
                        outside.add((name, "training" if trains else "start"))
            (folder / "ports.tmp").write_text(json.dumps({"speak": reached, "flood": reached}))
            os.replace(folder / "ports.tmp", ports)
            time.sleep(0.1)
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
        status = run.wait()
        for attacker in attackers:
            attacker.kill()
            attacker.wait()
    trained = next(iter([*folder.glob("runs/*/fit_1.model.safetensors"), *folder.glob("model.safetensors")]), None)
    weights = fingerprint(load_model(small_problem()[0], trained)) if status == 0 and trained is not None else None
    return Attack(
        status, (folder / "said").read_text(), pwned.exists(), weights, seen, outside, (folder / "answered").read_text()
    )


@pytest.fixture(
    scope="module", params=["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hosts", "min_hosts"))]
)
def attack(
    request: pytest.FixtureRequest, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Attack]:
    """A kind of run, and what came of it."""
    return request.param, attacked(hosts, request.param, tmp_path_factory.mktemp("attacks") / request.param)


def test_nothing_executes_no_bit_changes_and_nothing_ends(attack: tuple[str, Attack]) -> None:
    kind, found = attack
    assert not found.pwned, "the stranger's code was executed"
    assert "a store answered" not in found.stores
    assert found.status == 0, found.output
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(DiLoCoStrategy(H=5, lr=0.01), num_nodes=2, **FIT)
    assert found.weights == fingerprint(model)
    door = {"local": None, "hosts": "launcher", "min_hosts": "membership server"}[kind]
    assert found.outside >= ({(door, "start"), (door, "training")} if door else set())
    assert "restart" not in found.output and "ranks continue" not in found.output, found.output


def test_what_listens_is_what_the_page_says(attack: tuple[str, Attack]) -> None:
    """And nothing listens on all addresses. The page's table has a row for each listener of each kind of run."""
    kind, found = attack
    assert all(address != "everywhere" for _, address in found.listened), found
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", PAGE.read_text(), re.M)
    written = {(who, where) for run, who, where in rows if run == kind}
    assert found.listened <= written and {row for row in written - found.listened if row[0] != BEFORE} == set()
