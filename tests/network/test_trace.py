"""Links whose rates change: what a collective takes while they do, held against sums by hand and constant networks."""

import json

import pytest
import torch

from exogym.core.clock import Clock
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.study.advise import advise

FILE = "time_s,who,rate\n0,*,8Mbps\n3,*,4Mbps\n10,1,0\n12,1,16Mbps\n"


def ends(network, sizes, nodes=2, steps=0):
    """Return the moments at which all-reduces of so many bytes end, one after the other."""
    clock = Clock(nodes, network, 1.0)
    comm = Communicator(range(nodes), nodes)
    comm.ledger.listeners.append(clock.event)
    out = []
    for size in sizes:
        clock.advance(steps)
        comm.all_reduce(torch.zeros(nodes, size // 4))
        out.append(float(clock.time_s[0]))
    return out


def test_a_collective_goes_on_at_the_new_rate(tmp_path):
    """A ring of two carries S bytes each way: 1 MB takes 1 s at 8 Mbit/s and 2 s at 4."""
    (tmp_path / "rates.csv").write_text(FILE)
    network = Network("1Gbps", trace=str(tmp_path / "rates.csv"))
    # 2 s; 1 s and the other half at half the rate; till 10 s 2 of 3 parts, then down, then at 4 (node 0 is no faster)
    assert ends(network, [2_000_000, 2_000_000, 1_000_000]) == pytest.approx([2, 5, 7])
    assert ends(network, [2_000_000] * 3)[2] == pytest.approx(9)
    assert ends(network, [2_000_000] * 4)[3] == pytest.approx(15)  # 1 s of 4 done, 2 s down, 3 s more


@pytest.mark.parametrize("who", ["*", "0"])
def test_a_trace_of_one_rate_is_that_network(who):
    traced = Network("1Gbps", "5ms", jitter="1ms", trace=[(0, who, "20Mbps")])
    plain = Network("20Mbps", "5ms", jitter="1ms")
    sizes = [4_000_000, 400, 40_000]
    assert ends(traced, sizes, nodes=4, steps=1) == pytest.approx(ends(plain, sizes, nodes=4, steps=1))


def test_before_its_first_row_and_beside_its_pair_a_link_is_as_it_was():
    network = Network("8Mbps", trace=[(100, "*", "1kbps"), (5, "0-1", "4Mbps")])
    assert ends(network, [1_000_000, 4_000_000]) == pytest.approx([1, 5])
    later = network.at(5)
    assert later.link(0, 1)[0] == 4e6 and later.link(1, 0)[0] == 8e6 == later.link(0, 2)[0]
    assert network.at(4.999).link(0, 1)[0] == 8e6 and network.at(1e9).link(2, 3)[0] == 1e3
    assert network.at(0) is not network and Network("8Mbps").trace is None


def test_other_kinds_of_network_can_change_too():
    islands = Network.groups([2, 2], inside="1Gbps", between="8Mbps", trace=[(2, "0-2", "1Mbps")])
    assert islands.at(0).link(0, 2)[0] == 8e6 and islands.at(2).link(0, 2)[0] == 1e6
    assert islands.at(2).link(0, 1)[0] == 1e9 and islands.at(2).link(1, 2)[0] == 8e6
    matrix = Network.matrix([[0, 8e6], [8e6, 0]], trace=[(1, "0", "2Mbps")])
    assert matrix.at(1).link(1, 0)[0] == 2e6
    server = Network("8Mbps", server="1Gbps", trace=[(1, "0", "2Mbps")])
    assert server.at(1).cost("push", 1e6, [0]).seconds == pytest.approx(4)
    assert server.at(1).cost("push", 1e6, [1]).seconds == pytest.approx(1)


def test_a_description_makes_it_again():
    network = Network("8Mbps", trace=[(5, "0-1", "4Mbps"), (2, "*", "6Mbps")])
    again = Network.of(json.loads(json.dumps(network.describe())))
    assert again.describe() == network.describe() and ends(again, [9_000_000]) == ends(network, [9_000_000])
    assert "trace=<2 rows>" in repr(network)
    assert repr(network.at(5.0)) == repr(network).replace("trace=<2 rows>", "at a moment of a trace")


def test_a_stop_in_between_changes_nothing():
    network = Network("8Mbps", trace=[(2, "*", "4Mbps")])
    clock, again = Clock(2, network), Clock(2, network)
    comm = Communicator(range(2), 2)
    comm.ledger.listeners.append(clock.event)
    comm.all_reduce(torch.zeros(2, 375_000))
    again.load_state(clock.state())
    comm.ledger.listeners.append(again.event)
    comm.all_reduce(torch.zeros(2, 375_000))
    assert again.time_s.tolist() == clock.time_s.tolist() == pytest.approx([4.0, 4.0])  # 1.5 s, 0.5 s, 2 s


def test_advice_says_that_it_does_not_follow():
    told = advise(
        parameters=1e6, num_nodes=2, network=Network("1Gbps", trace=[(0, "*", "32Mbps"), (9, "*", "1Mbps")]),
        step_seconds=1.0, strategies=["ddp"],
    )  # fmt: skip
    assert told.rows[0].seconds_per_step == pytest.approx(2.0)
    assert any("change by a trace" in line for line in told.assumptions)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([(0, "x", "1Mbps")], "who='x' must be a node"),
        ([(0, "0-1-2", "1Mbps")], "must be a node"),
        ([(-1, "0", "1Mbps")], "time_s=-1 must be"),
        ([(0, "0", "fast")], "rate='fast'"),
        ([(0, "0", -1)], "rate=-1 must be"),
        ([(0, "0", 0)], "last rate of '0' is 0"),
        ([(0, "0")], "must be time_s, who, rate"),
        (["0,0,1"], "must be time_s, who, rate"),
        ([(0, "0", "100")], r"row 1: rate='100' has no unit: write '100Mbps'"),
        ("absent.csv", "cannot be read"),
    ],
)
def test_a_wrong_trace_is_refused(rows, message):
    with pytest.raises(ArgumentError, match=message):
        Network("1Gbps", trace=rows)


def test_a_trace_of_other_nodes_or_in_the_wrong_place_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="a network of 2 nodes does not have"):
        Network.matrix([[0, 1e6], [1e6, 0]], trace=[(0, "0-2", 1e6)])
    with pytest.raises(ArgumentError, match="give jitter, loss, trace and tcp to"):
        Network.groups([2, 2], Network("1Gbps", trace=[(0, "*", 1e6)]), "1Gbps")
    (tmp_path / "a.csv").write_text("time_s,node,rate\n0,1,1\n")
    with pytest.raises(ArgumentError, match="has no column who"):
        Network("1Gbps", trace=tmp_path / "a.csv")
