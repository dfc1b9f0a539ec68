"""Brings a file from a host to this machine over ssh, checked, and without holding it in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import IO, Any

from exogym.errors import ExoGymError
from exogym.remote import ssh
from exogym.remote.hosts import Host
from exogym.remote.onhost.fetch import MARK

BLOCK_BYTES = 1 << 20


class _Summed:
    """Writes to a file and sums what passes."""

    def __init__(self, file: IO[bytes]):
        self.file, self.digest = file, hashlib.sha256()

    def write(self, block: bytes) -> None:
        self.digest.update(block)
        self.file.write(block)


def fetch(host: Host, folder: str, path: str, target: Path) -> None:
    """Copy the file `path` in `folder` of `host` to `target` here, whole or not at all.

    Raises:
        ExoGymError: it is not there, was damaged on the way, or cannot be written here.
    """
    process = ssh.start(host, "fetch", {"folder": folder, "path": path})
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    said: list[bytes] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: said.append(stderr.read()), daemon=True)
    reader.start()
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        facts = _facts(process.stdout)
        if facts is None or "error" in facts:
            process.wait()
            reader.join()
            why = facts["error"] if facts else said[0].decode("utf-8", "replace").strip() or "the connection was lost"
            raise ExoGymError(f"{path} cannot be fetched from {host.address}: {why}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            sink = _Summed(file)
            shutil.copyfileobj(process.stdout, sink, BLOCK_BYTES)
        if sink.digest.hexdigest() != facts["sha256"]:
            raise ExoGymError(f"{path} from {host.address} was cut short or damaged on the way: fetch it again")
        os.replace(beside, target)
    except OSError as error:
        raise ExoGymError(f"{target} cannot be written: {error}") from None
    finally:
        beside.unlink(missing_ok=True)
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def _facts(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the line before the content; what a login script printed comes before."""
    for line in stream:
        if line.startswith(MARK.encode()):
            return json.loads(line[len(MARK) :])
    return None
