"""Predict how long a collective takes, by formula or from measurements, with jitter and loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.core.base.turns import turns_of
from exogym.errors import ArgumentError, check_choice, check_count, check_number
from exogym.network.costs import NAMES, Cost, MessageRound, algorithms_of, line_of_server, price
from exogym.network.libraries import OWN, chosen, cost_among
from exogym.network.links import GroupLinks, Links, MatrixLinks, UniformLinks
from exogym.network.measured import Measurement, Probes
from exogym.network.overheads import PAYLOAD_SHARE, messages_of, moved_in_memory, rounds_of_gloo, slow_start_s

if TYPE_CHECKING:
    from exogym.core.communicator import Event

AGREEMENTS = 2  # agreements between processes in a stretch: whether to stop, and the losses or the present gradients
Members = int | Sequence[int]
LATE = (
    "Delayed averages overlap with computation. On hosts, the overlap requires gloo, whole nodes in each process, "
    "and neither `faults` nor `min_hosts`; otherwise nodes wait for each average right after they send it."
)


class Pricing:
    """The base class of `exogym.network.Network`, which predicts communication times.

    `Network` adds the description of the links.

    Attributes:
        links: the links between nodes.
        measurement: measured times, which replace formulas, or None.
        jitter_s, loss, seed, server_bps, tcp, memory_bps, library, bucket_bytes: see `Network`.
    """

    links: Links
    measurement: Measurement | None = None
    jitter_s: float
    loss: float
    seed: int
    server_bps: float | None
    tcp: bool
    memory_bps: float | None
    library: str | None
    bucket_bytes: float

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes in the network, or None if the network fits any number of nodes."""
        return self.links.size if self.measurement is None else self.measurement.num_nodes

    @property
    def group_of(self) -> np.ndarray | None:
        """The index of each node's group in `Network.groups`, (N,). None for other networks."""
        return self.links.group_of if isinstance(self.links, GroupLinks) else None

    @property
    def lines_differ(self) -> bool:
        """Whether nodes may have different lines, so that a cost depends on which nodes send."""
        return self.num_nodes is not None or not isinstance(self.links, UniformLinks)

    def seconds(self, event: Event, draw: int | None = None, idle_s: float = math.inf) -> float:
        """Return the seconds that a communicator's event takes once its last member is ready.

        If the network has a `library`, the library's algorithm replaces the default algorithm of the event's
        collective.

        Args:
            draw: the event's number, which determines its jitter. Event 0 also sets connections up. None means the mean
                jitter, without setting connections up.
            idle_s: seconds for which the members' lines were idle before, used if connections start slowly.
        """
        members: Sequence[int] = event.members
        options: dict[str, Any] = {}
        if event.links:
            return self.duration_s(self._cost_of_links(event), draw)
        if not isinstance(self.links, UniformLinks):
            if len(event.givers) == 1:  # the root sends in broadcast and scatter; it receives in gather and reduce
                options["root"] = event.givers[0]
            elif event.kind in ("gather", "reduce"):
                options["root"] = members[int(np.argmin(event.tx_bytes))]
        way: str | None = event.algorithm
        if self.library is not None and way == algorithms_of(event.kind)[0]:
            way = None  # a default algorithm: the library uses its own
        cost = self.cost(event.kind, event.payload_bytes, members, way, **options)
        ramp_s = self.ramp_s(event.kind, event.payload_bytes, members, idle_s, way)
        return self.duration_s(cost, draw) + ramp_s + (self.set_up_s(event.kind, way) if draw == 0 else 0.0)

    def _cost_of_links(self, event: Event) -> Cost:
        """Return the cost of a mix's messages, which all start at the same time and share their nodes' lines."""
        at = {node: position for position, node in enumerate(event.members)}
        givers, takers = (np.array([at[link[end]] for link in event.links]) for end in (0, 1))
        out, into = (float(np.bincount(ends).max()) for ends in (givers, takers))
        messages = MessageRound(1, event.payload_bytes, lambda n: (givers, takers), out, into)
        turns = len(turns_of(event.links)) if self.tcp else 1
        return self._over_tcp(price([messages], self.links, self._members(event.members)), 2 * turns)

    def _over_tcp(self, cost: Cost, latencies: int = 1) -> Cost:
        """If the network uses TCP, add TCP's headers and multiply the latencies by `latencies`."""
        if not self.tcp:
            return cost
        return Cost(latencies * cost.latency_s, cost.transfer_s / PAYLOAD_SHARE, latencies * cost.hops)

    def duration_s(self, cost: Cost, draw: int | None = None) -> float:
        """Return the seconds of `cost` with loss and with the jitter of event number `draw`, or the mean jitter."""
        late = 0.0
        if self.jitter_s and cost.hops:
            late = cost.hops * self.jitter_s
            if draw is not None:
                late = self.jitter_s * numpy_generator(self.seed, "jitter", draw).gamma(cost.hops)
        return cost.latency_s + cost.transfer_s / (1 - self.loss) + late

    def cost(
        self,
        kind: str,
        payload_bytes: float,
        members: Members,
        algorithm: str | None = None,
        *,
        root: int | None = None,
        fan: Sequence[float] | None = None,
    ) -> Cost:
        """Return a collective's cost, before loss and jitter.

        Args:
            kind: the communicator's name for the collective: "all_reduce", "all_gather", ...
            payload_bytes: bytes that each sending member hands over.
            members: the members' ids, or their number n, which stands for nodes 0 to n - 1.
            algorithm: the algorithm's name in ExoGym, NCCL or gloo; default: the algorithm that the network's library
                uses, or the first of `algorithms_of(kind)` if the network has no library.
            root: the root of a broadcast, reduce, gather or scatter; default: the first member.
            fan: for a mix, the largest numbers of messages that a node sends and receives; default: one per other node.

        Raises:
            ArgumentError: the collective or algorithm is unknown, the payload is invalid, or a node is not in the
                network.
        """
        if not 0 <= payload_bytes < math.inf:
            raise ArgumentError(f"payload_bytes={payload_bytes!r} must be a finite number of bytes, at least 0")
        ids = self._members(members)
        count, names = self._buckets(kind, payload_bytes), algorithms_of(kind)
        size = payload_bytes / count
        way = self._own_way(kind, size, ids) if algorithm is None else NAMES.get(algorithm, algorithm)
        check_choice("algorithm", way, names)
        if count > 1 and way not in ("chain", "server"):  # a chain's pieces follow each other without a gap
            one = self._cost(kind, size, ids, way, root, fan)
            return Cost(count * one.latency_s, count * one.transfer_s, count * one.hops)
        return self._cost(kind, payload_bytes, ids, way, root, fan)

    def _cost(
        self, kind: str, payload_bytes: float, ids: Sequence[int], way: str, root: int | None,
        fan: Sequence[float] | None,
    ) -> Cost:  # fmt: skip
        n = len(ids)
        known = None if fan is not None else self._measured(kind, way, n)
        if known is not None:
            return known.cost(payload_bytes)
        rounds = rounds_of_gloo(kind, way, n, payload_bytes) if self.tcp and n > 1 else None
        if rounds is not None:
            cost = self._over_tcp(price(rounds, self.links, ids))
        else:
            fan = (n - 1, n - 1) if kind == "mix" and fan is None else fan
            cost = cost_among(self.links, self.server_bps, kind, way, payload_bytes, ids, root, fan, self.library)
            turns = 1 if fan is None else math.ceil(max(fan))
            alone = kind in ("push", "pull") or way in ("server", "hierarchical")
            cost = self._over_tcp(cost, 1 if alone else 2 * turns)
        return cost + Cost(self._copying_s(kind, way, payload_bytes, n))

    def _buckets(self, kind: str, payload_bytes: float) -> int:
        """Return the number of equal collectives in which a payload is sent."""
        return max(1, math.ceil(payload_bytes / self.bucket_bytes)) if kind in OWN["nccl"] else 1

    def _own_way(self, kind: str, payload_bytes: float, members: Sequence[int]) -> str:
        """Return the algorithm that the library uses, or the first one if the network has no library."""
        if self.library == "any":
            return self.cheapest(kind, payload_bytes, members)[0]
        if self.library not in OWN or kind not in OWN[self.library] or len(members) == 1:
            return algorithms_of(kind)[0]
        bandwidth, _ = self.links.slowest(np.asarray(members))
        return chosen(self.library, kind, len(members), payload_bytes, float(bandwidth))

    def _copying_s(self, kind: str, way: str, payload_bytes: float, n: int) -> float:
        return 0.0 if self.memory_bps is None else 8 * payload_bytes * moved_in_memory(kind, way, n) / self.memory_bps

    def processor_s(self, kind: str, payload_bytes: float, n: int, algorithm: str | None = None) -> float:
        """Return the seconds for which a collective's copies and sums occupy each of `n` members' processors.

        They are part of `cost`, and 0 if the network has no `memory` or has a measurement.
        """
        way = algorithms_of(kind)[0] if algorithm is None else NAMES.get(algorithm, algorithm)
        return 0.0 if self.measurement is not None else self._copying_s(kind, way, payload_bytes, n)

    def server_bps_of(self, nodes: Sequence[int], near: bool = False) -> float:
        """Return the rate, each way, of the line of the server of `nodes`, in bits per second.

        If `near`, the server is in the nodes' island, and the network's `server` is ignored.
        """
        served = nodes if isinstance(self.links, UniformLinks) else np.asarray(nodes)
        up, down, _ = (self.links.near if near else self.links.outside)(served)
        return line_of_server(up, down, None if near else self.server_bps)

    def server_s(self, payload_bytes: float, nodes: Sequence[int], near: bool = False) -> float:
        """Return the seconds for which `payload_bytes` occupy the line of the server of `nodes` in one direction."""
        return self.duration_s(self._over_tcp(Cost(0.0, 8 * payload_bytes / self.server_bps_of(nodes, near))))

    def cheapest(self, kind: str, payload_bytes: float, members: Members) -> tuple[str, float]:
        """Return the name of the fastest algorithm without a server for a collective, and its mean seconds.

        If the network has a `library`, the result is the library's algorithm; if it has `tcp`, the algorithm of
        ExoGym's hosts.
        """
        names = algorithms_of(kind)
        names = names[:1] if kind in ("push", "pull") else [name for name in names if name != "server"]
        if self.library in OWN:
            size = payload_bytes / self._buckets(kind, payload_bytes)
            names = [self._own_way(kind, size, self._members(members))]
        if self.tcp and self.measurement is None:
            names = ["exact"] if kind == "all_reduce" else names[:1]
        among = len(self._members(members))
        measured = [name for name in names if self._measured(kind, name, among) is not None]
        names = measured or names  # the measured algorithm counts as the library's best
        if not isinstance(self.links, GroupLinks | MatrixLinks):
            names = [name for name in names if name != "hierarchical"]
        times = {name: self.duration_s(self.cost(kind, payload_bytes, members, name)) for name in names}
        best = min(times, key=times.__getitem__)
        return best, times[best]

    def ramp_s(
        self, kind: str, payload_bytes: float, members: Members, idle_s: float, algorithm: str | None = None
    ) -> float:
        """Return the seconds that a collective loses by connections that start slowly after `idle_s` idle seconds."""
        ids = self._members(members)
        if not self.tcp or len(ids) < 2 or self._measured(kind, algorithms_of(kind)[0], len(ids)):
            return 0.0
        bandwidth, latency = self.links.slowest(np.asarray(ids))
        way = algorithms_of(kind)[0] if algorithm is None else NAMES.get(algorithm, algorithm)
        times, each_bytes = messages_of(kind, way, len(ids), payload_bytes)
        return times * slow_start_s(each_bytes, float(bandwidth), float(latency), idle_s)

    def set_up_s(self, kind: str, algorithm: str | None = None) -> float:
        """Return the extra seconds in which a run's first collective sets connections up; 0 if not measured."""
        way = algorithms_of(kind)[0] if algorithm is None else NAMES.get(algorithm, algorithm)
        return 0.0 if self.measurement is None else self.measurement.set_up_s(kind, way)

    def pipeline_s(
        self, compute_s: float, activation_bytes: float, depth: int, microbatches: int, backward: float = 2.0
    ) -> float:
        """Return the seconds of a step under pipeline parallelism (GPipe or 1F1B) over `depth` members.

        A stage computes f seconds for a micro-batch, and b for its gradients; c is a message's time without its latency
        alpha. Messages travel while stages compute, so the slower one of both sets the pace, and latencies count only
        while the pipeline fills and drains:

            (s-1) (f + c + alpha) + f + (m-1) max(f, c) + the same with b for f

        Args:
            compute_s: seconds of computation per stage and step, m (f + b).
            activation_bytes: bytes that a stage sends to the next one per micro-batch.
            depth: s, the number of stages.
            microbatches: m, the number of micro-batches in a step.
            backward: b / f. It is about 2, or 3 if stages compute their activations again.

        >>> from exogym.network import Network
        >>> round(Network("1Gbps", "10ms").pipeline_s(3.2, 8e6, depth=8, microbatches=32), 3)
        5.887
        """
        check_count("depth", depth)
        check_count("microbatches", microbatches)
        check_number("compute_s", compute_s, least=0)
        check_number("activation_bytes", activation_bytes, least=0)
        check_number("backward", backward, least=0)
        one = self.cost("send", activation_bytes, 2) if depth > 1 else Cost()
        alpha, send_s = self.duration_s(Cost(one.latency_s, hops=one.hops)), self.duration_s(Cost(0.0, one.transfer_s))
        total = 0.0
        for share in (1 / (1 + backward), backward / (1 + backward)):
            work_s = compute_s * share / microbatches
            fill_s = (depth - 1) * (work_s + send_s + alpha)
            total += fill_s + work_s + (microbatches - 1) * max(work_s, send_s)
        return total

    @property
    def message_s(self) -> float:
        """Seconds in which all nodes agree on a few bytes; 0 if not measured and not `tcp`."""
        if self.measurement is not None:
            return self.measurement.message_s
        if not self.tcp or self.num_nodes == 1:
            return 0.0
        _, latency_s = self.links.slowest(np.arange(self.num_nodes or 2))
        return self.duration_s(Cost(2 * float(latency_s), hops=2))

    def _measured(self, kind: str, way: str, members: int) -> Probes | None:
        return None if self.measurement is None else self.measurement.probes_for(kind, way, members)

    def _members(self, members: Members) -> Sequence[int]:
        if isinstance(members, int):
            check_count("members", members)
            members = range(members)
        if not len(members):
            raise ArgumentError("members is empty: a collective needs at least one node")
        if self.num_nodes is not None:
            self._check_ids(np.asarray(members))
        return members

    def _check_ids(self, *ids: np.ndarray) -> None:
        size = self.num_nodes
        for some in ids:
            if some.size and (some.min() < 0 or (size is not None and some.max() >= size)):
                wrong = int(some.min() if some.min() < 0 else some.max())
                raise ArgumentError(
                    f"node {wrong} is not in this network"
                    + ("" if size is None else f" of {size} nodes, 0 to {size - 1}")
                )
