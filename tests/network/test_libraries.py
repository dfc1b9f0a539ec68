"""NCCL's and gloo's own algorithms: their formulas, what a library chooses, and limits of lines and connections."""

from __future__ import annotations

import heapq
import math

import pytest

from exogym.clock import Clock
from exogym.communicator import Communicator
from exogym.core.communicator import Event
from exogym.errors import ArgumentError
from exogym.network import Network

MIB = 2**20
B, ALPHA = 1e9, 0.01


def seconds(library: str | None, kind: str, size: float, n: int, **options) -> float:
    return Network(B, ALPHA, library=library, **options).cost(kind, size, n).seconds


def gloo_ring_s(messages: int, size: float, bandwidth: float, alpha: float) -> float:
    """Simulate gloo's ring: all members alike, two messages in flight, announcements and data in one queue per member.

    A member announces that it is ready for message k + 2 when message k has arrived. The announcement waits behind data
    that its line is sending.
    """
    T, free = 8 * size / bandwidth, alpha  # announcements of the first two messages arrive after alpha
    ready, arrived = [(alpha, 0), (alpha, 1)], 0.0
    while ready:
        at, k = heapq.heappop(ready)
        start = max(at, free)
        free = start + T
        arrived = start + T + alpha
        if k + 2 < messages:
            following = [s for s, _ in ready] and max(ready[0][0], free)  # the other message's start, if it is known
            busy_until = following + T if following and following < arrived < following + T else arrived
            heapq.heappush(ready, (busy_until + alpha, k + 2))
    return arrived


@pytest.mark.parametrize("bandwidth, alpha", [(1e9, 0.01), (2e9, 0.005), (5e9, 0.001), (1e8, 0.001), (1e10, 0.05)])
def test_the_ring_of_gloo_takes_what_a_simulation_of_its_messages_takes(bandwidth, alpha):
    n, size = 4, 256 * MIB
    messages = 2 * 3 * 64  # of 1 MiB
    wanted = gloo_ring_s(messages, MIB, bandwidth, alpha)
    assert Network(bandwidth, alpha, library="gloo").cost("all_reduce", size, n).seconds == pytest.approx(wanted, 0.05)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 32])
def test_each_formula_is_the_documented_one(n):
    S, L = 64 * MIB, (n - 1).bit_length()
    N = n * math.ceil(max(64, 2 * n) / n)
    T = 8 * S / N / B
    each = max(ALPHA, T) + min(ALPHA, T) / 2
    line = 8 * S / B
    assert seconds("gloo", "all_reduce", S, n) == pytest.approx(2 * (n - 1) / n * N * each)
    around = (N - 2) * each + 2 * ALPHA + (n - 1) / n * line
    assert seconds("gloo", "reduce", S, n) == pytest.approx(around)
    assert seconds("gloo", "broadcast", S, n) == pytest.approx((L + 1) * ALPHA + L * (L + 1) / 2 * line)
    assert seconds("gloo", "all_to_all", S, n) == pytest.approx(2 * ALPHA + (n - 1) / n * line)
    loops = max(1, S / (n * 4 * MIB))
    ring = max(ALPHA + 2 * (n - 1) * line / n, 2 * (n - 1) * (loops * ALPHA + line / n / 2))
    assert seconds("nccl", "all_reduce", S, n) == pytest.approx(ring)
    chain = (n - 1) * ALPHA + (n - 2) * 8 * MIB / B + line
    for kind in ("broadcast", "reduce"):
        assert seconds("nccl", kind, S, n) == pytest.approx(chain)


def test_a_library_runs_its_own_algorithms():
    for size in (1e3, 1e6, 1e9):
        names = {lib: Network(B, ALPHA, library=lib).cheapest("all_reduce", size, 16)[0] for lib in ("gloo", "nccl")}
        assert names["gloo"] == "ring" and names["nccl"] == ("double_tree" if size == 1e3 else "ring")
    for kind in ("broadcast", "reduce", "all_gather", "all_reduce"):
        for library in ("gloo", "nccl"):
            network = Network(B, ALPHA, library=library)
            way, least = network.cheapest(kind, 1e6, 8)
            assert network.cost(kind, 1e6, 8).seconds == pytest.approx(least) == network.cost(kind, 1e6, 8, way).seconds


