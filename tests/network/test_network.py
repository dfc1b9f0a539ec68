"""What a collective costs: formulas, bounds, and rounds that really carry the data to everyone."""

import json
import math
import re

import numpy as np
import pytest
import torch

from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.network import NAMES, PRESETS, Network, algorithms_of, parse_bandwidth, parse_seconds
from exogym.network.costs import ALGORITHMS

S, B, ALPHA = 1e6, 1e9, 1e-3
LINE = Network(B, ALPHA)
SIZES = (2, 3, 4, 7, 8, 16, 33)
ALL = [(kind, way) for kind, ways in ALGORITHMS.items() for way in ways]


def seconds(kind, way, n, network=LINE, size=S):
    return network.cost(kind, size, n, way).seconds


# Units


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("1Gbps", 1e9), ("1 gbit/s", 1e9), ("2.5 kbps", 2500), ("3Tb/s", 3e12), ("100bps", 100), ("1e3Mbps", 1e9),
        ("1KB/s", 8e3), ("1 MB/s", 8e6), ("1GB/s", 8e9), ("1GBps", 8e9), (5, 5.0), (np.float64(2e9), 2e9),
    ],
)  # fmt: skip
def test_bandwidths(text, bps):
    assert parse_bandwidth(text) == bps


@pytest.mark.parametrize(
    ("text", "wanted"), [("50us", 5e-5), ("0.5 ms", 5e-4), ("2s", 2.0), ("3ns", 3e-9), (0, 0.0), ("1min", 60.0)]
)
def test_times(text, wanted):
    assert parse_seconds(text) == wanted


@pytest.mark.parametrize(
    "wrong", ["1Gb", "1GBPS", "1 furlong", "fast", "", "-1Gbps", "0Mbps", "nan", "inf", "1e308Gbps", -1, 0, True]
)
def test_a_wrong_bandwidth_is_refused(wrong):
    with pytest.raises(ArgumentError, match="bandwidth="):
        Network(wrong, 0)


@pytest.mark.parametrize("wrong", ["1 day", "-1ms", math.nan, math.inf, "soon", None])
def test_a_wrong_latency_is_refused(wrong):
    with pytest.raises(ArgumentError, match="latency="):
        Network("1Gbps", wrong)


# The formulas


@pytest.mark.parametrize("n", SIZES)
def test_costs_are_the_formulas(n):
    L, k = math.ceil(math.log2(n)), int(math.log2(n))
    t = 8 * S / B
    fold = 0 if n == 2**k else 2 * (ALPHA + t)
    wanted = {
        ("all_reduce", "ring"): 2 * (n - 1) * (ALPHA + t / n),
        ("all_reduce", "exact"): 2 * (n - 1) * (ALPHA + t / n),
        ("all_reduce", "tree"): 2 * L * (ALPHA + t),
        ("all_reduce", "double_tree"): 2 * L * ALPHA + 2 * t,
        ("all_reduce", "halving_doubling"): 2 * k * ALPHA + 2 * (1 - 2**-k) * t + fold,
        ("all_gather", "ring"): (n - 1) * (ALPHA + t),
        ("all_gather", "bruck"): L * ALPHA + (n - 1) * t,
        ("reduce_scatter", "ring"): (n - 1) * (ALPHA + t / n),
        ("all_to_all", "pairwise"): (n - 1) * (ALPHA + t / n),
        ("broadcast", "tree"): L * (ALPHA + t),
        ("reduce", "tree"): L * (ALPHA + t),
        ("gather", "direct"): ALPHA + (n - 1) * t,
        ("scatter", "direct"): ALPHA + (n - 1) / n * t,
        ("exchange", "pairwise"): ALPHA + t,
        ("barrier", "tree"): 2 * L * ALPHA,
        ("barrier", "dissemination"): L * ALPHA,
        ("all_reduce", "server"): 2 * ALPHA + 2 * n * t,
    }
    for (kind, way), value in wanted.items():
        assert seconds(kind, way, n) == pytest.approx(value, rel=1e-12), (kind, way)
    assert seconds("broadcast", "scatter_gather", n) <= (L + n - 1) * ALPHA + 2 * t


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("way", list(ALGORITHMS["all_reduce"]))
def test_no_all_reduce_beats_the_bound(way, n):
    bound = 2 * (n - 1) / n * 8 * S / B
    assert seconds("all_reduce", way, n) >= bound
    assert seconds("all_reduce", way, n, Network(B)) >= bound * (1 - 1e-12)


