"""Copy a file from a host to this machine over ssh, in small pieces, and compare the checksums of both files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

from exogym.core.base.files import beside
from exogym.core.progress import readable_bytes
from exogym.errors import ExoGymError
from exogym.machines.remote.budget import Quota
from exogym.machines.remote.hosts import Host
from exogym.machines.remote.inquiry import Inquiry, Unanswered

BLOCK_BYTES = 1 << 20
END_S = 10.0  # seconds for a host to end after an error
MOST_SAID = 1 << 16  # characters of a host's error


def fetch(host: Host, folder: str, path: str, target: Path, budget: Quota) -> None:
    """Copy the file `path` in `folder` on `host` to `target` on this machine, completely or not at all.

    Args:
        budget: the bytes that files from this host may still fill on this machine. Larger files are rejected, and bytes
            beyond the announced size are not read.

    Raises:
        ExoGymError: the file does not exist, is too large, was damaged on the way, or cannot be written to `target`.
    """
    inquiry = Inquiry(host, None)
    assert inquiry.process.stdout is not None
    try:
        size, digest = _facts(inquiry.ask("fetch", folder=folder, path=path))
        if not budget.take(size):
            raise ExoGymError(
                f"{path} of {host.address} has {readable_bytes(size)}, but this host's files may fill only "
                f"{readable_bytes(budget.left)} more on this machine's disk (limit: {readable_bytes(budget.most_bytes)}"
                "): free some space here, or copy the file by hand"
            )
        with beside(target) as made:
            with open(made, "wb") as file:
                copied = _copied(inquiry.process.stdout, file, size)
            if copied != digest:
                raise ExoGymError(f"{path} from {host.address} was truncated or damaged on the way: fetch it again")
    except (Unanswered, LookupError) as error:
        inquiry.end(END_S)
        why = inquiry.diagnosis()[1] if isinstance(error, Unanswered) else error.args[0]
        raise ExoGymError(f"{path} cannot be fetched from {host.address}: {why}") from None
    except OSError as error:
        raise ExoGymError(f"{target} cannot be written: {error}") from None
    finally:
        inquiry.process.kill()
        inquiry.end()


def _copied(source: IO[bytes], file: IO[bytes], size: int) -> str:
    """Copy at most `size` bytes; return their SHA-256."""
    digest = hashlib.sha256()
    while size > 0 and (block := source.read(min(size, BLOCK_BYTES))):
        digest.update(block)
        file.write(block)
        size -= len(block)
    return digest.hexdigest()


def _facts(said: Any) -> tuple[int, str]:
    """Return the size and SHA-256 of a file that a host is about to send.

    Raises:
        LookupError: the host sends no file. The message is the host's.
    """
    given = said if isinstance(said, dict) else {}
    size, digest = given.get("size"), given.get("sha256")
    if type(size) is int and size >= 0 and isinstance(digest, str):
        return size, digest
    raise LookupError(str(given.get("error", "it did not describe a file"))[:MOST_SAID])
