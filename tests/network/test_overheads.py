"""What a collective costs beside latency and rate: TCP's slow start, played round by round, and a host's memory."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.clock import Clock
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.network.overheads import FIRST_WINDOW_BYTES, PAYLOAD_SHARE, TIMEOUT_S, slow_start_s
from exogym.strategy.registry import parse_strategy
from exogym.study.advise import advise


def rows(count, width):
    return TensorDataset(torch.zeros(count, width), torch.zeros(count, width))


def played_s(payload, bandwidth, latency, idle=float("inf")):
    """Send windows that double, each answered after a round trip, until the line is full; then at its rate.

    Before, a message as large as this one had passed, and the window was halved for each timeout without a packet.
    """
    full = bandwidth / 8 * 2 * latency
    sent, window, now = 0, min(full, payload), 0.0
    while idle >= 2 * latency + TIMEOUT_S and window > FIRST_WINDOW_BYTES:
        idle, window = idle - 2 * latency - TIMEOUT_S, window / 2
    window = max(window, FIRST_WINDOW_BYTES)
    while window < full and sent + window < payload:
        sent, window, now = sent + window, 2 * window, now + 2 * latency
    return now + (payload - sent) * 8 / bandwidth


@pytest.mark.parametrize("payload", [1e3, 1e5, 3e6, 1e9])
@pytest.mark.parametrize(("bandwidth", "latency"), [(5e8, 0.075), (1e9, 0.01), (1e7, 0.1), (1e9, 1e-5)])
@pytest.mark.parametrize("idle", [0.1, 0.5, 1.3, 4.0, float("inf")])
def test_slow_start_is_what_it_is_round_by_round(payload, bandwidth, latency, idle):
    lost = played_s(payload, bandwidth, latency, idle) - payload * 8 / bandwidth
    assert slow_start_s(payload, bandwidth, latency, idle) == pytest.approx(lost, abs=1e-9)


def test_only_idle_connections_start_slowly():
    """H = 1 with short steps keeps the window; after ten seconds of computing it is lost in each of three rounds."""
    plain, slow = Network(5e8 * PAYLOAD_SHARE, "75ms"), Network("500Mbps", "75ms", tcp=True)
    ramp_s = 3 * slow_start_s(1e6, 5e8, 0.075)
    for step_s, ramps in ((0.1, 1), (10.0, 3)):
        ends = []
        for network in (plain, slow):
            clock = Clock(4, network, step_s)
            comm = Communicator(range(4), 4)
            comm.ledger.listeners.append(lambda event, clock=clock: clock.event(replace(event, algorithm="exact")))
            for _ in range(3):
                clock.advance(1)
                comm.all_reduce(torch.zeros(4, 1_000_000))
            ends.append(float(clock.time_s[0]))
        latencies = 3 * (8 - 6) * 0.075  # a sum waits for 8 latencies with gloo and for 6 without
        assert ends[1] - ends[0] == pytest.approx(ramps * ramp_s + latencies)
        rows = [
            advise(
                parameters=1e6, num_nodes=4, network=n, step_seconds=step_s, strategies=["ddp"], algorithm="recorded"
            ).rows[0].seconds_per_step
            for n in (plain, slow)
        ]  # fmt: skip
        agreeing = 3 * 2 * 0.075
        assert rows[1] - rows[0] == pytest.approx((ramp_s if ramps == 3 else 0) + latencies / 3 + agreeing)


def test_headers_take_a_share_of_the_rate():
    plain, tcp = Network("1Gbps", "1ms"), Network("1Gbps", "1ms", tcp=True)
    assert pytest.approx(1448 / 1547) == PAYLOAD_SHARE
    for kind in ("all_reduce", "all_gather", "push", "exchange"):
        bare, whole = (network.cost(kind, 4e6, 4) for network in (plain, tcp))
        assert whole.transfer_s == pytest.approx(bare.transfer_s * 1547 / 1448)
    times = []
    for network in (plain, tcp):  # rows between neighbors are priced by their links
        comm = Communicator(range(4), 4)
        comm.ledger.listeners.append(lambda event, network=network: times.append(network.seconds(event)))
        comm.mix(torch.zeros(4, 1_000_000), torch.eye(4).roll(1, 0) + torch.eye(4))
    assert times[1] - 0.002 == pytest.approx((times[0] - 0.001) * 1547 / 1448)


@pytest.mark.parametrize(("kind", "way", "sent"), [
    ("all_reduce", "exact", 2 * 3 / 4), ("all_gather", "ring", 3), ("gather", "direct", 3), ("reduce", "tree", 3),
    ("reduce_scatter", "ring", 3 / 4), ("all_to_all", "pairwise", 3 / 4), ("broadcast", "tree", 2),
    ("barrier", "tree", 0),
])  # fmt: skip
@pytest.mark.parametrize("size", [10_000, 4_000_000])
def test_bytes_take_as_long_in_any_order(kind, way, sent, size):
    """Latencies: test_messages_of_hosts.py."""
    tcp = Network("50Mbps", "20ms", tcp=True)
    assert tcp.cost(kind, size, 4, way).transfer_s == pytest.approx(sent * size * 8 / (50e6 * PAYLOAD_SHARE))


def test_torchs_own_sum_and_servers_stay_formulas():
    plain, tcp = Network("50Mbps", "20ms"), Network("50Mbps", "20ms", tcp=True)
    assert tcp.cost("all_reduce", 4e6, 4, "ring").latency_s == 2 * plain.cost("all_reduce", 4e6, 4, "ring").latency_s
    for kind, way in (("push", "server"), ("all_reduce", "server")):
        assert tcp.cost(kind, 4e6, 4, way).latency_s == plain.cost(kind, 4e6, 4, way).latency_s
    assert tcp.cheapest("all_reduce", 4e6, 4)[0] == "exact" and plain.cheapest("all_reduce", 4e6, 4)[0] != "exact"
    assert Network("50Mbps", "20ms", jitter="1ms", tcp=True).message_s == pytest.approx(0.042)
    assert (
        tcp.message_s == 0.04 and plain.message_s == 0 and Network.matrix([["1Gbps"]], "1ms", tcp=True).message_s == 0
    )


@pytest.mark.parametrize(("islands", "kind", "size", "measured_s"), [
    (4, "all_reduce", 400_000, 0.765), (4, "all_reduce", 100_000, 0.178), (4, "all_gather", 12_000, 0.094),
    (4, "all_gather", 100_000, 0.772), (2, "all_reduce", 400_000, 0.392),
])  # fmt: skip
def test_islands_share_their_line(islands, kind, size, measured_s):
    """Measured among hosts in namespaces: two islands with 20 Mbit/s of payload and 2 ms between them."""
    inside, between = Network(200e6 / PAYLOAD_SHARE, "1ms"), Network(20e6 / PAYLOAD_SHARE, "2ms")
    network = Network.groups([islands, islands], inside=inside, between=between, tcp=True)
    way = "exact" if kind == "all_reduce" else None
    assert network.cost(kind, size, 2 * islands, way).seconds == pytest.approx(measured_s, rel=0.16)


def test_rows_for_several_neighbors_go_one_after_the_other():
    """Hosts hand over one row at a time: a ring's two neighbors are two turns, of two latencies each."""
    tcp, comm, times = Network("1Gbps", "5ms", tcp=True), Communicator(range(4), 4), []
    comm.ledger.listeners.append(lambda event: times.append(tcp.seconds(event)))
    ring = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
    comm.mix(torch.zeros(4, 1000), ring / 3)
    assert times[0] == pytest.approx(4 * 0.005 + 2 * 4000 * 8 / (1e9 * PAYLOAD_SHARE))
    assert tcp.cost("mix", 4000, 4, fan=(2, 2)).seconds == pytest.approx(times[0])
    assert tcp.cost("mix", 4000, 4).latency_s == pytest.approx(3 * 2 * 0.005)  # each other node is a neighbor