@pytest.mark.parametrize("library", ["gloo", "nccl", "any"])
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_times_rise_with_bytes_and_latency_and_fall_with_bandwidth(library, kind):
    def time(size: float, bandwidth: float = B, alpha: float = ALPHA) -> float:
        return Network(bandwidth, alpha, library=library).cheapest(kind, size, 6)[1]

    sizes = [0, 1, 1e3, 1e5, 1e6, 1e7, 1e8]
    assert [time(s) for s in sizes] == sorted(time(s) for s in sizes)
    assert time(1e7, alpha=0.0) <= time(1e7) <= time(1e7, bandwidth=B / 2) and time(1e7) < time(1e7, alpha=0.1)


def test_the_clock_charges_what_the_library_costs():
    import torch

    for library in ("gloo", "nccl"):
        network = Network(B, ALPHA, library=library)
        clock, comm = Clock(4, network), Communicator(range(4), 4)
        comm.ledger.listeners.append(clock.event)
        comm.all_reduce(torch.zeros(4, 250_000))
        assert clock.last_s == pytest.approx(network.cost("all_reduce", 1e6, 4, "ring").seconds, abs=1e-9)


def test_a_root_may_be_any_member():
    matrix = Network.matrix([[0, 1e9, 1e9], [1e9, 0, 1e9], [1e6, 1e6, 0]], ALPHA, library="nccl")
    assert matrix.cost("broadcast", 1e6, 3, root=2).seconds > 5 * matrix.cost("broadcast", 1e6, 3, root=0).seconds


# What a line carries


def test_efficiency_is_a_share_of_every_line():
    matrix = [[0, 1e9, 1e8], [1e9, 0, 1e8], [1e8, 1e8, 0]]
    for make in (
        lambda **o: Network(B, ALPHA, **o), lambda **o: Network([1e9, 1e8, 1e9], ALPHA, **o),
        lambda **o: Network.matrix(matrix, ALPHA, **o),
        lambda **o: Network.groups([2, 1], Network(1e10, ALPHA), Network(1e8, ALPHA), **o),
    ):  # fmt: skip
        whole, half = make().cost("all_reduce", 1e7, 3), make(efficiency=0.5).cost("all_reduce", 1e7, 3)
        assert (half.latency_s, half.transfer_s) == pytest.approx((whole.latency_s, 2 * whole.transfer_s))
        assert make(efficiency=0.5, server="1Gbps").cost("push", 1e9, [0, 1]).transfer_s >= 2 * 8


def test_a_connection_reaches_its_rate_or_its_window_however_fast_the_line_is():
    assert Network("10Gbps", stream="5Gbps").cost("send", 1e9, 2).seconds == pytest.approx(1.6)
    far = Network("10Gbps", "50ms", stream="3MiB")
    assert far.cost("send", 3 * MIB * 10, 2).transfer_s == pytest.approx(10 * 0.1)  # one window in each round trip
    assert Network("10Gbps", stream="3MiB").cost("send", 1e9, 2).seconds == pytest.approx(0.8)
    spread = Network("10Gbps", library="gloo", stream="5Gbps")  # two connections fill the root's line
    assert spread.cost("broadcast", 1e9, 4).seconds == pytest.approx(2 * 1.6)
    sites = Network.groups([4, 4], "100Gbps", Network("10Gbps", stream="2Gbps"))
    assert sites.cost("exchange", 1e9, range(8)).seconds == pytest.approx(4)  # four connections don't fill the line
    slower = Network.groups([8, 8], "100Gbps", Network("10Gbps", stream="2Gbps"))
    assert slower.cost("exchange", 1e9, range(16)).seconds == pytest.approx(6.4)  # eight do


