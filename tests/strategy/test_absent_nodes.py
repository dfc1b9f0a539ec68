"""Strategies with absent nodes: each against its rule, and the laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from problems import Regressor, fleet_of, run_of, same, unlike
from torch import Tensor, nn

from exogym.core.base.rng import generator
from exogym.core.communicator import Communicator
from exogym.core.fleet import Fleet
from exogym.core.fleet.returning import take_state
from exogym.core.training.meeting import Meeting
from exogym.faults import Attendance, Faults
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    NoLoCoStrategy,
    PostLocalSGDStrategy,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator
from exogym.testing import _MeetingWire

P, RATE = 57, 0.1
SIZE = P * 8


class Hand:
    """Does what a driver does, with random numbers for local training.

    Args:
        names: whose random numbers each node takes; its own by default.
    """

    def __init__(
        self, strategy: CommunicateOptimizeStrategy, fleet: Fleet, there: Attendance, names: Sequence[int] | None = None
    ):
        self.strategy, self.fleet, self.there = strategy, fleet, there
        self.names = range(fleet.num_nodes) if names is None else names
        self.step, self.taken = 0, np.zeros(fleet.num_nodes, np.int64)
        self.inner_from: list[tuple[int, list[int], int]] = []  # (step, nodes, whose inner state they take)
        self.acting = strategy.on(fleet, run_of(fleet.num_nodes))

    def go(self, steps: int, max_stretch: int = 100) -> Tensor:
        """Go on to step `steps`; return the rows here."""
        acting, there, comm = self.acting, self.there, self.fleet.comm
        while self.step < steps:
            first = self.step
            last = min(acting.next_event(first), there.next_change(first), first + max_stretch, steps)
            nodes, source = there.returning(first + 1)
            comm.present = [i for i in there.up(last) if i not in nodes] or ([] if source is None else [source])
            outer = None if source is None else acting.consensus()
            comm.present = there.up(last)
            if source is not None and acting.bring_back(nodes, source, first + 1, outer=outer):
                self.inner_from.append((first + 1, nodes, source))
            counts = there.steps_between(first, last, acting.clients.local_steps)
            if self.strategy.needs_gradients:
                self._step_with_gradients(last)
            else:
                for row, rank in enumerate(self.fleet.ranks):
                    for k in range(counts[rank]):
                        for x, part in self._noise(row, rank, self.taken[rank] + k):
                            x.add_(part, alpha=RATE)
            self.taken += counts
            comm.present = there.present(last)
            acting.communicate(last)
            comm.present = there.up(last)
            self.step = last
        return torch.cat([block.params.double() for block in self.fleet.blocks], 1)

    def _step_with_gradients(self, step: int) -> None:
        up = self.fleet.comm.present
        for block in self.fleet.blocks:
            block.own_grads().fill_(torch.nan)  # who is away has computed nothing
        for row, rank in enumerate(self.fleet.ranks):
            for block, (_, part) in zip(self.fleet.blocks, self._noise(row, rank, step), strict=True):
                if rank in up:
                    block.grads[row] = part  # type: ignore[index]
        self.acting.transform_gradients(step, RATE)
        for row, rank in enumerate(self.fleet.ranks):
            for block in self.fleet.blocks if rank in up else ():
                block.params[row] -= RATE * block.grads[row]  # type: ignore[index]

    def _noise(self, row: int, rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for b, block in enumerate(self.fleet.blocks):
            yield block.params[row], local(self.names[rank], int(count), b, block.layout.numel).to(block.params)


def local(name: int, count: int, b: int = 0, width: int = P) -> Tensor:
    """The update (or gradient) of a node's local step number `count`."""
    return torch.randn(width, generator=generator(0, "local", name, count, b), dtype=torch.float64)


def start_values(num_nodes: int, model: nn.Module | None = None) -> Tensor:
    """All nodes start alike."""
    x = torch.cat([p.detach().double().flatten() for p in (model or Regressor()).parameters()])
    return x.expand(num_nodes, -1).clone()


