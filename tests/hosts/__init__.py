"""Hosts for tests: network namespaces with addresses of their own, joined by a bridge, a real sshd in each.

    with Hosts(2, folder) as hosts:
        hosts.controller.run(["exogym", "doctor", "--hosts", hosts.file()])
        with hosts.controller.inside():
            check_hosts(hosts.config())
        hosts[1].run(["ip", "addr"])
        hosts.limit("100mbit")
        hosts.cut(hosts[1])

The bridge lies in a namespace of its own, so the machine's own network is not touched and nothing leaves it. All hosts
share the machine's file system; each has its own home folder and host key. Needs Linux, root, and Debian's iproute2 and
openssh-server; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PREFIX = "exogym"
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync"}
SSHD = "/usr/sbin/sshd"
BURST_S = 0.01  # of the rate, that may pass at once
START_S = 60.0
CLONE_NEWNET = 0x40000000


def hosts_or_skip() -> None:
    """Skip the test that asks where hosts cannot be made; with EXOGYM_NEEDS_HOSTS set, as in CI, fail."""
    import pytest

    reason = why_not()
    if reason:
        (pytest.fail if os.environ.get("EXOGYM_NEEDS_HOSTS") else pytest.skip)(reason)


def why_not() -> str | None:
    """Return why hosts cannot be made here, with the remedy; None if they can."""
    if sys.platform != "linux":
        return "test hosts are Linux network namespaces: run these tests on Linux"
    if os.geteuid() != 0:
        return "test hosts need root, to make network namespaces: run these tests as root"
    missing = sorted({package for name, package in PROGRAMS.items() if not _which(name)})
    if missing:
        return f"test hosts need {', '.join(missing)}: apt-get install {' '.join(missing)}"
    return None


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def shell(*words: str) -> str:
    """Run a command that must succeed; return what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Machine:
    """A namespace with one interface: a host, or the controller from which runs are started."""

    def __init__(self, hosts: Hosts, name: str, address: str, port: str):
        self.hosts, self.name, self.address = hosts, name, address
        self.namespace = f"{hosts.prefix}-{name}"
        self.port = port  # its end of the cable at the bridge
        shell("ip", "netns", "add", self.namespace)
        shell("ip", "-n", self.namespace, "link", "set", "lo", "up")

    def plug_in(self) -> None:
        switch = self.hosts.switch
        shell("ip", "link", "add", "eth0", "netns", self.namespace, "type", "veth", "peer", self.port, "netns", switch)
        shell("ip", "-n", switch, "link", "set", self.port, "master", "bridge", "up")
        shell("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        shell("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def words(self, words: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the words that run `words` in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *map(os.fspath, words)]

    def run(self, words: Sequence[str | os.PathLike[str]], timeout_s: float = 600, **options: Any) -> Any:
        """Run a command here to its end; return subprocess's CompletedProcess, texts captured."""
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | options
        return subprocess.run(self.words(words), timeout=timeout_s, check=False, **options)

    def start(self, words: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Start a command here, in a session of its own."""
        options = {"text": True, "stdin": subprocess.DEVNULL, "start_new_session": True} | options
        return subprocess.Popen(self.words(words), **options)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Put this thread, and what it starts meanwhile, threads and processes, into this namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.namespace}") as here:
            if libc.setns(here.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(before.fileno(), CLONE_NEWNET)

    def processes(self) -> dict[int, str]:
        """Return {process id: command line} of what runs here, sshd itself left out."""
        found = {}
        for pid in map(int, shell("ip", "netns", "pids", self.namespace).split()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                if line and not line.startswith(("sshd:", SSHD)):
                    found[pid] = line
        return found

    def limit(self, rate: str | None) -> None:
        """Let it send at most `rate`, such as "100mbit"; None: as fast as it can."""
        device = ["-n", self.namespace, "qdisc"]
        if rate is None:
            subprocess.run(["tc", *device, "del", "dev", "eth0", "root"], capture_output=True, check=False)
            return
        burst = max(5000, int(bits_per_s(rate) / 8 * BURST_S))
        shell(
            "tc", *device, "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", str(burst), "latency", "1s"
        )

    def kill_all(self) -> None:
        for pid in shell("ip", "netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.kill_all()
        with contextlib.suppress(RuntimeError):
            shell("ip", "netns", "del", self.namespace)


class Host(Machine):
    """A machine with an sshd, a host key and a home folder of its own."""

    def __init__(self, hosts: Hosts, number: int):
        super().__init__(hosts, f"host{number}", f"10.77.0.{number + 10}", f"port{number}")
        self.folder = hosts.folder / self.name
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        self.authorized_keys = self.folder / "authorized_keys"
        shutil.copy(f"{hosts.key}.pub", self.authorized_keys)
        self.key = self.folder / "host_key"
        self.sshd: subprocess.Popen[Any] | None = None
        shell("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.key))

    def serve(self) -> None:
        """Start the sshd, and wait until it listens."""
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port 22\nListenAddress {self.address}\nHostKey {self.key}\nPidFile {self.folder / 'sshd.pid'}\n"
            f"AuthorizedKeysFile {self.authorized_keys}\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"PrintMotd no\nMaxStartups 100\nPermitTunnel point-to-point\nSetEnv HOME={self.home}\n"
        )
        log = self.folder / "sshd.log"
        self.sshd = self.start([SSHD, "-D", "-f", config, "-E", log])
        deadline = time.monotonic() + START_S
        pid = self.folder / "sshd.pid"
        while not pid.exists():
            if time.monotonic() > deadline or self.sshd.poll() is not None:
                raise RuntimeError(f"the sshd of {self.name} did not start: {log.read_text()}")
            time.sleep(0.01)

    def remove(self) -> None:
        super().remove()
        if self.sshd is not None:
            self.sshd.wait()

    def known_as(self, address: str | None = None) -> str:
        """Return its line of known_hosts."""
        return f"{address or self.address} {' '.join(self.key.with_suffix('.pub').read_text().split()[:2])}\n"


class Hosts:
    """`count` hosts and a controller on one bridge, while entered.

    Attributes:
        controller: the machine to start runs from; it has the key `key` and knows the hosts' keys.
        ssh_config: the client's config, for `ssh -F`.
    """

    def __init__(self, count: int, folder: Path):
        self.count, self.folder = count, Path(folder)
        self.prefix = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.machines: list[Host] = []
        self.key = self.folder / "key"
        self.ssh_config, self.known_hosts = self.folder / "ssh_config", self.folder / "known_hosts"

    def __enter__(self) -> Hosts:
        reason = why_not()
        if reason:
            raise RuntimeError(reason)
        remove_stale()
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd sheds its privileges
        try:
            shell("ip", "netns", "add", self.switch)
            shell("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            shell("ip", "-n", self.switch, "link", "set", "bridge", "up")
            self.controller = Machine(self, "controller", "10.77.0.2", "port-c")
            self.controller.plug_in()
            self._make_keys()
            for number in range(self.count):
                self.machines.append(Host(self, number))
                self.machines[-1].plug_in()
            for host in self.machines:
                host.serve()
            self.known_hosts.write_text("".join(host.known_as() for host in self.machines))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.machines[index]

    def __len__(self) -> int:
        return len(self.machines)

    def close(self) -> None:
        """Kill what runs on the machines, and remove them."""
        everything: list[Machine] = [*self.machines, *([self.controller] if hasattr(self, "controller") else [])]
        for machine in everything:
            machine.remove()
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True, check=False)

    def _make_keys(self) -> None:
        shell("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "controller", "-f", str(self.key))
        self.ssh_config.write_text(
            f"IdentityFile {self.key}\nIdentitiesOnly yes\nUserKnownHostsFile {self.known_hosts}\n"
            "GlobalKnownHostsFile /dev/null\nUpdateHostKeys no\nLogLevel ERROR\n"
        )

    # Using them

    def config(self, count: int | None = None, first: int = 0, **fields: Any) -> dict[str, Any]:
        """Return a hosts file's content for `count` hosts (all by default), on the CPU with this Python."""
        used = self.machines[first : first + (count or self.count)]
        entries = [{"address": host.address, "device": "cpu"} for host in used]
        base = {
            "master": entries[0], "workers": entries[1:], "ssh_config_path": str(self.ssh_config),
            "python_env": sys.executable,
        }  # fmt: skip
        return base | fields

    def file(self, path: Path | None = None, **given: Any) -> Path:
        """Write `config(**given)` as a hosts file; return its path."""
        path = path or self.folder / "distributed_hosts.json"
        path.write_text(json.dumps(self.config(**given)))
        return path

    def limit(self, rate: str | None) -> None:
        """Let every host and the controller send at most `rate`, such as "100mbit"; None: no limit."""
        for machine in [*self.machines, self.controller]:
            machine.limit(rate)

    def cut(self, machine: Machine) -> None:
        """Pull the cable of a machine out of the bridge: packets to and from it are lost without a word."""
        shell("ip", "-n", self.switch, "link", "set", machine.port, "nomaster")

    def restore(self, machine: Machine) -> None:
        """Put the cable back."""
        shell("ip", "-n", self.switch, "link", "set", machine.port, "master", "bridge")

    def left_over(self, within_s: float = 60.0) -> dict[str, dict[int, str]]:
        """Return {host: {process id: command line}} of what still runs on hosts after up to `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while True:
            left = {host.name: found for host in self.machines if (found := host.processes())}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


def bits_per_s(rate: str) -> float:
    """Return a rate as tc writes it, in bits per second.

    >>> bits_per_s("100mbit")
    100000000.0
    """
    found = re.fullmatch(r"([\d.]+)(k|m|g)bit", rate)
    if found is None:
        raise ValueError(f"rate={rate!r} should look like 100mbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def remove_stale() -> None:
    """Remove the namespaces of test runs that were killed."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/run/netns"):
            found = re.match(rf"{PREFIX}-(\d+)-", name)
            if found and not os.path.exists(f"/proc/{found[1]}"):
                with contextlib.suppress(RuntimeError, ProcessLookupError):
                    for pid in shell("ip", "netns", "pids", name).split():
                        os.kill(int(pid), signal.SIGKILL)
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
