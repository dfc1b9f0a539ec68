"""Read the hosts of a run from `distributed_hosts.json`, and check every field.

    {
      "master": "192.168.1.100",
      "workers": ["192.168.1.101", {"address": "192.168.1.102", "user": "ann", "slots": 2}],
      "ssh_user": "matt",
      "ssh_key_path": "~/.ssh/id_ed25519",
      "python_env": "/opt/env/bin/python",
      "project_path": "~/whisper"
    }

Values that ssh could read as an option, or that are special to a shell or to ssh, are rejected.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.core.base.files import short_text
from exogym.errors import ArgumentError, nearest

MASTER_PORT = 29500
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
DEVICE = re.compile(r"[a-z]+(:\d+)?")
CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029\ud800-\udfff]")
MOST_SLOTS = 4096  # per host; each slot is a process
TOP = (
    *("master", "workers", "ssh_user", "ssh_key_path", "ssh_port", "ssh_config_path", "python_env", "project_path"),
    "master_port",
)
OWN = ("address", "ssh_host", "user", "key", "port", "python", "path", "device", "slots")
EXAMPLE = '{"master": "192.168.1.100", "workers": ["192.168.1.101"], "ssh_user": "matt"}'


@dataclass(frozen=True)
class Host:
    """One host of a hosts file. Fields that are missing in its entry come from the file's common fields.

    Attributes:
        address: name or IP address at which the other hosts reach this host. It belongs to one of the host's network
            interfaces.
        ssh_host: the host's name for ssh, which is the address or an alias in the user's ssh config.
        user, key, port: user name, private key file and port for ssh; None: from the user's ssh config.
        python: path of the host's Python; None: see `interpreter`.
        path: the project's folder on the host; None: the same path as on the controller.
        device: device for the host's processes, such as "auto", "cpu", "cuda", "cuda:0" or "mps".
        slots: number of processes on the host.
        ssh_config: config file for ssh; None: the user's config.
    """

    address: str
    ssh_host: str
    user: str | None = None
    key: str | None = None
    port: int | None = None
    python: str | None = None
    path: str | None = None
    device: str = "auto"
    slots: int = 1
    ssh_config: str | None = None

    @property
    def interpreter(self) -> str:
        """Path of the host's Python: `python`, if it is set.

        Otherwise it is this process's Python on this machine, and python3 on other hosts.
        """
        return self.python or (sys.executable if self.is_local else "python3")

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine and the current user, so that commands run without ssh.

        >>> Host("localhost", "localhost").is_local
        True
        """
        if self.is_loopback:
            return True
        if self.ssh_host != self.address or self.port is not None:
            return False
        return (self.user is None or self.user == getpass.getuser()) and _is_own(self.address)


