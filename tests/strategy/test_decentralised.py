"""Nodes that meet on a graph or in pairs: D-PSGD, gradient push, NoLoCo; graphs, weights, bytes and the clock."""

from __future__ import annotations

import functools
from typing import Any

import networkx as nx
import pytest
import torch
from problems import (
    Regressor,
    adamw,
    examples,
    fleet_of,
    plain,
    put_rows,
    rows_of,
    run_of,
    same,
    sgd,
    shards,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn

from exogym.contrib.gradient_push import PushSum, pushing, takers_of
from exogym.core.clock import Clock
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    GradientPushStrategy,
    NoLoCoStrategy,
    OptimSpec,
    SimpleReduceStrategy,
)
from exogym.strategy.graphs import GRAPHS, diameter, edges_of, metropolis
from exogym.strategy.noloco import NoLoCoCommunicator
from exogym.study.advise import advise

Models = list[nn.Module]
S = 57 * 8.0


def everyone(n: int) -> tuple[int, ...]:
    return tuple(range(n))


# Graphs and weights


def test_named_graphs_are_those_of_networkx() -> None:
    same_edges = {
        "ring": nx.cycle_graph(8),
        "complete": nx.complete_graph(8),
        "exponential": nx.circulant_graph(8, [1, 2, 4]),
        "torus": nx.convert_node_labels_to_integers(nx.grid_2d_graph(2, 4, periodic=True), ordering="sorted"),
    }
    for name, graph in same_edges.items():
        assert edges_of(name, 8) == edges_of(graph, 8)
    assert edges_of("torus", 7) == edges_of("ring", 7) and edges_of("torus", 9) != edges_of("ring", 9)
    degrees = [sum(i in e for e in edges_of("torus", 9)) for i in range(9)]
    assert degrees == [4] * 9
    random = edges_of("random", 9, seed=3)
    assert random == edges_of("random", 9, seed=3) != edges_of("random", 9, seed=4)
    assert nx.is_connected(nx.Graph(list(random)))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_metropolis_weights_are_doubly_stochastic(graph: str, n: int) -> None:
    W = metropolis(edges_of(graph, n, turn=2), everyone(n), n)
    assert torch.equal(W, W.T) and bool((W >= 0).all())
    same(W.sum(0), torch.ones(n, dtype=torch.float64), 1e-15)
    x = torch.randn(n, 3, dtype=torch.float64)
    same((W @ x).mean(0), x.mean(0))
    if graph == "complete":
        same(W, torch.full((n, n), 1 / n, dtype=torch.float64), 1e-15)


