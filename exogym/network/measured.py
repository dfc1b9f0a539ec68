"""Measured times of collectives, which replace formulas, and the file that holds these times.

Between two probes the time is linear in the bytes (`exogym.network.probes`). Formulas predict every collective that was
not probed (another kind, another algorithm, fewer members). The formulas use the links that were measured between pairs
of hosts. If no pairs were measured, the formulas use links on which they give the largest probe's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_count, nearest
from exogym.network.costs import cost_among
from exogym.network.links import Links, MatrixLinks, UniformLinks, without_diagonal
from exogym.network.probes import NOISE, Probes, kind_and_way, positive_s, table_of

FIELDS = (
    *("num_nodes", "hosts", "pairs", "collectives", "first", "message_s", "step_s", "evaluation_s", "versions", "date"),
)
ALIKE = {("all_reduce", "exact"): "ring", ("all_reduce", "ring"): "exact"}  # equal bytes: each may replace the other


class Measurement:
    """Measured times of hosts and of the network between them. `Measurement.of` makes a measurement from the fields of
    a file.

    Attributes:
        num_nodes: N, the number of nodes.
        hosts: (N,) addresses of the hosts, or None.
        probes: measured times of each collective, by its name in the file ("exact all_reduce").
        message_s: seconds that all nodes need to agree on a few bytes; 0 if not measured.
        step_s: (N,) seconds of a step of the user's model on each host, or None; `task` names the model.
        evaluation_s: (N,) seconds of an evaluation on the validation set on each host, or None.
        links: the links that formulas use for collectives without probes.
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
        self.links: Links = _fitted(tables, num_nodes) if self.pairs is None else self.pairs
        self._first = {kind: positive_s(s, f"first of {kind}") for kind, s in (first or {}).items()}
        unprobed = sorted(self._first.keys() - tables.keys())
        if unprobed:
            raise ArgumentError(f"first has {unprobed[0]}, which has no probes: give probes of {unprobed[0]}, too")
        self.probes = {name: self._probes(name, *table) for name, table in tables.items()}
        self._by_way = {kind_and_way(name): probes for name, probes in self.probes.items()}
        if len(self._by_way) < len(self.probes):
            raise ArgumentError(f"two of {', '.join(sorted(self.probes))} are the same collective: give one of them")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Measurement:
        """Return the measurement that a file's fields describe.

        Raises:
            ArgumentError: an unknown or missing field; a value that is missing, not a number or not over 0; probes
                that contradict each other; hosts, pairs or steps for another number of nodes.
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
        """Return the fields of a file from which `of` makes the same measurement."""
        out: dict[str, Any] = {"num_nodes": self.num_nodes, "collectives": {}}
        for kind, probes in self.probes.items():
            sizes = (f"{size:.17g}" for size in probes.sizes_bytes)
            out["collectives"][kind] = dict(zip(sizes, probes.times_s.tolist(), strict=True))
        if self._first:
            out["first"] = dict(self._first)
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
        """Return the probes of the collective `kind` under the algorithm `way` among `members` members.

        Returns None if nobody measured this collective.
        """
        if members != self.num_nodes:
            return None
        return self._by_way.get((kind, way)) or self._by_way.get((kind, ALIKE.get((kind, way), "")))

    def set_up_s(self, kind: str, way: str) -> float:
        """Return the extra seconds that a run's first collective takes to set up connections.

        If the first time of this collective was not measured, return the largest extra time of all collectives.
        """
        probes = self.probes_for(kind, way, self.num_nodes)
        if probes is not None and probes.name in self._first:
            return probes.set_up_s
        return max((probes.set_up_s for probes in self.probes.values()), default=0.0)

    def check_hosts(self, hosts: Sequence[str]) -> None:
        """Check that the measurement belongs to these hosts.

        Raises:
            ArgumentError: the measurement names no hosts, other hosts, or the same hosts in another order.
        """
        if self.hosts is None:
            raise ArgumentError("the measurement does not name its hosts: measure these hosts")
        if list(self.hosts) != list(hosts):
            raise ArgumentError(
                f"the measurement is for {', '.join(self.hosts)}; the hosts are {', '.join(hosts)}: measure these hosts"
            )

    def _probes(self, name: str, sizes: np.ndarray, times: np.ndarray) -> Probes:
        kind, way = kind_and_way(name)
        floor_s = cost_among(self.links, None, kind, way, 0.0, range(self.num_nodes)).seconds
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
        count = len(given) if isinstance(given, Sequence) and not isinstance(given, str) else "no list"
        raise ArgumentError(f"{name} has values for {count} hosts, wanted {num_nodes}: give one value per node")
    return list(given)


def _pairs(given: Any, num_nodes: int) -> MatrixLinks:
    """Return the links for pairs[i][j] = [bandwidth_bps, latency_s] from i to j. The diagonal may hold anything."""
    wanted = f"pairs must hold [bandwidth_bps, latency_s] from each of {num_nodes} hosts to each other host"
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


def _fitted(tables: Mapping[str, tuple[np.ndarray, np.ndarray]], num_nodes: int) -> UniformLinks:
    """Return links on which the formula gives the largest probe's time, and at least the smallest probe's time.

    t = h alpha + k S / B: h hops and the share k of the payload, both of the kind's first algorithm.
    """
    rest = sorted(tables, key=lambda name: name == "barrier")  # a barrier's time does not depend on bytes
    name = next(name for name in ("all_reduce", "exact all_reduce", *rest) if name in tables)
    sizes, times = tables[name]
    kind, way = kind_and_way(name)
    unit = cost_among(UniformLinks(1.0, 1.0, 1.0), None, kind, way, 1.0, range(num_nodes))
    if not unit.transfer_s:
        raise ArgumentError(f"probes of {name} alone do not show the bandwidth: probe all_reduce, too")
    per_byte = float(times[-1] / sizes[-1])
    if len(sizes) > 1 and times[-1] > times[0]:
        per_byte = float((times[-1] - times[0]) / (sizes[-1] - sizes[0]))
    latency_s = max(0.0, float(times[-1] - per_byte * sizes[-1])) / unit.latency_s
    return UniformLinks(unit.transfer_s / per_byte, unit.transfer_s / per_byte, latency_s)