def hand(strategy: CommunicateOptimizeStrategy, given: Faults, num_nodes: int = 4) -> Hand:
    return Hand(strategy, fleet_of(start_values(num_nodes)), given.bind(num_nodes, strategy.needs_gradients))


def composition() -> CommunicateOptimizeStrategy:
    return CommunicateOptimizeStrategy("sgd", [SparseCommunicator(0.3, interval=2), AveragingCommunicator(H=5)])


ANY: dict[str, Callable[[], CommunicateOptimizeStrategy]] = {
    "ddp": lambda: SimpleReduceStrategy("sgd", lr=RATE, max_norm=1.0),
    "demo": lambda: DeMoStrategy(lr=RATE, compression_topk=3, compression_chunk=4, compression_decay=0.9),
    "diloco": lambda: DiLoCoStrategy("sgd", H=4),
    "diloco adam": lambda: DiLoCoStrategy("sgd", "adam", H=3, outer_lr=0.1),
    "diloco delayed": lambda: DiLoCoStrategy("sgd", H=4, delay=2),
    "diloco a round late": lambda: DiLoCoStrategy("sgd", H=3, delay=3),
    "diloco eager": lambda: DiLoCoStrategy("sgd", H=4, eager=True),
    "post-local sgd": lambda: PostLocalSGDStrategy("sgd", lr=RATE, H=3, start_step=7),
    "streaming": lambda: StreamingDiLoCoStrategy("sgd", H=4, fragment_sync_delay=1, fragment_update_alpha=0.5),
    "streaming 8 bit": lambda: StreamingDiLoCoStrategy("sgd", H=4, bits=8),
    "gossip complete": lambda: GossipStrategy("sgd", "complete", H=2),
    "noloco": lambda: NoLoCoStrategy("sgd", H=3),
    "sparta": lambda: SPARTAStrategy("sgd", p_sparta=0.3),
    "sparta all": lambda: SPARTAStrategy("sgd", p_sparta=1.0),
    "sparta sequential": lambda: SPARTAStrategy("sgd", p_sparta=0.3, compression_method="sequential", interval=2),
    "sparta 4 bit": lambda: SPARTAStrategy("sgd", p_sparta=0.5, compression_method="partitioned", quantization_bits=4),
    "sparta topk": lambda: SPARTAStrategy("sgd", p_sparta=0.1, compression_method="topk"),
    "sparta diloco": lambda: SPARTADiLoCoStrategy("sgd", p_sparta=0.3, H=6),
    "fedavg": lambda: FedAvgStrategy("sgd", H=3),
    "composition": composition,
}  # act alike in fleets of any size
SAMPLED: dict[str, Callable[[], CommunicateOptimizeStrategy]] = {
    "islands": lambda: FedAvgStrategy("sgd", H=3, island_size=2),
    "gossip": lambda: GossipStrategy("sgd", "ring"),
    "gossip random": lambda: GossipStrategy("sgd", "random", lr=RATE),
    "clients": lambda: FedAvgStrategy("sgd", H=4, client_fraction=0.5),
    "clients in islands": lambda: FedAvgStrategy("sgd", H=3, client_fraction=0.7, island_size=2),
    "unequal work": lambda: FedAvgStrategy("sgd", H=4, local_steps=[4, 1, 2, 3]),
}
ALL = ANY | SAMPLED