@dataclass(frozen=True)
class HostsConfig:
    """The hosts of a run. The first one is the master, to which the others connect at `master_port`.

    >>> config = HostsConfig.load({"master": "10.0.0.1", "workers": [{"address": "10.0.0.2", "slots": 2}]})
    >>> config.slots, config.master.address, config.hosts[1].slots
    (3, '10.0.0.1', 2)
    >>> HostsConfig.load({"master": "10.0.0.1", "worker": []})
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: hosts: there is no field 'worker': did you mean 'workers'?
    """

    hosts: tuple[Host, ...]
    master_port: int = MASTER_PORT

    @property
    def master(self) -> Host:
        return self.hosts[0]

    @property
    def slots(self) -> int:
        """Number of processes on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the ranks' hosts, in rank order."""
        return [host.address for host in self.hosts for _ in range(host.slots)]

    def ranks(self, index: int) -> range:
        """Return the ranks of the processes on `hosts[index]`."""
        first = sum(host.slots for host in self.hosts[:index])
        return range(first, first + self.hosts[index].slots)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | HostsConfig) -> HostsConfig:
        """Read hosts from a JSON file, or from a dict of the same form.

        Raises:
            ArgumentError: the file cannot be read, or a field is unknown, missing or wrong. The message names the
                field.
        """
        if isinstance(source, HostsConfig):
            return source
        if isinstance(source, Mapping):
            return _HostsReader("hosts", source).config()
        if not isinstance(source, str | os.PathLike):
            raise ArgumentError(f"hosts_config must be the path of a JSON file or a dict, not {type(source).__name__}")
        name = Path(source).name
        try:
            text = short_text(source)
        except ArgumentError as error:
            raise ArgumentError(f"the hosts file {error}, such as {EXAMPLE}") from None
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"the hosts file {os.fspath(source)!r} cannot be read ({error}): write one, such as {EXAMPLE}"
            ) from None
        try:
            value = json.loads(text, object_pairs_hook=lambda pairs: _once(name, pairs))
        except json.JSONDecodeError as error:
            raise ArgumentError(
                f"{name}: invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers with thousands of digits, endlessly nested lists
            raise ArgumentError(f"{name}: unreadable JSON ({error}); expected {EXAMPLE}") from None
        if not isinstance(value, dict):
            raise ArgumentError(f"{name} must hold an object such as {EXAMPLE}, not {type(value).__name__}")
        return _HostsReader(name, value).config()


def is_loopback(address: str) -> bool:
    """Return whether an address means "this machine" on every machine: localhost, 127.x.x.x or ::1."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_own(address: str) -> bool:
    """Return whether an interface of this machine has `address`, which may be looked up."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, target in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(target)
                return True
    return False


def _once(name: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ArgumentError(f"{name}: the field {key!r} occurs twice: keep one")
    return dict(pairs)


def _shown(value: Any) -> str:
    """Return `value` as a short text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with thousands of digits; an endlessly nested list
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 200 else f"{text[:200]}..."


class _HostsReader:
    """Reads the fields of a hosts file. Each error begins with `name`."""

    def __init__(self, name: str, fields: Mapping[str, Any]):
        self.name, self.fields = name, fields

    def config(self) -> HostsConfig:
        fields = self.fields
        self._known("", fields, TOP)
        if "master" not in fields:
            raise self._wrong("master", "is missing", f"the address of the first host, as in {EXAMPLE}")
        workers = fields.get("workers", [])
        if not isinstance(workers, list | tuple):
            raise self._wrong("workers", f"={_shown(workers)}", "a list of hosts; it may be empty")
        hosts = [self._host("master", fields["master"])]
        hosts += [self._host(f"workers[{i}]", worker) for i, worker in enumerate(workers)]
        self._together(hosts)
        return HostsConfig(tuple(hosts), self._port("master_port", fields.get("master_port", MASTER_PORT)))

    def _together(self, hosts: Sequence[Host]) -> None:
        seen: set[str] = set()
        for i, host in enumerate(hosts):
            where = "master" if i == 0 else f"workers[{i - 1}]"
            if host.is_loopback != hosts[0].is_loopback:
                raise self._wrong(
                    where, f"={host.address!r} beside master={hosts[0].address!r}",
                    "addresses at which the hosts reach each other, because localhost means another machine on each "
                    "host",
                )  # fmt: skip
            if host.address in seen and not host.is_loopback:
                raise self._wrong(where, f"={host.address!r} occurs twice", 'one entry with "slots": 2')
            seen.add(host.address)

    def _host(self, where: str, given: Any) -> Host:
        own: Any = {"address": given} if isinstance(given, str) else given
        if not isinstance(own, Mapping):
            raise self._wrong(where, f"={_shown(given)}", 'an address, or an object such as {"address": "10.0.0.2"}')
        self._known(f"{where}.", own, OWN)
        at = where if isinstance(given, str) else f"{where}.address"
        if "address" not in own:
            raise self._wrong(at, "is missing", "the address at which the other hosts reach this one")
        address = self._address(at, own["address"])
        config = self.fields.get("ssh_config_path")
        slots = own.get("slots", 1)
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ArgumentError(f"{self.name}: {where}.slots={_shown(slots)} must be a whole number of at least 1")
        if slots > MOST_SLOTS:
            wanted = f"at most {MOST_SLOTS}: each slot is a process on that host"
            raise self._wrong(f"{where}.slots", f"={_shown(slots)}", wanted)
        return Host(
            address=address,
            ssh_host=self._address(f"{where}.ssh_host", own["ssh_host"]) if "ssh_host" in own else address,
            user=self._pick(own, where, "user", "ssh_user", self._user),
            key=self._pick(own, where, "key", "ssh_key_path", self._local_file),
            port=self._pick(own, where, "port", "ssh_port", self._port),
            python=self._pick(own, where, "python", "python_env", self._python),
            path=self._pick(own, where, "path", "project_path", self._folder),
            device=self._match(f"{where}.device", own.get("device", "auto"), DEVICE, "auto, cpu, cuda, cuda:0 or mps"),
            slots=slots,
            ssh_config=None if config is None else self._local_file("ssh_config_path", config),
        )

    def _pick(
        self, own: Mapping[str, Any], where: str, name: str, common: str, checked: Callable[[str, Any], Any]
    ) -> Any:
        """Return the `checked` value of the host's own field or the common field, or None."""
        if name not in own and common not in self.fields:
            return None
        field, value = (f"{where}.{name}", own[name]) if name in own else (common, self.fields[common])
        if value is None:
            raise self._wrong(field, "=null", "a value, or omitted")
        return checked(field, value)

    # Values

    def _user(self, field: str, value: Any) -> str:
        return self._match(field, value, USER, "a user name of letters, digits and _ . @ + -")

    def _address(self, field: str, value: Any) -> str:
        wanted = "a host name or an IP address: letters, digits, dots and dashes"
        text = self._text(field, value, wanted)
        with contextlib.suppress(ValueError):
            if "%" not in text:
                return str(ipaddress.ip_address(text))
        return self._match(field, text, NAME, wanted)

    def _python(self, field: str, value: Any) -> str:
        wanted = "the path of a Python, such as /opt/env/bin/python or ~/env/bin/python, or its bare name"
        text = self._text(field, value, wanted)
        if text.startswith("-") or "\\" in text or ("/" in text and not text.startswith(("/", "~/"))):
            raise self._wrong(field, f"={_shown(text)}", wanted)
        return text

    def _folder(self, field: str, value: Any) -> str:
        wanted = "an absolute path of a folder, or a path from ~/"
        text = self._text(field, value, wanted)
        if not text.startswith(("/", "~/")) and text != "~":
            raise self._wrong(field, f"={_shown(text)}", wanted)
        return text

    def _local_file(self, field: str, value: Any) -> str:
        text = self._text(field, value, "the path of a file")
        if "%" in text or "${" in text:
            raise self._wrong(field, f"={_shown(text)}", "a path without % and ${, which are special to ssh")
        return os.path.abspath(os.path.expanduser(text))

    def _port(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
            raise self._wrong(field, f"={_shown(value)}", "a port, a whole number of 1 to 65535")
        return value

    def _match(self, field: str, value: Any, pattern: re.Pattern[str], wanted: str) -> str:
        text = self._text(field, value, wanted)
        if not pattern.fullmatch(text):
            raise self._wrong(field, f"={_shown(text)}", wanted)
        return text

    def _text(self, field: str, value: Any, wanted: str) -> str:
        if not isinstance(value, str) or not value or CONTROL.search(value):
            raise self._wrong(field, f"={_shown(value)}", wanted)
        return value

    def _known(self, where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in given:
            if key not in known:
                name = key if isinstance(key, str) else _shown(key)
                raise ArgumentError(
                    f"{self.name}: there is no field {_shown(where + name)}: {nearest(name[:200], known)}"
                )

    def _wrong(self, field: str, what: str, wanted: str) -> ArgumentError:
        what = what if what.startswith("=") else f" {what}"
        return ArgumentError(f"{self.name}: {field}{what}; expected {wanted}")
