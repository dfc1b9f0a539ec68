"""Find the network interface of this host that has a given address."""

from __future__ import annotations

import ctypes
import socket
import sys

OFFSETS: dict[int, tuple[int, int]] = {
    socket.AF_INET: (4, 4),
    socket.AF_INET6: (8, 16),
}  # where the address lies in a sockaddr, and its bytes


class _InterfaceEntry(ctypes.Structure):
    """The head of the kernel's `struct ifaddrs`, which Linux and macOS share."""


_InterfaceEntry._fields_ = [
    ("next", ctypes.POINTER(_InterfaceEntry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of every IPv4 and IPv6 address of this host."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceEntry)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    try:
        entry = first
        while entry:
            head = entry.contents
            if head.address:
                family = _family(ctypes.string_at(head.address, 2))
                if family in OFFSETS:
                    start, size = OFFSETS[family]
                    raw = ctypes.string_at(head.address + start, size)
                    found.append((head.name.decode(), socket.inet_ntop(family, raw)))
            entry = head.next
    finally:
        library.freeifaddrs(first)
    return found


def _family(head: bytes) -> int:
    """Return the family in the first two bytes of a sockaddr: macOS has its length first."""
    return head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)


def interface_of(address: str, is_loopback: bool = False) -> str:
    """Return the name of this host's network interface that has `address`, a host name or an IP address.

    Unless `is_loopback`, loopback addresses are ignored, because some systems map their own host name to a loopback
    address, which other hosts can't reach.

    Raises:
        LookupError: no interface has this address. The message lists the host's interfaces and addresses.
    """
    try:
        meant = {str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)}
    except (OSError, UnicodeError) as error:
        raise LookupError(f"the name {address!r} is not known on the host itself: {error}") from None
    there = addresses()
    for interface, own in there:
        if own in meant and (is_loopback or not (own.startswith("127.") or own == "::1")):
            return interface
    listed = ", ".join(f"{own} ({interface})" for interface, own in there) or "none"
    raise LookupError(f"no interface of the host has the address {address}; the host has {listed}")
