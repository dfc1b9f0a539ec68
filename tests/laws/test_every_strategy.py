"""What is asked of every strategy by name: a test for each identity that it states, and bytes equal to a formula.

A new strategy of the core has to enter both tables; tests/contrib/test_laws.py has those of the other methods. The
formulas are written down here again, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from battery import each
from formulas import STEPS, B, Formula, Shapes, check_bytes, degree, gather, once, ring, untested
from problems import Regressor, adamw, fleet_of, plain, run_of, same, shards, train, unlike, vector
from strategies import CORE

from exogym.strategy import (
    FedAvgStrategy,
    FedProxStrategy,
    GossipStrategy,
    MuLoCoStrategy,
    OptimSpec,
    TopKStrategy,
)

PLAIN = OptimSpec(torch.optim.SGD, lr=1.0)

# Identities: those a strategy states in `identities`, in order, and the test of each, which has a control that fails

IDENTITIES: dict[str, list[str]] = {
    "async_diloco": [
        "test_async::test_all_from_one_theta_is_diloco",
        "test_async::test_one_node_is_diloco",
        "test_async::test_without_momentum_it_is_asynchronous_fedavg",
    ],
    "ddp": [
        "test_identities::test_n_nodes_are_one_node_with_n_batches",
        "test_ddp::test_equals_torchs_distributed_data_parallel",
    ],
    "demo": [
        "test_identities::test_demo_that_sends_everything_is_the_sign_of_the_mean_gradient",
        "test_demo::test_what_is_sent_and_what_is_kept_add_up_to_all_gradients",
    ],
    "diloco": [
        "test_identities::test_diloco_with_plain_outer_sgd_is_fedavg",
        "test_identities::test_diloco_every_step_is_ddp_with_the_outer_momentum",
        "test_identities::test_one_node_with_plain_outer_sgd_is_the_inner_optimizer",
        "test_identities::test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter",
    ],
    "fedavg": [
        "test_identities::test_local_sgd_every_step_is_ddp_with_plain_sgd",
        "test_identities::test_islands_of_everyone_and_of_one",
        "test_identities::test_islands_of_everyone_and_of_one",
        "test_identities::test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter",
    ],
    "fedopt": [
        "test_federated::test_the_servers_plain_step_is_fedavg",
        "test_federated::test_fedavgm_is_diloco_with_heavy_ball",
        "test_federated::test_far_from_adaptive_it_is_fedavg",
        "test_federated::test_one_client_and_one_step_is_torchs_adam",
    ],
    "fedprox": [
        "test_federated::test_fedprox_without_its_term_is_fedavg_bit_by_bit",
        "test_federated::test_fedprox_of_one_step_is_ddp",
        "test_federated::test_fedprox_comes_to_rest_between_theta_and_the_clients_minimum",
    ],
    "gossip": [
        "test_decentralised::test_on_a_complete_graph_it_is_ddp",
        "test_decentralised::test_one_node_is_the_inner_optimizer_and_pairs_are_islands_of_two",
        "laws/test_every_strategy::test_gossip_keeps_the_mean_over_the_nodes",
    ],
    "muloco": [
        "test_outer::test_muloco_is_diloco_with_muon_inside",
        "test_outer::test_muloco_of_one_node_with_plain_outer_sgd_is_torchs_muon",
        "laws/test_every_strategy::test_equal_data_are_one_node",
    ],
    "noloco": [
        "test_decentralised::test_noloco_in_one_group_is_diloco_with_a_heavy_ball",
        "test_decentralised::test_without_momentum_it_averages_models_in_pairs",
        "test_decentralised::test_equal_data_keep_nodes_equal",
    ],
    "post_local_sgd": [
        "test_post_local_sgd::test_before_the_switch_it_is_ddp_and_without_one_local_sgd",
        "test_post_local_sgd::test_before_the_switch_it_is_ddp_and_without_one_local_sgd",
        "test_post_local_sgd::test_averages_at_every_step_are_ddp_with_sgd",
        "test_post_local_sgd::test_it_is_torchs_post_local_sgd",
    ],
    "powersgd": [
        "test_compressed::test_where_nothing_is_lost_it_is_ddp",
        "test_compressed::test_equals_torchs_powersgd_hook",
        "test_compressed::test_what_is_sent_and_what_is_kept_add_up_to_all_gradients",
    ],
    "qsgd": [
        "test_compressed::test_where_nothing_is_lost_it_is_ddp",
        "test_compressors::test_levels_are_right_in_the_mean_and_within_the_bound_of_the_variance",
    ],
    "scaffold": [
        "test_federated::test_the_first_round_of_scaffold_is_fedavg_and_the_second_is_not",
        "test_federated::test_scaffold_of_one_step_is_ddp",
        "test_federated::test_scaffold_of_equal_data_is_fedavg",
        "test_federated::test_the_servers_variate_is_the_mean_of_all_clients",
    ],
    "signsgd": [
        "test_compressed::test_the_vote_is_the_sign_of_the_sum_of_signs",
        "test_compressed::test_what_is_sent_and_what_is_kept_add_up_to_all_gradients",
    ],
    "sparseloco": [
        "test_sparseloco::test_everything_sent_is_diloco_with_plain_outer_sgd_bit_by_bit",
        "test_sparseloco::test_what_is_sent_and_what_is_kept_add_up_to_all_differences",
        "test_sparseloco::test_every_step_it_is_top_k_with_error_feedback",
    ],
    "sparta": [
        "test_identities::test_sparta_of_everything_is_averaging_every_step",
        "test_identities::test_sparta_of_nothing_is_independent_training",
        "test_identities::test_sparta_alone_changes_nothing",
    ],
    "sparta_diloco": [
        "test_identities::test_sparta_diloco_without_sparta_is_diloco",
        "test_identities::test_sparta_diloco_of_everything_with_plain_sgd_is_ddp",
        "test_identities::test_sparta_diloco_that_never_reaches_an_outer_step_is_sparta",
    ],
    "streaming_diloco": [
        "test_streaming_diloco::test_one_fragment_is_diloco_bit_for_bit",
        "test_streaming_diloco::test_one_fragment_is_diloco_bit_for_bit",
        "test_streaming_diloco::test_with_alpha_one_nodes_train_alone",
        "test_streaming_diloco::test_torchfts_traces",
    ],
    "topk": [
        "test_compressed::test_where_nothing_is_lost_it_is_ddp",
        "test_compressed::test_what_is_sent_and_what_is_kept_add_up_to_all_gradients",
        "laws/test_every_strategy::test_one_node_is_the_inner_optimizer",
    ],
}


def test_every_identity_has_its_test() -> None:
    stated = {name: kind.identities for name, kind in CORE.items()}
    assert untested(stated, IDENTITIES) == []
    assert all(stated.values())


def test_an_identity_without_a_test_would_be_noticed() -> None:
    tests = {"a": ["test_ddp::test_equals_torchs_distributed_data_parallel"], "b": ["test_ddp::test_of_nothing"]}
    found = untested({"a": ["one", "two"], "b": ["three"], "c": ["four"]}, tests)
    assert found == ["a: two", "b: test_ddp::test_of_nothing is no test with a control", "c: four"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MuLoCoStrategy(H=4, lr=0.02),
        lambda: MuLoCoStrategy(H=1, outer_optim=PLAIN, lr=0.02),
    ],
)
def test_equal_data_are_one_node(make: Callable[[], Any]) -> None:
    one = train(make(), shards(1, same=True), 1)
    many = train(make(), shards(3, same=True), 3)
    same(many.rows, one.rows.expand_as(many.rows), 1e-10)
    same(many.model, one.model, 1e-10)
    unlike(train(make(), shards(3), 3).model, one.model)


def test_one_node_is_the_inner_optimizer() -> None:
    alone = plain(shards(1), 12, adamw)
    same(train(TopKStrategy("adamw", 1.0, lr=0.02), shards(1), 1).rows, alone)
    unlike(train(TopKStrategy("adamw", 0.2, lr=0.02), shards(1), 1).rows, alone)


@pytest.mark.parametrize("graph", ["ring", "torus", "random", "matching"])
def test_gossip_keeps_the_mean_over_the_nodes(graph: str) -> None:
    """With a rate of zero nothing else moves it; nodes themselves come nearer to it."""
    n, width = 6, vector(Regressor()).numel()
    rows = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fleet = fleet_of(rows.clone())
    strategy = GossipStrategy("sgd", graph, lr=0.0)
    acting = strategy.on(fleet, run_of(n))
    for step in range(1, 4):
        acting.communicate(step)
    now = fleet.blocks[0].params
    same(now.mean(0), rows.mean(0), 1e-13)
    unlike(now, rows)
    assert now.var(0).sum() < 0.9 * rows.var(0).sum()


def test_a_heavy_proximal_term_holds_clients_where_they_began() -> None:
    """mu to infinity with lr mu < 2: what a client moves falls as 1 / mu."""
    moved = []
    for mu in (1e2, 1e3, 1e4):
        end = train(FedProxStrategy("sgd", mu, 6, lr=1 / mu), shards(3), 3).model
        moved.append(float((end - vector(Regressor())).norm()))
    assert 9 < moved[0] / moved[1] < 11 and 9.9 < moved[1] / moved[2] < 10.1
    free = train(FedAvgStrategy("sgd", H=6, lr=1e-2), shards(3), 3).model
    assert float((free - vector(Regressor())).norm()) > 3 * moved[0]


# Bytes: of a node over six steps, handed over and sent, for fleets and models of all sizes


def divisor(n: int, most: int) -> int:
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def blocks(shape: Sequence[int], side: int) -> tuple[int, int]:
    """How many blocks a tensor is cut into, and the entries of one."""
    if len(shape) < 2:
        size = divisor(math.prod(shape), side)
        return math.prod(shape) // size, size
    h, w = divisor(shape[0], side), divisor(shape[1], side)
    return math.prod(shape) // (h * w), h * w


def sparse(shape: Sequence[int]) -> int:
    """SparseLoCo with 4 of each 16, 2 bits: codes, places, a table."""
    count, size = blocks(shape, 4) if len(shape) > 1 else (math.prod(shape) // (d := divisor(math.prod(shape), 16)), d)
    kept, place = count * max(1, round(4 * size / 16)), math.ceil(math.log2(size))
    return math.ceil(kept * place / 8) + math.ceil(kept * 2 / 8) + 16


def sequential(P: int) -> int:
    """SPARTA's chunks of six steps, in turn; the first of four are larger where four do not divide P."""
    return sum((P + 3 - k % 4) // 4 for k in range(STEPS))


# text; (shapes of the tensors, P, N) -> payload of a node; what it sends, as a multiple of that
BYTES: dict[str, Formula] = {
    "ddp": ("ddp", lambda t, P, n: STEPS * P * B, ring),
    "diloco": ("diloco:H=3", lambda t, P, n: 2 * P * B, ring),
    "muloco": ("muloco:H=2", lambda t, P, n: 3 * P * B, ring),
    "fedavg": ("fedavg:H=3", lambda t, P, n: 2 * P * B, ring),
    "fedprox": ("fedprox:H=2", lambda t, P, n: 3 * P * B, ring),
    "fedopt": ("fedopt:H=3", lambda t, P, n: 2 * P * B, ring),
    "post_local_sgd": ("post_local_sgd:H=2:start_step=3", lambda t, P, n: (3 + 1) * P * B, ring),
    "scaffold": ("scaffold:H=3", lambda t, P, n: 2 * 2 * P * B, ring),
    "sparta": ("sparta:p_sparta=0.25:compression_method=sequential", lambda t, P, n: sequential(P) * B, ring),
    "sparta_diloco": (
        "sparta_diloco:H=3:p_sparta=0.25:compression_method=sequential",
        lambda t, P, n: sequential(P) * B + 2 * P * B,
        ring,
    ),
    "streaming_diloco": (  # both layers twice, of two tensors each: after steps 3 and 6, and after 1 and 4
        "streaming_diloco:H=3:bits=4",
        lambda t, P, n: sum(2 * (math.ceil(sum(map(math.prod, layer)) * 4 / 8) + 4 * 2) for layer in (t[:2], t[2:])),
        gather,
    ),
    "demo": (  # places fit into a byte
        "demo:compression_topk=3:compression_chunk=4",
        lambda t, P, n: STEPS * sum(c * min(3, size) * (B + 1) for c, size in (blocks(shape, 4) for shape in t)),
        gather,
    ),
    "sparseloco": ("sparseloco:H=3:topk=4:chunk=16", lambda t, P, n: 2 * sum(map(sparse, t)), gather),
    "topk": ("topk:density=0.3", lambda t, P, n: STEPS * round(0.3 * P) * (B + 4), gather),
    "qsgd": (
        "qsgd:levels=8:bucket=10",
        lambda t, P, n: STEPS * (math.ceil(P * 5 / 8) + 4 * math.ceil(P / 10)),
        gather,
    ),
    "signsgd": (
        "signsgd:error_feedback=true",
        lambda t, P, n: STEPS * (math.ceil(P / 8) + 4 * len(t)),
        gather,
    ),
    "powersgd": (  # the first matrix is worth it, the rest is sent as it is
        "powersgd:rank=1:start_step=2",
        lambda t, P, n: 2 * P * B + 4 * (sum(t[0]) + P - math.prod(t[0])) * B,
        ring,
    ),
    "gossip": ("gossip:H=2", lambda t, P, n: 3 * degree(n) * P * B, once),
    "noloco": ("noloco:H=3", lambda t, P, n: 2 * 2 * P * B * (n // 2 * 2) / n, once),  # one of an odd number is alone
    "async_diloco": ("async_diloco:H=3", lambda t, P, n: 2 * P * B, once),
}


def test_every_strategy_has_its_formula() -> None:
    assert set(BYTES) == set(CORE)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", each(BYTES))
def test_bytes_are_those_of_the_formula(name: str, n: int) -> None:
    check_bytes(BYTES[name], n, each_node=name != "noloco")  # where who is alone follows from the draws


def test_another_number_of_bytes_would_be_noticed() -> None:
    """The control: the formulas tell models, fleets and strategies apart."""

    def told(shapes: Shapes, n: int) -> dict[str, float]:
        P = sum(map(math.prod, shapes))
        return {name: payload(shapes, P, n) for name, (_, payload, _) in BYTES.items()}

    small, large = ([(h, 6), (h,), (1, h), (1,)] for h in (5, 8))
    assert all(told(small, 3)[name] != told(large, 3)[name] for name in BYTES)
    assert len(set(told(large, 3).values())) >= 14
