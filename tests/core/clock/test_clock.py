"""Virtual time: its sums, its laws, and that it goes on where it stopped."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exogym.core.clock import DEVICES, Clock, Device, StepTime, flops_of, seconds_of
from exogym.core.clock.clock import PARTS
from exogym.core.communicator import Communicator, Event
from exogym.errors import ArgumentError, ModelError
from exogym.network import Network

N, STEP_S, S = 4, 0.01, 1e6
LINE = Network("1Gbps", "1ms")
RING_S = 6 * (1e-3 + 8 * S / 4 / 1e9)
SPREAD = StepTime(STEP_S, speeds=[1, 2, 0.5, 1], sigma=0.5, straggler_share=0.2, straggler_factor=4, seed=3)


def event(members=range(N), size=S, kind="all_reduce", algorithm="ring"):
    members = tuple(members)
    moved = np.full(len(members), 2 * (len(members) - 1) / len(members) * size)
    return Event(kind, algorithm, members, size, moved, moved, "parameters", members)


def everything(clock):
    return {name: value.tolist() for name, value in clock.state().items()}


def busy(clock, rounds=6, stretch=4):
    """Let a clock live through stretches, collectives of all and of some, and one that overlaps."""
    for k in range(rounds):
        handle = clock.begin(event(range(2), 3 * S))
        clock.advance(stretch if k % 2 else np.array([stretch, 0, 1, stretch]))
        clock.event(event([1, 2, 3]))
        clock.wait(handle)
        clock.event(event())


# Computing


def test_steps_take_their_time():
    clock = Clock(N, LINE, [0.01, 0.02, 0.03, 0.04])
    clock.advance(3)
    clock.advance(np.array([0, 1, 0, 2]))
    assert clock.time_s.tolist() == [0.03, 0.08, 0.09, 0.2]
    assert clock.steps.tolist() == [3, 4, 3, 5]
    clock.advance(np.array([1, 0, 1, 1]), measured_s=[0.5, 9.0, 0.25, 0.0])
    assert clock.time_s.tolist() == [0.53, 0.08, 0.34, 0.2]


@pytest.mark.parametrize("time", [StepTime(1 / 3), SPREAD], ids=["fixed", "spread"])
def test_stretches_change_no_bit(time):
    whole, single = (Clock(N, LINE, time, timeline=True) for _ in range(2))
    for counts in ([7, 3, 0, 11], [5, 5, 5, 5], [0, 9, 1, 0]):
        whole.advance(np.array(counts))
        for k in range(max(counts)):
            single.advance((np.array(counts) > k).astype(int))
        for clock in (whole, single):
            clock.event(event([0, 1, 2]))
    assert everything(whole) == everything(single)
    assert sorted(whole.spans, key=repr) == sorted(single.spans, key=repr)


def test_sums_of_floats_would_not_pass():
    """The control: why time is counted in whole nanoseconds."""
    one_by_one = 0.0
    for _ in range(10):
        one_by_one += 0.1
    assert one_by_one != 10 * 0.1


def test_a_step_depends_on_node_and_number_alone():
    few, many = StepTime(1, sigma=1, seed=5), StepTime(1, sigma=1, seed=5)
    first, counts = np.arange(8), np.full(8, 3)
    wanted = many.ticks(first, counts)
    assert few.ticks(first[:4], counts[:4]).tolist() == wanted[:4].tolist()
    assert len(set(wanted.tolist())) == 8
    assert StepTime(1, sigma=1, seed=6).ticks(first, counts).tolist() != wanted.tolist()
    pieces = (
        few.ticks(first, np.ones(8, int))
        + few.ticks(first + 1, np.ones(8, int))
        + few.ticks(first + 2, np.ones(8, int))
    )
    assert pieces.tolist() == wanted.tolist()


def test_large_stretches_are_drawn_in_blocks(monkeypatch):
    counts = np.array([500, 0, 300, 900])
    whole = SPREAD.ticks(np.zeros(4, int), counts)
    monkeypatch.setattr("exogym.core.clock.steps.MOST_DRAWS", 64)
    assert SPREAD.ticks(np.zeros(4, int), counts).tolist() == whole.tolist()


def test_the_spread_has_its_moments():
    time = StepTime(2.0, sigma=0.4, straggler_share=0.1, straggler_factor=5)
    draws = time.step_ticks(np.repeat(np.arange(100), 400), np.tile(np.arange(400), 100)) / 1e9
    assert draws.mean() == pytest.approx(2 * 1.4, rel=0.02) == time.mean_s(1)[0]
    plain = StepTime(2.0, sigma=0.4).step_ticks(np.repeat(np.arange(100), 400), np.tile(np.arange(400), 100)) / 1e9
    assert np.log(plain).std() == pytest.approx(0.4, rel=0.02)
    assert np.log(plain).mean() == pytest.approx(math.log(2) - 0.08, abs=0.01)
    table = np.log(plain).reshape(100, 400)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02  # neighbours are strangers
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


# Collectives


def test_a_collective_waits_for_the_latest_and_then_for_the_wire():
    clock = Clock(N, LINE, [0.01, 0.02, 0.03, 0.1])
    clock.advance(1)
    clock.event(event([0, 1, 2]))
    cost = 4 * (1e-3 + 8 * S / 3 / 1e9)
    assert clock.time_s == pytest.approx([0.03 + cost, 0.03 + cost, 0.03 + cost, 0.1], abs=1e-9)
    assert clock.seconds("waiting") == pytest.approx([0.02, 0.01, 0, 0], abs=1e-9)
    assert clock.seconds("sending") == pytest.approx([cost, cost, cost, 0], abs=1e-9)
    assert clock.tx_bytes.tolist() == pytest.approx([4 / 3 * S] * 3 + [0])


def test_groups_work_at_once():
    comm, clock = Communicator(range(N), N), Clock(N, LINE)
    comm.ledger.listeners.append(clock.event)
    comm.all_reduce(torch.zeros(N, 250_000), groups=[[0, 1], [2, 3]])
    assert clock.time_s == pytest.approx([2 * (1e-3 + 8 * S / 2 / 1e9)] * N)
    assert clock.events == 2


@pytest.mark.parametrize("time", [StepTime(STEP_S), SPREAD], ids=["fixed", "spread"])
def test_time_is_the_sum_of_its_parts(time):
    clock = Clock(N, LINE, time)
    busy(clock)
    assert sum(clock.share(part) for part in PARTS) == pytest.approx(np.ones(N), abs=1e-15)
    assert sum(everything(clock)[f"part.{part}"][2] for part in PARTS) == everything(clock)["ticks"][2]
    assert (clock.waiting_share == clock.share("waiting") + clock.share("sending")).all()
    assert 0 < clock.share("waiting").max() < 1
    assert Clock(N, LINE).share("computing").tolist() == [0] * N
    for node in range(N):
        figures = {name: float(getattr(clock, name)[node]) for name in ("time_s", "waiting_share", "bandwidth_use")}
        assert clock.figures(node) == figures
    assert clock.last_s == clock.time_s.max()
    assert clock.seconds("waiting", slice(2)).tolist() == clock.seconds("waiting")[:2].tolist()


def test_the_use_of_a_line():
    clock = Clock(2, Network("1Gbps"))
    clock.event(event(range(2)))  # nothing but sending, without latency: the line is full
    assert clock.bandwidth_use == pytest.approx([1, 1])
    clock.advance(1, measured_s=clock.time_s.max())
    assert clock.bandwidth_use == pytest.approx([0.5, 0.5])
    home = Clock(2, Network(up="10Mbps", down="100Mbps"))
    home.event(event(range(2)))
    assert home.bandwidth_use == pytest.approx([1, 1])


# Overlap


@pytest.mark.parametrize("steps", [0, 1, 3, 50])
def test_an_overlapped_collective_is_paid_when_waited_for(steps):
    clock = Clock(N, LINE, STEP_S)
    handle = clock.begin(event())
    clock.advance(steps)
    clock.wait(handle)
    assert clock.time_s == pytest.approx([max(steps * STEP_S, RING_S)] * N, abs=1e-9)
    assert clock.seconds("sending") == pytest.approx([max(0, RING_S - steps * STEP_S)] * N, abs=1e-9)


def test_waiting_at_once_is_not_overlapping():
    one, two = Clock(N, LINE, SPREAD), Clock(N, LINE, SPREAD)
    for clock in (one, two):
        clock.advance(3)
    one.event(event())
    two.wait(two.begin(event()))
    assert everything(one) == everything(two)


def test_a_line_carries_one_collective_at_a_time():
    clock = Clock(N, LINE, STEP_S)
    first, second = clock.begin(event()), clock.begin(event())
    clock.wait(second)
    assert clock.time_s == pytest.approx([2 * RING_S] * N, abs=1e-8)
    clock.wait(first)
    assert clock.time_s == pytest.approx([2 * RING_S] * N, abs=1e-8)
    apart = Clock(N, LINE)  # the control: lines that have nothing to do with each other
    first, second = apart.begin(event([0, 1])), apart.begin(event([2, 3]))
    assert apart._flights[first].end == apart._flights[second].end
    with pytest.raises(ArgumentError, match="handle=0 is not a running collective"):
        clock.wait(0)


def test_jitter_is_one_draw_per_event():
    network = Network("1Gbps", "1ms", jitter="5ms", seed=2)
    clock, wanted = Clock(N, network), 0.0
    for k in range(5):
        clock.event(event())
        wanted += network.seconds(event(), draw=k)
        assert clock.time_s == pytest.approx([wanted] * N, abs=1e-8)


# Checkpoints


@pytest.mark.parametrize("network", [LINE, Network("1Gbps", "1ms", jitter="3ms")], ids=repr)
def test_it_goes_on_where_it_stopped(network):
    def make():
        return Clock(N, network, SPREAD)

    whole, first, second = make(), make(), make()
    for clock in (whole, first):
        busy(clock, 3)
        handle = clock.begin(event([0, 3], 1e8))
        clock.advance(2)
    second.load_state(first.state())
    fresh = make()  # the control: it has to be loaded
    for clock in (whole, second, fresh):
        if clock is not fresh:
            clock.wait(handle)
        busy(clock, 3)
    assert everything(second) == everything(whole) != everything(fresh)
    with pytest.raises(ArgumentError, match="for 4 nodes, but the clock is for 5"):
        Clock(5, network).load_state(first.state())


# The timeline


def test_spans_cover_the_time():
    clock = Clock(N, LINE, SPREAD, timeline=True)
    busy(clock)
    kinds = {"compute": "computing", "wait": "waiting", "send": "sending"}
    for node in range(N):
        mine = sorted((s for s in clock.spans if s.node == node), key=lambda s: s.start_s)
        assert mine[0].start_s == 0 and mine[-1].end_s == clock.time_s[node]
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(mine))
        for kind, part in kinds.items():
            total = sum(s.end_s - s.start_s for s in mine if s.kind == kind)
            assert total == pytest.approx(clock.seconds(part)[node], abs=1e-7)


# Work


def test_operations_of_known_layers():
    x = torch.randn(5, 8)
    deep = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    # forward, gradients of the weights, and gradients of the activations but for the input's
    assert flops_of(deep, x, lambda m, b: m(b).sum()) == 2 * 5 * (2 * (8 * 16 + 16 * 4) + 16 * 4)
    conv = nn.Conv2d(3, 6, 3, padding=1)
    assert flops_of(conv, torch.randn(2, 3, 4, 4), lambda m, b: m(b).mean()) == 2 * 2 * (2 * 4 * 4 * 6 * 3 * 9)


def test_a_transformer_takes_six_operations_per_parameter_and_token():
    width, tokens = 64, 16
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    size = 12 * width**2
    counted = flops_of(layer, torch.randn(1, tokens, width), lambda m, b: m(b).square().mean())
    assert counted == pytest.approx(6 * size * tokens, rel=0.1)


class Tracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, batch):
        x, y = batch
        return F.cross_entropy(F.dropout(self.norm(self.layer(x))), y)


def test_counting_leaves_everything_as_it_was():
    model, batch = Tracked(), (torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    model.layer.weight.grad = torch.ones(4, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    assert flops_of(model, batch) == 2 * 2 * 6 * 16
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 4)) and model.layer.bias.grad is None


@pytest.mark.parametrize("loss", [None, lambda m, b: 3.0, lambda m, b: m(b).sum().detach()])
def test_counting_needs_a_loss(loss):
    with pytest.raises(ModelError, match="needs a scalar loss"):
        flops_of(nn.Linear(2, 2), torch.randn(3, 2), loss)


def test_devices():
    assert all(len(device.source) > 10 and device.flops_per_s > 1e9 for device in DEVICES.values())
    assert seconds_of(989e12, "h100", 1.0) == 1
    assert seconds_of(1e12, Device(1e12, "fp32", "made up"), 0.5) == 2
    assert seconds_of(1e12, "h100") < seconds_of(1e12, "a100") < seconds_of(1e12, "m1") < seconds_of(1e12, "cpu-core")


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clock(0, LINE), "num_nodes=0"),
        (lambda: Clock(N, LINE, timelin=True), "did you mean 'timeline'"),
        (lambda: Clock(N, "wify"), "did you mean 'wifi'"),
        (lambda: Clock(N, Network.matrix(np.ones((3, 3)))), "network is for 3 nodes, but the clock is for 4"),
        (lambda: Clock(N, LINE, [1, 2]), "step_seconds is for 2 nodes"),
        (lambda: Clock(N, LINE, -1), "step_seconds=-1"),
        (lambda: Clock(N, LINE, "1 fortnight"), "step_seconds='1 fortnight'"),
        (lambda: Clock(N, LINE, algorithms="cheapest"), "Network.cheapest"),
        (lambda: Clock(N, LINE).advance(-1), "counts=-1"),
        (lambda: Clock(N, LINE).advance(np.ones(3)), "one per node"),
        (lambda: Clock(N, LINE).advance(1, measured_s=-1), "measured_s=-1"),
        (lambda: Clock(N, LINE).event(event([3, 4])), "node 4 takes part"),
        (lambda: Clock(N, LINE).share("computting"), "did you mean 'computing'"),
        (lambda: Clock(N, LINE).spans, "keeps no timeline"),
        (lambda: StepTime(1, speeds=[1, 0]), "speeds="),
        (lambda: StepTime(1, speeds=[1, "x"]), "must be one number over 0 per node"),
        (lambda: StepTime("²"), "is not a number with a unit"),
        (lambda: StepTime([1, 2], speeds=[1, 2, 3]), "speeds is for 3 nodes"),
        (lambda: StepTime(1, sigma=-1), "sigma=-1"),
        (lambda: StepTime(80), "'80s' or '80ms'"),
        (lambda: StepTime(["20", 1]), "'20s' or '20ms'"),
        (lambda: StepTime(1, straggler_share=2), "straggler_share=2"),
        (lambda: StepTime(1, straggler_factor=0.5), "straggler_factor=0.5"),
        (lambda: StepTime(1, sed=1), "did you mean 'seed'"),
        (lambda: seconds_of(1, "h200x"), "did you mean 'h100'"),
        (lambda: seconds_of(-1), "flops=-1"),
        (lambda: seconds_of(1, utilisation=0), "utilisation=0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
