"""The identities of the algorithms: where two of them must give the same numbers, and a control where they must not.

fp64; 1e-12 where the algebra is the same, bit for bit where the operations are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from problems import (
    BATCH,
    Regressor,
    adamw,
    average_gradients,
    averaged,
    dyadic,
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

from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedOptStrategy,
    FedProxStrategy,
    OptimSpec,
    PowerSGDStrategy,
    QSGDStrategy,
    ScaffoldStrategy,
    SignSGDStrategy,
    SimpleReduceStrategy,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    TopKStrategy,
)
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator

WEIGHTINGS = ("uniform", "examples")
PLAIN = OptimSpec(torch.optim.SGD, lr=1.0)  # the outer optimizer that only averages
NESTEROV = dict(momentum=0.9, nesterov=True)
OPTIMIZERS = {
    "sgd": OptimSpec("sgd", lr=0.05),
    "momentum": OptimSpec("sgd", lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": OptimSpec("adamw", lr=0.02),
}


# DDP


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_n_nodes_are_one_node_with_n_batches(name: str, num_nodes: int) -> None:
    data = examples(num_nodes * BATCH * 4)  # 4 steps an epoch
    many = train(SimpleReduceStrategy(OPTIMIZERS[name]), data, num_nodes)
    one = train(SimpleReduceStrategy(OPTIMIZERS[name]), data, 1, batch_size=num_nodes * BATCH)
    same(many.rows, one.rows.expand_as(many.rows))
    assert torch.equal(many.rows, many.rows[:1].expand_as(many.rows))
    local = train(FedAvgStrategy(OPTIMIZERS[name], H=3), data, num_nodes)  # averages at step 12, too
    unlike(local.rows, one.rows.expand_as(local.rows))


def test_clipping_acts_on_the_mean_in_ddp_and_on_the_own_gradient_elsewhere() -> None:
    data, limit = shards(3), 0.5

    def mean_then_clip(models: list[nn.Module], step: int) -> None:
        average_gradients(models)
        clip(models, step)

    def clip(models: list[nn.Module], step: int) -> None:
        for m in models:
            nn.utils.clip_grad_norm_(m.parameters(), limit)

    ddp = train(SimpleReduceStrategy("sgd", lr=0.05, max_norm=limit), data, 3).rows
    local = train(FedAvgStrategy("sgd", H=1, lr=0.05, max_norm=limit, weighting="uniform"), data, 3).rows
    same(ddp, plain(data, 12, sgd, before=mean_then_clip))
    same(local, plain(data, 12, sgd, before=clip, after=averaged(1)))
    unlike(ddp, local)


# Local SGD and FedAvg


def test_local_sgd_every_step_is_ddp_with_plain_sgd() -> None:
    ddp = train(SimpleReduceStrategy("sgd", lr=0.05))
    same(train(FedAvgStrategy("sgd", H=1, lr=0.05)).rows, ddp.rows)
    unlike(train(FedAvgStrategy("sgd", H=4, lr=0.05)).rows, ddp.rows)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_sgd_is_a_plain_loop_that_averages_after_steps_divisible_by_h(name: str) -> None:
    data, spec = shards(4), OPTIMIZERS[name]

    def build(parameters: object) -> torch.optim.Optimizer:
        return spec.cls(parameters, **spec.kwargs, foreach=False)

    ours = train(FedAvgStrategy(spec, H=5), data, steps=13).rows  # 3 steps are left unsynchronised
    same(ours, plain(data, 13, build, after=averaged(5)))
    unlike(
        ours, plain(data, 13, build, after=lambda models, step: averaged(5)(models, step - 1))
    )  # a counter that starts at zero
    assert ours.std(0).max() > 1e-4
    final = train(FedAvgStrategy(spec, H=5), data, steps=13, final_sync=True)
    same(final.rows, ours.mean(0).expand_as(ours))
    same(final.model, ours.mean(0))


def test_islands_of_everyone_and_of_one() -> None:
    full = train(FedAvgStrategy("adamw", H=4, lr=0.02)).rows
    assert torch.equal(train(FedAvgStrategy("adamw", H=4, lr=0.02, island_size=4)).rows, full)
    assert torch.equal(train(FedAvgStrategy("adamw", H=4, lr=0.02, island_size=9)).rows, full)
    alone = train(FedAvgStrategy("adamw", H=4, lr=0.02, island_size=1))
    independent = plain(shards(4), 12, adamw)
    same(alone.rows, independent)
    assert alone.tx.tolist() == alone.payload.tolist() == [0.0] * 4
    pairs = train(FedAvgStrategy("adamw", H=4, lr=0.02, island_size=2)).rows
    unlike(pairs, full)
    unlike(pairs, independent)


# DiLoCo


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_diloco_with_plain_outer_sgd_is_fedavg(name: str) -> None:
    fedavg = train(FedAvgStrategy(OPTIMIZERS[name], H=4)).rows
    diloco = train(DiLoCoStrategy(OPTIMIZERS[name], PLAIN, H=4))
    same(diloco.rows, fedavg)
    same(diloco.model, fedavg[0])
    unlike(train(DiLoCoStrategy(OPTIMIZERS[name], "sgd", H=4)).rows, fedavg)


def test_diloco_with_plain_outer_sgd_is_fedavg_of_the_same_weighting_only() -> None:
    uneven = [examples(BATCH * (2 + 3 * i), seed=i) for i in range(3)]
    options: dict[str, Any] = {"num_nodes": 3, "steps": 8}
    inner = OPTIMIZERS["sgd"]
    diloco = {w: train(DiLoCoStrategy(inner, PLAIN, H=4, weighting=w), uneven, **options).rows for w in WEIGHTINGS}
    fedavg = {w: train(FedAvgStrategy(inner, H=4, weighting=w), uneven, **options).rows for w in WEIGHTINGS}
    for weighting in WEIGHTINGS:
        same(diloco[weighting], fedavg[weighting])
    unlike(diloco["uniform"], fedavg["examples"])


def test_diloco_every_step_is_ddp_with_the_outer_momentum() -> None:
    gamma, eta = 0.05, 0.7
    ddp = train(SimpleReduceStrategy(OptimSpec("sgd", lr=gamma * eta, **NESTEROV))).rows
    same(train(DiLoCoStrategy("sgd", "sgd", H=1, lr=gamma)).rows, ddp)
    unlike(train(DiLoCoStrategy("sgd", "sgd", H=2, lr=gamma)).rows, ddp)
    plain_ddp = train(SimpleReduceStrategy("sgd", lr=gamma * eta)).rows
    same(train(DiLoCoStrategy("sgd", OptimSpec("sgd", lr=eta), H=1, lr=gamma)).rows, plain_ddp)
    unlike(ddp, plain_ddp)


def outer_loop(data: list, steps: int, H: int, outer: Callable, inner: Callable = adamw) -> tuple[Tensor, Tensor]:
    """DiLoCo in plain torch: theta and the rows at the end."""
    server = Regressor()
    optimizer = outer(server.parameters())

    def after(models: list[nn.Module], step: int) -> None:
        if step % H:
            return
        delta = copy.deepcopy(server)
        put(delta, vector(server) - torch.stack([vector(m) for m in models]).mean(0))
        for p, d in zip(server.parameters(), delta.parameters(), strict=True):
            p.grad = d.detach()
        optimizer.step()
        for m in models:
            put(m, vector(server))

    rows = plain(data, steps, inner, after=after)
    return vector(server), rows


@pytest.mark.parametrize("num_nodes", [1, 3, 4])
def test_diloco_is_a_plain_loop_with_torchs_outer_sgd(num_nodes: int) -> None:
    """Also for one node: its outer momentum acts (Lookahead), and is not skipped."""
    data = shards(num_nodes)

    def outer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7, foreach=False, **NESTEROV)  # type: ignore[arg-type]

    theta, rows = outer_loop(data, 14, 4, outer)
    ours = train(DiLoCoStrategy("adamw", H=4, lr=0.02), data, num_nodes, steps=14)
    same(ours.model, theta)
    same(ours.rows, rows)
    unlike(ours.model, plain(data, 14, adamw).mean(0))


def test_one_node_with_plain_outer_sgd_is_the_inner_optimizer() -> None:
    data = shards(1)
    alone = plain(data, 12, adamw)
    same(train(DiLoCoStrategy("adamw", PLAIN, H=3, lr=0.02), data, 1).rows, alone)
    unlike(train(DiLoCoStrategy("adamw", "sgd", H=3, lr=0.02), data, 1).rows, alone)


def test_after_an_outer_step_rows_are_theta_bit_for_bit() -> None:
    at_sync = train(DiLoCoStrategy(H=4, lr=0.02), steps=12)
    assert torch.equal(at_sync.rows, at_sync.model.expand_as(at_sync.rows))
    between = train(DiLoCoStrategy(H=4, lr=0.02), steps=14)
    unlike(between.rows, between.model.expand_as(between.rows))


# The same data everywhere


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: SimpleReduceStrategy("adamw", lr=0.02),
    "fedavg": lambda: FedAvgStrategy("adamw", H=4, lr=0.02),
    "islands": lambda: FedAvgStrategy("adamw", island_size=2, H=4, lr=0.02),
    "diloco": lambda: DiLoCoStrategy("adamw", H=4, lr=0.02),
    "sparta": lambda: SPARTAStrategy("adamw", 0.3, lr=0.02),
    "sparta topk": lambda: SPARTAStrategy("adamw", 0.3, lr=0.02, compression_method="topk"),
    "sparta+diloco": lambda: SPARTADiLoCoStrategy("adamw", H=4, p_sparta=0.3, lr=0.02),
    "demo": lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=4),
    "topk": lambda: TopKStrategy("sgd", 0.2, lr=0.05),
    "signs": lambda: SignSGDStrategy("sgd", lr=0.01),
    "scaled signs": lambda: SignSGDStrategy("sgd", error_feedback=True, lr=0.05),
    "powersgd": lambda: PowerSGDStrategy("adamw", 1, min_rate=1.0, lr=0.02),
    "sparseloco": lambda: SparseLoCoStrategy("adamw", 4, 16, 64, lr=0.02),
    "fedprox": lambda: FedProxStrategy("adamw", 0.1, 4, lr=0.02),
    "fedopt": lambda: FedOptStrategy("adamw", "adam", 0.02, 4, lr=0.02),
    "scaffold": lambda: ScaffoldStrategy("adamw", 4, lr=0.02),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter(name: str) -> None:
    one = train(STRATEGIES[name](), shards(1, same=True), 1)
    for num_nodes in (2, 3):
        many = train(STRATEGIES[name](), shards(num_nodes, same=True), num_nodes)
        same(many.rows, one.rows.expand_as(many.rows))
        same(many.model, one.model)
    unlike(train(STRATEGIES[name](), shards(3), 3).model, one.model)


# SPARTA


def test_sparta_of_everything_is_averaging_every_step() -> None:
    everything = train(SPARTAStrategy("adamw", 1.0, lr=0.02)).rows
    local = train(FedAvgStrategy("adamw", H=1, lr=0.02)).rows
    assert torch.equal(everything, local)
    same(train(SPARTAStrategy("sgd", 1.0, lr=0.05)).rows, train(SimpleReduceStrategy("sgd", lr=0.05)).rows)
    unlike(train(SPARTAStrategy("adamw", 0.5, lr=0.02)).rows, local)


@pytest.mark.parametrize("method", ["sequential", "partitioned", "topk"])
def test_every_method_of_everything_is_averaging_every_step(method: str) -> None:
    everything = train(SPARTAStrategy("adamw", 1.0, lr=0.02, compression_method=method))
    assert torch.equal(everything.rows, train(FedAvgStrategy("adamw", H=1, lr=0.02)).rows)


def test_sparta_of_nothing_is_independent_training() -> None:
    nothing = train(SPARTAStrategy("adamw", 0.0, lr=0.02))
    same(nothing.rows, plain(shards(4), 12, adamw))
    assert nothing.tx.tolist() == [0.0] * 4
    unlike(train(SPARTAStrategy("adamw", 0.1, lr=0.02)).rows, nothing.rows)


def test_the_interval_of_sparta_counts_from_one() -> None:
    spaced = train(SPARTAStrategy("adamw", 1.0, lr=0.02, interval=5), steps=13).rows
    assert torch.equal(spaced, train(FedAvgStrategy("adamw", H=5, lr=0.02), steps=13).rows)


def test_sparta_alone_changes_nothing() -> None:
    for options in ({}, {"quantization_bits": 4}, {"compression_method": "topk"}):
        alone = train(SPARTAStrategy("adamw", 0.5, lr=0.02, **options), shards(1), 1, final_sync=True)
        same(alone.rows, plain(shards(1), 12, adamw))
        assert alone.payload.tolist() == [0.0]
        unlike(train(SPARTAStrategy("adamw", 0.5, lr=0.02, **options), shards(2), 2).rows[:1], alone.rows)


# SPARTA and DiLoCo together


def test_sparta_diloco_without_sparta_is_diloco() -> None:
    diloco = train(DiLoCoStrategy("adamw", H=4, lr=0.02), steps=14, final_sync=True)
    both = train(SPARTADiLoCoStrategy("adamw", H=4, p_sparta=0.0, lr=0.02), steps=14, final_sync=True)
    assert torch.equal(both.rows, diloco.rows) and torch.equal(both.model, diloco.model)
    assert both.tx.tolist() == diloco.tx.tolist()
    unlike(train(SPARTADiLoCoStrategy("adamw", H=4, p_sparta=0.3, lr=0.02), steps=14).model, diloco.model)


def test_sparta_diloco_of_everything_with_plain_sgd_is_ddp() -> None:
    both = train(SPARTADiLoCoStrategy("sgd", PLAIN, H=5, p_sparta=1.0, lr=0.05), steps=10)
    same(both.rows, train(SimpleReduceStrategy("sgd", lr=0.05), steps=10).rows)
    unlike(both.rows, train(DiLoCoStrategy("sgd", PLAIN, H=5, lr=0.05), steps=10).rows)


def test_sparta_diloco_that_never_reaches_an_outer_step_is_sparta() -> None:
    both = train(SPARTADiLoCoStrategy("adamw", H=100, p_sparta=0.3, lr=0.02))
    sparta = train(SPARTAStrategy("adamw", 0.3, lr=0.02))
    assert torch.equal(both.rows, sparta.rows) and both.tx.tolist() == sparta.tx.tolist()
    unlike(train(SPARTADiLoCoStrategy("adamw", H=6, p_sparta=0.3, lr=0.02)).rows, sparta.rows)


def test_a_sparta_average_right_before_the_outer_step_leaves_theta_unchanged() -> None:
    width = vector(Regressor()).numel()
    values = torch.randn(4, width, dtype=torch.float64)

    def theta(before: CommunicateOptimizeStrategy | None, values: Tensor = values) -> Tensor:
        fleet = fleet_of(vector(Regressor()).expand(4, -1))
        outer = DiLoCoStrategy(H=1).on(fleet, run_of(4))
        fleet.blocks[0].params.copy_(values)
        if before is not None:
            fleet.state.parts.clear()  # two strategies on one fleet, of which none is saved
            before.on(fleet, run_of(4)).communicate(1)
            unlike(fleet.blocks[0].params, values)
        outer.communicate(1)
        (result,) = outer.consensus() or []
        return result

    expected = theta(None)
    same(theta(SPARTAStrategy(p_sparta=0.5)), expected)
    same(theta(SPARTAStrategy(p_sparta=0.5, compression_method="topk")), expected)
    unlike(theta(None, values * 1.01), expected)


def test_sparta_comes_before_the_outer_step_and_both_at_a_step_divisible_by_h() -> None:
    both = train(SPARTADiLoCoStrategy("adamw", H=3, p_sparta=0.5, sparta_interval=2, lr=0.02), steps=6)
    width = both.model.numel()
    sizes = [event.payload_bytes / 8 for event in both.events]
    # Steps 2, 3, 4, 6 and 6: sparse, dense, sparse, sparse, dense.
    assert [size == width for size in sizes] == [False, True, False, False, True]
    assert torch.equal(both.rows, both.model.expand_as(both.rows))


# DeMo


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_demo_that_sends_everything_is_the_sign_of_the_mean_gradient(num_nodes: int) -> None:
    data, gamma = shards(num_nodes), 0.01

    def signs(models: list[nn.Module], step: int) -> None:
        for group in zip(*(m.parameters() for m in models), strict=True):
            sign = torch.stack([p.grad for p in group]).mean(0).sign()
            for p in group:
                p.grad = sign

    def plain_sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=gamma, weight_decay=0.1, foreach=False)  # type: ignore[arg-type]

    expected = plain(data, 12, plain_sgd, before=signs)
    for decay in (0.0, 0.999):  # nothing is left to decay
        strategy = DeMoStrategy(
            lr=gamma, weight_decay=0.1, compression_decay=decay, compression_topk=64, compression_chunk=8
        )
        same(train(strategy, data, num_nodes).rows, expected)
    sparse = DeMoStrategy(lr=gamma, weight_decay=0.1, compression_topk=2, compression_chunk=8)
    unlike(train(sparse, data, num_nodes).rows, expected)


# Law 3: names do not matter

PERMUTATION = [2, 0, 3, 1]  # node i becomes node PERMUTATION[i]


def one_event(strategy: CommunicateOptimizeStrategy, x: Tensor, g: Tensor, ranks: list[int]) -> Tensor:
    """Rows after one step's communication, by node: gradients through the modules, plain SGD, then the parameters."""
    start = vector(Regressor())
    fleet = fleet_of(start.expand(len(x), -1), ranks)
    strategy = copy.deepcopy(strategy)
    acting = strategy.on(fleet, run_of(len(x)))
    (block,) = fleet.blocks
    block.params.copy_(x[ranks])
    if strategy.needs_gradients:
        block.own_grads().copy_(g[ranks])
        acting.transform_gradients(1, 0.25)
        block.params.sub_(block.grads, alpha=0.25)
    acting.communicate(1)
    return block.params[torch.tensor(ranks).argsort()].clone()


