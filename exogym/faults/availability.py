"""When each client is available, so that a server can choose it for a round, and how fast it is.

    Trace       intervals from a file: client, from, to, speed
    Devices     kinds of devices. Each kind has a speed and a share of the time in which its clients are available.

Times are seconds since the start of the run. Speeds are relative: at 0.5, a step takes twice `step_seconds`.
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError, DataError, check_number, checked

COLUMNS = ("client", "from", "to", "speed")


class There(NamedTuple):
    """The clients that are available at some time.

    Attributes:
        ids: the clients' numbers, ascending.
        until_s: the time until which each of these clients is available.
        speed: the speed of each of these clients.
    """

    ids: np.ndarray
    until_s: np.ndarray
    speed: np.ndarray


class Availability:
    """Base class of availability. Subclasses implement `at`, whose result must depend only on its arguments."""

    def check(self, num_nodes: int) -> None:
        """Raise ArgumentError or DataError if these times do not fit a fleet of `num_nodes` nodes."""

    def at(self, time_s: float, num_nodes: int) -> There:
        """Return the clients that are available at `time_s`."""
        raise NotImplementedError


class Trace(Availability):
    """Clients' availability from a CSV file with the columns client, from, to, speed.

    Args:
        file: the file's path. A row is an interval in which a client (a number from 0) is available, with `from` and
            `to` in seconds and a `speed` over 0, which is 1 for all clients if there is no such column.
        repeat_s: repeat the intervals after this many seconds. Default: no client is available after the last `to`.

    Raises:
        DataError: the file does not exist, a row is impossible, or two intervals of a client overlap. The message names
            the row and the reason.
    """

    @checked
    def __init__(self, file: str | os.PathLike[str], *, repeat_s: float | None = None):
        if repeat_s is not None:
            check_number("repeat_s", repeat_s, over=0)
        self.file, self.repeat_s = os.fspath(file), repeat_s
        path = Path(file)
        if not path.is_file():
            raise DataError(f"there is no trace {self.file!r}: expected a CSV file with {', '.join(COLUMNS)}")
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        client, self.begin, self.end, self.speed = map(np.array, _columns(path))
        if wrong := [k for k, x in enumerate(client) if not 0 <= x < 1 << 53 or x != int(x)]:
            raise DataError(
                f"{_row(self.file, wrong[0])}: client {client[wrong[0]]:g} is not a whole number of at least 0"
            )
        self.client = client.astype(np.int64)
        for k in np.flatnonzero(~((self.begin >= 0) & (self.end > self.begin)))[:1]:
            raise DataError(
                f"{_row(self.file, k)}: from={self.begin[k]:g}, to={self.end[k]:g}: expected a `from` of at least 0 "
                "and a `to` after it"
            )
        for k in np.flatnonzero(~((self.speed > 0) & np.isfinite(self.speed)))[:1]:
            raise DataError(f"{_row(self.file, k)}: speed {self.speed[k]:g} must be over 0")
        order = np.lexsort((self.begin, self.client))
        same = self.client[order][1:] == self.client[order][:-1]
        for k in np.flatnonzero(same & (self.begin[order][1:] < self.end[order][:-1]))[:1]:
            one, other = order[k], order[k + 1]
            raise DataError(
                f"{_row(self.file, other)}: client {self.client[other]} is available from {self.begin[other]:g}, but "
                f"also from row {one + 2}, until {self.end[one]:g}: use times that do not overlap"
            )
        if repeat_s is not None and self.end.max(initial=0) > repeat_s:
            raise DataError(
                f"{self.file!r} ends at {self.end.max():g} s, after repeat_s={repeat_s:g}: use a larger repeat_s"
            )

    def check(self, num_nodes: int) -> None:
        for k in np.flatnonzero(self.client >= num_nodes)[:1]:
            raise DataError(
                f"{_row(self.file, k)}: client {self.client[k]} does not exist with num_nodes={num_nodes}: "
                f"clients are 0 to {num_nodes - 1}"
            )

    def at(self, time_s: float, num_nodes: int) -> There:
        base = 0.0 if self.repeat_s is None else math.floor(time_s / self.repeat_s) * self.repeat_s
        now = np.flatnonzero((self.begin <= time_s - base) & (time_s - base < self.end))
        now = now[np.argsort(self.client[now])]
        return There(self.client[now], base + self.end[now], self.speed[now])


@dataclass(frozen=True)
class Profile:
    """A kind of device.

    Attributes:
        clients: this kind's share of all clients.
        speed: relative speed, over 0.
        online: the share of the time in which such a device is available, over 0 and at most 1.
        session_s: seconds for which such a device is available at a time.
    """

    clients: float
    speed: float
    online: float
    session_s: float

    def __post_init__(self) -> None:
        for name in ("clients", "speed", "session_s"):
            check_number(name, getattr(self, name), over=0)
        check_number("online", self.online, over=0, most=1)


PROFILES = {  # assumed, not measured
    "phone": Profile(0.7, speed=0.2, online=0.1, session_s=2 * 3600.0),
    "laptop": Profile(0.2, speed=1.0, online=0.3, session_s=3 * 3600.0),
    "board": Profile(0.1, speed=0.05, online=0.95, session_s=24 * 3600.0),
}


class Devices(Availability):
    """A fleet of several kinds of devices, each available for its share of the time, at its own speed.

    Args:
        kinds: the kinds of devices, {name: `Profile`}. Default: phones, laptops and boards, with assumed numbers.
        seed: the seed for each client's kind and times.

    >>> fleet = Devices({"phone": Profile(0.9, speed=0.2, online=0.1, session_s=7200),
    ...                  "board": Profile(0.1, speed=0.05, online=1.0, session_s=3600)})
    >>> available = fleet.at(0.0, num_nodes=1000)
    >>> 100 < len(available.ids) < 300, sorted(set(available.speed.tolist()))
    (True, [0.05, 0.2])
    """

    @checked
    def __init__(self, kinds: Mapping[str, Profile] | None = None, *, seed: int = 0):
        self.kinds = dict(PROFILES if kinds is None else kinds)
        if not self.kinds or not all(isinstance(kind, Profile) for kind in self.kinds.values()):
            raise ArgumentError(
                f"kinds={kinds!r} must map names to profiles, such as {{'phone': Profile(1.0, 0.2, 0.1, 7200)}}"
            )
        self.seed = seed
        self._windows: tuple[np.ndarray, ...] | None = None

    def at(self, time_s: float, num_nodes: int) -> There:
        if self._windows is None or len(self._windows[0]) != num_nodes:
            self._windows = self._drawn(num_nodes)
        begin, length, period, speed = self._windows
        since = (time_s - begin) % period
        ids = np.flatnonzero(since < length)
        return There(ids, time_s + (length - since)[ids], speed[ids])

    def _drawn(self, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return each client's first start, session and period (in seconds) and speed, (N,) each."""
        draw, kinds = numpy_generator(self.seed, "devices"), list(self.kinds.values())
        shares = np.array([kind.clients for kind in kinds])
        which = draw.choice(len(kinds), num_nodes, p=shares / shares.sum())
        length = np.array([kind.session_s for kind in kinds])[which]
        period = length / np.array([kind.online for kind in kinds])[which]
        return draw.random(num_nodes) * period, length, period, np.array([kind.speed for kind in kinds])[which]


def _columns(path: Path) -> list[list[float]]:
    """Return the numbers in a CSV file's columns client, from, to and speed (1 without such a column)."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r} is not a CSV file: {error}") from error
    lacking = [name for name in COLUMNS[:3] if not rows or name not in rows[0]]
    if lacking:
        raise DataError(
            f"{str(path)!r} has no column {', '.join(lacking)}: expected a header with {', '.join(COLUMNS)} and a row "
            "for each interval in which a client is available"
        )
    return [
        [_number(path, k, name, row.get(name, "1" if name == "speed" else None)) for k, row in enumerate(rows)]
        for name in COLUMNS
    ]


def _number(path: Path, index: int, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise DataError(f"{_row(str(path), index)}: {name} is {value!r}: expected a number")
    return number


def _row(file: str, index: int) -> str:
    return f"{file!r}, row {index + 2}"  # the header is row 1
