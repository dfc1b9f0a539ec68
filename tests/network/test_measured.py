"""A network from probes of real collectives: between, outside and without them, and what contradicts itself."""

import inspect
import itertools
import json

import pytest
import torch

from exogym import LocalTrainer, Placement
from exogym.core.clock import Clock
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.network import Network, algorithms_of
from exogym.network.pricing import LATE
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study.advise import advise

PROBES = {1e6: 0.02, 3e6: 0.04, 9e6: 0.13}
PAIRS = [[None, [1e8, 0.01], [2e8, 0.01]], [[1e8, 0.01], None, [2e8, 0.02]], [[1e8, 0.01], [2e8, 0.01], None]]
FILE = {
    "num_nodes": 3, "hosts": ["a", "b", "c"], "pairs": PAIRS, "step_s": [0.1, 0.1, 0.2], "date": "2026-11-22",
    "collectives": {"all_reduce": {"1000": 0.1, "1000000": 0.3}, "broadcast": {"1000000": 0.2}},
    "first": {"all_reduce": 0.5}, "versions": {"torch": "2.13.0"},
}  # fmt: skip


def seconds(network, size, kind="all_reduce", members=4, way=None):
    return network.cost(kind, size, members, way).seconds


def test_probes_are_met_and_between_them_time_is_linear(capsys):
    network = Network.measured(PROBES, num_nodes=4)
    for size, time in PROBES.items():
        assert seconds(network, size) == pytest.approx(time)
    assert seconds(network, 2e6) == pytest.approx(0.03)
    assert seconds(network, 6e6) == pytest.approx(0.085)
    assert capsys.readouterr().err == ""


def test_outside_of_probes_it_goes_on_and_says_so_once(capsys):
    network = Network.measured(PROBES, num_nodes=4)
    assert seconds(network, 0) == pytest.approx(0.01)  # where the line of the two smallest meets no bytes
    assert seconds(network, 5e5) == pytest.approx(0.015)
    assert seconds(network, 15e6) == pytest.approx(0.22)
    assert seconds(network, 18e6) == pytest.approx(0.265)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("times for ")[2] for line in lines] == [
        "smaller payloads are extrapolated, not measured", "larger payloads are extrapolated, not measured"
    ]  # fmt: skip


def test_one_probe_is_a_rate():
    network = Network.measured({4e6: 0.2}, num_nodes=4)
    assert [seconds(network, size) for size in (2e6, 4e6, 8e6)] == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_probes_of_the_formula_give_the_formula_of_everything(kind, n):
    """The oracle: what was measured on a network of the model is that network."""
    real = Network("100Mbps", "5ms")
    sizes = (1e3, 1e5, 1e7)
    probed = Network.of({"num_nodes": n, "collectives": {kind: {size: seconds(real, size, kind, n) for size in sizes}}})
    for other in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", "exchange"):
        for way in algorithms_of(other):
            if way not in ("hierarchical", "server"):
                wanted = seconds(real, 3e5, other, n, way)
                assert seconds(probed, 3e5, other, n, way) == pytest.approx(wanted), (other, way)
    assert seconds(probed, 3e5, kind, 2) == pytest.approx(seconds(real, 3e5, kind, 2))


def test_probes_stand_for_all_nodes_and_the_ways_that_move_as_much():
    network = Network.measured({4e6: 1.0}, num_nodes=4)
    assert seconds(network, 4e6, way="exact") == seconds(network, 4e6, way="nccl_ring") == 1.0
    assert seconds(network, 4e6, way="tree") == pytest.approx(4 * 4e6 * 8 / network.link(0, 1)[0])
    ring_of_two = 2 * 2e6 * 8 / network.link(0, 1)[0]
    assert seconds(network, 4e6, members=[1, 3]) == pytest.approx(ring_of_two)
    assert network.cheapest("all_reduce", 4e6, 4) == ("ring", 1.0)  # whatever the formulas say of others
    with pytest.raises(ArgumentError, match="node 4 is not in this network of 4"):
        seconds(network, 4e6, members=5)


BOTH = {
    "num_nodes": 2, "message_s": 0.001, "first": {"exact all_reduce": 7.5},
    "collectives": {"all_reduce": {"1": 1.0, "1000": 1.0}, "exact all_reduce": {"1": 3.0, "1000": 3.0}},
}  # fmt: skip


def test_each_way_has_its_own_probes_and_stands_for_the_other_where_that_has_none():
    network = Network.of(BOTH)
    assert seconds(network, 500, members=2) == 1.0 and seconds(network, 500, members=2, way="exact") == 3.0
    assert network.cheapest("all_reduce", 500, 2) == ("ring", 1.0)
    assert network.set_up_s("all_reduce", "exact") == 4.5
    alone = Network.of({"num_nodes": 2, "collectives": {"exact all_reduce": {"500": 3.0}}})
    assert seconds(alone, 500, members=2) == seconds(alone, 500, members=2, way="exact") == 3.0
    assert Network.of(network.describe()).describe() == network.describe()


