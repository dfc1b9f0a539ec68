"""Times of one kind of collective by size, measured, and the times between and beyond them.

Between two probes, of S_1 < S_2 bytes in t_1 and t_2 seconds, time is linear in the bytes, as the alpha-beta model has
it:

    t(S) = t_1 + (S - S_1) (t_2 - t_1) / (S_2 - S_1)

Outside of them nothing was measured. The line of the two outermost probes goes on, but down to no less than 0; one
probe alone is a line through the links' latency at no bytes. A notice says so, once for each kind and side.

A table of probes has the name of a collective, "all_reduce", which is then carried out as its library does, or of a
way to carry it out before it: "exact all_reduce" is the reduction in the fixed tree.
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

NOISE = 0.1  # a larger message may take so much less, or a cold one than a warm one, before it is a contradiction


def kind_and_way(name: str) -> tuple[str, str]:
    """Return the collective and the way to carry it out that a table of probes is named after.

    >>> kind_and_way("exact all_reduce"), kind_and_way("broadcast")
    (('all_reduce', 'exact'), ('broadcast', 'tree'))

    Raises:
        ArgumentError: an unknown collective or way.
    """
    way, _, kind = str(name).rpartition(" ")
    check_choice("collective", kind, ALGORITHMS)
    if way:
        check_choice(f"way of {kind}", way, ALGORITHMS[kind])
    return kind, way or next(iter(ALGORITHMS[kind]))


@dataclass(frozen=True)
class Probes:
    """One kind of collective among all nodes, measured.

    Attributes:
        name: of the collective, and of the way to carry it out where that is not its library's.
        sizes_bytes, times_s: (probes,) payloads, rising, and what they took.
        floor_s: of no bytes at all, where a single probe does not say it.
        set_up_s: by how much the first collective takes longer.
    """

    name: str
    sizes_bytes: np.ndarray
    times_s: np.ndarray
    floor_s: float = 0.0
    set_up_s: float = 0.0
    _said: set[str] = field(default_factory=set, compare=False, repr=False)

    def seconds(self, payload_bytes: float) -> float:
        """Return the seconds of a payload, with a notice where no probe is on one side of it."""
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
        """Return what is to be known of a payload outside the probes; None for one between them."""
        least, most = (readable_bytes(float(size)) for size in (self.sizes_bytes[0], self.sizes_bytes[-1]))
        probed = f"probes of {self.name} are of {least}" + ("" if least == most else f" to {most}")
        if payload_bytes < self.sizes_bytes[0]:
            return f"{probed}: the time of less is extrapolated, not measured"
        if payload_bytes > self.sizes_bytes[-1]:
            return f"{probed}: the time of more is extrapolated, not measured"
        return None

    def cost(self, payload_bytes: float) -> Cost:
        """Return the seconds of a payload as a cost, what no bytes at all would take as its latency."""
        seconds = self.seconds(payload_bytes)
        start_s = min(self._start_s(), seconds)
        return Cost(start_s, seconds - start_s, 1)

    def _start_s(self) -> float:
        """Return the seconds of no bytes: where the line of the two smallest probes meets the axis."""
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
    """Return seconds over 0, from a number or text."""
    if given is None:
        raise ArgumentError(f"{name} is missing: measure it again")
    seconds = parse_seconds(given, name)
    if not seconds:
        raise ArgumentError(f"{name}={given!r} must be over 0 seconds: measure it again")
    return seconds


def never_falling(table: Mapping[float, float]) -> dict[float, float]:
    """Return times by size, rising, in which more bytes never take less: a probe that took longer has the larger's.

    What else hosts do only adds time.

    >>> never_falling({8: 0.5, 100: 0.4, 1000: 2.0})
    {8: 0.4, 100: 0.4, 1000: 2.0}
    """
    least_s, found = math.inf, {}
    for size in sorted(table, reverse=True):
        found[size] = least_s = min(least_s, table[size])
    return dict(sorted(found.items()))


def table_of(name: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes, rising, and seconds of the probes of a kind, checked."""
    kind_and_way(name)
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(f"{name}={given!r} must be probes, bytes and their seconds, as {{4_000_000: 0.05}}")
    rows = {}
    for size, time in given.items():
        try:
            number = float(size) if not isinstance(size, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ArgumentError(f"{name}: the size {size!r} of a probe must be a number of bytes, over 0")
        if number in rows:
            raise ArgumentError(f"{name}: probes contradict each other: {number:g} bytes are given twice")
        rows[number] = positive_s(time, f"{name} of {number:g} bytes")
    ordered = sorted(rows.items())
    for (small, before), (large, after) in itertools.pairwise(ordered):
        if after < (1 - NOISE) * before:
            raise ArgumentError(
                f"{name}: probes contradict each other: {large:g} bytes took {after:g} s, fewer ({small:g}) {before:g} "
                "s; measure again, on quiet hosts and more often"
            )
    sizes, times = np.array(ordered).T
    return sizes, times
