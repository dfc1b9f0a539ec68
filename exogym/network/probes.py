"""Measured times of a collective by size (probes), and predicted times between and beyond these sizes.

Between two probes of S_1 < S_2 bytes, which took t_1 and t_2 seconds, the time is linear, as in the alpha-beta model:

    t(S) = t_1 + (S - S_1) (t_2 - t_1) / (S_2 - S_1)

Beyond the probes, the line through the two outermost probes continues, but never below 0. With a single probe the line
starts at the links' latency for zero bytes. A notice reports each extrapolation, once per kind and side.

A table of probes has the name of its collective: "all_reduce" ran by the algorithm of the library (NCCL or gloo). The
name may begin with another algorithm: "exact all_reduce" is the reduction in the fixed tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exogym.core.progress import notice, readable_bytes
from exogym.errors import ArgumentError, check_choice
from exogym.network.costs import ALGORITHMS, Cost
from exogym.network.units import parse_seconds

NOISE = 0.1  # a larger or colder message may be faster by this share before the probes contradict each other


def kind_and_way(name: str) -> tuple[str, str]:
    """Return the collective and the algorithm in the name of a table of probes.

    >>> kind_and_way("exact all_reduce"), kind_and_way("broadcast")
    (('all_reduce', 'exact'), ('broadcast', 'tree'))

    Raises:
        ArgumentError: an unknown collective or algorithm.
    """
    way, _, kind = str(name).rpartition(" ")
    check_choice("collective", kind, ALGORITHMS)
    if way:
        check_choice(f"way of {kind}", way, ALGORITHMS[kind])
    return kind, way or next(iter(ALGORITHMS[kind]))


@dataclass(frozen=True)
class Probes:
    """Measured times of one collective among all nodes, by payload.

    Attributes:
        name: the table's name. It is the collective, as in "all_reduce", or an algorithm and the collective, as in
            "exact all_reduce".
        sizes_bytes, times_s: (probes,) payloads, rising, and their seconds.
        floor_s: predicted seconds for zero bytes; used if there is only one probe.
        set_up_s: extra seconds of a run's first collective, which sets up connections.
    """

    name: str
    sizes_bytes: np.ndarray
    times_s: np.ndarray
    floor_s: float = 0.0
    set_up_s: float = 0.0
    _said: set[str] = field(default_factory=set, compare=False, repr=False)

    def seconds(self, payload_bytes: float) -> float:
        """Return the seconds for a payload. If the payload is outside the probes' sizes, print a notice once."""
        sizes, times = self.sizes_bytes, self.times_s
        text = self.beyond(payload_bytes)
        if text is None:
            return float(np.interp(payload_bytes, sizes, times))
        if text not in self._said:
            self._said.add(text)
            notice(text)
        if payload_bytes < sizes[0]:
            start_s = self._start_s()
            return start_s + float((times[0] - start_s) * payload_bytes / sizes[0])
        return float(times[-1] + (payload_bytes - sizes[-1]) * self._slope())

    def beyond(self, payload_bytes: float) -> str | None:
        """Return a warning if a payload is outside the probes' sizes; otherwise None."""
        least, most = (readable_bytes(float(size)) for size in (self.sizes_bytes[0], self.sizes_bytes[-1]))
        probed = f"probes of {self.name} have {least}" + ("" if least == most else f" to {most}")
        if payload_bytes < self.sizes_bytes[0]:
            return f"{probed}: times for less are extrapolated, not measured"
        if payload_bytes > self.sizes_bytes[-1]:
            return f"{probed}: times for more are extrapolated, not measured"
        return None

    def cost(self, payload_bytes: float) -> Cost:
        """Return the cost of a payload. Its latency is the time for zero bytes."""
        seconds = self.seconds(payload_bytes)
        start_s = min(self._start_s(), seconds)
        return Cost(start_s, seconds - start_s, 1)

    def _start_s(self) -> float:
        """Return the seconds of zero bytes: where the line through the two smallest probes meets the axis."""
        if len(self.sizes_bytes) == 1:
            return min(self.floor_s, float(self.times_s[0]))
        (a, b), (s, t) = self.sizes_bytes[:2], self.times_s[:2]
        return float(np.clip(s - a * (t - s) / (b - a), 0.0, s))

    def _slope(self) -> float:
        """Return the seconds per byte of large messages."""
        a, s = self.sizes_bytes[-1], self.times_s[-1]
        if len(self.sizes_bytes) > 1 and s > self.times_s[-2]:
            return float((s - self.times_s[-2]) / (a - self.sizes_bytes[-2]))
        return float((s - self._start_s()) / a) or float(s / a)


def positive_s(given: Any, name: str) -> float:
    """Return `given`, a number or text, as seconds. Seconds must be over 0. `name` is for the error message."""
    if given is None:
        raise ArgumentError(f"{name} is missing: measure it again")
    seconds = parse_seconds(given, name)
    if not seconds:
        raise ArgumentError(f"{name}={given!r} must be over 0 seconds: measure it again")
    return seconds


def never_falling(table: Mapping[float, float]) -> dict[float, float]:
    """Return a table of times by rising size, changed so that more bytes never take less time.

    If a probe took longer than a probe with more bytes, the probe with fewer bytes gets the time of the other probe.
    This change is safe because other work on the hosts only adds time.

    >>> never_falling({8: 0.5, 100: 0.4, 1000: 2.0})
    {8: 0.4, 100: 0.4, 1000: 2.0}
    """
    least_s, found = math.inf, {}
    for size in sorted(table, reverse=True):
        found[size] = least_s = min(least_s, table[size])
    return dict(sorted(found.items()))


def table_of(name: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check a table of probes. Return its sizes in rising order, and their seconds."""
    kind_and_way(name)
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(f"{name}={given!r} must be a table from bytes to seconds, such as {{4_000_000: 0.05}}")
    rows = {}
    for size, time in given.items():
        try:
            number = float(size) if not isinstance(size, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ArgumentError(f"{name}: a probe's size {size!r} must be a number of bytes over 0")
        if number in rows:
            raise ArgumentError(f"{name}: probes contradict each other: {number:g} bytes are given twice")
        rows[number] = positive_s(time, f"{name} of {number:g} bytes")
    ordered = sorted(rows.items())
    for (small, before), (large, after) in itertools.pairwise(ordered):
        if after < (1 - NOISE) * before:
            raise ArgumentError(
                f"{name}: probes contradict each other: {large:g} bytes took {after:g} s, but {small:g} bytes took "
                f"{before:g} s; measure again, on quiet hosts and more often"
            )
    sizes, times = np.array(ordered).T
    return sizes, times