def test_a_formula_below_the_bound_would_be_caught():
    """The control: a ring that forgot its way back, at half the bytes."""
    assert Network(B).cost("reduce_scatter", S, 8).seconds < 2 * 7 / 8 * 8 * S / B


def knowledge(rounds, n):
    """Return which contributions each node holds after the rounds, if it passes on all it has: a matrix of n x n."""
    holds = np.eye(n, dtype=bool)
    for r in rounds:
        for _ in range(r.count):
            senders, receivers = r.pairs(n)
            fresh = holds.copy()
            for i, j in zip(senders, receivers, strict=True):
                fresh[j] |= holds[i]
            holds = fresh
    return holds


EVERYWHERE = [
    ("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "halving_doubling"), ("all_gather", "ring"),
    ("all_gather", "bruck"), ("reduce_scatter", "ring"), ("reduce_scatter", "halving"),
]  # fmt: skip


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("kind", "way"), EVERYWHERE)
def test_the_rounds_reach_everyone(kind, way, n):
    rounds = ALGORITHMS[kind][way](n, S)
    assert knowledge(rounds, n).all()
    if way != "ring":  # the control: every round is needed
        assert not knowledge(rounds[:-1], n).all()


@pytest.mark.parametrize("n", SIZES)
def test_trees_reach_everyone_from_the_root_and_back(n):
    for way in ("tree", "scatter_gather"):
        assert knowledge(ALGORITHMS["broadcast"][way](n, S), n)[:, 0].all()
    assert knowledge(ALGORITHMS["reduce"]["tree"](n, S), n)[0].all()
    assert knowledge(ALGORITHMS["gather"]["direct"](n, S), n)[0].all()
    assert knowledge(ALGORITHMS["scatter"]["direct"](n, S), n)[:, 0].all()


# Laws


@pytest.mark.parametrize(("kind", "way"), [*ALL, ("all_reduce", "server"), ("push", "server"), ("pull", "island")])
def test_more_bandwidth_and_less_latency_help(kind, way):
    for n in (2, 5, 8):
        now = seconds(kind, way, n)
        faster, nearer = seconds(kind, way, n, Network(2 * B, ALPHA)), seconds(kind, way, n, Network(B, ALPHA / 2))
        assert faster == now if kind == "barrier" else faster < now
        assert nearer < now
        assert seconds(kind, way, n, size=2 * S) >= now
        assert seconds(kind, way, n, Network(B, 0), 0) == 0


@pytest.mark.parametrize(("kind", "way"), [*ALL, ("all_reduce", "server")])
def test_one_node_costs_nothing(kind, way):
    assert seconds(kind, way, 1) == 0


@pytest.mark.parametrize("n", (2, 5, 8))
@pytest.mark.parametrize(("kind", "way"), [*ALL, ("all_reduce", "server")])
def test_networks_of_equal_links_are_one_network(kind, way, n):
    matrix = Network.matrix(np.full((n, n), B), ALPHA)
    islands = Network.groups([n - 1, 1], LINE, LINE)
    for other in (matrix, islands):
        assert seconds(kind, way, n, other) == pytest.approx(seconds(kind, way, n), rel=1e-12)
        assert other.num_nodes == n


@pytest.mark.parametrize("slow", [(2, 3), (4, 0)])
def test_the_slowest_link_governs_a_ring(slow):
    n, speeds, far = 5, np.full((5, 5), B), np.full((5, 5), ALPHA)
    speeds[slow], far[slow] = B / 10, 3 * ALPHA
    network = Network.matrix(speeds, far)
    wanted = 2 * (n - 1) * (3 * ALPHA + 8 * S / n / (B / 10))
    assert seconds("all_reduce", "ring", n, network) == pytest.approx(wanted)
    off = speeds.copy()
    off[slow], off[3, 1] = B, B / 10  # the control: a link that no ring neighbour uses
    assert seconds("all_reduce", "ring", n, Network.matrix(off, ALPHA)) == pytest.approx(
        seconds("all_reduce", "ring", n)
    )