def test_metropolis_weights_on_an_uneven_graph() -> None:
    star = edges_of(nx.star_graph(3), 4)
    W = metropolis(star, everyone(4), 4)
    assert W[0].tolist() == [0.25] * 4 and W[1].tolist() == [0.25, 0.75, 0, 0]
    less = metropolis(star, (0, 1), 4)  # nodes 2 and 3 are away
    assert less.tolist() == [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_mixing_brings_nodes_nearer_by_the_second_eigenvalue() -> None:
    W = metropolis(edges_of("ring", 8), everyone(8), 8)
    second = torch.linalg.eigvalsh(W).abs().sort().values[-2]
    x = torch.randn(8, 5, dtype=torch.float64)
    apart, mixed = x - x.mean(0), W @ x - x.mean(0)
    assert mixed.norm() <= second * apart.norm() < apart.norm()
    assert mixed.norm() > second**2 * apart.norm() * 0.1


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ("rong", "did you mean 'ring'"),
        (nx.path_graph(5), "must have the nodes 0 to 3"),
        (nx.Graph([(0, 1), (2, 3)]), "not connected"),
        (nx.DiGraph([(0, 1), (1, 2), (2, 3)]), "directed.*GradientPushStrategy"),
        ([(0, 1)], "one of 'ring'.*or a networkx graph"),
    ],
)
def test_wrong_graphs(graph: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        train(GossipStrategy("sgd", graph, lr=0.05))


# D-PSGD


def gossip(W: Tensor, steps: int, H: int = 1, build: Any = sgd) -> Tensor:

    def after(models: Models, step: int) -> None:
        if step % H == 0:
            put_rows(models, W @ rows_of(models))

    return plain(shards(len(W)), steps, build, after=after)


@pytest.mark.parametrize("graph", ["ring", nx.star_graph(4)])
def test_gossip_is_its_rule(graph: Any) -> None:
    W = metropolis(edges_of(graph, 5), everyone(5), 5)
    inner = OptimSpec("adamw", lr=0.02)
    ours = train(GossipStrategy(inner, graph, H=2), shards(5), 5)
    same(ours.rows, gossip(W, 12, 2, adamw))
    unlike(ours.rows, gossip(W, 12, 3, adamw))
    same(ours.model, ours.rows.mean(0))


def test_on_a_complete_graph_it_is_ddp() -> None:
    ddp = train(SimpleReduceStrategy("sgd", lr=0.05)).rows
    same(train(GossipStrategy("sgd", "complete", lr=0.05)).rows, ddp)
    unlike(train(GossipStrategy("sgd", "ring", lr=0.05)).rows, ddp)


def test_one_node_is_the_inner_optimizer_and_pairs_are_islands_of_two() -> None:
    alone = plain(shards(1), 12, adamw)
    for graph in GRAPHS:
        same(train(GossipStrategy("adamw", graph, lr=0.02), shards(1), 1).rows, alone)
    pair = train(GossipStrategy("adamw", "matching", H=3, lr=0.02), shards(2), 2).rows
    same(pair, train(FedAvgStrategy("adamw", H=3, lr=0.02), shards(2), 2).rows)
    unlike(pair, plain(shards(2), 12, adamw))


def test_weights_of_one_leave_nodes_alone() -> None:
    comm, x = Communicator(range(4), 4), torch.randn(4, 3)
    assert torch.equal(comm.mix(x, torch.eye(4, dtype=torch.float64)), x)
    assert comm.ledger.tx_bytes.tolist() == [0.0] * 4 and not comm.ledger.traffic
    comm.mix(x, metropolis(edges_of("ring", 4), everyone(4), 4))
    assert comm.ledger.traffic["neighbours mix"]["calls"] == 1


def test_uneven_graphs_send_unevenly() -> None:
    seen = train(GossipStrategy("sgd", nx.star_graph(3), lr=0.05), steps=3)
    assert seen.payload.tolist() == seen.tx.tolist() == seen.rx.tolist() == [9 * S, 3 * S, 3 * S, 3 * S]


# What the clock and the formula say


def test_a_node_waits_for_its_neighbours_only() -> None:
    n, comm = 6, Communicator(range(6), 6)
    clock = Clock(n, "1Gbps,1ms", [0.1, 0.1, 0.1, 1.0, 0.1, 0.1])
    comm.ledger.listeners.append(clock.event)
    clock.advance(1)
    comm.mix(torch.zeros(n, 125_000), metropolis(edges_of("ring", n), everyone(n), n))  # 0.5 MB to two: 1 + 8 ms
    assert clock.time_s.tolist() == pytest.approx([0.109, 0.109, 1.009, 1.009, 1.009, 0.109])
    clock.advance(1)
    comm.all_reduce(torch.zeros(n, 1))
    assert len(set(clock.time_s.tolist())) == 1  # all wait for all
    other, push = Clock(n, "1Gbps,1ms", [0.1, 0.1, 0.1, 1.0, 0.1, 0.1]), Communicator(range(n), n)
    push.ledger.listeners.append(other.event)
    other.advance(1)
    push.mix(torch.zeros(n, 125_000), pushing(takers_of("ring", n)))  # node 4 waits for node 3; nobody else
    assert other.time_s.tolist() == pytest.approx([0.105, 0.105, 0.105, 1.005, 1.005, 0.105])


def test_a_link_that_nobody_uses_costs_nothing() -> None:
    bandwidth = torch.full((4, 4), 1e9).numpy()
    bandwidth[0, 2] = bandwidth[2, 0] = 1e6  # across the ring
    network = Network.matrix(bandwidth, 1e-3)
    comm, events = Communicator(range(4), 4), []
    comm.ledger.listeners.append(events.append)
    x = torch.zeros(4, 125_000)
    comm.mix(x, metropolis(edges_of("ring", 4), everyone(4), 4))
    comm.mix(x, metropolis(edges_of("complete", 4), everyone(4), 4))
    ring, complete = map(network.seconds, events)
    assert ring == pytest.approx(1e-3 + 2 * 4e-3) and complete > 100 * ring
    assert Network(1e9, 1e-3).seconds(events[0]) == pytest.approx(ring)
    assert comm.ledger.payload_bytes.tolist() == [5 * 500_000.0] * 4
    assert comm.ledger.traffic["neighbours mix"]["payload_bytes"] == 4 * 5 * 500_000.0


def test_the_formulas_of_advise() -> None:
    advice = advise(
        parameters=1e6, num_nodes=8, network="1Gbps,1ms", step_seconds="100ms",
        strategies=["gossip", "gossip:graph=complete", "sgp", "noloco:H=50", "gossip:graph=matching"],
    )  # fmt: skip
    rows = {row.strategy: row for row in advice.rows}
    t = 8 * 4e6 / 1e9
    assert rows["gossip"].seconds_per_step == pytest.approx(0.1 + 1e-3 + 2 * t)
    assert rows["gossip:graph=complete"].seconds_per_step == pytest.approx(0.1 + 1e-3 + 7 * t)
    assert rows["sgp"].seconds_per_step == pytest.approx(0.1 + 1e-3 + t, rel=1e-5)
    assert rows["noloco:H=50"].seconds_per_step == pytest.approx(0.1 + 2 * (1e-3 + t) / 50)
    assert rows["gossip"].tx_bytes_per_step == 8e6 and rows["noloco:H=50"].tx_bytes_per_step == pytest.approx(1.6e5)
    couples = [rows[name].couples_every for name in ("gossip", "gossip:graph=complete", "gossip:graph=matching")]
    assert couples == [4, 1, 3]


@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "matching"] + [nx.path_graph])
def test_the_diameter_is_the_power_that_fills_the_matrix(graph):
    for n in (1, 2, 3, 4, 7, 12, 30):
        given = graph(n) if callable(graph) else graph
        near = torch.eye(n)
        for i, j in edges_of(given, n):
            near[i, j] = near[j, i] = 1
        hops = diameter(given, n)
        assert bool((torch.linalg.matrix_power(near, hops) > 0).all())
        assert hops == 0 or not bool((torch.linalg.matrix_power(near, hops - 1) > 0).all())


