"""A network: its links, made from what a user says of them. What a collective costs on them is in `pricing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked, nearest
from exogym.network.links import GroupLinks, Links, MatrixLinks, UniformLinks, without_diagonal
from exogym.network.measured import Measurement
from exogym.network.parse import settings_of
from exogym.network.presets import PRESETS
from exogym.network.pricing import Pricing
from exogym.network.trace import RateTrace
from exogym.network.units import parse_bandwidth, parse_seconds, readable_bandwidth, readable_seconds

OPTIONS = ("jitter", "loss", "seed", "server", "trace", "tcp", "memory")
SHAPES = ("preset", "bandwidth", "latency", "up", "down", "matrix", "groups", "inside", "between", "shared", *OPTIONS)


class Network(Pricing):
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
        check_number("loss", loss, least=0, under=1)
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
        self.trace = None if trace is None else RateTrace(links, trace)
        self._at: dict[int, Network] = {}
        if self.trace is not None:
            options["trace"] = [list(row) for row in self.trace.rows]
        self._description = shape | {name: value for name, value in options.items() if value}
        return self

    # What it is

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
