"""Pair with an agent by its code, and add the agent's computer to a hosts file."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError, ExoGymError
from exogym.files import write_json
from exogym.home.discovery import login
from exogym.home.discovery.announcing import plain_name, told_name
from exogym.home.discovery.channel import (
    CALLER,
    REFUSALS,
    VERSION,
    Exchange,
    Messages,
    PairingError,
    refusal,
    typed_code,
)
from exogym.machines.remote.inquiry import ask
from exogym.progress import notice
from exogym.remote import Host, HostsConfig

PAIR_S = 20.0
MOST_KEYS = 16


@dataclass(frozen=True)
class Paired:
    """A paired computer, as its agent described it.

    Attributes:
        name: the agent's name.
        entry: the computer's entry for a hosts file.
        host_keys: keys of the computer's SSH server, each "KIND BASE64".
    """

    name: str
    entry: dict[str, Any]
    host_keys: tuple[str, ...]


def pair(address: str, port: int, code: str, key: str) -> Paired:
    """Pair with the agent at `address` and `port`. Afterward the owner of `key` may log in to the agent's computer.

    The agent saves this computer under its host name.

    Args:
        code: the code that the agent shows.
        key: file of a private SSH key. If the file does not exist, a new key is made. The private key is not sent; it
            signs the session.

    Raises:
        ArgumentError: `code` is not a code, or `key` is not a private key.
        PairingError: the codes differ, somebody interfered, or the agent refused. The message says what to do.
    """
    code, public_key = typed_code(code), login.own_key(key)
    try:
        connection = socket.create_connection((address, port), timeout=PAIR_S)
    except OSError as error:
        raise PairingError(f"{address} port {port} does not answer ({error}): start exogym agent there") from None
    with connection:
        address = connection.getpeername()[0]
        line = Messages(connection, PAIR_S)
        line.tell({"exogym": VERSION, "want": "pair"})
        agent = told_name(line.hear())
        exchange = Exchange(line, CALLER, code, agent)
        try:
            exchange.meet()
        except PairingError as error:
            raise PairingError(f"{agent} at {address} did not pair: {error}") from None
        exchange.seal({
            "name": plain_name(socket.gethostname()), "public_key": public_key,
            "signature": login.sign(key, exchange.statement(public_key)),
            "address": connection.getsockname()[0], "agent_address": address,
        })  # fmt: skip
        message = line.receive()
        answer = exchange.open(message)
    if answer is None or "refused" in answer:
        why = refusal(message) if answer is None else str(answer["refused"])
        raise PairingError(f"{agent} at {address} did not pair: {REFUSALS.get(why or 'code', REFUSALS['code'])}")
    return _checked(agent, address, answer)


def _checked(name: str, address: str, answer: Mapping[str, Any]) -> Paired:
    """Check a paired agent's answer, and return it.

    Raises:
        PairingError: a value is not valid in a hosts file.
    """
    port, keys = answer.get("ssh_port"), answer.get("host_keys")
    entry = {"address": address, "user": answer.get("user"), "python": answer.get("python")}
    entry |= {} if port == 22 else {"port": port}
    try:
        HostsConfig.load({"master": entry})
        if not isinstance(keys, list) or not 0 < len(keys) <= MOST_KEYS:
            raise ArgumentError("the agent sent no host keys")
        known = tuple(login.public_key(key) for key in keys)
    except ArgumentError as error:
        raise PairingError(f"{name} at {address} sent invalid data: {error}") from None
    return Paired(name, entry, known)


def enrol(paired: Paired, hosts_file: str | os.PathLike[str], key: str, ssh_config: str | None = None) -> Host:
    """Save a paired computer's host key, test the login, and add the computer to a hosts file.

    In a new hosts file the computer becomes the master. In an existing file it becomes a worker, or replaces the entry
    that has the same address.

    Args:
        hosts_file: path of the hosts file, which is made if it does not exist.
        key: file of the private key that `pair` used.
        ssh_config: config file for `ssh -F`. If `ssh_config` is None, ssh reads the user's own config.

    Raises:
        ExoGymError: the login does not work, or a file cannot be written.
    """
    entry = paired.entry | {"key": _whole(key)}
    ssh_config = None if ssh_config is None else _whole(ssh_config)
    fields = {"master": entry} | ({} if ssh_config is None else {"ssh_config_path": ssh_config})
    (host,) = HostsConfig.load(fields).hosts
    try:
        if login.remember(host, paired.host_keys):
            notice(f"{host.address} had a different host key before, which was replaced by the key from this pairing")
    except OSError as error:
        raise ExoGymError(f"the host key of {host.address} cannot be saved: {error}") from None
    ask(host, "python")
    write_entry(hosts_file, entry, ssh_config)
    return host


def _whole(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def write_entry(path: str | os.PathLike[str], entry: Mapping[str, Any], ssh_config: str | None = None) -> None:
    """Add `entry` to a hosts file, or let it replace the entry with the same address. Other entries do not change.

    Raises:
        ArgumentError: the file is not a hosts file, or has another `ssh_config_path`.
    """
    fields: dict[str, Any] = {}
    if os.path.exists(path):
        HostsConfig.load(path)
        fields = json.loads(Path(path).read_text("utf-8"))
    if ssh_config is not None:
        if fields and fields.get("ssh_config_path") != ssh_config:
            there = fields.get("ssh_config_path")
            raise ArgumentError(
                f"ssh_config={ssh_config!r}, but {os.fspath(path)} has ssh_config_path={there!r}: pass the same path"
            )
        fields["ssh_config_path"] = ssh_config
    hosts = [fields["master"], *fields.get("workers", [])] if "master" in fields else []
    addresses = [host if isinstance(host, str) else host["address"] for host in hosts]
    if entry["address"] in addresses:
        hosts[addresses.index(entry["address"])] = dict(entry)
    else:
        hosts.append(dict(entry))
    fields |= {"master": hosts[0], "workers": hosts[1:]}
    HostsConfig.load(fields)
    write_json(path, fields, indent=2)


def own_entry(address: str) -> dict[str, Any]:
    """Return this computer's entry for a hosts file, without SSH fields.

    >>> sorted(own_entry("10.0.0.1"))
    ['address', 'python', 'user']
    """
    return {"address": address, "user": getpass.getuser(), "python": sys.executable}