def test_islands_have_as_many_lines_as_given():
    def all_to_all(shared: int) -> float:
        return Network.groups([8, 8], "1000Gbps", "100Gbps", shared=shared).cost("exchange", 1e9, 16).seconds

    one = all_to_all(True)
    assert [one / all_to_all(lines) for lines in (1, 2, 4, 8, False)] == pytest.approx([1, 2, 4, 8, 8])


def test_each_bucket_has_its_own_latency():
    whole, cut = (Network(B, ALPHA, bucket=bucket).cost("all_reduce", 1e8, 4) for bucket in (None, "25MB"))
    assert (cut.latency_s, cut.transfer_s) == pytest.approx((4 * whole.latency_s, whole.transfer_s))
    nccl = [Network(B, ALPHA, library="nccl", bucket=bucket).cost("reduce", 1e8, 4) for bucket in (None, "25MB")]
    assert nccl[0] == nccl[1]  # pieces follow each other down a chain


def test_each_bucket_chooses_its_algorithm():
    small, cut = (Network(B, ALPHA, library="nccl", bucket=bucket) for bucket in (None, "1kB"))
    assert cut.cheapest("all_reduce", 1e6, 16)[0] == small.cheapest("all_reduce", 1e3, 16)[0] == "double_tree"
    assert cut.cheapest("all_reduce", 1e6, 16)[1] == pytest.approx(cut.cost("all_reduce", 1e6, 16).seconds)


@pytest.mark.parametrize("stream", ["10Mbps", "12.5kB"])  # 12.5 kB in each round trip of 10 ms are 10 Mbps
@pytest.mark.parametrize(
    "make",
    [
        lambda **limits: Network("1Gbps", "5ms", **limits),
        lambda **limits: Network(["1Gbps", "1Gbps"], "5ms", **limits),
        lambda **limits: Network.matrix([[0, "1Gbps"], ["1Gbps", 0]], "5ms", **limits),
        lambda **limits: Network.groups([1, 1], "1Gbps,5ms", "1Gbps,5ms", **limits),
        lambda **limits: Network.groups([1, 1], Network("1Gbps", "5ms", **limits), Network("1Gbps", "5ms", **limits)),
    ],
)
def test_a_connection_to_a_server_has_its_limit_too(make, stream):
    network = make(stream=stream)
    assert network.cost("push", 1e6, 2).transfer_s == pytest.approx(0.8)
    assert network.cost("push", 1e6, 2, "island").transfer_s == pytest.approx(0.8)


@pytest.mark.parametrize("size", [1e3, 1e9])
def test_any_library_takes_the_fastest_algorithm(size):
    import numpy as np

    network = Network("1Gbps", "10ms", library="any")
    usual = Network("1Gbps", "10ms").cost("all_reduce", size, 12, "ring").seconds
    fastest = min(network.cheapest("all_reduce", size, 12)[1], usual)
    event = Event(
        "all_reduce", "ring", tuple(range(12)), size, np.zeros(12), np.zeros(12), "", tuple(range(12)), (), None
    )
    assert network.cost("all_reduce", size, 12).seconds == network.seconds(event) == fastest
    assert (fastest < usual) == (size == 1e3)
    assert Network("1Gbps", library="any").cost("push", size, 2).seconds > 0


def test_one_member_of_a_matrix_costs_nothing():
    network = Network.matrix([[0, 1e9], [1e9, 0]], ALPHA, library="nccl")
    assert network.cost("all_reduce", 1e6, 1).seconds == network.cheapest("all_reduce", 1e6, [1])[1] == 0


def test_hierarchical_all_reduce_finds_the_islands_of_a_matrix():
    zone = [0, 0, 0, 1, 1, 1]
    rates = [[1e10 if a == b else 1e8 for b in zone] for a in zone]
    matrix = Network.matrix(rates, ALPHA)
    way, least = matrix.cheapest("all_reduce", 1e8, 6)
    assert way == "hierarchical" and least < matrix.cost("all_reduce", 1e8, 6, "ring").seconds
    islands = Network.groups([3, 3], Network(1e10, ALPHA), Network(1e8, ALPHA))
    assert least == pytest.approx(islands.cost("all_reduce", 1e8, 6, "hierarchical").seconds)