@pytest.mark.parametrize("name", ANY)
def test_nodes_that_never_come_are_as_if_there_were_none(name: str) -> None:
    """A fleet in which some are away from the start goes the way of the smaller fleet, and sends its bytes."""
    away, there = [1, 3], [0, 2, 4]
    many = hand(ANY[name](), Faults(absent={node: [(1, None)] for node in away}), 5)
    few = Hand(ANY[name](), fleet_of(start_values(3)), Faults().bind(3), names=there)
    rows, wanted = many.go(24), few.go(24)
    same(rows[there], wanted, 1e-12)
    assert torch.equal(rows[away], start_values(2))
    unlike(rows[there], start_values(3))
    mine, theirs = many.fleet.comm.ledger, few.fleet.comm.ledger
    for kind in ("payload_bytes", "tx_bytes", "rx_bytes"):
        assert getattr(mine, kind)[there].tolist() == getattr(theirs, kind).tolist()
        assert getattr(mine, kind)[away].tolist() == [0, 0]
    assert theirs.tx_bytes.sum() > 0
    many.acting.finish(24), few.acting.finish(24)
    same(torch.cat([b.params for b in many.fleet.blocks], 1)[there], few.fleet.blocks[0].params, 1e-12)
    full = hand(ANY[name](), Faults(), 5).go(24)
    unlike(rows[there], full[there])


@pytest.mark.parametrize("name", ALL)
def test_faults_that_never_strike_change_no_bit(name: str) -> None:
    quiet = hand(ALL[name](), Faults(absent={0: [(99, None)]}, lost={1: [98]})).go(24)
    assert torch.equal(quiet, hand(ALL[name](), Faults()).go(24))
    assert not torch.equal(quiet, hand(ALL[name](), Faults(absent={0: [(7, None)]})).go(24))


# Strategies against their rules, written out

LOST = Faults(absent={1: [(6, 11), (19, 23)], 3: [(2, 7)]}, lost={0: [8, 16], 2: [12, 16]}, slow={2: 0.5})


def rule(
    given: Faults,
    steps: int,
    back: Callable[[Tensor, int, int], None],
    meet: Callable[[Tensor, int, list[int]], None],
    num_nodes: int = 4,
) -> Tensor:
    """Random local steps on a plain matrix; `back(x, node, source)` on return, `meet(x, step, present)` after steps."""
    x, there, taken = start_values(num_nodes), given.bind(num_nodes), [0] * num_nodes
    for step in range(1, steps + 1):
        nodes, source = there.returning(step)
        for node in nodes:
            back(x, node, source)  # type: ignore[arg-type]
        for node, count in enumerate(there.steps_between(step - 1, step).tolist()):
            if count:
                x[node] += RATE * local(node, taken[node])
            taken[node] += count
        meet(x, step, there.present(step))
    return x


def diloco(given: Faults, steps: int, H: int, eta: float, mu: float, wrong: str = "") -> tuple[Tensor, Tensor]:
    theta, v = start_values(1)[0], torch.zeros(P, dtype=torch.float64)
    received = start_values(4)

    def back(x: Tensor, node: int, source: int) -> None:
        x[node] = received[node] = x[source] if wrong == "row of another" else theta

    def meet(x: Tensor, step: int, present: list[int]) -> None:
        nonlocal theta, v
        if step % H == 0 and present:
            members = list(range(4)) if wrong == "all nodes" else present
            against = theta if wrong == "newest theta" else received[members]
            delta = (against - x[members]).mean(0)
            v = mu * v + delta
            theta = theta - eta * (delta + mu * v)
            x[present] = received[present] = theta

    return rule(given, steps, back, meet), theta


def test_diloco_measures_against_the_theta_each_node_last_received() -> None:
    ours = hand(DiLoCoStrategy("sgd", H=4), LOST)
    rows = ours.go(23).clone()
    same(rows, diloco(LOST, 23, 4, 0.7, 0.9)[0])
    for wrong in ("newest theta", "all nodes", "row of another"):
        unlike(rows, diloco(LOST, 23, 4, 0.7, 0.9, wrong)[0])
    wanted, theta = diloco(LOST, 26, 4, 0.7, 0.9)
    same(ours.go(26), wanted)
    same(ours.acting.consensus()[0], theta)  # type: ignore[index]
    module: Any = ours.strategy.modules[0].received
    assert module.last.tolist() == [6, 6, 6, 6] and not module.earlier  # what nobody needs is not kept
    kept = hand(DiLoCoStrategy("sgd", H=4), LOST)
    kept.go(9)
    module = kept.strategy.modules[0].received
    assert module.last.tolist() == [1, 1, 2, 2] and list(module.earlier) == [1]