NAMELESS: dict[str, CommunicateOptimizeStrategy] = {
    "ddp": SimpleReduceStrategy("sgd", lr=0.25),
    "fedavg": FedAvgStrategy("sgd", H=1),
    "diloco": DiLoCoStrategy("sgd", OptimSpec("sgd", lr=0.5), H=1),
    "sparta": SPARTAStrategy("sgd", 0.5),
    "sparta sequential": SPARTAStrategy("sgd", 0.5, compression_method="sequential"),
    "sparta+diloco": SPARTADiLoCoStrategy("sgd", PLAIN, H=1, p_sparta=0.5),
    "demo": DeMoStrategy(lr=0.25, compression_topk=1, compression_chunk=1),  # 1 x 1 cosine transform: exact
    "topk": TopKStrategy("sgd", 0.2, lr=0.25),
    "sparseloco": SparseLoCoStrategy("sgd", 1, 16, 64, bits=32, error_decay=0.5),
    "fedprox": FedProxStrategy("sgd", 0.5, 1),
    "fedopt": FedOptStrategy("sgd", "momentum", 0.5, 1),
}
# Where a choice names nodes, a relabelled fleet makes another choice: islands and clients are drawn over ids, and the
# nodes announce top-k in turn by id. Quantised sums are of scaled codes, which are not dyadic, and so is DeMo's DCT.
NAMED: dict[str, CommunicateOptimizeStrategy] = {
    "islands": FedAvgStrategy("sgd", H=1, island_size=2),
    "clients": FedAvgStrategy("sgd", H=1, client_fraction=0.5),
    "sparta topk": SPARTAStrategy("sgd", 0.2, compression_method="topk"),
}


