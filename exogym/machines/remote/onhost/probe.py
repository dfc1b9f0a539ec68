"""Answer the controller's questions about this host before a run, with one JSON line each."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import select
import shutil
import socket
import sys
import time
from typing import IO, Any

from exogym.machines.remote.onhost.interfaces import interface_of

MARK = "exogym:"  # ignores output of a login script, which comes first
SKIPPED = ("runs", "build", "dist", "node_modules", "__pycache__")
MOST_FILES = 20_000
CONNECT_S = 5.0


def main(given: dict[str, Any], stream: IO[bytes]) -> int:
    """Answer the questions in `stream`, one per line, until the controller closes the connection."""
    listening: list[socket.socket] = []
    for line in stream:
        asked = json.loads(line)
        question = asked.pop("ask")
        try:
            if question == "listen":
                answer: Any = _listen(listening, **asked)
            elif question == "fetch":
                answer = None
                _send(**asked)
            else:
                answer = QUESTIONS[question](**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            _say(answer)
    return 0


def _say(answer: Any) -> None:
    print(MARK + json.dumps(answer), flush=True)


def _python() -> dict[str, Any]:
    return {"version": list(sys.version_info[:3]), "executable": sys.executable}


def packages(names: list[str]) -> dict[str, str | None]:
    """Return {package: its version}, with None for a package that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def package_sum(name: str, folder: str | None = None) -> str | None:
    """Return a checksum of a package's Python files. Return None if there is no such package.

    The package is searched for as by `python -m` in `folder`.
    """
    before = list(sys.path)
    if folder is not None:
        sys.path[:1] = [os.path.expanduser(folder)]
    try:
        spec = importlib.util.find_spec(name)
    finally:
        sys.path[:] = before
    if spec is None or not spec.submodule_search_locations:
        return None
    return _total(source_sums(next(iter(spec.submodule_search_locations))))


def source_sums(folder: str) -> dict[str, str]:
    """Return {path: short SHA-256} of the Python files below `folder`, without hidden folders and build outputs.

    Raises:
        NotADirectoryError: the folder does not exist.
        ValueError: the folder has more than 20,000 Python files, so it is hardly one project's folder.
    """
    root = os.path.expanduser(folder)
    if not os.path.isdir(root):
        raise NotADirectoryError(f"there is no folder {root}")
    sums: dict[str, str] = {}
    for here, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED
            and not name.endswith(".egg-info")
            and not os.path.exists(os.path.join(here, name, "pyvenv.cfg"))
        )
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(here, name)
                with open(path, "rb") as file:
                    sums[os.path.relpath(path, root)] = hashlib.sha256(file.read()).hexdigest()[:12]
        if len(sums) > MOST_FILES:
            raise ValueError(f"{root} holds more than {MOST_FILES} Python files: use the project's own folder")
    return sums


def _total(sums: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:12]


def _disk(folder: str) -> dict[str, Any]:
    path = os.path.abspath(os.path.expanduser(folder))
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return {"free_bytes": shutil.disk_usage(path).free, "writable": os.access(path, os.W_OK), "path": path}


def _interface(address: str, is_loopback: bool) -> dict[str, str]:
    try:
        return {"interface": interface_of(address, is_loopback)}
    except LookupError as error:
        return {"missing": str(error)}


def _device(device: str) -> dict[str, Any]:
    """Return the devices that torch sees. Torch is loaded only if another device than the CPU may be needed."""
    if device == "cpu":
        return {"kinds": ["cpu"], "gpus": 0}
    import torch

    from exogym.core.base.devices import Device

    found = Device.accelerator()
    kinds = [] if found is None else [found.place.type]
    return {"kinds": [*kinds, "cpu"], "gpus": torch.accelerator.device_count() if kinds else 0}


def _file(path: str, text: str | None, folder: str) -> dict[str, Any]:
    """Write `text`, if given, to a file. Return the file's contents; None: it does not exist."""
    where = os.path.join(os.path.expanduser(folder), os.path.expanduser(path))
    if text is not None:
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(where, "w") as file:
            file.write(text)
    with contextlib.suppress(FileNotFoundError), open(where) as file:
        return {"text": file.read()}
    return {"text": None}


def _send(path: str, folder: str) -> None:
    """Send a line with a file's size and SHA-256, then its bytes; or the reason why it cannot be read."""
    where = os.path.join(os.path.expanduser(folder), path)
    try:
        with open(where, "rb") as file:
            digest = hashlib.sha256()
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
            _say({"size": file.tell(), "sha256": digest.hexdigest()})
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()
    except OSError as error:
        _say({"error": f"{where}: {error.strerror}"})


def _make(folder: str) -> dict[str, Any]:
    os.makedirs(os.path.expanduser(folder), exist_ok=True)
    return {}


def _remove(path: str, folder: str) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(os.path.expanduser(folder), os.path.expanduser(path)))
    return {}


QUESTIONS: dict[str, Any] = {
    "python": _python,
    "packages": packages,
    "exogym": lambda folder: {"sum": package_sum("exogym", folder)},
    "project": lambda folder: {"sums": source_sums(folder)},
    "disk": _disk,
    "interface": _interface,
    "device": _device,
    "time": time.time,
    "rsync": lambda: {"path": shutil.which("rsync")},
    "file": _file,
    "make": _make,
    "remove": _remove,
    "connect": lambda others: _connect(others),
}


# Connections between hosts: every host listens, and then every host connects to all others.


def _listen(listening: list[socket.socket], address: str, port: int) -> dict[str, Any]:
    """Listen on `port` (0: any free port) of this address only, as the meeting and gloo do. Return the port."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(64)
    except OSError as error:
        listener.close()
        return {"taken": error.strerror}
    listening.append(listener)
    return {"port": listener.getsockname()[1]}


def _connect(others: list[tuple[str, int]]) -> dict[str, Any]:
    """Connect to all others at the same time. Return unreachable hosts with reasons."""
    calls = []
    for address, port in others:
        calls.append((address, port, _call(address, port)))
    deadline = time.monotonic() + CONNECT_S
    failed: dict[str, str] = {}
    for address, port, call in calls:
        if isinstance(call, str):
            failed[address] = call
            continue
        ready = select.select([], [call], [], max(0.0, deadline - time.monotonic()))[1]
        code = call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else None
        if code is None:
            failed[address] = f"port {port} does not answer within {CONNECT_S:g} s"
        elif code:
            failed[address] = f"port {port}: {os.strerror(code)}"
        call.close()
    return {"failed": failed}


def _call(address: str, port: int) -> socket.socket | str:
    """Begin to connect. Return the socket, or the reason for a failure."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        call = socket.socket(family, kind)
        call.setblocking(False)
        code = call.connect_ex(target)
        if code in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            return call
        call.close()
        return f"port {port}: {os.strerror(code)}"
    except (OSError, UnicodeError) as error:
        return str(error)
