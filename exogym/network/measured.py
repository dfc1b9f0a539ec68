"""Measured times of collectives, which replace formulas, and the file that stores them.

A table of probes maps sizes to measured times of one collective, whose name is the table's name. "all_reduce" ran with
the library's algorithm (NCCL or gloo); another algorithm precedes the name, as in "exact all_reduce", the reduction in
the fixed tree. Between two probes of S_1 < S_2 bytes, which took t_1 and t_2 seconds, the time is linear, as in the
alpha-beta model:

    t(S) = t_1 + (S - S_1) (t_2 - t_1) / (S_2 - S_1)

Outside the probes, the line through the two outermost probes continues, but never below 0. With a single probe, the
line starts at the links' latency for zero bytes. A notice reports extrapolation, once per kind and side.

Formulas predict every collective that was not probed (another kind, another algorithm, fewer members). They use the
links measured between pairs of hosts or, if no pairs were measured, links for which they give the largest probe's time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exogym.core.progress import notice, readable_bytes
from exogym.errors import ArgumentError, check_choice, check_count, nearest
from exogym.network.costs import ALGORITHMS, Cost
from exogym.network.libraries import LIBRARIES, cost_among
from exogym.network.links import Links, MatrixLinks, UniformLinks, without_diagonal
from exogym.network.units import parse_seconds

FIELDS = (
    *("num_nodes", "hosts", "pairs", "collectives", "first", "message_s", "step_s", "evaluation_s", "versions", "date"),
    *("latency_s", "library"),
)
ALIKE = {("all_reduce", "exact"): "ring", ("all_reduce", "ring"): "exact"}  # equal bytes: each may replace the other
HALVINGS = 100  # bisections of a bandwidth's logarithm until it is exact
NOISE = 0.1  # a larger or first message may be faster by this fraction before the probes contradict each other


def kind_and_way(name: str) -> tuple[str, str]:
    """Return the collective and the algorithm in the name of a probe table.

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
        name: the table's name: a collective, as in "all_reduce", or an algorithm and a collective, as in "exact
            all_reduce".
        sizes_bytes, times_s: (probes,) payloads, rising, and their seconds.
        floor_s: predicted seconds for zero bytes, used if there is only one probe.
        set_up_s: extra seconds of a run's first collective, which sets connections up.
    """

    name: str
    sizes_bytes: np.ndarray
    times_s: np.ndarray
    floor_s: float = 0.0
    set_up_s: float = 0.0
    _said: set[str] = field(default_factory=set, compare=False, repr=False)

    def seconds(self, payload_bytes: float) -> float:
        """Return the seconds for a payload. Print a notice once if the payload is outside the probes' sizes."""
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
        """Return a warning if a payload is outside the probes' sizes, otherwise None."""
        least, most = (readable_bytes(float(size)) for size in (self.sizes_bytes[0], self.sizes_bytes[-1]))
        probed = f"probes of {self.name} have {least}" + ("" if least == most else f" to {most}")
        if payload_bytes < self.sizes_bytes[0]:
            return f"{probed}: times for smaller payloads are extrapolated, not measured"
        if payload_bytes > self.sizes_bytes[-1]:
            return f"{probed}: times for larger payloads are extrapolated, not measured"
        return None

    def cost(self, payload_bytes: float) -> Cost:
        """Return the cost of a payload, with the time for zero bytes as latency."""
        seconds = self.seconds(payload_bytes)
        start_s = min(self._start_s(), seconds)
        return Cost(start_s, seconds - start_s, 1)

    def _start_s(self) -> float:
        """Return the seconds for zero bytes: the intercept of the line through the two smallest probes."""
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
    """Return `given`, a number or text, as seconds over 0. `name` is for the error message."""
    if given is None:
        raise ArgumentError(f"{name} is missing: measure it again")
    seconds = parse_seconds(given, name)
    if not seconds:
        raise ArgumentError(f"{name}={given!r} must be over 0 seconds: measure it again")
    return seconds


