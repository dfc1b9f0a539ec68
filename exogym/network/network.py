"""A network: its links, and what a collective costs on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exogym.base.rng import numpy_generator
from exogym.communicator import Event
from exogym.errors import ArgumentError, check_choice, check_count, checked, nearest
from exogym.network.costs import NAMES, Cost, Round, algorithms_of, cost_among, price
from exogym.network.links import GroupLinks, Links, MatrixLinks, UniformLinks, without_diagonal
from exogym.network.measured import Measurement, Probes
from exogym.network.overheads import IDLE_S, moved_in_memory, slow_start_s
from exogym.network.parse import settings_of
from exogym.network.presets import PRESETS
from exogym.network.trace import Trace
from exogym.network.units import parse_bandwidth, parse_seconds, readable_bandwidth, readable_seconds

Members = int | Sequence[int]
OPTIONS = ("jitter", "loss", "seed", "server", "trace", "tcp", "memory")
SHAPES = ("preset", "bandwidth", "latency", "up", "down", "matrix", "groups", "inside", "between", "shared", *OPTIONS)


class Network:
    """Links with a bandwidth and a latency each, and the time a collective takes on them.

    Every node has a full-duplex line to every other. `Network.matrix` gives each pair its own, `Network.groups` makes
    islands, `Network.preset` knows some by name, and `Network.parse` reads what a command line gives.

    Args:
        bandwidth: bits per second, or text such as "1Gbps" or "100MB/s".
        latency: seconds one way, or text such as "0.5ms".
        up, down: of a node's line, where they differ; what is not given is `bandwidth`. Two nodes have the slower.
        jitter: mean seconds by which a message is late, exponentially distributed, drawn for each message of a
            collective's longest chain from (seed, number of the event).
        loss: share of packets lost, from 0 and under 1. Each is sent again until it arrives, which takes
            1 / (1 - loss) times the transfer: the expectation under selective repeat (Bertsekas, Gallager, Data
            Networks, 2.4). That TCP slows down on loss is not in it.
        seed: of the jitter.
        server: bandwidth of a parameter server's line; by default it has the fastest line of the members it serves.
        trace: rates over time, a CSV file or rows (time_s, who, rate), see `exogym.network.trace`; a clock follows it.
        tcp: connections that were idle start slowly, see `exogym.network.overheads`.
        memory: rate at which a host reads and writes memory, as "10GB/s": then the copies and sums of the exact
            reduction take time (torch's own, `reduction="native"`, has fewer).

    Raises:
        ArgumentError: an unknown unit; a bandwidth that is not over 0; a negative latency, jitter or loss.

    >>> network = Network("1Gbps", "0.5ms")
    >>> network.link(0, 1)
    (1000000000.0, 0.0005)
    >>> round(network.cost("all_reduce", 1e6, 4).seconds, 6)  # ring: 6 (0.0005 + 0.25e6 * 8 / 1e9)
    0.015
    >>> network.cheapest("all_reduce", 1000, 8)[0]
    'halving_doubling'
    """

    measurement: Measurement | None = None  # where collectives were measured, not reckoned

    @checked
    def __init__(
        self,
        bandwidth: Any = None,
        latency: Any = 0.0,
        *,
        up: Any = None,
        down: Any = None,
        jitter: Any = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        server: Any = None,
        trace: Any = None,
        tcp: bool = False,
        memory: Any = None,
    ):
        if bandwidth is None and (up is None or down is None):
            raise ArgumentError("a network needs a bandwidth, as in Network('1Gbps', '0.5ms'), or up= and down=")
        if bandwidth is not None and up is not None and down is not None:
            raise ArgumentError(f"bandwidth={bandwidth!r}, up={up!r} and down={down!r} are one too many: leave one out")
        ways = {name: bandwidth if given is None else given for name, given in (("up", up), ("down", down))}
        up_bps, down_bps = (
            parse_bandwidth(given, name if given is not bandwidth else "bandwidth") for name, given in ways.items()
        )
        links = UniformLinks(up_bps, down_bps, parse_seconds(latency))
        shape = {"up": up_bps, "down": down_bps, "latency": links.latency_s}
        self._set(links, jitter, loss, seed, server, trace, shape, tcp, memory)

    @classmethod
    @checked
    def matrix(
        cls, bandwidth: Any, latency: Any = 0.0, *, jitter: Any = 0.0, loss: float = 0.0, seed: int = 0,
        server: Any = None, trace: Any = None,
        tcp: bool = False, memory: Any = None,
    ) -> Network:  # fmt: skip
        """Return a network with a link of its own for each ordered pair of nodes.

        Args:
            bandwidth, latency: (N, N) numbers or text, entry [i][j] from i to j, the diagonal ignored; one latency
                may stand for all. Every pair needs a way.
            jitter, loss, seed, server, trace, tcp, memory: as `Network`.

        Raises:
            ArgumentError: not square, of different sizes, or a pair that cannot reach each other.

        >>> network = Network.matrix([[0, "1Gbps"], ["20Mbps", 0]], "10ms")
        >>> network.link(1, 0)
        (20000000.0, 0.01)
        """
        links = MatrixLinks(bandwidth, latency)
        shape = {"bandwidth": links.bandwidth_bps.tolist(), "latency": links.latency_s.tolist()}
        return cls.__new__(cls)._set(
            links, jitter, loss, seed, server, trace, {"matrix": without_diagonal(shape)}, tcp, memory
        )

    @classmethod
    @checked
    def groups(
        cls, groups: Sequence[Any], inside: Any, between: Any, *, shared: bool = True, jitter: Any = 0.0,
        loss: float = 0.0, seed: int = 0, server: Any = None, trace: Any = None,
        tcp: bool = False, memory: Any = None,
    ) -> Network:  # fmt: skip
        """Return islands: fast links inside each, slow ones between them.

        Args:
            groups: their sizes, as [4, 4], or lists of ids that name each node once.
            inside: the network inside an island, or one per island: a `Network`, or what `Network.parse` reads.
            between: the network of two nodes of different islands; a matrix has one row per island.
            shared: an island has one such line, which all its messages of a moment share; False gives each node its
                own.
            jitter, loss, seed, server, trace, tcp, memory: as `Network`, for all links.

        Raises:
            ArgumentError: groups that are empty or miss nodes, or networks that do not fit them.

        >>> network = Network.groups([4, 4], inside="nvlink", between="100Mbps,20ms")
        >>> network.link(0, 3), network.link(3, 4)
        ((3600000000000.0, 2e-06), (100000000.0, 0.02))
        """
        many = isinstance(inside, Sequence) and not isinstance(inside, str)
        insides = [cls.of(one) for one in inside] if many else [cls.of(inside)]
        outer = cls.of(between)
        for part in (*insides, outer):
            if part.jitter_s or part.loss or part.trace is not None:
                raise ArgumentError(
                    "give jitter, loss and trace to Network.groups(), for all links, not to the networks inside and "
                    "between"
                )
        kinds: list[UniformLinks] = [part.links for part in insides if isinstance(part.links, UniformLinks)]
        if len(kinds) < len(insides):
            raise ArgumentError("the network inside an island must be uniform, as Network('10Gbps', '0.1ms')")
        if isinstance(groups, Sequence) and not many:
            kinds *= len(groups)
        links = GroupLinks(groups, kinds, outer.links, shared)
        shape: dict[str, Any] = {
            "groups": [g if isinstance(g, int) else list(g) for g in groups],
            "between": outer.describe(),
        }
        shape["inside"] = [part.describe() for part in insides] if many else insides[0].describe()
        shape["shared"] = bool(shared)
        return cls.__new__(cls)._set(links, jitter, loss, seed, server, trace, shape, tcp, memory)

    @classmethod
    @checked
    def measured(cls, all_reduce: Mapping[float, Any], *, num_nodes: int, first: Any = None) -> Network:
        """Return the network on which all-reduces took as long as was measured.

        Between probes the time is linear in the bytes; outside of them it is extrapolated, and a notice says so. Other
        collectives go by formula, on links that give the probes' times (`exogym.network.measured`).

        Args:
            all_reduce: bytes to seconds, of all-reduces among all nodes over connections that had been used.
            num_nodes: N, how many took part.
            first: seconds of the first one of all, of the largest size, which sets connections up; the first
                collective of a clock takes as much longer.

        Raises:
            ArgumentError: no probe, sizes or times that are missing or not over 0, or probes that contradict each
                other: a larger or a cold one that took less than nine tenths of the other.

        >>> network = Network.measured({1e6: 0.02, 3e6: 0.04}, num_nodes=4, first=0.1)
        >>> round(network.cost("all_reduce", 2e6, 4).seconds, 6), round(network.set_up_s("all_reduce"), 6)
        (0.03, 0.06)
        """
        cold = None if first is None else {"all_reduce": first}
        return cls._of_measurement(Measurement(num_nodes, {"all_reduce": all_reduce}, first=cold))

    @classmethod
    def _of_measurement(cls, measurement: Measurement) -> Network:
        network = cls.__new__(cls)
        network.measurement = measurement
        return network._set(measurement.links, 0.0, 0.0, 0, None, None, measurement.describe(), False, None)

    @classmethod
    def preset(cls, name: str) -> Network:
        """Return a network by name; `exogym.network.PRESETS` lists them, each with its source.

        Raises:
            ArgumentError: an unknown name.

        >>> Network.preset("lan-1g")
        Network('941 Mbps', '100 us')
        """
        return cls.of({"preset": name})

    @classmethod
    def parse(cls, text: str) -> Network:
        """Return the network that a text describes: a preset, a bandwidth and perhaps a latency, or a JSON file.

        `wifi`, `lan-1g`, `100Mbps`, `100Mbps,20ms`, `wifi,loss=0.01`, `up=20Mbps,down=100Mbps`, `sites.json`. The file
        holds one object: the arguments of `Network`; {"matrix": {...}} with those of `Network.matrix`; "groups",
        "inside" and "between"; `jitter`, `loss`, `seed` and `server` may stand beside each; or what the self-test
        measured.

        Raises:
            ArgumentError: none of these; a file that is missing or is no such object.

        >>> Network.parse("100Mbps,20ms,jitter=5ms")
        Network('100 Mbps', '20 ms', jitter='5 ms')
        """
        try:
            return cls.of(settings_of(text))
        except ArgumentError as error:
            if text in str(error):
                raise
            raise ArgumentError(f"network {text!r}: {error}") from None

    @classmethod
    def of(cls, given: Network | str | Mapping[str, Any]) -> Network:
        """Return a network from one, from text as `parse`, or from what `describe` returned.

        Raises:
            ArgumentError: a setting that no network has, or settings that do not go together.
        """
        if isinstance(given, Network):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if not isinstance(given, Mapping):
            raise ArgumentError(f"{given!r} is no network: wanted a Network, text as '1Gbps,0.5ms', or settings")
        settings = dict(given)
        if settings.keys() & {"collectives", "num_nodes", "pairs"}:
            return cls._of_measurement(Measurement.of(settings))
        for name in settings:
            if name not in SHAPES:
                raise ArgumentError(f"a network has no setting {name!r}: {nearest(str(name), SHAPES)}")
        if "preset" in settings:
            check_choice("network", settings["preset"], PRESETS)
            return cls.of(PRESETS[settings.pop("preset")].settings | settings)
        shape = "matrix" if "matrix" in settings else "groups" if "groups" in settings else None
        if shape is None:
            return cls(**settings)
        wanted = {"matrix": ("matrix",), "groups": ("groups", "inside", "between")}[shape]
        extra = ("shared", *OPTIONS) if shape == "groups" else OPTIONS
        options = {name: settings.pop(name) for name in extra if name in settings}
        if sorted(settings) != sorted(wanted):
            raise ArgumentError(f"a network by {shape} takes {', '.join(wanted)}, not {', '.join(sorted(settings))}")
        return cls.matrix(**settings["matrix"], **options) if shape == "matrix" else cls.groups(**settings, **options)

    def _set(
        self, links: Links, jitter: Any, loss: float, seed: int, server: Any, trace: Any, shape: dict[str, Any],
        tcp: bool, memory: Any,
    ) -> Network:  # fmt: skip
        self.links = links
        self.jitter_s = parse_seconds(jitter, "jitter")
        if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < 1:
            raise ArgumentError(f"loss={loss!r} must be a share from 0 and under 1")
        check_count("seed", seed, least=0)
        self.loss, self.seed = float(loss), seed
        self.server_bps = None if server is None else parse_bandwidth(server, "server")
        options: dict[str, Any] = {
            "jitter": self.jitter_s,
            "loss": self.loss,
            "seed": self.seed,
            "server": self.server_bps,
        }
        if not isinstance(tcp, bool):
            raise ArgumentError(f"tcp={tcp!r} must be True or False")
        self.tcp = tcp
        self.memory_bps = None if memory is None else parse_bandwidth(memory, "memory")
        options |= {"tcp": self.tcp, "memory": self.memory_bps}
        self.trace = None if trace is None else Trace(links, trace)
        self._at: dict[int, Network] = {}
        if self.trace is not None:
            options["trace"] = [list(row) for row in self.trace.rows]
        self._description = shape | {name: value for name, value in options.items() if value}
        return self

    # What it is

    @property
    def num_nodes(self) -> int | None:
        """How many nodes the network is for; None: any number."""
        return self.links.size if self.measurement is None else self.measurement.num_nodes

    def describe(self) -> dict[str, Any]:
        """Return the network as plain numbers, lists and dicts, from which `Network.of` makes it again."""
        return dict(self._description)

    def __repr__(self) -> str:
        links = self.links
        if self.measurement is not None:
            probed = ", ".join(f"{kind} of {len(p.times_s)} sizes" for kind, p in self.measurement.probes.items())
            return f"Network.measured(<{self.num_nodes} nodes: {probed}>)"
        extra = f", jitter={readable_seconds(self.jitter_s)!r}" if self.jitter_s else ""
        extra += f", loss={self.loss:g}" if self.loss else ""
        extra += f", trace=<{len(self.trace.rows)} rows>" if self.trace is not None else ""
        if isinstance(links, MatrixLinks):
            return f"Network.matrix(<{links.size} nodes>{extra})"
        if isinstance(links, GroupLinks):
            sizes = np.bincount(links.group_of).tolist()
            return f"Network.groups({sizes if len(sizes) < 9 else f'<{len(sizes)} islands>'}{extra})"
        assert isinstance(links, UniformLinks)
        up, down, latency = readable_bandwidth(links.up_bps), readable_bandwidth(links.down_bps), links.latency_s
        if up == down:
            return f"Network({up!r}, {readable_seconds(latency)!r}{extra})"
        return f"Network(latency={readable_seconds(latency)!r}, up={up!r}, down={down!r}{extra})"

    def link(self, i: Any, j: Any) -> tuple[Any, Any]:
        """Return bits per second and seconds of latency from node i to node j, for numbers or arrays of ids.

        A node reaches itself at once: infinite bandwidth, no latency.

        Raises:
            ArgumentError: an id that the network does not have.
        """
        i, j = np.broadcast_arrays(np.asarray(i), np.asarray(j))
        self._check_ids(i, j)
        bandwidth, latency = self.links.link(i, j)
        bandwidth, latency = np.where(i == j, np.inf, bandwidth), np.where(i == j, 0.0, latency)
        return (bandwidth, latency) if i.ndim else (float(bandwidth), float(latency))

    def line_bps(self, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (num_nodes,) bits per second up and down of each node's own line, which all its messages share."""
        up, down = self.links.line(np.arange(num_nodes))
        return np.broadcast_to(up, num_nodes), np.broadcast_to(down, num_nodes)

    # What things cost

    def at(self, time_s: float) -> Network:
        """Return the network with the links that it has at a moment, by its trace; itself where it has none."""
        return self if self.trace is None else self._in_interval(self.trace.interval(time_s))

    def _in_interval(self, k: int) -> Network:
        assert self.trace is not None
        if k not in self._at:
            network = copy.copy(self)
            network.links, network.trace = self.trace.links(k), None
            self._at[k] = network
        return self._at[k]

    def seconds(
        self, event: Event, draw: int | None = None, algorithm: str | None = None, start_s: float = 0.0,
        idle_s: float = math.inf,
    ) -> float:  # fmt: skip
        """Return how many seconds an event of the communicator takes, from the moment its last member is ready.

        Args:
            draw: number of the event, which picks its jitter; the first, 0, sets connections up. None: the mean jitter
                of any other.
            algorithm: another way to carry it out than the event names.
            start_s: that moment, which counts where links change.
            idle_s: how long the members' lines had been idle then, which counts where connections start slowly.
        """
        if self.trace is not None:
            return self.trace.seconds(
                start_s, lambda k: self._in_interval(k).seconds(event, draw, algorithm, start_s, idle_s)
            )
        members: Sequence[int] = event.members
        options: dict[str, Any] = {}
        if event.links:
            return self.duration_s(self._cost_of_links(event), draw)
        if not isinstance(self.links, UniformLinks):
            if len(event.givers) == 1:  # broadcast and scatter have a root that gives, gather and reduce one that gets
                options["root"] = event.givers[0]
            elif event.kind in ("gather", "reduce"):
                options["root"] = members[int(np.argmin(event.tx_bytes))]
        way = event.algorithm if algorithm is None else algorithm
        cost = self.cost(event.kind, event.payload_bytes, members, way, **options)
        ramp_s = self.ramp_s(event.kind, event.payload_bytes, members, idle_s)
        return self.duration_s(cost, draw) + ramp_s + (self.set_up_s(event.kind, way) if draw == 0 else 0.0)

    def _cost_of_links(self, event: Event) -> Cost:
        """Return what the messages of a mix cost, which go at once; those of a node share its line."""
        at = {node: position for position, node in enumerate(event.members)}
        givers, takers = (np.array([at[link[end]] for link in event.links]) for end in (0, 1))
        out, into = (float(np.bincount(ends).max()) for ends in (givers, takers))
        messages = Round(1, event.payload_bytes, lambda n: (givers, takers), out, into)
        return price([messages], self.links, self._members(event.members))

    def duration_s(self, cost: Cost, draw: int | None = None) -> float:
        """Return the seconds of a cost with the network's loss and jitter: of event number `draw`, or the mean."""
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
        """Return what a collective costs, before loss and jitter.

        Args:
            kind: "all_reduce", "all_gather", ...: as the communicator names them.
            payload_bytes: what each giver hands over.
            members: ids, or how many (the first ones).
            algorithm: how; the first of `algorithms_of(kind)` if None. NCCL's and gloo's names are known too.
            root: of a broadcast, reduce, gather or scatter; the first member if None.
            fan: of a mix, the most messages a node sends and gets; all others if None.

        Raises:
            ArgumentError: an unknown collective or algorithm, a bad payload, or a node the network does not have.
        """
        names = algorithms_of(kind)
        way = names[0] if algorithm is None else NAMES.get(algorithm, algorithm)
        check_choice("algorithm", way, names)
        if not 0 <= payload_bytes < math.inf:
            raise ArgumentError(f"payload_bytes={payload_bytes!r} must be a finite number of bytes, at least 0")
        ids = self._members(members)
        n = len(ids)
        known = None if fan is not None else self._measured(kind, way, n)
        if known is not None:
            return known.cost(payload_bytes)
        cost = cost_among(self.links, self.server_bps, kind, way, payload_bytes, ids, root, fan)
        if self.memory_bps is not None:
            cost += Cost(8 * payload_bytes * moved_in_memory(kind, way, n) / self.memory_bps)
        return cost

    def cheapest(self, kind: str, payload_bytes: float, members: Members) -> tuple[str, float]:
        """Return the fastest algorithm for a collective among nodes alone (no server), and its mean seconds."""
        names = [name for name in algorithms_of(kind) if name != "server" or kind in ("push", "pull")]
        among = len(self._members(members))
        measured = [name for name in names if self._measured(kind, name, among) is not None]
        names = measured or names  # what was measured stands for the best that the library has
        if not isinstance(self.links, GroupLinks):
            names = [name for name in names if name != "hierarchical"]
        times = {name: self.duration_s(self.cost(kind, payload_bytes, members, name)) for name in names}
        best = min(times, key=times.__getitem__)
        return best, times[best]

    def ramp_s(self, kind: str, payload_bytes: float, members: Members, idle_s: float) -> float:
        """Return the seconds that a collective loses as its connections start slowly; 0 where they were not idle."""
        ids = self._members(members)
        if not self.tcp or idle_s <= IDLE_S or len(ids) < 2 or self._measured(kind, algorithms_of(kind)[0], len(ids)):
            return 0.0
        bandwidth, latency = self.links.slowest(np.asarray(ids))
        return slow_start_s(payload_bytes, float(bandwidth), float(latency))

    def set_up_s(self, kind: str, algorithm: str | None = None) -> float:
        """Return by how many seconds the first collective of a run takes longer, as far as it was measured."""
        way = algorithms_of(kind)[0] if algorithm is None else NAMES.get(algorithm, algorithm)
        return 0.0 if self.measurement is None else self.measurement.set_up_s(kind, way)

    @property
    def message_s(self) -> float:
        """Seconds in which all nodes agree on a few bytes, as far as it was measured."""
        return 0.0 if self.measurement is None else self.measurement.message_s

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