def test_a_tree_uses_the_links_of_its_root():
    speeds = np.full((4, 4), B)
    speeds[0, 2] = B / 10  # node 0 sends to node 2 in the tree from 0, and nobody in the tree from 1
    network = Network.matrix(speeds, ALPHA)
    assert network.cost("broadcast", S, 4, root=0).seconds > network.cost("broadcast", S, 4, root=1).seconds
    assert network.cost("broadcast", S, 4, root=1).seconds == pytest.approx(LINE.cost("broadcast", S, 4).seconds)


def test_directions_differ():
    home = Network(up="20Mbps", down="100Mbps")
    assert home.link(0, 1) == (20e6, 0.0)
    assert seconds("all_reduce", "ring", 4, home) == pytest.approx(6 * 8 * S / 4 / 20e6)
    assert seconds("gather", "direct", 4, home) == pytest.approx(8 * S * max(1 / 20e6, 3 / 100e6))
    assert seconds("gather", "direct", 9, home) == pytest.approx(
        8 * S * 8 / 100e6
    )  # the root's line is the narrow place
    one_way = Network.matrix([[0, 1e9], [1e6, 0]])
    assert one_way.link(0, 1)[0] > one_way.link(1, 0)[0]


def test_a_server_carries_everyone():
    assert seconds("all_reduce", "server", 10) == pytest.approx(2 * ALPHA + 2 * 10 * 8 * S / B)
    wide = Network(B, ALPHA, server="100Gbps")
    assert seconds("all_reduce", "server", 10, wide) == pytest.approx(2 * ALPHA + 2 * 8 * S / B)
    assert seconds("push", "server", 1) == pytest.approx(ALPHA + 8 * S / B)  # one node still has to reach it


def test_a_mix_pays_for_the_busiest_node():
    assert LINE.cost("mix", S, 5, fan=(2, 2)).seconds == pytest.approx(ALPHA + 2 * 8 * S / B)
    assert LINE.cost("mix", S, 5, fan=(0, 0)).seconds == 0


# Islands


def test_islands_are_fast_inside_and_slow_between():
    network = Network.groups([[0, 2], [1, 3]], inside=["10Gbps,1us", "1Gbps,2us"], between="10Mbps,50ms")
    bandwidth, latency = network.link([0, 1, 0, 3], [2, 3, 1, 3])
    assert bandwidth.tolist() == [1e10, 1e9, 1e7, math.inf]
    assert latency.tolist() == [1e-6, 2e-6, 0.05, 0.0]


def test_a_server_in_the_own_island_is_near():
    """And what its server sends to the server above pays as a node's message to it does."""
    network = Network.groups([2, 2], ["10Gbps,1us", "1Gbps,2us"], "10Mbps,50ms", server="5Mbps")
    near, far = ([network.cost("push", S, [node], way).seconds for node in range(4)] for way in ("island", "relay"))
    assert near == pytest.approx([1e-6 + 8 * S / 1e10] * 2 + [2e-6 + 8 * S / 1e9] * 2)
    assert far == [network.cost("push", S, [node], "server").seconds for node in range(4)] and min(far) > 0.05
    assert network.group_of.tolist() == [0, 0, 1, 1] and Network("1Gbps").group_of is None
    matrix = Network.matrix(
        [[0, 1e9, 1e6], [1e9, 0, 1e6], [1e6, 1e6, 0]], [[0, 0.1, 0.9], [0.1, 0, 0.5], [0.9, 0.5, 0]]
    )
    assert [matrix.links.near(node)[2] for node in range(3)] == [0.1, 0.1, 0.5]
    assert [matrix.links.outside(node)[2] for node in range(3)] == [0.9, 0.5, 0.9]
    assert LINE.cost("pull", S, [0], "island") == LINE.cost("pull", S, [0], "server")
    assert network.cheapest("push", S, [0])[0] == "server"


