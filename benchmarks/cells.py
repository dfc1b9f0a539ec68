"""Cells of a long benchmark: stored in a file as they are measured, with the load of other programs.

    cells = Cells("rows.json", again="disturbed", turn_s=200)
    for key in ("2 hosts, ddp", "4 hosts, ddp"):
        if cells.wants(key):
            with cells.watched(pids) as seen:
                row = measure()
            cells.put(key, row | seen)

A stopped run continues where it was. `others_cores` is the processor time of all other programs, in cores, without the
kernel's work on packets. It includes the time that a virtual machine was denied ("steal"). A cell with more than
`LIMIT_CORES` is marked as disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing

LIMIT_CORES = 0.25
AGAIN = ("disturbed", "off", "all")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cells:
    """The measured cells, by key.

    Args:
        file: where to store them; None: nowhere.
        again: cells to measure again: "disturbed", "off" (by more than `limit`), or "all".
        limit: the largest share in a row's "off" (names to shares) that is not off.
        turn_s: seconds from now after which no cell begins; None: no limit.
    """

    def __init__(
        self, file: str | None, again: str | None = None, limit: float = 0.10, turn_s: float | None = None
    ) -> None:
        self.path = None if file is None else Path(file)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            self.rows = json.loads(self.path.read_text("utf-8"))
        self._stale = {key for key, row in self.rows.items() if self._is_stale(row, again, limit)}
        self._end = None if turn_s is None else time.monotonic() + turn_s
        self.left = 0  # cells that were wanted after the turn's end

    @staticmethod
    def _is_stale(row: dict[str, Any], again: str | None, limit: float) -> bool:
        if again == "off":
            return any(abs(share) > limit for share in row.get("off", {}).values())
        return again == "all" or (again == "disturbed" and row["is_disturbed"])

    @property
    def is_over(self) -> bool:
        """Whether the turn is over."""
        return self._end is not None and time.monotonic() > self._end

    def has(self, key: str) -> bool:
        """Return whether a cell is known and stays as it is."""
        return key in self.rows and key not in self._stale

    def wants(self, key: str) -> bool:
        """Return whether to measure a cell now."""
        if self.has(key):
            return False
        if self.is_over:
            self.left += 1
            return False
        return True

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Store a cell, in the file, too."""
        self.rows[key] = row
        self._stale.discard(key)
        if self.path is not None:
            with replacing(self.path) as out:
                json.dump(self.rows, out)

    @contextlib.contextmanager
    def watched(self, pids: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield a dict that gets "others_cores" and "is_disturbed" for this time at the end."""
        seen: dict[str, Any] = {}
        start, busy_s, own_s = time.perf_counter(), machine_s(), processes_s(pids)
        yield seen
        wall_s = time.perf_counter() - start
        others_s = machine_s() - busy_s - (processes_s(pids) - own_s)
        seen |= {"wall_s": wall_s, "others_cores": max(0.0, others_s / wall_s)}
        seen["is_disturbed"] = seen["others_cores"] > LIMIT_CORES


def machine_s() -> float:
    """Return the processor seconds that this machine has spent on programs, or was denied, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, _, _, steal = map(int, fields[:8])
    return (user + nice + system + steal) / TICKS_PER_S


def processes_s(pids: Sequence[int]) -> float:
    """Return the processor seconds of this process, of `pids`, and of their ended children."""
    ticks = 0
    for pid in (os.getpid(), *pids):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / TICKS_PER_S