def test_memory_is_read_and_written():
    plain, busy = Network("1Gbps"), Network("1Gbps", memory="10GB/s")
    for n, passes in ((2, 9.5), (4, 9.25)):
        more = busy.cost("all_reduce", 4e6, n).seconds - plain.cost("all_reduce", 4e6, n).seconds
        assert more == pytest.approx(passes * 4e6 / 10e9)
    assert busy.cost("all_reduce", 4e6, 1).seconds == 0
    assert busy.cost("all_reduce", 4e6, 4, "tree") == plain.cost("all_reduce", 4e6, 4, "tree")


def test_copies_and_sums_of_a_transfer_take_the_processor():
    """A transfer that steps hide costs its copies and sums; one that is waited for costs them once."""
    for memory, busy_s in ((None, 0.0), ("10GB/s", 9.25 * 4e6 / 10e9)):
        network = Network("1Gbps", memory=memory)
        for steps in (0, 100):
            clock, comm = Clock(4, network, 0.01), Communicator(range(4), 4)
            comm.ledger.listeners.append(clock.event)
            flight = comm.new_flight()
            with comm.on_its_way(flight):
                comm.all_reduce(torch.zeros(4, 1_000_000))
            clock.advance(steps)
            comm.arrive(flight)
            spent_s = network.cost("all_reduce", 4e6, 4).seconds if not steps else 1.0 + busy_s
            assert clock.time_s == pytest.approx(spent_s)


@pytest.mark.parametrize("rules", ["H=10", "H=10:delay=8", "H=10:eager=true"])
def test_advice_charges_them_as_the_clock_does(rules):
    """Rounds of ten steps of 2 ms: the late average's transfer is hidden, its copies and sums are not."""
    width, times = 400, []
    for memory in (None, "2GB/s"):
        network, strategy = Network("1Gbps", "0.1ms", memory=memory), parse_strategy(f"diloco:{rules}", lr=1e-3)
        marks = []
        LocalTrainer(torch.nn.Linear(width, width, bias=False), rows(8, width), loss_fn=mse_loss).fit(
            strategy,
            num_nodes=4,
            max_steps=31,
            batch_size=1,
            device="cpu",
            network=network,
            step_seconds=0.002,
            final_sync=False,
            progress=False,
            callbacks=[Every(10, lambda loop, marks=marks: marks.append(loop.timing.time_s), may_end=False)],
        )
        advice = advise(
            parameters=width**2,
            num_nodes=4,
            network=network,
            step_seconds=0.002,
            strategies=[strategy],
            algorithm="recorded",
        )
        times.append(advice.rows[0].seconds_per_step)
        assert (marks[-1] - marks[1]) / 10 == pytest.approx(times[-1], rel=1e-6)
        assert ("adding up take no time" in "\n".join(advice.assumptions)) == (memory is None)
    assert times[1] > times[0]


def test_they_are_settings_like_others():
    text = Network.parse("1Gbps,20ms,tcp=true,memory=10GB/s")
    assert text.tcp and text.memory_bps == 80e9
    assert Network.of(text.describe()).describe() == text.describe()
    assert "tcp" not in Network("1Gbps").describe()
    for wrong in ({"tcp": "yes"}, {"memory": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            Network("1Gbps", **wrong)