def test_hierarchical_pays_the_slow_link_once_per_island():
    network = Network.groups([5, 6, 7], "100Gbps,5us", "100Mbps,20ms")
    inside, across = Network("100Gbps", "5us"), Network("100Mbps", "20ms")
    wanted = sum(
        (inside.cost("all_reduce", S, 7).seconds, across.cost("all_reduce", S, 3).seconds,
         inside.cost("broadcast", S, 7).seconds)
    )  # fmt: skip
    assert seconds("all_reduce", "hierarchical", 18, network) == pytest.approx(wanted)
    assert network.cheapest("all_reduce", S, 18) == ("hierarchical", pytest.approx(wanted))
    with pytest.raises(ArgumentError, match="needs a network with islands"):
        seconds("all_reduce", "hierarchical", 4)


def test_an_island_shares_its_line():
    shared, own = (Network.groups([4, 4], "100Gbps", "100Mbps", shared=s) for s in (True, False))
    t = 8 * S / 1e8
    # the last round of halving, and the first of doubling: four pairs across the islands at once, S/8 each
    assert seconds("all_reduce", "halving_doubling", 8, own) == pytest.approx(2 * t / 8, rel=0.05)
    assert seconds("all_reduce", "halving_doubling", 8, shared) == pytest.approx(2 * 4 * t / 8, rel=0.05)
    assert seconds("all_reduce", "ring", 8, shared) == seconds("all_reduce", "ring", 8, own)  # one message each way
    assert seconds("all_reduce", "server", 8, shared) > 3 * seconds("all_reduce", "server", 8, own)
    sites = Network.groups([2, 2, 2], "100Gbps", Network.matrix(np.full((3, 3), 1e8)))
    assert sites.cost("all_reduce", S, 6, "ring").seconds == pytest.approx(10 / 6 * t, rel=0.01)


def test_islands_of_sites():
    """Between islands a matrix may stand, one row per site."""
    sites = Network.matrix([[0, 1e9, 1e6], [1e9, 0, 1e6], [1e6, 1e6, 0]], "10ms")
    network = Network.groups([2, 2, 1], "10Gbps", sites)
    assert network.link(0, 3)[0] == 1e9 and network.link(1, 4)[0] == 1e6
    assert network.cost("all_reduce", S, [0, 1, 2, 3]).seconds < network.cost("all_reduce", S, [0, 1, 4]).seconds


# Choice


@pytest.mark.parametrize("kind", list(ALGORITHMS))
@pytest.mark.parametrize("size", [0, 100.0, 1e9])
def test_the_cheapest_is_the_least(kind, size):
    best, least = LINE.cheapest(kind, size, 12)
    ways = [way for way in algorithms_of(kind) if way not in ("server", "hierarchical")]
    assert least == min(seconds(kind, way, 12, size=size) for way in ways) == seconds(kind, best, 12, size=size)


def test_small_messages_want_few_hops_and_large_ones_few_bytes():
    assert LINE.cost("all_reduce", 10, 64, LINE.cheapest("all_reduce", 10, 64)[0]).hops == 12
    assert Network(B).cheapest("all_reduce", 1e9, 7)[0] in ("ring", "exact")
    assert LINE.cheapest("all_gather", 10, 64)[0] == "bruck"
    assert LINE.cheapest("broadcast", 1e9, 64)[0] == "chain"


def test_library_names_mean_what_they_say():
    for name, way in NAMES.items():
        assert seconds("all_reduce", name, 6) == seconds("all_reduce", way, 6)


# Jitter and loss


def test_jitter_is_drawn_from_the_seed_and_has_its_mean():
    network = Network(B, ALPHA, jitter="2ms")
    cost = network.cost("all_reduce", S, 4)
    draws = np.array([network.duration_s(cost, k) for k in range(4000)])
    assert (draws > cost.seconds).all() and len(set(draws)) == 4000
    assert draws.mean() == pytest.approx(network.duration_s(cost), rel=0.02) == cost.seconds + 6 * 2e-3
    assert network.duration_s(cost, 7) == draws[7] != Network(B, ALPHA, jitter="2ms", seed=1).duration_s(cost, 7)


def test_lost_packets_are_sent_again():
    lossy = Network(B, ALPHA, loss=0.2)
    cost = lossy.cost("all_reduce", S, 4)
    assert lossy.duration_s(cost) == pytest.approx(cost.latency_s + cost.transfer_s / 0.8)


