"""A network: links built from a user's description. `pricing` computes the times of collectives on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from exogym.core.base.retired import retired
from exogym.errors import ArgumentError, check_choice, check_count, check_number, check_switch, checked, nearest
from exogym.network.libraries import LIBRARIES
from exogym.network.links import GroupLinks, LineLinks, Links, MatrixLinks, UniformLinks, limited, without_diagonal
from exogym.network.measured import Measurement
from exogym.network.presets import PRESETS, settings_of
from exogym.network.pricing import Pricing
from exogym.network.units import parse_bandwidth, parse_bytes, parse_seconds, readable_bandwidth, readable_seconds


class Options(TypedDict, total=False):
    """The options of every network (see `Network`)."""

    jitter: Any
    loss: float
    seed: int
    server: Any
    tcp: bool
    memory: Any
    library: str | None
    efficiency: float
    stream: Any
    bucket: Any


OPTIONS = tuple(Options.__annotations__)
SHAPES = ("preset", "bandwidth", "latency", "up", "down", "matrix", "groups", "inside", "between", "shared", *OPTIONS)


class Network(Pricing):
    """A network of links with bandwidth and latency, which predicts how long a collective takes.

    By default, all nodes have the same full-duplex line. `Network.matrix` gives each pair its own link,
    `Network.groups` builds islands, `Network.preset` returns a network by name, and `Network.parse` reads text.

    Args:
        bandwidth: bits per second, or text such as "1Gbps" or "100MB/s". A list holds the bandwidth of each node's
            line; two nodes then communicate at the slower line's rate.
        latency: seconds one way, or text such as "0.5ms".
        up, down: bandwidths of a node's line in each direction, if they differ; default: `bandwidth`. Two nodes
            communicate at the slower of the sender's `up` and the receiver's `down`.
        jitter: mean random delay of a message in seconds, or text. Each message in a collective's longest chain gets an
            exponentially distributed delay, drawn from (seed, number of the event).
        loss: fraction of lost packets, at least 0 and under 1. Packets are resent until they arrive, so a transfer
            takes 1 / (1 - loss) times as long, the expectation under selective repeat (Bertsekas, Gallager, Data
            Networks, 2.4). TCP's slowdown after a loss is not included.
        seed: seed of the jitter.
        server: bandwidth of a parameter server's line; default: the fastest line of its members.
        tcp: whether to predict runs of ExoGym on hosts over TCP: packet headers take 6.4 % of the rate, idle
            connections start slowly, messages wait until their receivers are ready, and nodes agree before they
            communicate (see `exogym.network.overheads`).
        memory: a host's memory speed, such as "10GB/s", from which the time of the exact reduction's copies and sums is
            predicted. They take this time even if steps hide the transfer. None: they take no time. torch's own
            reduction (`Placement(reduction="native")`) copies less.
        library: the library whose collectives are predicted: "gloo", "nccl", or "any" for the fastest known algorithm.
            Each library has its own algorithms and times (see `exogym.network.libraries`). None is "any" with times as
            in textbooks, and lets `advise` choose: NCCL for steps on NVIDIA's GPUs, otherwise gloo.
        efficiency: the fraction of every line's rate that messages reach, over 0 and up to 1.
        stream: the highest rate of one connection between two nodes, however fast their lines are: a rate such as
            "5Gbps", or the connection's window in bytes, such as "3MiB", which is sent once per round trip. gloo uses
            one connection between two nodes; NCCL uses 16 on AWS, 4 on Google's cloud and otherwise 1 (net_socket.cc).
        bucket: the most bytes of one collective, such as "25MB". Larger payloads are sent in several equal collectives,
            one after the other, each with its own latencies.

    Raises:
        ArgumentError: a unit is unknown; a bandwidth is not over 0; a latency, jitter or loss is negative; or `library`
            is combined with `tcp=True`, which predicts ExoGym's own messages over gloo.

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
        **options: Unpack[Options],
    ):
        if bandwidth is None and (up is None or down is None):
            raise ArgumentError("a network needs a bandwidth, as in Network('1Gbps', '0.5ms'), or up= and down=")
        if bandwidth is not None and up is not None and down is not None:
            raise ArgumentError(
                f"bandwidth={bandwidth!r}, up={up!r} and down={down!r} cannot all be set: leave one out"
            )
        links: Links
        if isinstance(bandwidth, list | tuple):
            if up is not None or down is not None:
                raise ArgumentError(
                    f"bandwidth={bandwidth!r} lists each node's line and cannot be combined with up= or down=: for "
                    "lines with two rates, use Network.matrix"
                )
            links = LineLinks(bandwidth, latency)
            shape = {"bandwidth": links.lines_bps.tolist(), "latency": links.latency_s}
        else:
            ways = {name: bandwidth if given is None else given for name, given in (("up", up), ("down", down))}
            up_bps, down_bps = (
                parse_bandwidth(given, name if given is not bandwidth else "bandwidth") for name, given in ways.items()
            )
            links = UniformLinks(up_bps, down_bps, parse_seconds(latency))
            shape = {"up": up_bps, "down": down_bps, "latency": links.latency_s}
        for name in options:
            if name not in OPTIONS:
                instead = retired(name, "Network") or nearest(name, ("bandwidth", "latency", "up", "down", *OPTIONS))
                raise ArgumentError(f"Network() has no argument {name!r}: {instead}")
        self._read(**options)
        self._put(links, shape)

    @classmethod
    @checked
    def matrix(
        cls, bandwidth: Any, latency: Any = 0.0, **options: Unpack[Options],
    ) -> Network:  # fmt: skip
        """Return a network in which each ordered pair of nodes has its own link.

        Args:
            bandwidth, latency: (N, N) numbers or text; entry [i][j] is for the link from i to j. Every pair needs a
                link, and the diagonal is ignored. A single latency applies to all pairs.
            **options: jitter, loss, seed, server, tcp, memory, library, efficiency, stream and bucket, as in `Network`.

        Raises:
            ArgumentError: the matrices are not square or differ in size, or two nodes can't reach each other.

        >>> network = Network.matrix([[0, "1Gbps"], ["20Mbps", 0]], "10ms")
        >>> network.link(1, 0)
        (20000000.0, 0.01)
        """
        links = MatrixLinks(bandwidth, latency)
        shape = {"bandwidth": links.bandwidth_bps.tolist(), "latency": links.latency_s.tolist()}
        return cls(1.0, **options)._put(links, {"matrix": without_diagonal(shape)})

    @classmethod
    @checked
    def groups(
        cls, groups: Sequence[Any], inside: Any, between: Any, *, shared: int = True, **options: Unpack[Options],
    ) -> Network:  # fmt: skip
        """Return a network of islands, with fast links inside an island and slow links between islands.

        Args:
            groups: the islands' sizes, such as [4, 4], or lists of ids that contain each node once.
            inside: the network inside every island, or a list with one network per island. A network is a `Network`, or
                text or settings for `Network.of`.
            between: the network between nodes of different islands. A matrix has one row per island.
            shared: the number of lines from an island to the other islands, over which its simultaneous messages are
                spread. True is one line, as for machines with several GPUs and one network card. False gives each node
                its own line, as for one card per GPU.
            **options: as in `Network.matrix`, for all links.

        Raises:
            ArgumentError: groups are empty or leave out nodes, or the networks don't fit the groups.

        >>> network = Network.groups([4, 4], inside="nvlink", between="100Mbps,20ms")
        >>> network.link(0, 3), network.link(3, 4)
        ((3600000000000.0, 2e-06), (100000000.0, 0.02))
        """
        many = isinstance(inside, Sequence) and not isinstance(inside, str)
        insides = [cls.of(one) for one in inside] if many else [cls.of(inside)]
        outer = cls.of(between)
        for part in (*insides, outer):
            if others := sorted(part._options.keys() - {"efficiency", "stream"}):
                raise ArgumentError(
                    f"the networks inside and between groups cannot set {', '.join(others)}: leave that out there, "
                    "as in 'wifi,jitter=0', and pass it to Network.groups(), for all links"
                )
        kinds: list[UniformLinks] = [part.links for part in insides if isinstance(part.links, UniformLinks)]
        if len(kinds) < len(insides):
            raise ArgumentError("the network inside an island must be uniform, such as Network('10Gbps', '0.1ms')")
        if isinstance(groups, Sequence) and not many:
            kinds *= len(groups)
        check_count("shared", int(shared), least=0)
        links = GroupLinks(groups, kinds, outer.links, int(shared))
        shape: dict[str, Any] = {
            "groups": [g if isinstance(g, int) else list(g) for g in groups],
            "between": outer.describe(),
        }
        shape["inside"] = [part.describe() for part in insides] if many else insides[0].describe()
        shape["shared"] = shared
        return cls(1.0, **options)._put(links, shape)

    @classmethod
    @checked
    def measured(
        cls, all_reduce: Mapping[float, Any], *, num_nodes: int, first: Any = None, latency: Any = None,
        library: str | None = None,
    ) -> Network:  # fmt: skip
        """Return a network in which all-reduces take their measured times.

        Between two probes, the time is linear in the bytes. Outside the probes it is extrapolated, with a notice. Other
        collectives use formulas on links that reproduce the probes' times (see `exogym.network.measured`).

        Args:
            all_reduce: a dict from bytes to seconds, for all-reduces among all nodes over established connections.
            num_nodes: N, the number of nodes that took part.
            first: seconds of the very first all-reduce, of the largest size, which also set connections up. In a
                prediction, a run's first collective takes the same extra time.
            latency: seconds one way; by default estimated from the probes, or 0 from a single probe.
            library: "gloo" or "nccl", whose formulas predict the other collectives.

        Raises:
            ArgumentError: there is no probe; a size or time is missing or not over 0; or probes contradict each other.
                A larger all-reduce, or the first one, must take at least nine tenths of the time of a smaller or later
                one.

        >>> network = Network.measured({1e6: 0.02, 3e6: 0.04}, num_nodes=4, first=0.1)
        >>> round(network.cost("all_reduce", 2e6, 4).seconds, 6), round(network.set_up_s("all_reduce"), 6)
        (0.03, 0.06)
        """
        cold = None if first is None else {"all_reduce": first}
        return cls._of_measurement(
            Measurement(num_nodes, {"all_reduce": all_reduce}, first=cold, latency_s=latency, library=library)
        )

    @classmethod
    def _of_measurement(cls, measurement: Measurement) -> Network:
        network = cls(1.0, library=measurement.library)
        network.measurement = measurement
        return network._put(measurement.links, measurement.describe())

    @classmethod
    def preset(cls, name: str) -> Network:
        """Return a network by name. `exogym.network.PRESETS` lists the names and their sources.

        Raises:
            ArgumentError: an unknown name.

        >>> Network.preset("lan-1g")
        Network('941 Mbps', '100 us')
        """
        return cls.of({"preset": name})

    @classmethod
    def parse(cls, text: str) -> Network:
        """Return the network that a text describes: a preset, a bandwidth and optionally a latency, or a JSON file.

        Examples: `wifi`, `lan-1g`, `100Mbps`, `100Mbps,20ms`, `wifi,loss=0.01`, `up=20Mbps,down=100Mbps`, `sites.json`.
        A list such as `1Gbps,1Gbps,50Mbps:10ms` has each node's line and, after the last colon, the latency between any
        two nodes. The file holds one object:

        - the arguments of `Network`;
        - {"matrix": {...}} with the arguments of `Network.matrix`;
        - "groups", "inside" and "between" of `Network.groups`;
        - or the self-test's measurements.

        The objects with "matrix" or "groups" may also have `jitter`, `loss`, `seed` and `server`.

        Raises:
            ArgumentError: the text is not a preset, a bandwidth or a file; or the file is missing or doesn't hold such
                an object.

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
        """Return a network from text as in `parse`, or from settings as returned by `describe`.

        A `Network` is returned unchanged.

        Raises:
            ArgumentError: a setting is unknown, or settings can't be combined.
        """
        if isinstance(given, Network):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if not isinstance(given, Mapping):
            raise ArgumentError(f"{given!r} is not a network: pass a Network, text such as '1Gbps,0.5ms', or settings")
        settings = dict(given)
        if settings.keys() & {"collectives", "num_nodes", "pairs"}:
            return cls._of_measurement(Measurement.of(settings))
        for name in settings:
            if name not in SHAPES:
                instead = retired(str(name), "Network") or nearest(str(name), SHAPES)
                raise ArgumentError(f"a network has no setting {name!r}: {instead}")
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
            raise ArgumentError(
                f"a network by {shape} takes {', '.join(wanted)}, but has {', '.join(sorted(settings))}"
            )
        return cls.matrix(**settings["matrix"], **options) if shape == "matrix" else cls.groups(**settings, **options)

    def _read(
        self, jitter: Any = 0.0, loss: float = 0.0, seed: int = 0, server: Any = None, tcp: bool = False,
        memory: Any = None, library: str | None = None, efficiency: float = 1.0, stream: Any = None, bucket: Any = None,
    ) -> None:  # fmt: skip
        self.jitter_s = parse_seconds(jitter, "jitter")
        check_number("loss", loss, least=0, under=1)
        check_number("efficiency", efficiency, over=0, most=1)
        check_count("seed", seed, least=0)
        check_switch("tcp", tcp)
        self.loss, self.seed, self.tcp, self._share = float(loss), seed, tcp, float(efficiency)
        self.server_bps = None if server is None else parse_bandwidth(server, "server") * self._share
        self.memory_bps = None if memory is None else parse_bandwidth(memory, "memory")
        if library is not None:
            check_choice("library", library, LIBRARIES)
            if tcp:
                raise ArgumentError(
                    f"library={library!r} cannot be combined with tcp=True, which predicts ExoGym's own messages: "
                    "leave one of them out"
                )
        self.library, (self._stream_bps, stream) = library, _stream(stream)
        self.bucket_bytes = math.inf if bucket is None else parse_bytes(bucket, "bucket")
        options = {
            "jitter": self.jitter_s, "loss": self.loss, "seed": seed, "server": server and parse_bandwidth(server),
            "tcp": tcp, "memory": self.memory_bps, "library": library, "efficiency": self._share % 1, "stream": stream,
            "bucket": bucket and self.bucket_bytes,
        }  # fmt: skip
        self._options = {name: value for name, value in options.items() if value}

    def _put(self, links: Links, shape: dict[str, Any]) -> Network:
        """Set the network's links, and return the network."""
        self.links = limited(links, self._share, self._stream_bps)
        self._description = shape | self._options
        return self

    def with_library(self, library: str | None) -> Network:
        """Return this network with another library for its collectives.

        >>> Network("1Gbps", "10ms").with_library("nccl")
        Network('1 Gbps', '10 ms', library='nccl')
        """
        return Network.of(self.describe() | {"library": library})

    # Describing it

    def describe(self) -> dict[str, Any]:
        """Return the network's settings as numbers, lists and dicts.

        `Network.of` restores the network from the returned settings.
        """
        return dict(self._description)

    def __repr__(self) -> str:
        links = self.links
        if self.measurement is not None:
            probed = ", ".join(f"{kind} of {len(p.times_s)} sizes" for kind, p in self.measurement.probes.items())
            return f"Network.measured(<{self.num_nodes} nodes: {probed}>)"
        extra = f", jitter={readable_seconds(self.jitter_s)!r}" if self.jitter_s else ""
        extra += f", loss={self.loss:g}" if self.loss else ""
        extra += ", tcp=True" if self.tcp else ""
        others = ("library", "efficiency", "stream", "bucket")
        extra += "".join(f", {name}={self._options[name]!r}" for name in others if name in self._options)
        if isinstance(links, LineLinks):
            lines = [readable_bandwidth(bps / self._share) for bps in links.lines_bps]
            shown = repr(lines if len(lines) < 9 else f"<{len(lines)} lines>")
            return f"Network({shown}, {readable_seconds(links.latency_s)!r}{extra})"
        if isinstance(links, MatrixLinks):
            return f"Network.matrix(<{links.size} nodes>{extra})"
        if isinstance(links, GroupLinks):
            sizes = np.bincount(links.group_of).tolist()
            return f"Network.groups({sizes if len(sizes) < 9 else f'<{len(sizes)} islands>'}{extra})"
        assert isinstance(links, UniformLinks)
        up, down = (readable_bandwidth(bps / self._share) for bps in (links.up_bps, links.down_bps))
        latency = links.latency_s
        if up == down:
            return f"Network({up!r}, {readable_seconds(latency)!r}{extra})"
        return f"Network(latency={readable_seconds(latency)!r}, up={up!r}, down={down!r}{extra})"

    def link(self, i: Any, j: Any) -> tuple[Any, Any]:
        """Return the link from node i to node j: its bandwidth in bits per second, and its latency in seconds.

        i and j are ids or arrays of ids. From a node to itself the bandwidth is infinite and the latency zero.

        Raises:
            ArgumentError: an id is not in the network.
        """
        i, j = np.broadcast_arrays(np.asarray(i), np.asarray(j))
        self._check_ids(i, j)
        bandwidth, latency = self.links.link(i, j)
        bandwidth, latency = np.where(i == j, np.inf, bandwidth), np.where(i == j, 0.0, latency)
        return (bandwidth, latency) if i.ndim else (float(bandwidth), float(latency))

    def line_bps(self, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rates of each node's own line, up and down, in bits per second: two (num_nodes,) arrays.

        All messages of a node share its line.
        """
        up, down = self.links.line(np.arange(num_nodes))
        return np.broadcast_to(up, num_nodes), np.broadcast_to(down, num_nodes)


def _stream(given: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return a connection's highest rate in bits per second as a function of the latency, and its description."""
    if given is None:
        return lambda latency_s: np.inf, None
    if isinstance(given, str) and given.rstrip().endswith("B"):
        window = parse_bytes(given, "stream")
        return lambda latency_s: 8 * window / np.maximum(2 * latency_s, 1e-12), f"{window:.17g}B"
    bps = parse_bandwidth(given, "stream")
    return lambda latency_s: bps, bps