# Stochastic gradient push


def by_push(
    takers: Any, steps: int, n: int, forget: bool = False, H: int = 1, by_weight: bool = False, build: Any = adamw
) -> Tensor:
    """Push-sum after every H steps; `by_weight` steps x, so z at 1 / w of the rate, at the steps between, too."""
    x, w = vector(Regressor()).expand(n, -1).clone(), torch.ones(n, 1, dtype=torch.float64)

    def after(models: Models, step: int) -> None:
        nonlocal x, w
        if step % H:
            if by_weight:
                x = x + rows_of(models) - x / w
                put_rows(models, x / w)
            return
        P = pushing(takers(step // H - 1))
        x = P @ (x + rows_of(models) - x / w)
        w = torch.ones_like(w) if forget else P @ w
        put_rows(models, x / w)

    return plain(shards(n), steps, build, after=after)


UNEVEN = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 3), (3, 0), (3, 1), (3, 4), (4, 0)])


@pytest.mark.parametrize("graph", ["exponential", "ring", UNEVEN])
def test_gradient_push_is_its_rule(graph: Any) -> None:
    ours = train(GradientPushStrategy("adamw", graph, lr=0.02), shards(5), 5)
    same(ours.rows, by_push(lambda turn: takers_of(graph, 5, turn), 12, 5))
    unlike(ours.rows, by_push(lambda turn: takers_of(graph, 5, turn + 1), 12, 5) if graph == "exponential" else (
        by_push(lambda turn: takers_of("complete", 5), 12, 5)))  # fmt: skip
    if graph is UNEVEN:
        unlike(ours.rows, by_push(lambda turn: takers_of(graph, 5), 12, 5, forget=True))