@pytest.mark.parametrize("name", NAMELESS)
def test_relabelled_nodes_get_the_relabelled_result(name: str) -> None:
    width = vector(Regressor()).numel()
    x, g = dyadic(4, width, 1), dyadic(4, width, 2)
    inverse = torch.tensor(PERMUTATION).argsort()
    here = one_event(NAMELESS[name], x, g, [0, 1, 2, 3])
    there = one_event(NAMELESS[name], x[inverse], g[inverse], [0, 1, 2, 3])
    assert torch.equal(there[PERMUTATION], here)
    assert not torch.equal(there, here) or torch.equal(here, here[:1].expand_as(here))
    assert not torch.equal(here, x)


@pytest.mark.parametrize("name", NAMED)
def test_where_nodes_are_chosen_by_name_relabelling_chooses_others(name: str) -> None:
    width = vector(Regressor()).numel()
    x = dyadic(4, width, 1)
    here = one_event(NAMED[name], x, x, [0, 1, 2, 3])

    def relabelled(permutation: Sequence[int]) -> Tensor:
        inverse = torch.tensor(permutation).argsort()
        return one_event(NAMED[name], x[inverse], x[inverse], [0, 1, 2, 3])[list(permutation)]

    average = AveragingCommunicator(1, island_size=2)
    clients = AveragingCommunicator(1, client_fraction=0.5)
    for module in (average, clients):
        module.start(fleet_of(x), run_of(4))
    sampled = clients.clients(0)
    theta_goes_to = sampled + clients.clients(1)
    chosen = {"islands": average.islands(0), "clients": [sampled, theta_goes_to], "sparta topk": [[0]]}

    def names(permutation: Sequence[int]) -> list[set[int]]:
        groups = [{permutation[i] for i in group} for group in chosen[name]]
        return sorted(groups, key=min) if name == "islands" else groups

    for permutation in itertools.permutations(range(4)):
        keeps = names(permutation) == names(range(4))
        assert torch.equal(relabelled(permutation), here) == keeps


