"""What a collective costs beside latency and rate: TCP's slow start, played round by round, and a host's memory."""

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

    Before, the window was halved for each timeout without a packet.
    """
    full = bandwidth / 8 * 2 * latency
    sent, window, now = 0, full, 0.0
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
    """H = 1 with short steps keeps the window; after ten seconds of computing it is lost."""
    plain, slow = Network(5e8 * PAYLOAD_SHARE, "75ms"), Network("500Mbps", "75ms", tcp=True)
    ramp_s = slow_start_s(4e6, 5e8, 0.075)
    for step_s, ramps in ((0.1, 1), (10.0, 3)):
        ends = []
        for network in (plain, slow):
            clock = Clock(4, network, step_s)
            comm = Communicator(range(4), 4)
            comm.ledger.listeners.append(clock.event)
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


def played_by_gloo(n, message_bytes, bandwidth, latency):
    """Let n hosts send to each other, message by message: when is the last one there?

    A host says to all at the beginning that it is ready. A message begins after its receiver's word and after the
    sender's last message. With large messages, a host takes part in one round after the other.
    """
    word, took = latency, message_bytes * 8 / bandwidth
    if message_bytes <= FIRST_WINDOW_BYTES:
        return word + (n - 1) * took + latency
    ready = [0.0] * n
    for hop in range(1, n):
        there = [max(ready[(host - hop) % n], word) + took + latency for host in range(n)]
        ready = [max(now, arrived) for now, arrived in zip(ready, there, strict=True)]
    return max(ready)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("payload", [100.0, 1448.0, 5000.0, 50_000.0, 4e6])
def test_messages_wait_until_their_receivers_are_ready(n, payload):
    tcp = Network("50Mbps", "20ms", tcp=True)

    def played(message_bytes):
        return played_by_gloo(n, message_bytes, 50e6 * PAYLOAD_SHARE, 0.02)

    is_whole = payload <= 1448 and n * payload <= FIRST_WINDOW_BYTES
    summed = played(payload) if is_whole else 2 * played(payload / n)
    assert tcp.cost("all_reduce", payload, n).seconds == pytest.approx(summed)
    assert tcp.cost("all_reduce", payload, n, "exact") == tcp.cost("all_reduce", payload, n)
    assert tcp.cost("all_gather", payload, n).seconds == pytest.approx(played(payload))
    assert tcp.cost("reduce_scatter", payload, n).seconds == pytest.approx(played(payload / n))
    assert tcp.cost("exchange", payload, n).seconds == pytest.approx(
        played_by_gloo(2, payload, 50e6 * PAYLOAD_SHARE, 0.02)
    )
    assert tcp.cost("push", payload, n).latency_s == 0.02
    assert tcp.message_s == 0.04 and Network("50Mbps", "20ms").message_s == 0
    late = Network("50Mbps", "20ms", jitter="1ms", tcp=True)
    assert late.message_s == pytest.approx(0.042)


def test_rows_for_several_neighbors_go_one_after_the_other():
    """Hosts hand over one row at a time: a ring's two neighbors are two turns, of two latencies each."""
    tcp, comm, times = Network("1Gbps", "5ms", tcp=True), Communicator(range(4), 4), []
    comm.ledger.listeners.append(lambda event: times.append(tcp.seconds(event)))
    ring = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
    comm.mix(torch.zeros(4, 1000), ring / 3)
    assert times[0] == pytest.approx(4 * 0.005 + 2 * 4000 * 8 / (1e9 * PAYLOAD_SHARE))
    assert tcp.cost("mix", 4000, 4, fan=(2, 2)).seconds == pytest.approx(times[0])


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
