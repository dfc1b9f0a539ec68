"""Check every host before a run starts, and name a remedy for each problem.

All hosts are checked at the same time, each over one connection. Checks that depend on a failed check are skipped: if
the login fails, for example, Python is not checked.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError, ExoGymError, checked
from exogym.machines.remote.hosts import HostsConfig
from exogym.machines.remote.inquiry import ANSWER_S, Inquiry, Unanswered
from exogym.machines.remote.onhost.probe import package_sum, packages, source_sums

PYTHON = (3, 11)
LEAST_DISK_BYTES = 1_000_000_000
MOST_CLOCK_S = 5.0
SHOWN_FILES = 3
WAY = "way to the others"
OWN_FOLDER = "not shared with the master: this host keeps its own nodes' rows, and can resume from them"


@dataclass(frozen=True)
class Check:
    """The result of a check on one host: `check` (its name), `ok` (whether it passed), `seen` (its finding), `remedy`.

    >>> check = Check("10.0.0.2", "disk", ok=False, seen="1 GB free", remedy="remove old runs")
    >>> check.ok, check.remedy
    (False, 'remove old runs')
    """

    host: str
    check: str
    ok: bool
    seen: str
    remedy: str = ""


class Controller:
    """This machine's versions of torch and exogym and its files' checksums, which all hosts must match.

    Args: see `check_hosts`.
    """

    def __init__(self, project: str, sync: bool, save_dir: str | None, code: bool):
        self.project, self.sync, self.save_dir = project, sync, save_dir
        try:
            self.sums = source_sums(project) if code and not sync else None
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the project's folder {project!r}: {error}") from None
        here = packages(["torch", "exogym"])
        self.torch, self.exogym = here["torch"] or "", here["exogym"]
        self.exogym_sum = package_sum("exogym")
        self.token = secrets.token_hex(8)
        self.token_is_written = threading.Event()


class Inspection:
    """Check one host, and collect the results in `checks`.

    Args:
        config: the hosts of the run.
        index: number of the checked host in `config.hosts`.
        here: the controller's versions and files, with which the host is compared.

    Attributes:
        checks: the results so far.
        place: address and port at which the other hosts should reach this host, or None if they are unknown.
    """

    def __init__(self, config: HostsConfig, index: int, here: Controller):
        self.config, self.here, self.index = config, here, index
        self.host = config.hosts[index]
        self.folder = self.host.path or here.project
        self.checks: list[Check] = []
        self.place: tuple[str, int] | None = None
        self._inquiry: Inquiry | None = None

    # Three parts, each of which runs on all hosts at the same time

    def look(self) -> None:
        """Check the host's login, software, disk, device and address."""
        try:
            self._inquiry = Inquiry(self.host)
            self._python()
            self._clock()
            self._torch()
            self._exogym()
            self._project()
            self._disk()
            self._device()
            self._address()
            if self.here.sync and not self.host.is_local:
                self._rsync()
            if self.here.save_dir is not None and len(self.config.hosts) > 1:
                self._save_dir()
        except Unanswered:
            self._unanswered()
        except ExoGymError as error:  # this machine doesn't have this Python
            self._note("python", False, str(error), f"set {self._field('python', 'python_env')} to the host's Python")
        finally:
            if self.index == 0:
                self.here.token_is_written.set()

    def reach(self, places: dict[int, tuple[str, int]]) -> None:
        """Check that this host can connect to the other hosts. `places` has each host's address and port."""
        if self._inquiry is None or self.index not in places:
            return
        targets = [place for i, place in places.items() if i != self.index]
        try:
            found = self._answer(WAY, "", "connect", others=targets)
        except Unanswered:
            return self._unanswered()
        if found is not None:
            trouble = "; ".join(f"{address}, {why}" for address, why in found["failed"].items())
            self._note(
                WAY, not trouble, trouble or f"reaches {', '.join(address for address, _ in targets)}",
                f"open the firewall between the hosts for port {self.config.master_port} and ports above 1023, and "
                "use addresses on one network",
            )  # fmt: skip

    def end(self) -> None:
        """Remove the checks' files from the host, and end the connection."""
        if self._inquiry is None:
            return
        try:
            if self.index == 0 and self.here.save_dir is not None:
                self._inquiry.ask("remove", path=self._token_file, folder=self.folder)
        except Unanswered:
            self._unanswered()
        else:
            self._inquiry.end()

    def abort(self) -> None:
        """Cut the connection immediately, even while another thread is waiting for an answer."""
        if self._inquiry is not None:
            self._inquiry.process.kill()

    # The checks

    def _python(self) -> None:
        found = self._ask("python")
        self._note("login", True, "this machine, without ssh" if self.host.is_local else "by ssh, host key known")
        seen = ".".join(map(str, found["version"]))
        self._note(
            "python", tuple(found["version"]) >= PYTHON, f"{seen} ({found['executable']})",
            f"install Python {PYTHON[0]}.{PYTHON[1]} or later on the host (this machine has "
            f"{platform.python_version()}) and name it in {self._field('python', 'python_env')}",
        )  # fmt: skip

    def _clock(self) -> None:
        best_s, off_s = float("inf"), 0.0
        for _ in range(3):
            before = time.time()
            there = self._ask("time")
            after = time.time()
            if after - before < best_s:
                best_s, off_s = after - before, there - (before + after) / 2
        self._note(
            "clock", abs(off_s) <= MOST_CLOCK_S, f"{off_s:+.2f} s from this machine's",
            "set both clocks by network time: timedatectl set-ntp true (Linux), Settings, Date & Time (macOS)",
        )  # fmt: skip

    def _torch(self) -> None:
        wanted = _public(self.here.torch)
        remedy = f"on the host: {self.host.interpreter} -m pip install torch=={wanted}"
        found = self._answer("torch", remedy, "packages", names=["torch"])
        if found is not None:
            seen = found["torch"]
            same = seen is not None and _public(seen) == wanted
            self._note("torch", same, _beside(seen or "not installed", same, self.here.torch), remedy)

    def _exogym(self) -> None:
        remedy = (
            "install this machine's version from the same source on the host, in the environment of "
            f"{self.host.interpreter}"
        )
        found = self._answer("exogym", remedy, "packages", names=["exogym"])
        code = None if found is None else self._answer("exogym", remedy, "exogym", folder=self.folder)
        if found is not None and code is not None:
            seen, here = (found["exogym"], code["sum"]), (self.here.exogym, self.here.exogym_sum)
            text = "not installed" if code["sum"] is None else f"{seen[0]} (code {seen[1]})"
            self._note("exogym", seen == here, _beside(text, seen == here, f"{here[0]} (code {here[1]})"), remedy)

    def _project(self) -> None:
        here = self.here.sums
        if here is None:
            return
        remedy = "copy the project to the host (with --sync, or sync=True in Python), or set its folder in "
        remedy += self._field("path", "project_path")
        found = self._answer("project", remedy, "project", folder=self.folder)
        if found is None:
            return
        there = found["sums"]
        unlike = sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path))
        text = f"{self.folder}: its {len(there)} Python files equal this machine's"
        if unlike:
            shown = ", ".join(f"{path} ({_difference(path, there, here)})" for path in unlike[:SHOWN_FILES])
            more = f" and {len(unlike) - SHOWN_FILES} more" if len(unlike) > SHOWN_FILES else ""
            text = f"{self.folder} differs from this machine's: {shown}{more}"
        self._note("project", not unlike, text, remedy)

    def _disk(self) -> None:
        found = self._answer("disk", "", "disk", folder=self.folder)
        if found is not None:
            enough, writable = found["free_bytes"] >= LEAST_DISK_BYTES, found["writable"]
            text = (
                f"{readable_bytes(found['free_bytes'])} free in {found['path']}{'' if writable else ', not writable'}"
            )
            remedy = f"free {readable_bytes(LEAST_DISK_BYTES)} in a folder that the user may write to"
            self._note("disk", enough and writable, text, remedy)

    def _device(self) -> None:
        device = self.host.device
        remedy = (
            f"set {self._field('device')} to one of the host's devices, or install a torch that supports this device"
        )
        found = self._answer("device", remedy, "device", device=device)
        if found is not None:
            kind, _, number = device.partition(":")
            there = kind in ("auto", *found["kinds"]) and (not number or int(number) < found["gpus"])
            seen = ", ".join(found["kinds"]) + (f", {found['gpus']} GPUs" if found["gpus"] else "")
            self._note("device", there, device if device == seen else f"{device}; torch sees {seen}", remedy)

    def _address(self) -> None:
        host = self.host
        remedy = (
            f"set {self._field('address')} to the address that `ip addr` (macOS: ifconfig) shows on the host, and put "
            "a name that only ssh knows into ssh_host"
        )
        found = self._answer("address", remedy, "interface", address=host.address, is_loopback=host.is_loopback)
        if found is None:
            return
        self._note("address", "interface" in found, found.get("missing") or f"on {found['interface']}", remedy)
        if self.index == 0:
            port = self.config.master_port
            remedy = f"end the program that uses port {port} on the master, or use another master_port"
            if self._listen("port", port, remedy):
                self._note("port", True, f"{port} is free")
        elif "interface" in found:
            self._listen(WAY, 0, "")

    def _listen(self, check: str, port: int, remedy: str) -> bool:
        found = self._answer(check, remedy, "listen", address=self.host.address, port=port)
        if found is not None and "taken" in found:
            self._note(check, False, f"{port}: {found['taken']}", remedy)
        elif found is not None:
            self.place = (self.host.address, found["port"])
        return self.place is not None

    def _rsync(self) -> None:
        found = self._answer("rsync", "", "rsync")
        if found is not None:
            path = found["path"]
            self._note(
                "rsync",
                path is not None,
                path or "not installed",
                "install rsync on the host, or copy the project in another way",
            )

    def _save_dir(self) -> None:
        """Check that this host can write into `save_dir`, and whether it shares the folder with the master."""
        token, folder = self.here.token, self.here.save_dir
        remedy = "use a save_dir that the user may write to, on a disk with free space"
        own = f"{folder}/.writable-{token}-{self.index}"
        written = self._answer("save_dir", remedy, "file", path=own, folder=self.folder, text=token)
        if written is None:
            return
        self._ask("remove", path=own, folder=self.folder)
        if self.index > 0:
            self.here.token_is_written.wait(ANSWER_S)
        text = token if self.index == 0 else None
        found = self._answer("save_dir", remedy, "file", path=self._token_file, folder=self.folder, text=text)
        if found is not None and self.index == 0:
            self._note("save_dir", True, f"{folder} can be written")
        elif found is not None:
            shared = found["text"] == token
            self._note("save_dir", True, f"{folder} is {'shared with the master' if shared else OWN_FOLDER}")

    @property
    def _token_file(self) -> str:
        return f"{self.here.save_dir}/.shared-{self.here.token}"

    # Lines

    def _ask(self, question: str, **given: Any) -> Any:
        assert self._inquiry is not None
        return self._inquiry.ask(question, **given)

    def _answer(self, check: str, remedy: str, question: str, **given: Any) -> Any:
        """Return the host's answer, or add a failed check and return None if there is none."""
        found = self._ask(question, **given)
        if isinstance(found, dict) and "error" in found:
            self._note(check, False, found["error"], remedy)
            return None
        return found

    def _note(self, check: str, ok: bool, seen: str, remedy: str = "") -> None:
        self.checks.append(Check(self.host.address, check, ok, seen, "" if ok else remedy))

    def _field(self, own: str, common: str | None = None) -> str:
        where = "master" if self.index == 0 else f"workers[{self.index - 1}]"
        return f"{where}.{own}" + (f" or {common}" if common else "")

    def _unanswered(self) -> None:
        inquiry, self._inquiry, self.place = self._inquiry, None, None
        assert inquiry is not None
        inquiry.end()
        check, seen, remedy = inquiry.diagnosis()
        self._note(check, False, seen, remedy)