@pytest.mark.parametrize(("strategy", "sums", "agreements"), [("ddp", 6, 18), ("diloco:H=3", 2, 4)])
@pytest.mark.parametrize(("reduction", "sum_s", "first_s"), [("native", 1.0, 4.5), ("tree", 3.0, 4.5)])
def test_a_run_is_predicted_with_the_reduction_that_it_has(strategy, sums, agreements, reduction, sum_s, first_s):
    """Six steps of a tenth of a second; processes agree twice in a stretch, and where gradients meet once more."""
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    trainer = LocalTrainer(torch.nn.Linear(2, 1), data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(
        parse_strategy(strategy), num_nodes=2, batch_size=1, max_steps=6, placement=Placement(reduction=reduction),
        network=Network.of(BOTH), step_seconds=0.1,
    )  # fmt: skip
    assert trainer.clock.time_s[0] == pytest.approx(0.6 + first_s + sums * sum_s + agreements * 0.001)


def test_late_averages_overlap_unless_the_run_says_otherwise():
    """Eight fragments in twelve steps hide in the steps, on named links and on measured hosts."""
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    ends, rows = [], []
    links = Network("32bps")  # two fragments of 8 bytes a round, 2 s each
    probes = {"num_nodes": 2, "collectives": {"exact all_reduce": {"4": 1.0, "8": 1.0}}}
    strategy = "streaming_diloco:H=3:num_fragments=2:fragment_sync_delay=1:outer_optim=sgd"
    for network, overlap in itertools.product((links, Network.of(probes)), (True, False)):
        model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False))
        trainer = LocalTrainer(model, data, loss_fn=lambda x, y: x.square().mean())
        trainer.fit(
            parse_strategy(strategy), num_nodes=2, batch_size=1, max_steps=12, network=network, step_seconds=10.0,
            final_sync=False, placement=Placement(overlap=overlap),
        )  # fmt: skip
        ends.append(float(trainer.clock.time_s[0]))
        rows += advise(parameters=4, num_nodes=2, network=network, step_seconds=10.0, strategies=[strategy]).rows
    assert ends == pytest.approx([120.0, 120.0 + 16, 120.0, 120.0 + 8])
    assert [row.seconds_per_step for row in rows] == pytest.approx([10.0] * 4)


def test_every_strategy_with_late_averages_says_when_they_overlap():
    options = {"delay", "eager", "fragment_sync_delay"}
    late = [kind for kind in STRATEGIES.values() if options & inspect.signature(kind).parameters.keys()]
    assert len(late) >= 2
    for kind in late:
        assert "overlap" in (kind.__doc__ or ""), kind


@pytest.mark.parametrize("network", ["lan-1g", Network.of(BOTH)], ids=["named", "measured"])
def test_advice_says_once_that_late_averages_overlap(network):
    told = advise(parameters=4, num_nodes=2, network=network, step_seconds=10.0)
    assert [line for line in told.assumptions if "overlap" in line] == [LATE]


def test_who_agrees_waits_for_the_latest():
    clock = Clock(2, Network.of(BOTH), [1.0, 2.0])
    clock.advance(1)
    clock.agree(3)
    assert clock.time_s.tolist() == [2.003, 2.003] and clock.seconds("waiting").tolist() == [1.0, 0.0]
    silent = Clock(2, "1Gbps", [1.0, 2.0])
    silent.advance(1)
    silent.agree(3)
    assert silent.time_s.tolist() == [1.0, 2.0]


def test_the_first_collective_of_a_clock_sets_up():
    network = Network.measured({4e6: 1.0}, num_nodes=4, first=1.5)
    clock = Clock(4, network)
    comm = Communicator(range(4), 4)
    comm.ledger.listeners.append(clock.event)
    for wanted in (1.5, 2.5, 3.5):
        comm.all_reduce(torch.zeros(4, 1_000_000))
        assert clock.time_s.tolist() == pytest.approx([wanted] * 4)
    assert seconds(network, 4e6) == 1.0
    again = Clock(4, network)
    again.load_state(clock.state())
    comm.ledger.listeners[:] = [again.event]
    comm.all_reduce(torch.zeros(4, 1_000_000))
    assert again.time_s.tolist() == pytest.approx([4.5] * 4)  # a run that goes on is not cold


