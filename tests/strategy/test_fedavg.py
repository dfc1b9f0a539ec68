"""FedAvg: who takes part, how much each counts, how long each works, and what that costs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    BATCH,
    Regressor,
    averaged,
    examples,
    fleet_of,
    plain,
    put,
    run_of,
    same,
    sgd,
    shards,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError
from exogym.strategy import CommunicateOptimizeStrategy, FedAvgStrategy, OptimSpec
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.simple_reduce import GradientAverage
from exogym.testing import small_problem

P = 57
SIZE = P * 8


def communicator(
    num_nodes: int, seed: int = 0, sizes: list[int] | None = None, **options: Any
) -> AveragingCommunicator:
    module = AveragingCommunicator(options.pop("H", 1), **options)
    module.start(fleet_of(vector(Regressor()).expand(num_nodes, -1)), run_of(num_nodes, seed, sizes=sizes))
    return module


# Who takes part


@pytest.mark.parametrize(("num_nodes", "fraction"), [(10, 0.1), (10, 0.25), (10, 0.3), (7, 0.5), (3, 0.01), (5, 0.999)])
def test_rounds_sample_m_clients(num_nodes: int, fraction: float) -> None:
    size = max(math.ceil(fraction * num_nodes - 1e-9), 1)
    module = communicator(num_nodes, client_fraction=fraction)
    rounds = [module.clients(r) for r in range(300)]
    for clients in rounds:
        assert clients == sorted(set(clients)) and len(clients) == size
        assert all(0 <= c < num_nodes for c in clients)
    counts = Counter(itertools.chain.from_iterable(rounds))
    share = size / num_nodes
    for node in range(num_nodes):  # five standard deviations of a binomial
        assert abs(counts[node] - 300 * share) <= 5 * math.sqrt(300 * share * (1 - share)) + 1e-9
    assert [module.clients(r) for r in range(300)] == rounds
    assert [communicator(num_nodes, client_fraction=fraction).clients(r) for r in range(300)] == rounds
    other = communicator(num_nodes, seed=1, client_fraction=fraction)
    assert size == num_nodes or [other.clients(r) for r in range(300)] != rounds


def test_a_tenth_of_ten_is_one_and_of_eleven_two() -> None:
    assert len(communicator(10, client_fraction=0.1).clients(0)) == 1
    assert len(communicator(11, client_fraction=0.1).clients(0)) == 2
    assert 0.07 * 100 > 7  # in binary
    assert len(communicator(100, client_fraction=0.07).clients(0)) == 7


@pytest.mark.parametrize(("num_nodes", "size"), [(4, 2), (5, 2), (6, 4), (6, 6), (6, 1), (6, None)])
def test_islands_cut_the_clients_into_groups(num_nodes: int, size: int | None) -> None:
    module = communicator(num_nodes, island_size=size)
    for round_ in range(50):
        islands = module.islands(round_)
        assert sorted(itertools.chain.from_iterable(islands)) == list(range(num_nodes))
        assert all(len(island) == (size or num_nodes) for island in islands[:-1])
        assert all(island == sorted(island) for island in islands)
    if size == 2:  # drawn anew: every pair comes up
        pairs = {tuple(island) for r in range(50) for island in module.islands(r) if len(island) == 2}
        assert len(pairs) == num_nodes * (num_nodes - 1) // 2
    sampled = communicator(num_nodes, island_size=2, client_fraction=0.5)
    for round_ in range(10):
        assert sorted(itertools.chain.from_iterable(sampled.islands(round_))) == sampled.clients(round_)


def test_islands_average_inside_and_keep_the_mean() -> None:
    values = torch.randn(5, P, dtype=torch.float64)
    fleet, module = fleet_of(values), communicator(5, island_size=2)
    module.communicate(fleet, 1)
    x = fleet.blocks[0].params
    for island in module.islands(0):
        same(x[island], values[island].mean(0).expand(len(island), -1), 1e-14)
    assert float(x.var(0).sum()) < float(values.var(0).sum())
    unlike(x, values.mean(0).expand_as(x))
    even = fleet_of(values[:4])
    communicator(4, island_size=2).communicate(even, 1)
    same(even.blocks[0].params.mean(0), values[:4].mean(0), 1e-14)


# Sampled clients


def federated(
    data: list, rounds: int, H: int, fraction: float, seed: int = 0, weighted: bool = True
) -> tuple[Tensor, Tensor]:
    """FedAvg with sampling in plain torch: theta, and what each client last held."""
    n = len(data)
    size = max(math.ceil(fraction * n - 1e-9), 1)
    sampled = [
        sorted(numpy_generator(seed, "clients", r).choice(n, size, replace=False).tolist()) for r in range(rounds + 1)
    ]
    theta = [vector(Regressor())]

    def after(models: list[nn.Module], step: int) -> None:
        if step % H:
            return
        clients = sampled[step // H - 1]
        weights = torch.tensor([len(data[i]) if weighted else 1 for i in clients], dtype=torch.float64)
        theta[0] = (weights[:, None] * torch.stack([vector(models[i]) for i in clients])).sum(0) / weights.sum()
        for i in {*clients, *sampled[step // H]}:
            put(models[i], theta[0])

    def acts(node: int, step: int) -> bool:
        return node in sampled[(step - 1) // H]

    rows = plain(data, rounds * H, sgd, after=after, acts=acts)
    return theta[0], rows


SIZES = [8, 12, 16, 20, 24]


def uneven() -> list:
    return [examples(n, i, 0.3 * i) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.8])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_sampled_clients_average_by_their_examples(fraction: float, weighting: str) -> None:
    data, H, rounds = uneven(), 3, 5
    strategy = FedAvgStrategy("sgd", H=H, lr=0.05, client_fraction=fraction, weighting=weighting)
    ours = train(strategy, data, 5, steps=H * rounds)
    theta, rows = federated(data, rounds, H, fraction, weighted=weighting == "examples")
    same(ours.model, theta)
    if fraction > 0.2:  # more than one client, and all nodes have rows
        same(ours.rows, rows)  # nodes that sat out hold what they last held
        unlike(ours.model, federated(data, rounds, H, fraction, weighted=weighting != "examples")[0])
    unlike(ours.model, federated(data, rounds, H, fraction, seed=1)[0])


def test_nodes_that_sit_out_cost_nothing_and_do_nothing() -> None:
    H, rounds = 3, 6
    strategy = FedAvgStrategy("sgd", H=H, lr=0.05, client_fraction=0.4)
    result = train(strategy, shards(5), 5, steps=H * rounds)
    sampled = [communicator(5, client_fraction=0.4).clients(r) for r in range(rounds)]
    times = np.bincount(list(itertools.chain.from_iterable(sampled)), minlength=5)
    assert result.payload.tolist() == result.tx.tolist() == result.rx.tolist() == (times * SIZE).tolist()
    assert [event.members for event in result.events] == [tuple(clients) for clients in sampled]
    assert {event.algorithm for event in result.events} == {"server"}
    acted = ~np.isnan(result.losses)
    for round_, clients in enumerate(sampled):
        for node in range(5):
            assert acted[node, round_ * H : (round_ + 1) * H].tolist() == [node in clients] * H
    assert 0 < acted.mean() < 1


def test_the_evaluated_model_is_theta_also_in_the_middle_of_a_round() -> None:
    half = train(FedAvgStrategy("sgd", H=3, lr=0.05, client_fraction=0.4), uneven(), 5, steps=8)
    theta, _ = federated(uneven(), 2, 3, 0.4)
    same(half.model, theta)
    done = train(FedAvgStrategy("sgd", H=3, lr=0.05, client_fraction=0.4), uneven(), 5, steps=9, final_sync=True)
    synced = train(FedAvgStrategy("sgd", H=3, lr=0.05, client_fraction=0.4), uneven(), 5, steps=9)
    assert torch.equal(done.model, synced.model) and done.tx.tolist() == synced.tx.tolist()  # nothing was left
    unlike(done.model, theta)
    wide = train(FedAvgStrategy("sgd", H=3, lr=0.05, client_fraction=0.4, island_size=5), uneven(), 5, steps=8)
    assert torch.equal(wide.model, half.model)  # an island of all clients is none


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_buffers_travel_with_theta() -> None:
    """Running statistics of clients that never took part must not be in the model that is evaluated."""
    H, rounds = 2, 3
    data = [examples(20, i, 5.0) for i in range(8)]
    strategy = FedAvgStrategy("sgd", H=H, lr=0.01, client_fraction=0.25)
    result = train(strategy, data, 8, steps=H * rounds, model=Normed())
    module = communicator(8, client_fraction=0.25)
    mean, var = torch.zeros(6).double(), torch.ones(6).double()
    taken = [0] * 8
    for round_ in range(rounds):
        means, variances = [], []
        for node in module.clients(round_):
            own = nn.BatchNorm1d(6).double()
            own.running_mean.copy_(mean)
            own.running_var.copy_(var)
            for _ in range(H):
                at = taken[node] % 5 * BATCH
                own(data[node][at : at + BATCH][0])
                taken[node] += 1
            means.append(own.running_mean)
            variances.append(own.running_var)
        mean, var = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    state = result.trainer.model.state_dict()
    same(state["norm.running_mean"], mean)
    same(state["norm.running_var"], var)
    assert int(state["norm.num_batches_tracked"]) == H * rounds
    payload = {(event.tag, event.kind, event.payload_bytes) for event in result.events}
    parameters, statistics, counter = 8 * (6 + 6 + 6 + 1), 6 * 8, 8
    assert payload == {
        ("parameters", "all_reduce", parameters),
        ("buffers", "all_reduce", statistics),
        ("buffers", "broadcast", counter),
    }


def test_buffers_are_averaged_where_everyone_takes_part() -> None:
    data = shards(3)
    result = train(FedAvgStrategy("sgd", H=2, lr=0.01), data, 3, steps=2, model=Normed())
    means = []
    for node in range(3):
        own = nn.BatchNorm1d(6).double()
        for step in range(2):
            own(data[node][step * BATCH : (step + 1) * BATCH][0])
        means.append(own.running_mean)
    same(result.buffers["norm.running_mean"], torch.stack(means).mean(0).expand(3, -1))
    assert result.buffers["norm.num_batches_tracked"].tolist() == [2, 2, 2]
    work = train(FedAvgStrategy("sgd", H=2, lr=0.01, local_steps=[1, 2, 2]), data, 3, steps=2, model=Normed())
    assert work.buffers["norm.num_batches_tracked"].tolist() == [1, 1, 1]  # a whole number: the lowest id's
    unlike(result.buffers["norm.running_mean"][0], means[0])


# How much each counts


def test_weights_by_examples_and_their_scale() -> None:
    data = uneven()
    alone = plain(data, 4, sgd)
    weights = torch.tensor(SIZES, dtype=torch.float64)
    weighted = train(FedAvgStrategy("sgd", H=4, lr=0.05), data, 5, steps=4)
    same(weighted.model, (weights[:, None] * alone).sum(0) / weights.sum())
    uniform = train(FedAvgStrategy("sgd", H=4, lr=0.05, weighting="uniform"), data, 5, steps=4)
    same(uniform.model, alone.mean(0))
    unlike(weighted.model, uniform.model)
    values = torch.randn(5, P, dtype=torch.float64)
    results = []
    for factor in (1, 8, 7):
        fleet = fleet_of(values)
        communicator(5, sizes=[factor * n for n in SIZES]).communicate(fleet, 1)
        results.append(fleet.blocks[0].params[0].clone())
    assert torch.equal(results[0], results[1])
    same(results[2], results[0], 1e-15)


# How long each works


def test_unequal_local_steps() -> None:
    data, work, H = shards(4), [5, 3, 1, 4], 5

    def acts(node: int, step: int) -> bool:
        return (step - 1) % H < work[node]

    strategy = FedAvgStrategy("sgd", H=H, lr=0.05, local_steps=work)
    ours = train(strategy, data, steps=13)
    expected = plain(data, 13, sgd, after=averaged(H), acts=acts)
    same(ours.rows, expected)
    assert (~np.isnan(ours.losses)).sum(1).tolist() == [13, 3 + 3 + 3, 3, 4 + 4 + 3]
    unlike(ours.rows, train(FedAvgStrategy("sgd", H=H, lr=0.05), data, steps=13).rows)
    # Stretches that are cut by evaluations, or at every step, change nothing.
    for interval in (1, 2, 7):
        again = train(strategy, data, steps=13, callbacks=[Every(interval, lambda loop: None)])
        assert torch.equal(again.rows, ours.rows)


def test_local_epochs_are_epochs_of_the_own_data() -> None:
    sizes = [8, 12, 20]  # 2, 3 and 5 batches
    data = [examples(n, i, 0.3 * i) for i, n in enumerate(sizes)]
    module = communicator(3, sizes=sizes, local_epochs=2)
    assert module.interval_steps == 10
    assert module.local_steps(0, 10).tolist() == [4, 6, 10]
    assert module.local_steps(10, 15).tolist() == [4, 5, 5] and module.local_steps(15, 20).tolist() == [0, 1, 5]
    ours = train(FedAvgStrategy("sgd", lr=0.05, local_epochs=2), data, 3, steps=20)
    explicit = train(FedAvgStrategy("sgd", H=10, lr=0.05, local_steps=[4, 6, 10]), data, 3, steps=20)
    assert torch.equal(ours.rows, explicit.rows)
    odd = communicator(3, sizes=[9, 12, 21], local_epochs=1)
    assert odd.local_steps(0, 6).tolist() == [3, 3, 6]  # a short last batch is a step


# What a client keeps


def momentum_loop(data: list, steps: int, H: int, fresh: bool) -> Tensor:
    buffers: dict[int, Any] = {}

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, foreach=False)
        buffers[len(buffers)] = optimizer
        return optimizer

    def after(models: list[nn.Module], step: int) -> None:
        averaged(H)(models, step)
        if step % H == 0 and fresh:
            for optimizer in buffers.values():
                optimizer.state.clear()

    return plain(data, steps, build, after=after)


def test_the_inner_state_is_kept_or_started_afresh() -> None:
    spec = OptimSpec("sgd", lr=0.02, momentum=0.9)
    kept = train(FedAvgStrategy(spec, H=4)).rows
    fresh = train(FedAvgStrategy(spec, H=4, keep_inner_state=False)).rows
    same(kept, momentum_loop(shards(4), 12, 4, False))
    same(fresh, momentum_loop(shards(4), 12, 4, True))
    unlike(kept, fresh)


# Bytes


def test_bytes_of_islands() -> None:
    result = train(FedAvgStrategy("sgd", H=4, lr=0.01, island_size=3), shards(7), 7, steps=4)
    islands = communicator(7, island_size=3).islands(0)
    for island in islands:
        n = len(island)
        assert result.payload[island].tolist() == [SIZE if n > 1 else 0] * n
        assert result.tx[island] == pytest.approx(2 * (n - 1) / n * SIZE)
    assert sorted(len(island) for island in islands) == [1, 3, 3]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"H": 0}, "H=0"),
        ({"H": 2.5}, "H=2.5"),
        ({"island_size": 0}, "island_size=0"),
        ({"client_fraction": 0.0}, "client_fraction=0.0"),
        ({"client_fraction": 1.1}, "client_fraction=1.1"),
        ({"weighting": "example"}, "did you mean 'examples'"),
        ({"local_steps": [1, 2], "local_epochs": 1}, "pass only one of them"),
        ({"local_steps": [1, 11]}, "raise H"),
        ({"local_steps": [1, 0]}, "local_steps=0"),
        ({"local_epochs": 0}, "local_epochs=0"),
        ({"client_fractions": 0.5}, "did you mean 'client_fraction'"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FedAvgStrategy("sgd", **arguments)


@pytest.mark.parametrize("options", [{"client_fraction": 0.5}, {"local_steps": [3, 1, 2, 3]}, {"local_epochs": 1}])
def test_nodes_cannot_rest_where_gradients_meet_at_every_step(options: dict[str, Any]) -> None:
    average = AveragingCommunicator(3, **options)
    with pytest.raises(ArgumentError, match="leave one of them out"):
        train(CommunicateOptimizeStrategy("sgd", [average], gradient_modules=[GradientAverage()]))


def test_local_steps_must_name_every_node() -> None:
    with pytest.raises(ArgumentError, match="local_steps has 2 entries for 4 nodes"):
        train(FedAvgStrategy("sgd", H=5, local_steps=[1, 2]))


@pytest.mark.parametrize(("client_fraction", "kept"), [(1.0, False), (0.5, True)])
def test_theta_is_kept_where_clients_are_sampled_alone(client_fraction: float, kept: bool) -> None:
    """Else it would be one more copy of the parameters in memory."""
    model, data = small_problem()
    modules: list[AveragingCommunicator] = []

    def look(loop: Any) -> None:
        modules.extend(loop.driver.algorithm.strategy.communication_modules)

    strategy = FedAvgStrategy("sgd", H=2, lr=0.01, client_fraction=client_fraction)
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(strategy, num_nodes=4, max_steps=2, batch_size=4, callbacks=[look], processes=1)
    assert modules and {hasattr(module, "server") for module in modules} == {kept}
