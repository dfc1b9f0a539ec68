"""Limits on the disk space of this machine that one host of a run may fill.

printed output    256 MB are saved; later output is printed but not saved
files of the run  1 GB is copied while the run trains; the rest is copied at the end of the run
fetched files     a quarter of the disk space that was free when the first file was fetched
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

PRINTED_BYTES, TOLD_BYTES = 256 << 20, 1 << 30
FETCHED_SHARE = 0.25
LINE_BYTES = 1 << 20  # longest line that is read in one piece


class Quota:
    """A limit of `most_bytes` written bytes, of them `left` remaining.

    >>> budget = Quota(10)
    >>> budget.take(6), budget.take(6), budget.left, budget.take(4)
    (True, False, 4, True)
    """

    def __init__(self, most_bytes: int):
        self.most_bytes = self.left = most_bytes
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Subtract `count` from the remaining bytes and return True, or only return False if too few remain."""
        with self._lock:
            if count > self.left:
                return False
            self.left -= count
            return True

    @classmethod
    def of_disk(cls, folder: Path) -> Quota:
        """Return the budget for files fetched from one host: a quarter of the free space on the disk of `folder`."""
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return cls(int(FETCHED_SHARE * shutil.disk_usage(there).free))