@pytest.mark.parametrize(("inner", "build"), [("adamw", adamw), ("sgd", sgd)])
def test_between_exchanges_push_steps_at_the_full_rate(inner: str, build: Any) -> None:
    """Whatever a node's weight is; where all weights are 1 there is no other way."""
    for graph in (UNEVEN, "ring"):
        ours = train(
            GradientPushStrategy(inner, graph, 3, lr=0.02 if inner == "adamw" else 0.05), shards(5), 5, 14
        ).rows
        push = functools.partial(by_push, lambda turn, graph=graph: takers_of(graph, 5, turn), 14, 5, H=3, build=build)
        same(ours, push())
        (unlike if graph is UNEVEN else same)(ours, push(by_weight=True))


def test_steps_at_the_full_rate_between_exchanges_bear_rates_at_which_steps_by_weight_diverge() -> None:
    """What the page says of five quadratic clients: H = 8, rate 0.1."""
    data = [examples(24, i, 0.2 * i) for i in range(5)]
    A = torch.stack([2 * x.T @ x / 24 for x, _ in (d.tensors for d in data)])
    b = torch.stack([2 * x.T @ y[:, 0] / 24 for x, y in (d.tensors for d in data)])
    best, P = torch.linalg.solve(A.mean(0), b.mean(0)), pushing(takers_of(UNEVEN, 5))
    line = nn.Linear(6, 1, bias=False).double()
    nn.init.zeros_(line.weight)
    ours = train(GradientPushStrategy("sgd", UNEVEN, 8, lr=0.1), data, 5, 240, line, batch_size=24)
    x, w = torch.zeros(5, 6, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    for step in range(1, 801):
        x -= 0.1 * (torch.einsum("nij,nj->ni", A, x / w) - b)
        x, w = (x, w) if step % 8 else (P @ x, P @ w)
    assert float((ours.model - best).norm()) == pytest.approx(0.07, abs=0.005)
    assert float(((x / w).mean(0) - best).norm()) > 1e3


def test_push_of_one_node_is_the_inner_optimizer() -> None:
    alone = plain(shards(1), 12, adamw)
    for graph in ("exponential", "complete"):
        same(train(GradientPushStrategy("adamw", graph, lr=0.02), shards(1), 1).rows, alone)
    unlike(train(GradientPushStrategy("adamw", lr=0.02), shards(2), 2).rows[:1], alone)


def test_push_on_a_complete_graph_is_ddp_with_sgd() -> None:
    ddp = train(SimpleReduceStrategy("sgd", lr=0.05)).rows
    same(train(GradientPushStrategy("sgd", "complete", lr=0.05)).rows, ddp)
    unlike(train(GradientPushStrategy("sgd", lr=0.05)).rows, ddp)


@pytest.mark.parametrize(("n", "graph"), [(8, "exponential"), (5, UNEVEN)])
def test_push_keeps_the_sums_and_finds_the_mean(n: int, graph: Any) -> None:
    width = vector(Regressor()).numel()
    values = torch.randn(n, width, dtype=torch.float64)
    fleet, module = fleet_of(values), PushSum(graph, 1)
    module.start(fleet, run_of(n))
    for turn in range(3 if n == 8 else 200):
        module.communicate(fleet, turn + 1)
        same(module.x[0].sum(0), values.sum(0))
        same(module.w.sum(), torch.tensor(float(n), dtype=torch.float64))
        if turn == 1:
            unlike(fleet.blocks[0].params, values.mean(0).expand(n, -1))
    same(fleet.blocks[0].params, values.mean(0).expand(n, -1))
    if graph is UNEVEN:
        unlike(module.x[0], values.mean(0).expand(n, -1))  # without the weights the mean is biased


# NoLoCo


def noloco(n: int, steps: int, H: int, size: int, alpha: float, beta: float, gamma: float) -> Tensor:
    groups_of = NoLoCoCommunicator(H, size, alpha, beta, gamma)
    groups_of.run = run_of(n)
    phi = vector(Regressor()).expand(n, -1).clone()
    delta = torch.zeros_like(phi)

    def after(models: Models, step: int) -> None:
        if step % H:
            return
        D = rows_of(models) - phi
        old = phi.clone()
        for group in groups_of.groups(step // H - 1, range(n)):
            pull = old[group].mean(0) - old[group]
            delta[group] = alpha * delta[group] + beta * D[group].mean(0) + gamma * pull
        phi.add_(delta)
        put_rows(models, phi)

    return plain(shards(n), steps, adamw, after=after)


@pytest.mark.parametrize(("n", "size"), [(4, 2), (5, 2), (6, 3)])
def test_noloco_is_its_rule(n: int, size: int) -> None:
    strategy = NoLoCoStrategy(H=3, group_size=size, lr=0.02)
    ours = train(strategy, shards(n), n)
    same(ours.rows, noloco(n, 12, 3, size, 0.5, 0.7, 0.7))
    unlike(ours.rows, noloco(n, 12, 3, size, 0.5, 0.7, 0.0))
    same(ours.model, ours.rows.mean(0))
    assert ours.rows.std(0).max() > 1e-4


def test_groups_hold_each_node_once_and_are_drawn_anew() -> None:
    module = NoLoCoCommunicator(1, 2, 0.5, 0.7, 0.9)
    module.run = run_of(6)
    groups = module.groups(0, range(6))
    assert sorted(i for g in groups for i in g) == list(range(6)) and {len(g) for g in groups} == {2}
    assert groups == module.groups(0, range(6)) != module.groups(1, range(6))


def test_noloco_in_one_group_is_diloco_with_a_heavy_ball() -> None:
    ball = OptimSpec("sgd", lr=0.7, momentum=0.5)
    diloco = train(DiLoCoStrategy("adamw", ball, H=4, lr=0.02)).rows
    for gamma in (0.0, 0.9):
        same(train(NoLoCoStrategy(H=4, group_size=4, gamma=gamma, lr=0.02)).rows, diloco)
    two = train(NoLoCoStrategy(H=4, lr=0.02), shards(2), 2).rows
    same(two, train(DiLoCoStrategy("adamw", ball, H=4, lr=0.02), shards(2), 2).rows)
    unlike(train(NoLoCoStrategy(H=4, group_size=2, lr=0.02)).rows, diloco)


def test_without_momentum_it_averages_models_in_pairs() -> None:
    ours = train(NoLoCoStrategy("adamw", H=3, alpha=0.0, beta=1.0, gamma=1.0, lr=0.02))
    groups = NoLoCoCommunicator(3, 2, 0.0, 1.0, 1.0)
    groups.run = run_of(4)

    def after(models: Models, step: int) -> None:
        if step % 3 == 0:
            rows = rows_of(models)
            for pair in groups.groups(step // 3 - 1, range(4)):
                rows[pair] = rows[pair].mean(0)
            put_rows(models, rows)

    same(ours.rows, plain(shards(4), 12, adamw, after=after))
    unlike(ours.rows, train(NoLoCoStrategy("adamw", H=3, alpha=0.0, lr=0.02)).rows)


def test_equal_data_keep_nodes_equal() -> None:
    for make in (
        lambda: NoLoCoStrategy(H=3, lr=0.02),
        lambda: GossipStrategy("adamw", "torus", lr=0.02),
        lambda: GradientPushStrategy("adamw", lr=0.02),
    ):
        one = train(make(), shards(1, same=True), 1)
        many = train(make(), shards(4, same=True), 4)
        same(many.rows, one.rows.expand_as(many.rows), 1e-11)
    unlike(train(NoLoCoStrategy(H=3, lr=0.02), shards(4), 4).model, one.model)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"alpha": 1.0}, r"alpha=1\.0"), ({"beta": -1.0}, r"beta=-1\.0"), ({"group_size": 0}, "group_size")],
)
def test_wrong_noloco(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        NoLoCoStrategy(**options)