def _public(version: str) -> str:
    """Return a version without its build: 2.13.0+cpu becomes 2.13.0."""
    return version.partition("+")[0]


def _beside(seen: str, same: bool, here: str) -> str:
    return seen if same else f"{seen}; this machine has {here}"


def _difference(path: str, there: dict[str, str], here: dict[str, str]) -> str:
    if path not in there:
        return "missing on the host"
    return "changed" if path in here else "only on the host"


@checked
def check_hosts(
    hosts_config: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig,
    *,
    project: str | os.PathLike[str] | None = None,
    sync: bool = False,
    save_dir: str | None = None,
    code: bool = True,
) -> list[Check]:
    """Run all checks on all hosts in parallel. Return the list of `Check` results, in the order of the hosts file.

    Args:
        hosts_config: see `HostsConfig.load`.
        project: the project's folder on this machine. Default: the current folder.
        sync: True if the project will be copied to the hosts, so rsync is checked instead of the project's files.
        save_dir: folder for checkpoints, if any: checks that every host can write to it, and whether the hosts share
            it.
        code: whether to check that the project's Python files on the hosts equal those on this machine.

    Raises:
        ArgumentError: the hosts file is wrong, or names a file that does not exist.

    >>> [check.check for check in check_hosts({"master": {"address": "localhost", "device": "cpu"}}, code=False)]
    ['login', 'python', 'clock', 'torch', 'exogym', 'disk', 'device', 'address', 'port']
    """
    config = HostsConfig.load(hosts_config)
    _check_files(config)
    here = Controller(os.path.abspath(project or os.getcwd()), sync, save_dir, code)
    inspections = [Inspection(config, i, here) for i in range(len(config.hosts))]
    with ThreadPoolExecutor(len(inspections)) as pool:
        try:
            list(pool.map(Inspection.look, inspections))
            places = {i: inspection.place for i, inspection in enumerate(inspections) if inspection.place is not None}
            if len(places) > 1:
                list(pool.map(lambda inspection: inspection.reach(places), inspections))
            list(pool.map(Inspection.end, inspections))
        except BaseException:  # Ctrl-C above all
            for inspection in inspections:
                inspection.abort()
            raise
    return [check for inspection in inspections for check in inspection.checks]


def _check_files(config: HostsConfig) -> None:
    """Reject a missing key or ssh config, which ssh would ignore and then perhaps log in differently."""
    for host in config.hosts:
        for field, path in (("ssh_key_path", host.key), ("ssh_config_path", host.ssh_config)):
            if path is not None and not host.is_local and not os.path.isfile(path):
                raise ArgumentError(
                    f"{field}={path!r} (for {host.address}) does not exist on this machine: set it to an existing "
                    "file, or leave the field out to use your SSH config"
                )


def require(checks: Sequence[Check]) -> None:
    """Raise ExoGymError, with a line per failed check and its remedy, if any check failed."""
    failed = [check for check in checks if not check.ok]
    if failed:
        lines = [f"{check.host}: {check.check}: {check.seen}. Remedy: {check.remedy}" for check in failed]
        raise ExoGymError("the hosts are not ready (exogym doctor shows all):\n  " + "\n  ".join(lines))
