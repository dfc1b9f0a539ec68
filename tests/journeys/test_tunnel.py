"""The tunnels of docs/real_machines.md: with their commands, nothing of a training can be read on the way."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hosts import Host, Hosts, fixtures
from hosts.fixtures import said
from paths import ROOT

from exogym import LocalTrainer, load_model
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem

hosts, project = fixtures.hosts, fixtures.project  # where pytest looks for them
COUNT = 2
PAGE = ROOT / "docs" / "real_machines.md"
INSIDE = "10.99.0.1", "10.99.0.2"
SSH_PORT, WIREGUARD_PORT = 22, 51820
TCP, UDP, ALL_PACKETS = 6, 17, 3
FIT = {"max_steps": 12, "batch_size": 8}
TRAIN = """
import torch
from exogym import NetworkTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

model, data = small_problem()
trainer = NetworkTrainer("hosts.json", model, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(H=5, lr=0.01), max_steps=12, batch_size=8)
"""


def commands(heading: str) -> Iterator[tuple[list[int], str]]:
    """Yield (numbers of the hosts, command) of the block below a heading; a comment says on which hosts."""
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n##")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.S)
    where: list[int] = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            where = [number for number, name in enumerate(("master", "worker")) if name in line]
        elif line:
            yield where, line


def run(host: Host, line: str, folder: Path) -> None:
    """Run a line of the page; what it leaves in the background keeps no pipe of ours open."""
    with open(folder / "tunnel.log", "a+") as log:
        done = host.run(["bash", "-c", line], cwd=folder, capture_output=False, stdout=log, stderr=log)
        log.seek(0)
        assert done.returncode == 0, (line, log.read())


@contextlib.contextmanager
def sniffed(host: Host) -> Iterator[set[tuple[str, int]]]:
    """Collect (protocol, port) of all that passes the host's cable; the lower port where none is a tunnel's."""
    found: set[tuple[str, int]] = set()
    with host.inside():
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PACKETS))
        ear.bind(("eth0", ALL_PACKETS))
    ear.settimeout(0.2)
    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                packet, place = ear.recvfrom(65535)
                if place[1] == 0x0800 and packet[9] in (TCP, UDP):
                    start = 4 * (packet[0] & 15)
                    ports = [int.from_bytes(packet[start + i : start + i + 2], "big") for i in (0, 2)]
                    known = [port for port in ports if port in (SSH_PORT, WIREGUARD_PORT)]
                    found.add(("tcp" if packet[9] == TCP else "udp", known[0] if known else min(ports)))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        ear.close()


def train(hosts: Hosts, project: Path, inside: bool) -> set[tuple[str, int]]:
    """Train on both hosts, over the addresses in the tunnel or the outer ones; return what passed the cable."""
    config = hosts.config()
    for entry, address in zip([config["master"], *config["workers"]], INSIDE, strict=True):
        if inside:
            entry.update(ssh_host=entry["address"], address=address)
    hosts.file(project / "hosts.json", **config)
    (project / "train.py").write_text(TRAIN)
    with sniffed(hosts[0]) as found:
        done = hosts.controller.run([sys.executable, "train.py"], cwd=project)
    assert done.returncode == 0, said(done)
    model, data = small_problem()
    LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss).fit(
        DiLoCoStrategy(H=5, lr=0.01), num_nodes=2, **FIT
    )
    (trained,) = project.glob("runs/*/fit_1.model.safetensors")
    assert fingerprint(load_model(small_problem()[0], trained)) == fingerprint(model)
    return found


@pytest.fixture
def kernel_has_wireguard(hosts: Hosts) -> bool:
    """Whether the kernel has it; else the program of the same name can do it."""
    if shutil.which("wg") is None:
        pytest.skip("needs WireGuard: apt-get install wireguard-tools wireguard-go")
    made = hosts[0].run(["ip", "link", "add", "probe", "type", "wireguard"]).returncode == 0
    hosts[0].run(["ip", "link", "del", "probe"])
    if not made and shutil.which("wireguard-go") is None:
        pytest.skip("the kernel has no WireGuard: apt-get install wireguard-go")
    return made


@pytest.mark.slow
def test_through_ssh_nothing_else_passes(hosts: Hosts, project: Path) -> None:
    for where, line in commands("Through SSH, two hosts"):
        here = line.replace("ssh ", f"ssh -F {hosts.ssh_config} ").replace("192.168.1.101", hosts[1].address)
        for number in where:
            run(hosts[number], here, project)
    passed = train(hosts, project, inside=True)
    for pid in [pid for pid, line in hosts[0].processes().items() if " -w 0:0 " in line]:
        os.kill(pid, signal.SIGTERM)
    assert passed == {("tcp", SSH_PORT)}
    assert hosts.left_over() == {}


@pytest.mark.slow
def test_without_a_tunnel_more_passes(hosts: Hosts, project: Path) -> None:
    """The control."""
    passed = train(hosts, project, inside=False)
    assert {("tcp", SSH_PORT), ("tcp", 29500)} < passed


@pytest.mark.slow
def test_through_wireguard_nothing_else_passes(hosts: Hosts, project: Path, kernel_has_wireguard: bool) -> None:
    folders = [project / "master", project / "worker"]
    for folder in folders:
        folder.mkdir()
    for where, line in commands("Through WireGuard, any number of hosts"):
        for number in where:
            here = line.replace("wg0", f"wg{number}")  # the namespaces share their files, the program's socket too
            for name, folder in (("MASTERS", folders[0]), ("WORKERS", folders[1])):
                key = folder / "wireguard.pub"
                here = here.replace(f"{name}_KEY", key.read_text().strip() if key.exists() else "")
            for name, host in (("192.168.1.100", hosts[0]), ("192.168.1.101", hosts[1])):
                here = here.replace(name, host.address)
            if not kernel_has_wireguard:
                here = re.sub(r"ip link add (wg\d) type wireguard", r"wireguard-go \1", here)
            run(hosts[number], here, folders[number])
    passed = train(hosts, project, inside=True)
    for number, host in enumerate(hosts.machines):
        host.run(["ip", "link", "del", f"wg{number}"])
    assert passed == {("tcp", SSH_PORT), ("udp", WIREGUARD_PORT)}
    assert hosts.left_over() == {}


def test_the_page_is_read() -> None:
    assert [where for where, line in commands("Through SSH, two hosts") if "ssh" in line] == [[0]]
    assert {number for where, _ in commands("Through WireGuard, any number of hosts") for number in where} == {0, 1}
    with pytest.raises(ValueError, match="not enough values"):
        list(commands("No such heading"))