# Events


def test_every_call_of_the_communicator_has_a_price():
    n, events = 4, []
    comm = Communicator(range(n), n)
    comm.ledger.listeners.append(events.append)
    x, parts = torch.zeros(n, 1000), torch.zeros(n, n, 250)
    comm.all_reduce(x)
    comm.all_reduce(x, algorithm="server")
    comm.all_reduce(x, groups=[[0, 1], [2, 3]])
    comm.sum_decoded([x], lambda v: v)
    comm.reduce(x, dst=2)
    comm.reduce_scatter(parts)
    comm.all_to_all(parts)
    comm.broadcast(x, src=1)
    comm.gather(x, dst=3)
    comm.all_gather(x)
    comm.scatter(parts, src=1)
    comm.exchange(x, [1, 0, 3, 2])
    comm.mix(x, torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]))
    comm.barrier()
    size, a, t = 4000, ALPHA, 8 * 4000 / B
    wanted = {
        ("all_reduce", "ring", 4): 6 * (a + t / 4), ("all_reduce", "server", 4): 2 * a + 8 * t,
        ("all_reduce", "ring", 2): 2 * (a + t / 2), ("all_gather", "ring", 4): 3 * (a + t),
        ("reduce", "tree", 4): 2 * (a + t), ("reduce_scatter", "ring", 4): 3 * (a + t / 4),
        ("all_to_all", "pairwise", 4): 3 * (a + t / 4),
        ("broadcast", "tree", 4): 2 * (a + t), ("gather", "direct", 4): a + 3 * t,
        ("scatter", "direct", 4): a + 3 / 4 * t, ("exchange", "pairwise", 2): a + t,
        ("mix", "neighbours", 4): a + 2 * t, ("barrier", "tree", 4): 4 * a,
    }  # fmt: skip
    matrix = Network.matrix(np.full((n, n), B), ALPHA)
    assert {(e.kind, e.algorithm, len(e.members)) for e in events} == wanted.keys()
    for e in events:
        assert e.payload_bytes in (0, size)
        assert LINE.seconds(e) == pytest.approx(wanted[e.kind, e.algorithm, len(e.members)]), e
        assert matrix.seconds(e) == pytest.approx(LINE.seconds(e)), e


def test_an_event_finds_its_root():
    far = np.full((4, 4), ALPHA)
    far[2] = far[:, 2] = 1.0
    network, events = Network.matrix(np.full((4, 4), B), far), []
    comm = Communicator(range(4), 4)
    comm.ledger.listeners.append(events.append)
    comm.present = [0, 1, 3]
    comm.gather(torch.zeros(4, 10), dst=1)
    comm.present = [0, 1, 2, 3]
    comm.gather(torch.zeros(4, 10), dst=2)
    assert [network.seconds(e) > 1 for e in events] == [False, True]


# Names, text and files


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_a_source_and_work(name):
    assert len(PRESETS[name].source) > 20
    network = Network.preset(name)
    assert 0 < network.cost("all_reduce", S, 4).seconds < 10
    assert repr(Network.parse(name)) == repr(network)


def test_presets_are_in_their_order():
    times = [Network.preset(n).cost("all_reduce", 1e8, 4).seconds
             for n in ("nvlink", "infiniband", "lan-10g", "lan-1g", "wan", "wifi", "home")]  # fmt: skip
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("100Mbps,20ms", Network("100Mbps", "20ms")), ("1Gbps", Network("1Gbps")), ("1e6bps,0.5s", Network(1e6, 0.5)),
        ("up=20Mbps,down=100Mbps,latency=15ms", Network(up="20Mbps", down="100Mbps", latency="15ms")),
        ("lan-1g, loss=0.01,seed=3", Network("941Mbps", "100us", loss=0.01, seed=3)),
        ("home,jitter=0,server=1Gbps", Network(up="20Mbps", down="100Mbps", latency="15ms", server="1Gbps")),
    ],
)  # fmt: skip
def test_text(text, same):
    assert Network.parse(text).describe() == same.describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wify", "did you mean 'wifi'"), ("1Gbps,2ms,3", "must be a preset"), ("1Gbps,wifi", "latency='wifi'"),
        ("1Gbps,jiter=2ms", "did you mean 'jitter'"), ("1Gbps,loss=0.1,loss=0.2", "sets loss twice"),
        ("1Gbps,bandwidth=2", "must be a preset"), ("1Gbps,loss=half", "loss='half'"), ("", "network"),
        ("no/such.json", "cannot be read"),
        ("1Gbps,seed=1.5", "seed=1.5"),
        ("100", "bandwidth='100' has no unit: write '100Mbps' .*, '100MB/s' .* or '100bps'"),
        ("100Mbps,20", "latency='20' has no unit: write '20us', '20ms', '20s', '20min' or '20h'"),
        ("wifi,jitter=2", "jitter='2' has no unit"), ("wifi,server=10", "server='10' has no unit"),
        ("up=20,down=100Mbps", "up='20' has no unit"),
    ],
)  # fmt: skip
def test_wrong_text_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        Network.parse(text)