def test_a_file_is_the_network_again(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(FILE))
    network = Network.of(str(file))
    assert network.num_nodes == 3 and network.link(1, 2) == (2e8, 0.02)
    assert seconds(network, 1e6, members=3) == 0.3 and seconds(network, 1e6, "broadcast", 3) == 0.2
    assert network.set_up_s("all_reduce") == network.set_up_s("broadcast") == pytest.approx(0.2)
    again = Network.of(json.loads(json.dumps(network.describe())))
    assert again.describe() == network.describe()
    assert seconds(again, 5e5, members=3) == seconds(network, 5e5, members=3)
    network.measurement.check_hosts(["a", "b", "c"])


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "d"], ["b", "a", "c"]])
def test_a_file_of_other_hosts_is_refused(hosts):
    with pytest.raises(ArgumentError, match="for a, b, c, but the hosts are"):
        Network.of(FILE).measurement.check_hosts(hosts)
    with pytest.raises(ArgumentError, match="for 3 nodes, but the clock is for 2"):
        Clock(2, Network.of(FILE))


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ({1e6: 0.04, 3e6: 0.02}, "contradict each other: 3e[+]06 bytes took 0.02 s, but 1e[+]06 bytes"),
        ({1e6: 0.04, "1000000": 0.05}, "contradict each other: 1e[+]06 bytes occur twice"),
        ({1e6: -0.04}, "must be at least 0"),
        ({1e6: 0.0}, "must be over 0"),
        ({1e6: None}, "is missing"),
        ({1e6: float("nan")}, "finite"),
        ({-1e6: 0.04}, "probe's size -1000000.0 must be"),
        ({0: 0.04}, "probe's size 0 must be"),
        ({"many": 0.04}, "probe's size 'many' must be"),
        ({}, "must be a table from bytes to seconds"),
        (None, "must be a table from bytes to seconds"),
    ],
)
def test_wrong_probes_are_refused(probes, message):
    with pytest.raises(ArgumentError, match=message):
        Network.measured(probes, num_nodes=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 4}, "hosts must have one value per node, 4, but has 3"),
        ({"num_nodes": 1}, "at least 2"),
        ({"num_nodes": None}, "has no num_nodes: measure it again"),
        ({"collectives": None}, "has no collectives"),
        ({"collectives": {"all_redude": {1: 1}}}, "did you mean 'all_reduce'"),
        ({"collectives": {"exakt all_reduce": {1: 1}}}, "did you mean 'exact'"),
        (
            {"collectives": {"all_reduce": {1: 1}, "ring all_reduce": {1: 1}}, "first": {}},
            "two of all_reduce, ring all_reduce are the same",
        ),
        ({"message_s": -1}, "message_s"),
        ({"message_s": 0}, "message_s=0 must be over 0"),
        ({"collectives": {}, "pairs": None, "first": {}}, "needs a probe"),
        ({"first": {"all_reduce": 0.2}}, "contradict each other: the first all_reduce took 0.2 s"),
        ({"first": {"gather": 0.2}}, "first contains gather, which has no probes"),
        ({"first": 0.5}, "must map names of collectives"),
        ({"step_s": [0.1, None, 0.1]}, "step_s of host 1 is missing"),
        ({"step_s": [0.1, -1, 0.1]}, "step_s of host 1=-1 must be"),
        ({"step_s": [0.1, 0.1]}, "step_s must have one value per node, 3, but has 2"),
        ({"pairs": PAIRS[:2]}, "pairs has 2 rows"),
        ({"pairs": [[None, [1e8], [1e8, 0.0]], *PAIRS[1:]]}, r"pairs\[0\]\[1\] is"),
        ({"pairs": [[None, [-1e8, 0.0], [1e8, 0.0]], *PAIRS[1:]]}, "node 0 cannot reach node 1"),
        ({"jitter": "1ms"}, "has no field 'jitter'"),
    ],
)
def test_a_wrong_file_is_refused(change, message):
    with pytest.raises(ArgumentError, match=message):
        Network.of(FILE | change)


def test_small_disorder_is_noise_and_a_cold_one_may_be_no_slower():
    network = Network.measured({4: 1.00e-3, 4096: 0.95e-3}, num_nodes=2, first=0.9e-3)
    assert seconds(network, 2050, members=2) == pytest.approx(0.975e-3)
    assert network.set_up_s("all_reduce") == 0.0


@pytest.mark.parametrize("library", [None, "gloo", "nccl"])
@pytest.mark.parametrize("probes", [{1e3: 6e-3, 1e6: 7e-3}, {1e3: 6e-3, 1e9: 2.0}])
def test_links_from_probes_give_the_probes_time(library, probes):
    network = Network.measured(probes, num_nodes=4, library=library)
    size, time = list(probes.items())[-1]
    assert network.links.bandwidth_bps < 1e12
    links = Network(network.links.bandwidth_bps, network.links.latency_s, library=library)
    assert links.cost("all_reduce", size, 4, "ring").seconds == pytest.approx(time)


def test_advice_says_what_was_measured_and_what_was_not(capsys):
    network = Network.measured({4e8: 10.0}, num_nodes=4, first=11.0)
    told = advise(parameters=1e8, num_nodes=4, network=network, step_seconds=1.0, strategies=["ddp", "diloco:H=10"])
    assert {row.strategy: row.seconds_per_step for row in told.rows} == pytest.approx({"diloco:H=10": 2, "ddp": 11})
    assert any("measured: all_reduce; others by formula" in line for line in told.assumptions)
    assert any("first collective takes 1 s more" in line for line in told.assumptions)
    assert not any("extrapolated" in line for line in told.assumptions)
    told = advise(parameters=2e8, num_nodes=4, network=network, step_seconds=1.0, strategies=["ddp"])
    assert "extrapolated, not measured" in "".join(told.assumptions) and "extrapolated" in capsys.readouterr().err