def never_falling(table: Mapping[float, float]) -> dict[float, float]:
    """Return a table of times by rising size in which more bytes never take less time.

    A probe that took longer than a larger probe gets the larger probe's time. The lower time is closer to the truth,
    because other work on the hosts only adds time.

    >>> never_falling({8: 0.5, 100: 0.4, 1000: 2.0})
    {8: 0.4, 100: 0.4, 1000: 2.0}
    """
    least_s, found = math.inf, {}
    for size in sorted(table, reverse=True):
        found[size] = least_s = min(least_s, table[size])
    return dict(sorted(found.items()))


def table_of(name: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check a table of probes. Return its sizes in rising order and their seconds."""
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
            raise ArgumentError(f"{name}: probes contradict each other: {number:g} bytes occur twice")
        rows[number] = positive_s(time, f"{name} of {number:g} bytes")
    ordered = sorted(rows.items())
    for (small, before), (large, after) in itertools.pairwise(ordered):
        if after < (1 - NOISE) * before:
            raise ArgumentError(
                f"{name}: probes contradict each other: {large:g} bytes took {after:g} s, but {small:g} bytes took "
                f"{before:g} s; measure again on idle hosts, with more repetitions"
            )
    sizes, times = np.array(ordered).T
    return sizes, times


class Measurement:
    """Measured times of hosts and of the network between them. `Measurement.of` reads the fields of a file.

    Attributes:
        num_nodes: N, the number of nodes.
        hosts: (N,) addresses of the hosts, or None.
        probes: measured times of each collective by its name in the file ("exact all_reduce").
        message_s: seconds in which all nodes agree on a few bytes; 0 if not measured.
        step_s: (N,) seconds of a step of the user's model on each host, or None; `task` names the model.
        evaluation_s: (N,) seconds of an evaluation on the validation set on each host, or None.
        links: the links for the formulas of collectives without probes.
    """

    def __init__(
        self,
        num_nodes: int,
        collectives: Mapping[str, Mapping[Any, Any]],
        *,
        first: Mapping[str, Any] | None = None,
        pairs: Any = None,
        hosts: Sequence[str] | None = None,
        message_s: Any = None,
        step_s: Any = None,
        evaluation_s: Any = None,
        versions: Mapping[str, Any] | None = None,
        date: str | None = None,
        latency_s: Any = None,
        library: str | None = None,
    ):
        check_count("num_nodes", num_nodes, least=2)
        self.num_nodes = num_nodes
        self.hosts = _per_host("hosts", hosts, num_nodes)
        self.step_s = _seconds_per_host("step_s", step_s, num_nodes)
        self.evaluation_s = _seconds_per_host("evaluation_s", evaluation_s, num_nodes)
        self.about = {name: value for name, value in (("versions", versions), ("date", date)) if value}
        self.message_s = 0.0 if message_s is None else positive_s(message_s, "message_s")
        self.task = None if versions is None else versions.get("task")
        tables = {kind: table_of(kind, given) for kind, given in collectives.items()}
        if not tables and pairs is None:
            raise ArgumentError("a measured network needs a probe, as in all_reduce={4_000_000: 0.05}")
        self.pairs = None if pairs is None else _pairs(pairs, num_nodes)
        if library is not None:
            check_choice("library", library, LIBRARIES)
        self.library, self.latency_s = library, None if latency_s is None else parse_seconds(latency_s)
        self.links: Links = self._fitted(tables) if self.pairs is None else self.pairs
        self._first = {kind: positive_s(s, f"first of {kind}") for kind, s in (first or {}).items()}
        unprobed = sorted(self._first.keys() - tables.keys())
        if unprobed:
            raise ArgumentError(f"first contains {unprobed[0]}, which has no probes: add probes of {unprobed[0]}")
        self.probes = {name: self._probes(name, *table) for name, table in tables.items()}
        self._by_way = {kind_and_way(name): probes for name, probes in self.probes.items()}
        if len(self._by_way) < len(self.probes):
            raise ArgumentError(f"two of {', '.join(sorted(self.probes))} are the same collective: keep one of them")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Measurement:
        """Return the measurement with the fields of a file.

        Raises:
            ArgumentError: a field is unknown or missing; a value is missing, not a number or not over 0; probes
                contradict each other; or hosts, pairs or steps are for another number of nodes.
        """
        for name in fields:
            if name not in FIELDS:
                raise ArgumentError(f"a measured network has no field {name!r}: {nearest(str(name), FIELDS)}")
        for name in ("num_nodes", "collectives"):
            if fields.get(name) is None:
                raise ArgumentError(f"a measured network has no {name}: measure it again")
        for name in ("collectives", "first"):
            if not isinstance(fields.get(name, {}), Mapping):
                raise ArgumentError(
                    f"{name}={fields[name]!r} must map names of collectives, as in {{'all_reduce': ...}}"
                )
        given = dict(fields)
        return cls(given.pop("num_nodes"), given.pop("collectives"), **given)

    def describe(self) -> dict[str, Any]:
        """Return fields from which `of` restores this measurement."""
        out: dict[str, Any] = {"num_nodes": self.num_nodes, "collectives": {}}
        for kind, probes in self.probes.items():
            sizes = (f"{size:.17g}" for size in probes.sizes_bytes)
            out["collectives"][kind] = dict(zip(sizes, probes.times_s.tolist(), strict=True))
        if self._first:
            out["first"] = dict(self._first)
        out |= {name: value for name in ("library", "latency_s") if (value := getattr(self, name)) is not None}
        if self.message_s:
            out["message_s"] = self.message_s
        if self.pairs is not None:
            clean = without_diagonal({"b": self.pairs.bandwidth_bps.tolist(), "l": self.pairs.latency_s.tolist()})
            rows = zip(clean["b"], clean["l"], strict=True)
            out["pairs"] = [[list(pair) for pair in zip(*row, strict=True)] for row in rows]
        for name in ("hosts", "step_s", "evaluation_s"):
            if getattr(self, name) is not None:
                out[name] = list(getattr(self, name))
        return out | self.about

    def probes_for(self, kind: str, way: str, members: int) -> Probes | None:
        """Return the probes of the collective `kind` with the algorithm `way` among `members` members.

        Returns None if this collective was not measured.
        """
        if members != self.num_nodes:
            return None
        return self._by_way.get((kind, way)) or self._by_way.get((kind, ALIKE.get((kind, way), "")))

    def set_up_s(self, kind: str, way: str) -> float:
        """Return the extra seconds in which a run's first collective sets connections up.

        If this collective's first call was not measured, return the largest extra time of all collectives.
        """
        probes = self.probes_for(kind, way, self.num_nodes)
        if probes is not None and probes.name in self._first:
            return probes.set_up_s
        return max((probes.set_up_s for probes in self.probes.values()), default=0.0)

    def check_hosts(self, hosts: Sequence[str]) -> None:
        """Check that the measurement belongs to these hosts.

        Raises:
            ArgumentError: the measurement has no hosts, other hosts, or the same hosts in another order.
        """
        if self.hosts is None:
            raise ArgumentError("the measurement does not list its hosts: measure these hosts")
        if list(self.hosts) != list(hosts):
            raise ArgumentError(
                f"the measurement is for {', '.join(self.hosts)}, but the hosts are {', '.join(hosts)}: measure these "
                "hosts"
            )

    def _fitted(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> UniformLinks:
        """Return links for which the formula gives the largest probe's time, and at least the smallest probe's time."""
        rest = sorted(tables, key=lambda name: name == "barrier")  # a barrier's time doesn't depend on bytes
        name = next(name for name in ("all_reduce", "exact all_reduce", *rest) if name in tables)
        sizes, times = tables[name]
        kind, way = kind_and_way(name)
        size, time = float(sizes[-1]), float(times[-1])
        unit = cost_among(UniformLinks(1.0, 1.0, 1.0), None, kind, way, 1.0, range(self.num_nodes))
        if not unit.transfer_s:
            raise ArgumentError(f"probes of {name} alone do not show the bandwidth: probe all_reduce as well")
        per_byte = time / size
        if len(sizes) > 1 and times[-1] > times[0]:
            per_byte = float((times[-1] - times[0]) / (sizes[-1] - sizes[0]))
        least, most = 1.0, 1e16  # bits per second
        alpha = self.latency_s
        if alpha is None:
            waits = cost_among(
                UniformLinks(most, most, 1.0), None, kind, way, size, range(self.num_nodes), library=self.library
            )
            alpha = max(0.0, time - per_byte * size) / waits.latency_s
        if (shortest_s := self._formula_s(UniformLinks(most, most, alpha), kind, way, size)) >= time:
            raise ArgumentError(
                f"latency={alpha!r} alone would make {name} take {shortest_s:.3g} s, but the measured time is "
                f"{time:.3g} s: pass a smaller latency, or leave it out"
            )
        for _ in range(HALVINGS):  # the time falls as the bandwidth grows
            middle = math.sqrt(least * most)
            is_fast = self._formula_s(UniformLinks(middle, middle, alpha), kind, way, size) < time
            least, most = (least, middle) if is_fast else (middle, most)
        return UniformLinks(least, least, alpha)

    def _formula_s(self, links: Links, kind: str, way: str, size: float) -> float:
        return cost_among(links, None, kind, way, size, range(self.num_nodes), library=self.library).seconds

    def _probes(self, name: str, sizes: np.ndarray, times: np.ndarray) -> Probes:
        kind, way = kind_and_way(name)
        floor_s = self._formula_s(self.links, kind, way, 0.0)
        set_up_s = 0.0
        if name in self._first:
            cold_s, warm_s = self._first[name], float(times[-1])
            if cold_s < (1 - NOISE) * warm_s:
                raise ArgumentError(
                    f"probes contradict each other: the first {name} took {cold_s:g} s, but a later {name} of the same "
                    f"size ({sizes[-1]:g} bytes) took {warm_s:g} s; measure both again"
                )
            set_up_s = max(0.0, cold_s - warm_s)
        return Probes(name, sizes, times, floor_s, set_up_s)


def _seconds_per_host(name: str, given: Any, num_nodes: int) -> list[float] | None:
    values = _per_host(name, given, num_nodes)
    return None if values is None else [positive_s(s, f"{name} of host {i}") for i, s in enumerate(values)]


def _per_host(name: str, given: Any, num_nodes: int) -> list[Any] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != num_nodes:
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        found = f"has {len(given)}" if is_list else "is not a list"
        raise ArgumentError(f"{name} must have one value per node, {num_nodes}, but {found}")
    return list(given)


def _pairs(given: Any, num_nodes: int) -> MatrixLinks:
    """Return the links for pairs[i][j] = [bandwidth_bps, latency_s] from i to j. The diagonal is ignored."""
    wanted = f"pairs must hold [bandwidth_bps, latency_s] from each of {num_nodes} hosts to every other host"
    if not isinstance(given, Sequence) or len(given) != num_nodes:
        raise ArgumentError(f"{wanted}; pairs has {len(given) if isinstance(given, Sequence) else 'no'} rows")
    tables: list[list[list[Any]]] = [[], []]
    for i, row in enumerate(given):
        if not isinstance(row, Sequence) or len(row) != num_nodes:
            raise ArgumentError(f"{wanted}; pairs[{i}] is {row!r}")
        for j, pair in enumerate(row):
            if i != j and (not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2):
                raise ArgumentError(f"{wanted}; pairs[{i}][{j}] is {pair!r}")
        for k, table in enumerate(tables):
            table.append([1.0 if i == j else pair[k] for j, pair in enumerate(row)])
    return MatrixLinks(*tables)
