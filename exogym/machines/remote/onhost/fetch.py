"""Sends one file of this host to the controller: a line with its size and SHA-256, then its bytes, on stdout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from typing import IO, Any

MARK = "exogym:"  # what a login script prints comes before, and is not ours


def main(given: dict[str, Any], stream: IO[bytes]) -> int:
    """Send the file `given["path"]`; the status is 1 where it cannot be read, and the line says why."""
    path = os.path.join(os.path.expanduser(given["folder"]), given["path"])
    out = sys.stdout.buffer
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256()
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
            head = {"size": file.tell(), "sha256": digest.hexdigest()}
            out.write(f"{MARK}{json.dumps(head)}\n".encode())
            file.seek(0)
            shutil.copyfileobj(file, out, 1 << 20)
    except OSError as error:
        out.write(f"{MARK}{json.dumps({'error': f'{path}: {error.strerror}'})}\n".encode())
        out.flush()
        return 1
    out.flush()
    return 0
