"""This process's sockets: list all of them, shut down a connection, close ports that are no longer needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator

SO_ATTACH_FILTER = 26  # Linux's number; Python has no name for it
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: keep 0 bytes of every packet
EVERYWHERE = ("0.0.0.0", "::")

Sockets = set[tuple[int, int]]


def sockets() -> Sockets:
    """Return (descriptor, inode) of each socket of this process."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = set()
    for name in os.listdir(folder):
        with contextlib.suppress(OSError, ValueError):
            facts = os.fstat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found.add((int(name), facts.st_ino))
    return found


def shut(descriptor: int, inode: int) -> None:
    """Shut down the connection if `descriptor` is still the socket `inode`. The descriptor stays open."""

    def act(one: socket.socket) -> None:
        one.getpeername()  # fails for a listening socket: gloo does not survive its end
        one.shutdown(socket.SHUT_RDWR)

    _touch(descriptor, inode, act)


@contextlib.contextmanager
def ports_closed_afterwards(backend: str) -> Iterator[None]:
    """A context in which to make a process group. At its end, the port at which gloo's members connected is closed.

    gloo keeps this port open as long as the group exists, and lets anybody connect. gloo needs the port only until all
    members are connected, but fails if the port's socket is closed. So the context tells the kernel to drop all packets
    that arrive at this port. Only Linux can do this; on other systems the port stays open. Sockets that listen on all
    addresses are not gloo's, so the context does not change them. Other backends keep their ports.
    """
    before = sockets()
    yield
    if sys.platform == "linux" and backend == "gloo":
        for descriptor, inode in sockets() - before:
            _touch(descriptor, inode, _close_port)


def _close_port(one: socket.socket) -> None:
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[0] not in EVERYWHERE:
        program = ctypes.create_string_buffer(DROP_ALL)
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _touch(descriptor: int, inode: int, act: Callable[[socket.socket], None]) -> None:
    """Call `act` with a duplicate of the socket, unless it is local or `descriptor` is another socket now."""
    with contextlib.suppress(OSError):
        double = socket.socket(fileno=os.dup(descriptor))
        try:
            if os.fstat(double.fileno()).st_ino == inode and double.family != socket.AF_UNIX:
                act(double)
        finally:
            double.close()
