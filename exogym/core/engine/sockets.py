"""The sockets of this process: which there are, how to cut one, and how to close a port that nobody needs any more."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator

SO_ATTACH_FILTER = 26  # of Linux; Python does not name it
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: of every packet keep 0 bytes
EVERYWHERE = ("0.0.0.0", "::")

Sockets = set[tuple[int, int]]


def sockets() -> Sockets:
    """Return (descriptor, inode) of the sockets that this process has."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = set()
    for name in os.listdir(folder):
        with contextlib.suppress(OSError, ValueError):
            facts = os.fstat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found.add((int(name), facts.st_ino))
    return found


def shut(descriptor: int, inode: int) -> None:
    """Shut down the connection, if the descriptor still is that socket; it stays open for who holds it."""

    def act(one: socket.socket) -> None:
        one.getpeername()  # gloo does not survive the end of a socket that listens, which has no peer
        one.shutdown(socket.SHUT_RDWR)

    _touch(descriptor, inode, act)


@contextlib.contextmanager
def ports_closed_afterwards() -> Iterator[None]:
    """Inside, a process group of gloo's meets. Afterwards nobody can connect to the port at which it did so.

    gloo keeps its port for as long as the group lives, does not ask who connects, and needs it no more once all members
    are connected. It does not survive the end of that socket either, so the kernel is told to drop what arrives there.
    Only Linux can; elsewhere the port stays open. What listens on all addresses is not gloo's, and is left alone.
    """
    before = sockets()
    yield
    if sys.platform == "linux":
        for descriptor, inode in sockets() - before:
            _touch(descriptor, inode, _close_port)


def _close_port(one: socket.socket) -> None:
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[0] not in EVERYWHERE:
        program = ctypes.create_string_buffer(DROP_ALL)
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _touch(descriptor: int, inode: int, act: Callable[[socket.socket], None]) -> None:
    """Act on the socket through another handle, if the descriptor still is that one, and not a local one."""
    with contextlib.suppress(OSError):
        double = socket.socket(fileno=os.dup(descriptor))
        try:
            if os.fstat(double.fileno()).st_ino == inode and double.family != socket.AF_UNIX:
                act(double)
        finally:
            double.close()
