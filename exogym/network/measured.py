"""Times of real collectives in place of a formula, and the file that the self-test writes them to.

Between two probes of a kind, of S_1 < S_2 bytes in t_1 and t_2 seconds, the time is linear in the bytes, as the
alpha-beta model has it:

    t(S) = t_1 + (S - S_1) (t_2 - t_1) / (S_2 - S_1)

Outside of them nothing was measured. The line of the two outermost probes goes on, but down to no less than 0; one
probe alone is a line through the links' latency at no bytes. A notice says so, once for each kind and side.

Where a collective was not probed (another kind, another way, fewer members), the formulas hold, on links that are the
probed pairs or, without these, such that the formula for the largest probe gives its time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_choice, check_count, nearest
from exogym.network.costs import ALGORITHMS, Cost, cost_among
from exogym.network.links import Links, MatrixLinks, UniformLinks, without_diagonal
from exogym.network.units import parse_seconds
from exogym.progress import notice, readable_bytes

FIELDS = ("num_nodes", "hosts", "pairs", "collectives", "first", "step_s", "versions", "date")
ALIKE = {"all_reduce": ("ring", "exact")}  # ways of a kind for which its probes stand; of others its first alone
NOISE = 0.1  # a larger message may take so much less, or a cold one than a warm one, before it is a contradiction


@dataclass(frozen=True)
class Probes:
    """One kind of collective among all nodes, measured.

    Attributes:
        sizes_bytes, times_s: (probes,) payloads, rising, and what they took.
        floor_s: of no bytes at all, where a single probe does not say it.
        set_up_s: by how much the first collective takes longer.
    """

    kind: str
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
        probed = f"probes of {self.kind} are of {least}" + ("" if least == most else f" to {most}")
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


class Measurement:
    """What was measured of hosts and of the network between them; `of` reads it from the fields of a file.

    Attributes:
        num_nodes: N.
        hosts: their addresses, (N,), or None.
        probes: of each kind that was measured.
        step_s: (N,) seconds of a step of the user's model on each host, or None; `task` is its name.
        links: for what was not probed.
    """

    def __init__(
        self,
        num_nodes: int,
        collectives: Mapping[str, Mapping[Any, Any]],
        *,
        first: Mapping[str, Any] | None = None,
        pairs: Any = None,
        hosts: Sequence[str] | None = None,
        step_s: Any = None,
        versions: Mapping[str, Any] | None = None,
        date: str | None = None,
    ):
        check_count("num_nodes", num_nodes, least=2)
        self.num_nodes = num_nodes
        self.hosts = _per_host("hosts", hosts, num_nodes)
        steps = _per_host("step_s", step_s, num_nodes)
        self.step_s = None if steps is None else [_positive(s, f"step_s of host {i}") for i, s in enumerate(steps)]
        self.about = {name: value for name, value in (("versions", versions), ("date", date)) if value}
        self.task = None if versions is None else versions.get("task")
        tables = {kind: _table(kind, given) for kind, given in collectives.items()}
        if not tables and pairs is None:
            raise ArgumentError("a measured network needs a probe, as in all_reduce={4_000_000: 0.05}")
        self.pairs = None if pairs is None else _pairs(pairs, num_nodes)
        self.links: Links = _fitted(tables, num_nodes) if self.pairs is None else self.pairs
        self._first = {kind: _positive(s, f"first of {kind}") for kind, s in (first or {}).items()}
        unprobed = sorted(self._first.keys() - tables.keys())
        if unprobed:
            raise ArgumentError(f"first is of {unprobed[0]}, of which there is no probe: give warm times of it, too")
        self.probes = {kind: self._probes(kind, *table) for kind, table in tables.items()}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Measurement:
        """Return what the fields of a file say.

        Raises:
            ArgumentError: an unknown or missing field, values that are missing, not over 0 or no numbers, probes that
                contradict each other, or hosts, pairs or steps for another number of nodes.
        """
        for name in fields:
            if name not in FIELDS:
                raise ArgumentError(f"a measured network has no field {name!r}: {nearest(str(name), FIELDS)}")
        for name in ("num_nodes", "collectives"):
            if fields.get(name) is None:
                raise ArgumentError(f"a measured network has no {name}: measure it again")
        for name in ("collectives", "first"):
            if not isinstance(fields.get(name, {}), Mapping):
                raise ArgumentError(f"{name}={fields[name]!r} must name each collective, as {{'all_reduce': ...}}")
        given = dict(fields)
        return cls(given.pop("num_nodes"), given.pop("collectives"), **given)

    def describe(self) -> dict[str, Any]:
        """Return it as a file holds it, from which `of` makes it again."""
        out: dict[str, Any] = {"num_nodes": self.num_nodes, "collectives": {}}
        for kind, probes in self.probes.items():
            sizes = (f"{size:.17g}" for size in probes.sizes_bytes)
            out["collectives"][kind] = dict(zip(sizes, probes.times_s.tolist(), strict=True))
        if self._first:
            out["first"] = dict(self._first)
        if self.pairs is not None:
            clean = without_diagonal({"b": self.pairs.bandwidth_bps.tolist(), "l": self.pairs.latency_s.tolist()})
            rows = zip(clean["b"], clean["l"], strict=True)
            out["pairs"] = [[list(pair) for pair in zip(*row, strict=True)] for row in rows]
        for name in ("hosts", "step_s"):
            if getattr(self, name) is not None:
                out[name] = list(getattr(self, name))
        return out | self.about

    def probes_for(self, kind: str, way: str, members: int) -> Probes | None:
        """Return the probes that stand for a collective among so many members carried out in that way, or None."""
        if members != self.num_nodes or kind not in self.probes:
            return None
        return self.probes[kind] if way in ALIKE.get(kind, tuple(ALGORITHMS[kind])[:1]) else None

    def set_up_s(self, kind: str) -> float:
        """Return by how many seconds the first collective takes longer; of a kind not probed so, as the longest."""
        if kind in self._first:
            return self.probes[kind].set_up_s
        return max((probes.set_up_s for probes in self.probes.values()), default=0.0)

    def check_hosts(self, hosts: Sequence[str]) -> None:
        """Refuse a measurement of other hosts.

        Raises:
            ArgumentError: it does not say of which hosts it is, or they are others, or in another order.
        """
        if self.hosts is None:
            raise ArgumentError("the measurement does not say of which hosts it is: measure these hosts")
        if list(self.hosts) != list(hosts):
            raise ArgumentError(
                f"the measurement is of {', '.join(self.hosts)}; the hosts are {', '.join(hosts)}: measure these hosts"
            )

    def _probes(self, kind: str, sizes: np.ndarray, times: np.ndarray) -> Probes:
        way = next(iter(ALGORITHMS[kind]))
        floor_s = cost_among(self.links, None, kind, way, 0.0, range(self.num_nodes)).seconds
        set_up_s = 0.0
        if kind in self._first:
            cold_s, warm_s = self._first[kind], float(times[-1])
            if cold_s < (1 - NOISE) * warm_s:
                raise ArgumentError(
                    f"probes contradict each other: the first {kind} took {cold_s:g} s, a later one of "
                    f"{sizes[-1]:g} bytes {warm_s:g} s; first is that of the largest size, so measure both again"
                )
            set_up_s = max(0.0, cold_s - warm_s)
        return Probes(kind, sizes, times, floor_s, set_up_s)


def _per_host(name: str, given: Any, num_nodes: int) -> list[Any] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != num_nodes:
        count = len(given) if isinstance(given, Sequence) and not isinstance(given, str) else "no list"
        raise ArgumentError(f"{name} is for {count} hosts, wanted {num_nodes}: one for each node")
    return list(given)


def _positive(given: Any, name: str) -> float:
    """Return seconds over 0, from a number or text."""
    if given is None:
        raise ArgumentError(f"{name} is missing: measure it again")
    seconds = parse_seconds(given, name)
    if not seconds:
        raise ArgumentError(f"{name}={given!r} must be over 0 seconds: measure it again")
    return seconds


def _table(kind: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes, rising, and seconds of the probes of a kind, checked."""
    check_choice("collective", kind, ALGORITHMS)
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(f"{kind}={given!r} must be probes, bytes and their seconds, as {{4_000_000: 0.05}}")
    rows = {}
    for size, time in given.items():
        try:
            number = float(size) if not isinstance(size, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ArgumentError(f"{kind}: the size {size!r} of a probe must be a number of bytes, over 0")
        if number in rows:
            raise ArgumentError(f"{kind}: probes contradict each other: {number:g} bytes are given twice")
        rows[number] = _positive(time, f"{kind} of {number:g} bytes")
    ordered = sorted(rows.items())
    for (small, before), (large, after) in itertools.pairwise(ordered):
        if after < (1 - NOISE) * before:
            raise ArgumentError(
                f"{kind}: probes contradict each other: {large:g} bytes took {after:g} s, fewer ({small:g}) {before:g} "
                "s; measure again, on quiet hosts and more often"
            )
    sizes, times = np.array(ordered).T
    return sizes, times


def _pairs(given: Any, num_nodes: int) -> MatrixLinks:
    """Return the links of pairs[i][j] = [bandwidth_bps, latency_s] from i to j; the diagonal may hold anything."""
    wanted = f"pairs must hold [bandwidth_bps, latency_s] for each of {num_nodes} hosts to each other"
    if not isinstance(given, Sequence) or len(given) != num_nodes:
        raise ArgumentError(f"{wanted}; it has {len(given) if isinstance(given, Sequence) else 'no'} rows")
    tables: list[list[list[Any]]] = [[], []]
    for i, row in enumerate(given):
        if not isinstance(row, Sequence) or len(row) != num_nodes:
            raise ArgumentError(f"{wanted}; row {i} is {row!r}")
        for j, pair in enumerate(row):
            if i != j and (not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2):
                raise ArgumentError(f"{wanted}; from {i} to {j} it is {pair!r}")
        for k, table in enumerate(tables):
            table.append([1.0 if i == j else pair[k] for j, pair in enumerate(row)])
    return MatrixLinks(*tables)


def _fitted(tables: Mapping[str, tuple[np.ndarray, np.ndarray]], num_nodes: int) -> UniformLinks:
    """Return links on which the formula gives the time of the largest probe, and of the smallest no less than it took.

    t = h alpha + k S / B, with the hops h and the share k of the payload that the kind's first algorithm has.
    """
    kind = "all_reduce" if "all_reduce" in tables else next(kind for kind in tables if kind != "barrier")
    sizes, times = tables[kind]
    way = next(iter(ALGORITHMS[kind]))
    unit = cost_among(UniformLinks(1.0, 1.0, 1.0), None, kind, way, 1.0, range(num_nodes))
    if not unit.transfer_s:
        raise ArgumentError(f"probes of {kind} alone say nothing of the bandwidth: probe all_reduce, too")
    per_byte = float(times[-1] / sizes[-1])
    if len(sizes) > 1 and times[-1] > times[0]:
        per_byte = float((times[-1] - times[0]) / (sizes[-1] - sizes[0]))
    latency_s = max(0.0, float(times[-1] - per_byte * sizes[-1])) / unit.latency_s
    return UniformLinks(unit.transfer_s / per_byte, unit.transfer_s / per_byte, latency_s)