def shapes():
    return [
        Network("1Gbps", "1ms", jitter=0.1, loss=0.1, seed=4, server="10Gbps"),
        Network.preset("home"),
        Network.matrix([[0, 1e9, 2e9], [3e9, 0, 1e8], [1e7, 1e9, 0]], "5ms", loss=0.1),
        Network.groups([2, 3], "10Gbps,1us", "100Mbps,20ms", jitter="1ms", shared=False),
        Network.groups([[0, 2], [1]], ["10Gbps", "1Gbps"], Network.matrix([[0, 1e6], [1e7, 0]])),
    ]


@pytest.mark.parametrize("network", shapes(), ids=repr)
def test_a_network_is_its_description(network, tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps(network.describe()))
    again = Network.parse(str(path))
    assert again.describe() == network.describe() and repr(again) == repr(network)
    assert again.cost("all_reduce", S, 3).seconds == network.cost("all_reduce", S, 3).seconds


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "must hold one object"), ("{", "is not JSON"), ('{"bandwith": "1Gbps"}', "did you mean 'bandwidth'"),
        ('{"matrix": {"bandwidth": [[0]]}, "groups": [1]}', "takes matrix"),
        ('{"groups": [2, 2], "inside": "wifi"}', "takes groups, inside, between"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(content, message, tmp_path):
    path = tmp_path / "network.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=message) as caught:
        Network.parse(str(path))
    assert "network.json" in str(caught.value)


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network(), "needs a bandwidth"),
        (lambda: Network("1Gbps", up="1Gbps", down="1Gbps"), "cannot all be set"),
        (lambda: Network("1Gbps", latensy=1), "did you mean 'latency'"),
        (lambda: Network("1Gbps", loss=1), "loss=1"),
        (lambda: Network("1Gbps", loss=-0.1), "loss=-0.1"),
        (lambda: Network("1Gbps", jitter=-1), "jitter=-1"),
        (lambda: Network("1Gbps", seed=-1), "seed=-1"),
        (lambda: Network("1Gbps", server=0), "server=0"),
        (lambda: Network.preset("token-ring"), "network='token-ring'"),
        (lambda: Network.of(3), "is not a network"),
        (lambda: Network.matrix([[0, 1e9], [0, 0]]), "node 1 cannot reach node 0"),
        (lambda: Network.matrix([[0, "1Gbps"], ["slow", 0]]), "node 1 cannot reach node 0"),
        (lambda: Network.matrix([[0, 1e9], [1e9, 0]], [[0, math.inf], [0, 0]]), "node 0 cannot reach node 1"),
        (lambda: Network.matrix([[0, 1e9]]), "must be square"),
        (lambda: Network.matrix([]), "must be square"),
        (lambda: Network.matrix([1, 2]), "must be square"),
        (lambda: Network.matrix([[0, 1], [1, 0]], np.zeros((3, 3))), "latency matrix has 3 nodes"),
        (lambda: Network.groups([], "1Gbps", "1Gbps"), "must be a list of sizes"),
        (lambda: Network.groups([2, 0], "1Gbps", "1Mbps"), "at least one node"),
        (lambda: Network.groups([[0], []], "1Gbps", "1Mbps"), "nonempty lists"),
        (lambda: Network.groups([[0, 1], [1, 2]], "1Gbps", "1Mbps"), "each node from 0 to 3 once"),
        (lambda: Network.groups([2, 2], ["1Gbps"] * 3, "1Mbps"), "3 networks for 2 groups"),
        (lambda: Network.groups([2, 2], "1Gbps", Network.matrix(np.ones((3, 3)))), "one node per group, 2"),
        (lambda: Network.groups([2, 2], Network.matrix(np.ones((2, 2))), "1Mbps"), "must be uniform"),
        (lambda: Network.groups([2, 2], "wifi", "1Mbps"), "cannot set jitter: leave that out there, as in"),
        (lambda: LINE.cost("all_reduse", S, 4), "did you mean 'all_reduce'"),
        (lambda: LINE.cost("all_reduce", S, 4, "rings"), "did you mean 'ring'"),
        (lambda: LINE.cost("all_reduce", -1, 4), "payload_bytes=-1"),
        (lambda: LINE.cost("all_reduce", math.nan, 4), "payload_bytes=nan"),
        (lambda: LINE.cost("all_reduce", S, 0), "members=0"),
        (lambda: LINE.cost("all_reduce", S, []), "members is empty"),
        (lambda: LINE.cost("broadcast", S, 3, root=5), "root=5 is not among the 3 members"),
        (lambda: Network.matrix(np.ones((2, 2))).cost("all_reduce", S, 3), "node 2 is not in this network of 2 nodes"),
        (lambda: Network.matrix(np.ones((2, 2))).link(0, 2), "node 2 is not in this network"),
        (lambda: LINE.link(-1, 0), "node -1 is not in this network"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_each_node_may_have_its_own_line():
    """Pairs are as fast as the slower line, as in the matrix of these rates; a line's own rate counts at a server."""
    lines = Network(["1Gbps", "50Mbps", "50Mbps"], "10ms")
    matrix = Network.matrix([[0, 5e7, 5e7], [5e7, 0, 5e7], [5e7, 5e7, 0]], "10ms")
    for kind in ("all_reduce", "all_gather", "broadcast", "exchange"):
        assert lines.cost(kind, 1e6, 3).seconds == matrix.cost(kind, 1e6, 3).seconds
    assert lines.links.outside(0)[0] == 1e9 and matrix.links.outside(0)[0] == 5e7
    assert lines.num_nodes == 3 and Network(["1Gbps"] * 4, "1ms").cost("all_reduce", 1e6, 4) == Network(
        "1Gbps", "1ms"
    ).cost("all_reduce", 1e6, 4)
    text = Network.parse("1Gbps, 50Mbps,50Mbps:10ms, jitter=1ms")
    assert text.describe() == Network(["1Gbps", "50Mbps", "50Mbps"], "10ms", jitter="1ms").describe()
    assert Network.of(text.describe()).describe() == text.describe()
    assert repr(lines) == "Network(['1 Gbps', '50 Mbps', '50 Mbps'], '10 ms')"
    assert Network.parse("1Gbyte/s,50Mbyte/s:10ms").links.lines_bps.tolist() == [8e9, 4e8]
    assert Network.parse("1Gbps,50Mbps,latency=10ms").describe() == Network(["1Gbps", "50Mbps"], "10ms").describe()


@pytest.mark.parametrize("text, why", [
    ("1Gbps:1ms,50Mbps:2ms", "write it after the last line, as in 1Gbps,50Mbps:10ms"),
    ("1Gbps,50Mbps,20ms", "'20ms' has no known unit"), ("1Gbps,50", "latency='50' has no unit"),
    ("1Gbps,50Mbps:", "latency=''"), ("1Gbps,50Mbps,up=1Mbps", "cannot be combined with up= or down="),
    ("1Gbps,50Mbps:1ms,latency=2ms", "gives latency twice"), ("1Gbps,-5Mbps", "must be over 0"), ("100", "no unit"),
])  # fmt: skip
def test_lines_that_cannot_be_read_are_refused(text, why):
    with pytest.raises(ArgumentError, match=re.escape(why)):
        Network.parse(text)
    with pytest.raises(ArgumentError, match="must list at least two lines"):
        Network(["1Gbps"])