@pytest.mark.parametrize("name", [*NAMELESS, *NAMED, "quantised", "real demo"])
def test_where_rows_are_stored_changes_no_bit(name: str) -> None:
    """Any numbers, all strategies: the result goes by global id, not by row."""
    more = {
        "quantised": SPARTAStrategy("sgd", 0.5, quantization_bits=4),
        "real demo": DeMoStrategy(lr=0.25, compression_topk=2, compression_chunk=4),
        "signs": SignSGDStrategy("sgd", lr=0.25),
        "qsgd": QSGDStrategy("sgd", 3, bucket=10),
        "powersgd": PowerSGDStrategy("sgd", 1, min_rate=1.0),
        "2 bits": SparseLoCoStrategy("sgd", 1, 16, 64),
    }
    strategy = (NAMELESS | NAMED | more)[name]
    width = vector(Regressor()).numel()
    x, g = torch.randn(5, width, dtype=torch.float64), torch.randn(5, width, dtype=torch.float64)
    straight = one_event(strategy, x, g, [0, 1, 2, 3, 4])
    assert torch.equal(one_event(strategy, x, g, [3, 1, 4, 0, 2]), straight)
    assert not torch.equal(straight, one_event(strategy, x.flip(0), g.flip(0), [0, 1, 2, 3, 4]))


@pytest.mark.parametrize("name", ["ddp", "fedavg", "diloco", "sparta", "sparta+diloco"])
def test_a_whole_run_of_relabelled_nodes(name: str) -> None:
    data = shards(4)
    relabelled = [data[i] for i in torch.tensor(PERMUTATION).argsort().tolist()]
    here, there = train(STRATEGIES[name](), data), train(STRATEGIES[name](), relabelled)
    same(there.rows[PERMUTATION], here.rows, 1e-10)
    same(there.model, here.model, 1e-10)
    other = [data[1], data[1], data[2], data[3]]
    unlike(train(STRATEGIES[name](), other).model, here.model)


# Composition


def test_modules_act_in_the_order_given() -> None:
    outer, coarse = DiLoCoCommunicator(2), SparseCommunicator(1.0, quantization_bits=3, interval=2)
    outer_last = train(CommunicateOptimizeStrategy("sgd", [coarse, outer], lr=0.05), steps=4)
    assert torch.equal(outer_last.rows, outer_last.model.expand_as(outer_last.rows))
    coarse_last = train(CommunicateOptimizeStrategy("sgd", [outer, coarse], lr=0.05), steps=4)
    unlike(coarse_last.rows, coarse_last.model.expand_as(coarse_last.rows))
