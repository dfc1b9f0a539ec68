"""send, recv and exchange between nodes of a strategy that is written for one, in every layout."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from paths import TESTS
from processes import world

from exogym import LocalTrainer
from exogym.core.communicator import Communicator, Parcel
from exogym.errors import StrategyError
from exogym.faults import Faults
from exogym.network import Network
from exogym.strategy import OptimSpec, PeriodicModule, Strategy
from exogym.strategy.communicate import all_reduce, exchange, recv, send
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.testing import fingerprint, small_problem

PLAIN = OptimSpec("sgd", lr=0.05)
ROW = 4 * sum(p.numel() for p in small_problem()[0].parameters())


def fit(strategy, num_nodes=4, max_steps=3, **options):
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=F.mse_loss)
    options = {"batch_size": 8, "device": "cpu", "progress": False} | options
    trainer.fit(strategy, num_nodes=num_nodes, max_steps=max_steps, **options)
    return trainer


def neighbour(rank, step):
    """Pairs (0, 1), (2, 3), ... in even steps, and (1, 2), (3, 4), ... in odd ones; the ends then have themselves."""
    return rank ^ 1 if step % 2 == 0 else ((rank - 1) ^ 1) + 1


class Gossip(Strategy):
    """After each step average with a neighbour."""

    def step(self):
        self.update_parameters()
        partner = neighbour(self.rank, self.local_step)
        if not 0 <= partner < self.num_nodes:
            partner = self.rank
        for p in self.model.parameters():
            p.data.add_(exchange(p.data, partner)).mul_(0.5)
        super().step()


class RowGossip(PeriodicModule):
    """The same as a module that acts on rows: the reference."""

    def communicate(self, fleet, step):
        n = fleet.num_nodes
        partner = [other if 0 <= (other := neighbour(i, step - 1)) < n else i for i in range(n)]
        for block in fleet.blocks:
            block.params.add_(fleet.comm.exchange(block.params, partner)).mul_(0.5)


def test_gossip_is_that_on_rows_and_a_neighbour_costs_one_row_each_way():
    mine = fit(Gossip(PLAIN))
    rows = fit(CommunicateOptimizeStrategy(PLAIN, [RowGossip()]))
    assert fingerprint(mine.model) == fingerprint(rows.model)
    alone = fit(CommunicateOptimizeStrategy(PLAIN, []))
    assert fingerprint(alone.model) != fingerprint(mine.model)
    # steps 0 and 2: all four in pairs; step 1: two of four
    for name in ("tx_bytes", "rx_bytes", "payload_bytes"):
        assert mine.history.last[name] == 2 * ROW + ROW / 2 == rows.history.last[name]
    assert mine.traffic["pairwise exchange"]["tx_bytes"] == 10 * ROW


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_change_no_bit(processes):
    one, several = fit(Gossip(PLAIN), num_nodes=5), fit(Gossip(PLAIN), num_nodes=5, processes=processes)
    assert fingerprint(one.model) == fingerprint(several.model)
    assert one.history.last["tx_bytes"] == several.history.last["tx_bytes"]
    assert one.traffic == several.traffic


class Passing(Strategy):
    """A token goes round; each adds its own number in another kind of tensor. Meanwhile all others wait at the end."""

    kinds = (torch.float64, torch.int64, torch.bfloat16, torch.bool)

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.got = []

    def step(self):
        last = self.num_nodes - 1
        if self.rank:
            self.got.append(recv(self.rank - 1))
        if self.rank < last:
            kind = self.kinds[self.rank % len(self.kinds)]
            send(torch.full((self.rank, 2), self.rank + 1, dtype=kind), self.rank + 1)
        if self.rank == last:
            send(torch.tensor(7.0), 0)
        elif self.rank == 0:
            self.got.append(recv(src=last))
        self.total = all_reduce(torch.tensor(float(len(self.got))))
        self.update_parameters()
        super().step()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_send_and_recv_take_any_tensor(processes):
    got = []
    call = lambda loop: got.append([s.got for s in loop.driver.algorithm.strategies])  # noqa: E731
    trainer = fit(Passing(PLAIN), max_steps=1, processes=processes, callbacks=[call])
    first = got[-1]
    assert torch.equal(first[0][0], torch.tensor(7.0))
    if processes == 1:
        assert torch.equal(first[1][0], torch.empty(0, 2, dtype=torch.float64))
        assert torch.equal(first[2][0], torch.full((1, 2), 2)) and first[3][0].dtype == torch.bfloat16
    moved = 2 * 8 + 4 * 2 + 4  # of nodes 1, 2 and 3
    assert trainer.traffic["direct send"] == {
        "calls": 4.0, "payload_bytes": moved, "tx_bytes": moved, "rx_bytes": moved
    }  # fmt: skip


def test_what_comes_back_is_ones_own():
    class Writing(Strategy):
        def step(self):
            mine = torch.full((3,), float(self.rank))
            theirs = exchange(mine, self.rank ^ 1)
            theirs += 100
            itself = exchange(mine, self.rank)
            itself += 100
            assert mine.tolist() == [float(self.rank)] * 3
            self.update_parameters()
            super().step()

    for processes in (1, 2):
        fit(Writing(PLAIN), max_steps=1, processes=processes)


def test_the_clock_charges_the_pair_alone():
    class First(Strategy):
        """Nodes 0 and 1 exchange, and 2 sends to 3."""

        def step(self):
            x = torch.zeros(250_000)
            if self.rank < 2:
                exchange(x, 1 - self.rank)
            elif self.rank == 2:
                send(x, 3)
            elif self.rank == 3:
                recv(2)
            self.update_parameters()
            super().step()

    trainer = fit(First(PLAIN), num_nodes=5, max_steps=1, network="8Mbps,0.5ms", step_seconds=0.1)
    message = 0.0005 + 1e6 * 8 / 8e6
    assert trainer.clock.time_s == pytest.approx([0.1 + message] * 4 + [0.1])
    slow_up = Network(up="1Mbps", down="8Mbps", latency="0ms")
    assert slow_up.cost("send", 1e6, [3, 1]).seconds == pytest.approx(8.0)


# What cannot go on


class Calls(Strategy):
    """Each node makes the call that `what` has for it."""

    def __init__(self, what, **kwargs):
        super().__init__(PLAIN, **kwargs)
        self.what = what

    def step(self):
        call = self.what.get(self.rank)
        if call is not None:
            call()
        self.update_parameters()
        super().step()


X = torch.zeros(3)
STUCK = {
    "nobody sends": ({0: lambda: recv(1)}, r"node 0 waits at recv\(src=1\).*node 1 has ended its step"),
    "nobody receives": ({3: lambda: send(X, 0)}, r"node 3 waits at send\(.*dst=0\).*node 0 has ended"),
    "all send first": (
        {i: lambda i=i: send(X, (i + 1) % 4) for i in range(4)},
        r"node 0 waits at send\(.*dst=1\), node 1 waits at send\(.*dst=2\).*node 3 waits at send\(.*dst=0\)",
    ),
    "a ring of partners": (
        {i: lambda i=i: exchange(X, (i + 1) % 4) for i in range(4)}, r"node 2 waits at exchange\(.*partner=3\)"
    ),
    "the other is at a collective": (
        {0: lambda: exchange(X, 3), **{i: lambda: all_reduce(X.clone()) for i in (1, 2, 3)}},
        r"node 0 waits at exchange\(.*partner=3\).*node 3 waits at all_reduce\(",
    ),
    "shapes": (
        {0: lambda: exchange(X, 2), 2: lambda: exchange(torch.zeros(2), 0)},
        r"exchange\(partner=2\), which node 0 calls: this node passes torch.float32 \(3,\), but node 2 .* \(2,\)",
    ),
    "nobody of that name": ({1: lambda: send(X, 4)}, r"send\(dst=4\), which node 1 calls: no such node.*0 to 3"),
    "to itself": ({1: lambda: recv(1)}, r"recv\(src=1\), which node 1 calls: a node cannot be its own partner"),
    "no number": ({1: lambda: exchange(X, "next")}, r"exchange\(\) needs a node's number as partner, not 'next'"),
    "half a number": ({1: lambda: exchange(X, 0.5)}, r"needs a node's number as partner, not 0.5"),
    "no tensor": ({1: lambda: send([1.0], 0)}, r"send\(\) got a list, expected a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("name", STUCK)
def test_what_cannot_go_on_is_an_error_that_names_the_nodes(name, processes):
    what, message = STUCK[name]
    with pytest.raises(StrategyError, match=message):
        fit(Calls(what), processes=processes)


@pytest.mark.parametrize("processes", [2, 4])
def test_unlike_collectives_in_several_processes_are_an_error_too(processes):
    with pytest.raises(StrategyError, match=r"node 0 waits at all_reduce.*node 3 has ended its step"):
        fit(Calls({i: lambda: all_reduce(X.clone()) for i in range(3)}), processes=processes)
    with pytest.raises(StrategyError, match=r"op='sum'.*op='max'"):
        fit(Calls({i: lambda i=i: all_reduce(X.clone(), "max" if i else "sum") for i in range(4)}), processes=processes)


def test_stacked_code_has_no_partners():
    class Sending(Strategy):
        stacked = True

        def step(self):
            exchange(torch.zeros(len(self.rank), 2), 0)

    with pytest.raises(StrategyError, match=r"exchange\(\) works for one node only: leave stacked = True out"):
        fit(Sending(PLAIN))


def test_a_partner_that_is_away_is_an_error_and_one_that_is_there_can_be_chosen():
    with pytest.raises(StrategyError, match=r"that node is absent; choose among self.present, which is \[0, 1, 2\]"):
        fit(Gossip(PLAIN), faults=Faults(absent={3: [(3, 4)]}))

    class Careful(Strategy):
        def step(self):
            self.update_parameters()
            others = [rank for rank in self.present if rank // 2 == self.rank // 2 and rank != self.rank]
            for p in self.model.parameters():
                p.data.add_(exchange(p.data, others[0] if others else self.rank)).mul_(0.5)
            super().step()

    trainer = fit(Careful(PLAIN), faults=Faults(absent={3: [(3, 4)]}))
    assert trainer.history.last["payload_bytes"] < 3 * ROW


# Between processes of torch


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from strategy.test_point_to_point import Calls, Gossip, PLAIN, Passing, STUCK, fit
from exogym.errors import StrategyError
from exogym.testing import fingerprint

prints = [fingerprint(fit(make(PLAIN)).model) for make in (Gossip, Passing)]
what, message = STUCK["the other is at a collective"]
try:
    fit(Calls(what))
except StrategyError as error:
    prints.append("node 0 waits at exchange" in str(error))
print("ended", *prints, flush=True)
"""


def test_in_processes_that_meet_over_gloo(tmp_path):
    status, log = world(2, tmp_path, textwrap.dedent(SCRIPT.format(tests=str(TESTS))))
    assert status == 0, log[-3000:]
    wanted = " ".join(["ended", *(fingerprint(fit(make(PLAIN)).model) for make in (Gossip, Passing)), "True"])
    assert log.splitlines().count(wanted) == 2


def test_what_a_node_keeps_for_itself_is_not_sent():
    comm = Communicator(range(2), 2)
    x = {0: torch.ones(2), 1: torch.zeros(2)}
    got = comm.hand_over(x, [Parcel(0, 0, (2,), torch.float32, True), Parcel(1, 1, (2,), torch.float32, True)])
    assert torch.equal(got[0], x[0]) and comm.ledger.tx_bytes.sum() == 0