@pytest.mark.parametrize(
    "network",
    [
        Network("1Gbps", "10ms", library="nccl", efficiency=0.5, stream="5Gbps", bucket="25MB"),
        Network.matrix([[0, 1e9], [1e8, 0]], "5ms", library="gloo", stream="3MiB"),
        Network.groups([2, 2], "10Gbps", Network("1Gbps", efficiency=0.5), shared=2, library="any"),
        Network.measured({1e6: 0.2}, num_nodes=4, latency="10ms", library="gloo"),
    ],
)
def test_options_survive_their_description(network):
    again = Network.of(network.describe())
    assert again.describe() == network.describe() and repr(again) == repr(network)
    assert again.cost("broadcast", 1e7, 2) == network.cost("broadcast", 1e7, 2)


@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_links_from_one_probe_give_its_time(library):
    truth = Network(B, ALPHA, library=library)
    probe_s = truth.cost("all_reduce", 128 * MIB, 8).seconds
    probed = Network.measured({128 * MIB: probe_s}, num_nodes=8, latency=ALPHA, library=library)
    for kind in ("broadcast", "reduce"):
        assert probed.cost(kind, 256 * MIB, 8).seconds == pytest.approx(truth.cost(kind, 256 * MIB, 8).seconds, 1e-6)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Network(B, library="mpi"), "gloo"),
        (lambda: Network(B, library="nccl", tcp=True), "leave one of them out"),
        (lambda: Network(B, efficiency=1.2), "efficiency"),
        (lambda: Network(B, stream="fast"), "stream"),
        (lambda: Network(B, bucket="25"), "bytes"),
        (lambda: Network(B, streams="5Gbps"), "did you mean 'stream'"),
        (lambda: Network(B, bucket=1e-310), "bucket=1e-310 must be at least 1 byte"),
        (lambda: Network(B).pipeline_s(math.nan, 1.0, 4, 8), "compute_s=nan"),
        (lambda: Network(B).pipeline_s(1.0, 1.0, 4, 8, backward=-1), "backward=-1"),
        (lambda: Network.measured({1e6: 0.02}, num_nodes=4, latency=1), "latency=1.0 alone would make all_reduce"),
        (lambda: Network.groups([2, 2], Network(B, library="nccl"), "1Gbps"), "cannot set library: leave that out"),
        (lambda: Network.groups([2, 2], "1Gbps", Network(B, server=B, seed=1)), "cannot set seed, server"),
    ],
)
def test_wrong_options_say_what_is_wanted(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


# Pipelines


def test_a_pipelines_pace_is_its_slower_part():
    step = Network(B, ALPHA).pipeline_s(3.0, 1.0, depth=4, microbatches=30)
    assert step == pytest.approx(3.0 / 30 * 33 + 6 * ALPHA, abs=1e-3)  # (m + s - 1) (f + b), and latencies of fills
    slow = Network(1e8, ALPHA).pipeline_s(3.0, 1e7, depth=4, microbatches=30)
    assert slow == pytest.approx(2 * (29 * 0.8) + 6 * (0.8 + ALPHA) + 4 * 0.1)
    assert Network(B, ALPHA).pipeline_s(3.0, 1e9, depth=1, microbatches=30) == pytest.approx(3.0)


def test_events_are_priced_with_the_library():
    import numpy as np

    event = Event("reduce", "chain", (0, 1, 2), 1000, np.zeros(3), np.zeros(3), "", (0, 1, 2), (), None)
    assert Network(B, ALPHA, library="nccl").seconds(event) == pytest.approx(2 * ALPHA + 2 * 8e3 / B, rel=1e-6)
