"""Announce and find agents by mDNS, the protocol by which computers of a local network find each other.

Announcements are not trusted. Only three values of an announcement are used: an address in this computer's networks, a
port, and a name of letters and digits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from exogym.errors import ArgumentError, ExoGymError
from exogym.home.discovery.channel import VERSION, Messages, PairingError

SERVICE = "_exogym._tcp.local."
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
PORT = 8422
LEAST_PORT = 1024
MOST_FOUND, AT_ONCE = 64, 16
ASK_S, RESOLVE_MS = 3.0, 500
MDNS_PORT = "allow UDP port 5353 in the firewall"


@dataclass(frozen=True)
class Found:
    """An agent that was announced by mDNS, or found at a given address.

    Attributes:
        name: the agent's name. Any computer could claim this name.
        address, port: where the agent listens.
        answers: True if an agent with this name answered at the address.
    """

    name: str
    address: str
    port: int
    answers: bool


def plain_name(text: str) -> str:
    """Return `text` as a valid name for an agent. Every character that is not allowed becomes "-".

    >>> plain_name("Ann's MacBook Pro.local"), plain_name("\\u2028")
    ('Ann-s-MacBook-Pro', 'computer')
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", text.removesuffix(".local")).strip("-_")[:40].strip("-_")
    return name or "computer"


def own_networks() -> list[ipaddress.IPv4Interface]:
    """Return this computer's IPv4 addresses with their networks, without loopback addresses."""
    import ifaddr

    found = []
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if isinstance(ip.ip, str):  # of IPv4
                interface = ipaddress.IPv4Interface(f"{ip.ip}/{ip.network_prefix}")
                if not interface.ip.is_loopback:
                    found.append(interface)
    return found


def own_address(given: str | None = None) -> str:
    """Return the address at which other computers should reach this computer.

    The result is `given` if this is not None. Otherwise the function returns this computer's only address, or the
    address with which this computer reaches other networks.

    Raises:
        ArgumentError: `given` is not an address of this computer; or this computer has no address; or it has several
            addresses and no default route.
    """
    addresses = [str(network.ip) for network in own_networks()]
    if given is not None:
        if given not in addresses:
            known = ", ".join(addresses) or "none"
            raise ArgumentError(f"--address={given!r} is not an address of this computer; its addresses: {known}")
        return given
    if not addresses:
        raise ArgumentError("this computer has no network address: connect it to a network")
    if len(addresses) > 1:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only selects the outgoing address
            if probe.getsockname()[0] in addresses:
                return str(probe.getsockname()[0])
        raise ArgumentError(f"this computer has several addresses: choose one with --address: {', '.join(addresses)}")
    return addresses[0]


@contextlib.contextmanager
def announced(name: str, address: str, port: int) -> Iterator[str]:
    """Announce an agent while the block runs. Yield the agent's name, with a number if another agent has this name.

    Raises:
        ExoGymError: mDNS does not work at this address.
    """
    from zeroconf import IPVersion, ServiceInfo, Zeroconf

    try:
        zeroconf = Zeroconf(interfaces=[address], ip_version=IPVersion.V4Only)
    except OSError as error:
        raise ExoGymError(f"cannot announce this computer at {address} by mDNS ({error}): {MDNS_PORT}") from None
    info = ServiceInfo(
        SERVICE, f"{name}.{SERVICE}", addresses=[socket.inet_aton(address)], port=port, properties={},
        server=f"exogym-{secrets.token_hex(6)}.local.",
    )  # fmt: skip
    try:
        zeroconf.register_service(info, allow_name_change=True)
        yield info.name.removesuffix(f".{SERVICE}")
    finally:
        zeroconf.close()


def find(seconds: float = 3.0) -> list[Found]:
    """Return the agents that are announced in the network, at most 64, sorted by name.

    Args:
        seconds: how long to listen for announcements, at all of this computer's addresses except the loopback.

    Raises:
        ArgumentError: this computer is in no network.
        ExoGymError: mDNS does not work.
    """
    from zeroconf import IPVersion, ServiceBrowser, Zeroconf

    networks = own_networks()
    if not networks:
        raise ArgumentError("this computer has no network address: connect it to a network")
    names: dict[str, None] = {}
    lock = threading.Lock()

    def changed(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        with lock:
            if len(names) < MOST_FOUND and is_name(name):
                names[name] = None

    try:
        zeroconf = Zeroconf(interfaces=[str(network.ip) for network in networks], ip_version=IPVersion.V4Only)
    except OSError as error:
        raise ExoGymError(f"cannot listen for mDNS ({error}): {MDNS_PORT}") from None
    try:
        ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
        time.sleep(seconds)
        with lock:
            heard = list(names)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            infos = list(pool.map(lambda name: zeroconf.get_service_info(SERVICE, name, RESOLVE_MS), heard))
            places = [place for info in infos if info is not None for place in place_of(info, networks)]
            return sorted(pool.map(asked, dict.fromkeys(places)), key=lambda found: (found.name, found.address))
    finally:
        zeroconf.close()


def is_name(name: str) -> bool:
    """Return whether an announced name is valid for an agent.

    >>> is_name("studio._exogym._tcp.local."), is_name("a\\x1b[2J._exogym._tcp.local.")
    (True, False)
    """
    return name.endswith(f".{SERVICE}") and NAME.fullmatch(name.removesuffix(f".{SERVICE}")) is not None


def place_of(info: Any, networks: Iterable[ipaddress.IPv4Interface]) -> Iterator[tuple[str, str, int]]:
    """Yield (name, address, port) of an announced agent, or nothing if its announcement has no usable address.

    The address is the announcement's first address in `networks`. Loopback addresses, addresses outside `networks`, and
    ports below 1024 are ignored.
    """
    name = str(info.name).removesuffix(f".{SERVICE}")
    for packed in list(info.addresses)[:MOST_FOUND]:
        if len(packed) == 4 and isinstance(info.port, int) and LEAST_PORT <= info.port <= 65535:
            address = ipaddress.IPv4Address(packed)
            if any(address in network.network for network in networks) and not address.is_loopback:
                yield name, str(address), info.port
                return


def asked(place: tuple[str, str, int]) -> Found:
    """Ask whether an agent with this name answers at this address and port, and return the answer as a `Found`.

    Args:
        place: (name, address, port) of an announced agent.
    """
    name, address, port = place
    try:
        return Found(name, address, port, name_at(address, port) == name)
    except (OSError, PairingError):
        return Found(name, address, port, False)


def name_at(address: str, port: int) -> str:
    """Ask the agent at an address for its name.

    Raises:
        OSError: nothing answers.
        PairingError: the answer is not an agent's answer, or comes too late.
    """
    with socket.create_connection((address, port), timeout=ASK_S) as connection:
        line = Messages(connection, ASK_S)
        line.tell({"exogym": VERSION, "want": "name"})
        return told_name(line.hear())


def told_name(answer: dict[str, Any]) -> str:
    """Return the name in an agent's first answer.

    Raises:
        PairingError: the name is not valid for an agent.
    """
    name = answer.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise PairingError(
            "the other computer does not run this version of exogym agent: install the same version there"
        )
    return name