def averaging(given: Faults, steps: int, H: int, wrong: str = "") -> Tensor:
    def back(x: Tensor, node: int, source: int) -> None:
        if wrong != "old parameters":
            x[node] = x[source]

    def meet(x: Tensor, step: int, present: list[int]) -> None:
        if step % H == 0 and present:
            members = list(range(4)) if wrong == "all nodes" else present
            x[present] = x[members].mean(0)

    return rule(given, steps, back, meet)


def test_averages_are_over_those_that_are_there() -> None:
    rows = hand(FedAvgStrategy("sgd", H=4), LOST).go(26)
    same(rows, averaging(LOST, 26, 4))
    for wrong in ("old parameters", "all nodes"):
        unlike(rows, averaging(LOST, 26, 4, wrong))
    same(hand(SPARTAStrategy("sgd", p_sparta=1.0), LOST).go(26), averaging(LOST, 26, 1))


def test_weights_and_islands_count_those_that_are_there() -> None:
    values, sizes = torch.randn(6, P, dtype=torch.float64), [1, 2, 3, 4, 5, 6]
    module = AveragingCommunicator(1, island_size=3)
    fleet = fleet_of(values)
    module.start(fleet, run_of(6, sizes=sizes))
    fleet.comm.present = [0, 2, 3, 5]
    module.communicate(fleet, 1)
    x, wanted = fleet.blocks[0].params, values.clone()
    for island in module.islands(0):
        members = [i for i in island if i in fleet.comm.present]
        weights = torch.tensor([sizes[i] for i in members], dtype=torch.float64)
        wanted[members] = (weights[:, None] * values[members]).sum(0) / weights.sum()
    same(x, wanted)
    assert torch.equal(x[[1, 4]], values[[1, 4]]) and not torch.equal(x[0], values[0])


