"""Brings a file from a host to this machine over ssh, checked, and without holding it in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import IO, Any

from exogym.core.progress import readable_bytes
from exogym.errors import ExoGymError
from exogym.machines.remote import ssh
from exogym.machines.remote.budget import LINE_BYTES, Budget
from exogym.machines.remote.hosts import Host
from exogym.machines.remote.onhost.fetch import MARK

BLOCK_BYTES = 1 << 20
END_S = 10.0  # for a host that sends no file, to end
MOST_SAID, MOST_LINES = 1 << 16, 1000  # of what a host says beside the file


def fetch(host: Host, folder: str, path: str, target: Path, budget: Budget) -> None:
    """Copy the file `path` in `folder` of `host` to `target` here, whole or not at all.

    Args:
        budget: of the host; a file that it says is larger is refused, and none is read beyond what was said.

    Raises:
        ExoGymError: it is not there, is too large, was damaged on the way, or cannot be written here.
    """
    process = ssh.start(host, "fetch", {"folder": folder, "path": path})
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    said: list[bytes] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: said.append(_beginning(stderr)), daemon=True)
    reader.start()
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        facts = _facts(process.stdout)
        if facts is None or "error" in facts:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that goes on talking is cut off
                process.wait(END_S)
            process.kill()
            reader.join()
            why = facts["error"] if facts else said[0].decode("utf-8", "replace").strip() or "the connection was lost"
            raise ExoGymError(f"{path} cannot be fetched from {host.address}: {why}")
        if not budget.take(facts["size"]):
            raise ExoGymError(
                f"{path} of {host.address} has {readable_bytes(facts['size'])}, and {readable_bytes(budget.left)} of "
                f"the {readable_bytes(budget.most_bytes)} that a host may fill here are left: free some space on this "
                "machine, or copy it by hand"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            digest = _copied(process.stdout, file, facts["size"])
        if digest != facts["sha256"]:
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


def _copied(source: IO[bytes], file: IO[bytes], size: int) -> str:
    """Copy so many bytes, or fewer where there are no more; return their SHA-256."""
    digest = hashlib.sha256()
    while size > 0 and (block := source.read(min(size, BLOCK_BYTES))):
        digest.update(block)
        file.write(block)
        size -= len(block)
    return digest.hexdigest()


def _beginning(stream: IO[bytes]) -> bytes:
    """Read a stream to its end; return how it begins."""
    found = stream.read(MOST_SAID)
    while stream.read(BLOCK_BYTES):
        pass
    return found


def _facts(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the line before the content, or the error it tells of; what a login script printed comes before."""
    for _ in range(MOST_LINES):
        line = stream.readline(LINE_BYTES)
        if not line:
            return None
        if line.startswith(MARK.encode()):
            try:
                facts = json.loads(line[len(MARK) :])
            except (ValueError, RecursionError):
                return None
            if isinstance(facts, dict) and isinstance(facts.get("error"), str):
                return {"error": facts["error"][:MOST_SAID]}
            is_file = isinstance(facts, dict) and type(facts.get("size")) is int and facts["size"] >= 0
            return facts if is_file and isinstance(facts.get("sha256"), str) else None
    return None