def test_sampled_clients_that_are_away_are_missed_and_theta_waits_for_them() -> None:
    given, H, rounds = Faults(absent={1: [(6, 11)], 4: [(2, 23)]}, lost={0: [8, 16], 2: [12, 16]}), 4, 9
    strategy = FedAvgStrategy("sgd", H=H, client_fraction=0.5)
    ours = hand(strategy, given, 5)
    rows = ours.go(H * rounds)
    module: Any = strategy.modules[0]
    x, theta, there = start_values(5), start_values(1)[0], given.bind(5)
    taken = [0] * 5
    for step in range(1, H * rounds + 1):
        clients, following = module.clients((step - 1) // H), module.clients((step - 1) // H + 1)
        for node in there.returning(step)[0]:
            if node in clients:
                x[node] = theta
        for node in clients:
            if node in there.up(step):
                x[node] += RATE * local(node, taken[node])
                taken[node] += 1
        if step % H == 0:
            members = [i for i in clients if i in there.present(step)]
            if members:
                theta = x[members].mean(0)
                x[members] = theta
            for node in following:
                if node in there.present(step):
                    x[node] = theta
    same(rows, x)
    same(ours.acting.consensus()[0], theta)  # type: ignore[index]
    counts = np.zeros(5)
    for round_ in range(rounds):
        members = [i for i in module.clients(round_) if i in there.present((round_ + 1) * H)]
        counts[members] += SIZE  # one alone too: the server is there
    back = [(step, i) for step in range(1, H * rounds + 1) for i in there.returning(step)[0]]
    joined = [there.returning(step) for step, i in back if i in module.clients((step - 1) // H)]
    for nodes, source in joined:
        counts[source] += SIZE * len(nodes)
    assert ours.fleet.comm.ledger.payload_bytes.tolist() == counts.tolist()
    assert len({len([i for i in module.clients(r) if i in there.present(r * H + H)]) for r in range(rounds)}) > 1


def test_a_round_without_clients_leaves_theta_alone() -> None:
    strategy = FedAvgStrategy("sgd", H=2, client_fraction=0.5)
    module: Any = strategy.modules[0]
    ours = hand(strategy, Faults())
    ours.go(2)
    theta = ours.acting.consensus()[0].clone()  # type: ignore[index]
    before = ours.fleet.comm.ledger.tx_bytes.copy()
    others = [i for i in range(4) if i not in module.clients(1)]
    fleet, after = ours.fleet, module.clients(2)
    fleet.blocks[0].params.add_(1.0)
    fleet.comm.present = others
    ours.acting.communicate(4)
    assert torch.equal(ours.acting.consensus()[0], theta) and fleet.comm.ledger.tx_bytes.tolist() == before.tolist()  # type: ignore[index]
    for node in range(4):
        assert torch.equal(fleet.blocks[0].params[node], theta) == (node in others and node in after)


@pytest.mark.parametrize("method", ["random", "sequential", "partitioned"])
def test_sparta_averages_the_chosen_values_of_those_that_are_there(method: str) -> None:
    values = torch.randn(5, P, dtype=torch.float64)
    for bits in (None, 8):
        module = SparseCommunicator(0.4, method, bits)
        fleet = fleet_of(values)
        module.start(fleet, run_of(5))
        fleet.comm.present = [1, 2, 4]
        chosen = module.indices(fleet.blocks[0], 0, 3)
        module.communicate(fleet, 3)
        wanted = values.clone()
        mean = values[[1, 2, 4]][:, chosen].mean(0)
        for node in (1, 2, 4):
            wanted[node, chosen] = mean
        x = fleet.blocks[0].params
        assert torch.equal(x[[0, 3]], values[[0, 3]])
        scale = float(values[:, chosen].abs().max()) / 127
        assert float((x - wanted).abs().max()) <= (1e-14 if bits is None else scale / 2 + 1e-14)
        assert torch.equal(x[1, chosen], x[4, chosen])
        unlike(x[1, chosen], values[:, chosen].mean(0))
        fleet.comm.present = [3]
        module.communicate(fleet, 4)
        assert torch.equal(x[[0, 3]], values[[0, 3]])  # not even quantised
        payload = len(chosen) * 8 if bits is None else len(chosen) + 4
        assert fleet.comm.ledger.payload_bytes.tolist() == [0, payload, payload, 0, payload]
        per_payload = 2 * 2 / 3 if bits is None else 2
        assert fleet.comm.ledger.tx_bytes == pytest.approx(fleet.comm.ledger.payload_bytes * per_payload)


def test_top_k_is_announced_by_those_that_are_there_in_turn() -> None:
    values = torch.randn(5, P, dtype=torch.float64)
    for step in range(1, 7):
        module = SparseCommunicator(5 / P, "topk")
        fleet = fleet_of(torch.zeros(5, P, dtype=torch.float64))
        acting = CommunicateOptimizeStrategy("sgd", [module]).on(fleet, run_of(5))
        fleet.blocks[0].params.copy_(values)
        fleet.comm.present = [1, 2, 4]
        module.communicate(fleet, step)
        announcer = [1, 2, 4][(step - 1) % 3]
        chosen = values[announcer].abs().topk(5).indices
        wanted = values.clone()
        for node in (1, 2, 4):
            wanted[node, chosen] = values[[1, 2, 4]][:, chosen].mean(0)
        same(fleet.blocks[0].params, wanted, 1e-14)
        reference = module.row_state["reference.0"]
        assert torch.equal(reference[4, chosen], fleet.blocks[0].params[4, chosen])
        assert not reference[[0, 3]].any() and int(reference[1].count_nonzero()) == 5
        payload = fleet.comm.ledger.payload_bytes
        assert payload.tolist() == [0 if i in (0, 3) else 5 * 8 + (5 * 4 if i == announcer else 0) for i in range(5)]
        fleet.comm.present = [0, 1, 2, 4]
        acting.bring_back([0], 1, step + 1)
        assert torch.equal(fleet.blocks[0].params[0], fleet.blocks[0].params[1])
        assert torch.equal(reference[0], fleet.blocks[0].params[0])


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_replicas_that_meet_at_every_step_are_equal_again(name: str) -> None:
    given = Faults(absent={0: [(3, 6), (12, 14)], 2: [(5, 9), (12, 15)], 1: [(12, 14)]}, lost={1: [8], 3: [8, 12]})
    ours = hand(ANY[name](), given)
    there = given.bind(4, lockstep=True)
    assert there.up(12) == [] and there.returning(13) == ([3], 3)
    theta = start_values(1)[0]
    for step in range(1, 21):
        before = ours.fleet.blocks[0].params.clone()
        rows, up = ours.go(step), there.up(step)
        assert all(torch.equal(rows[i], rows[up[0]]) for i in up)
        for node in set(range(4)) - set(up):
            assert torch.equal(rows[node], before[node])
        if name == "ddp" and up:
            g = torch.stack([local(i, step) for i in up]).mean(0)
            theta = theta - RATE * g * min(1.0, 1 / (float(g.norm()) + 1e-6))
            same(rows[up[0]], theta)
            unlike(rows[up[0]], theta - 1e-3)
    assert ours.inner_from == [(6, [0], 1), (9, [1, 2, 3], 0), (13, [3], 3), (14, [0, 1], 3), (15, [2], 0)]


@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_a_parameter_that_only_an_absent_node_used_is_left_alone(name: str) -> None:
    fleet, strategy = fleet_of(start_values(3)), ANY[name]()
    acting = strategy.on(fleet, run_of(3))
    block = fleet.blocks[0]
    block.own_grads().normal_()
    block.has_grad[:] = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]) > 0
    fleet.comm.present = [1, 2]
    acting.transform_gradients(1, RATE)
    assert block.has_grad.tolist() == [[False, True, True, False]] * 3


def test_the_momentum_of_demo_rests_and_then_starts_afresh() -> None:
    ours = hand(ANY["demo"](), Faults(absent={1: [(4, 7)], 2: [(5, None)]}))
    residual = ours.strategy.modules[0].row_state["residual.0"]
    ours.go(3)
    rest = residual.clone()
    assert bool(rest.abs().amax(1).gt(0).all())
    ours.go(6)
    assert torch.equal(residual[1], rest[1]) and not torch.equal(residual[0], rest[0])
    assert bool(torch.isfinite(residual).all())
    ours.fleet.comm.present = [0, 1, 3]
    assert ours.acting.bring_back([1], 0, 7)
    assert not residual[1].any() and residual[0].any() and residual[2].any()


# Buffers, state and bytes on return


def with_buffers(num_nodes: int) -> Fleet:
    fleet = fleet_of(start_values(num_nodes))
    fleet.buffers = {"mean": torch.randn(num_nodes, 3), "count": torch.arange(num_nodes)[:, None] * 10}
    return fleet


@pytest.mark.parametrize("name", ["ddp", "diloco", "fedavg", "clients"])
def test_buffers_are_those_of_the_nodes_that_are_there(name: str) -> None:
    fleet, strategy = with_buffers(5), ALL[name]()
    before = {key: value.clone() for key, value in fleet.buffers.items()}
    acting = strategy.on(fleet, run_of(5))
    module: Any = strategy.modules[0]
    present, step = [1, 2, 4], 4 if name == "clients" else 12
    members, holders = present, present
    if name == "clients":
        members = [i for i in module.clients(0) if i in present]
        assert 0 < len(members) < len(present) and 3 in module.clients(0) + module.clients(1)
        holders = [i for i in range(5) if i in present or i not in module.clients(0) + module.clients(1)]
    fleet.comm.present = present
    for block in fleet.blocks:
        block.own_grads().zero_()
    if strategy.needs_gradients:
        acting.transform_gradients(step, RATE)
        wanted = before["mean"][1]
    else:
        acting.communicate(step)
        wanted = before["mean"][members].mean(0)
    for node in range(5):
        mean = wanted if node in holders else before["mean"][node]
        assert torch.allclose(fleet.buffers["mean"][node], mean, rtol=0, atol=1e-6)
        assert fleet.buffers["count"][node].item() == 10 * (members[0] if node in holders else node)


@pytest.mark.parametrize("name", sorted({*ALL} - {"unequal work"}))
def test_a_return_costs_a_row_and_leaves_the_others_alone(name: str) -> None:
    fleet, strategy = with_buffers(5), ALL[name]()
    acting = strategy.on(fleet, run_of(5))
    fleet.blocks[0].params.add_(torch.randn(5, P, dtype=torch.float64))
    rows = fleet.blocks[0].params.clone()
    means, ledger = fleet.buffers["mean"].clone(), fleet.comm.ledger
    fleet.comm.present = [0, 2, 3, 4]
    takes_inner = acting.bring_back([0, 4], 2, 7)
    assert takes_inner == strategy.needs_gradients
    outer = acting.consensus()
    module: Any = strategy.modules[0]
    joined = [0, 4]
    if name == "clients":
        joined = [i for i in joined if i in module.clients(1)]
    if name == "clients in islands":
        joined = []
    for node in range(5):
        x, mean = fleet.blocks[0].params[node], fleet.buffers["mean"][node]
        taken = rows[2] if outer is None else outer[0]
        assert torch.equal(x, taken if node in joined else rows[node])
        assert torch.equal(mean, means[2 if node in joined else node])
    assert ledger.payload_bytes.tolist() == [0, 0, SIZE if joined else 0, 0, 0]
    assert ledger.rx_bytes.tolist() == [SIZE if node in joined else 0 for node in range(5)]
    assert ledger.tx_bytes.sum() == ledger.rx_bytes.sum() and ledger.buffer_bytes.sum() == len(joined) * (3 * 4 + 8)


@pytest.mark.parametrize("blocks", [[[0, 1, 2, 3]], [[0], [1, 2], [3]]])
def test_state_that_only_its_owner_knows_reaches_those_that_come_back(blocks: list[list[int]]) -> None:
    state = {
        "0.exp_avg": torch.randn(3, 2),
        "0.step": torch.tensor(7.0),
        "steps": torch.tensor(9),
        "empty": torch.ones(0),
    }
    got: dict[int, dict[str, Tensor]] = {}
    sent: list[list[float]] = []

    def program(k: int) -> Callable[[], None]:
        def run_it() -> None:
            fleet = fleet_of(start_values(4), blocks[k])
            if len(blocks) > 1:
                fleet.comm = Communicator(blocks[k], 4, _MeetingWire(blocks, k))
            given = state if 1 in blocks[k] else None
            got[k] = take_state(fleet, given, 1, [0, 2], torch.device("cpu"))
            sent.append(fleet.comm.ledger.payload_bytes.tolist())

        return run_it

    meeting = Meeting(Communicator(range(4), 4), lambda _: None, lambda _: None, blocks)
    try:
        meeting.run([program(k) for k in range(len(blocks))])
    finally:
        meeting.close()
    for k, block in enumerate(blocks):
        assert got[k].keys() == (state.keys() if {0, 2} & {*block} else set())
        assert all(
            torch.equal(got[k][name], state[name]) and got[k][name].dtype == state[name].dtype for name in got[k]
        )
    assert sent == [[0, 6 * 4 + 4 + 8, 0, 0]] * len(blocks)


@pytest.mark.parametrize("name", ALL)
def test_with_nobody_there_nothing_happens(name: str) -> None:
    strategy = ALL[name]()
    out = Faults(absent={node: [(5 - node, 20)] for node in range(4)})
    ours = hand(strategy, out)
    rows = ours.go(5).clone()
    tx = ours.fleet.comm.ledger.tx_bytes.tolist()
    assert torch.equal(ours.go(19), rows) and ours.fleet.comm.ledger.tx_bytes.tolist() == tx
    ours.acting.finish(19)
    assert torch.equal(ours.fleet.blocks[0].params, rows)
    assert not torch.equal(ours.go(30), rows)
