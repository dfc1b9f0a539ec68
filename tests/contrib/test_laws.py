"""What `exogym.contrib` promises of each method, beside the methods' own files: three laws, and what is refused.

A method is equal to a reference or to another method, and each identity that it states has a test with a control. Its
bytes equal a formula, written down here again, tensor by tensor. A run repeats, goes on after a stop, and has the same
bits in several processes. A feature that its class does not list in `tried` is refused. A new method enters the tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from battery import battery, each, outcome
from battery import train as train_small
from formulas import STEPS, B, Formula, check_bytes, degree, gather, once, ring, untested
from problems import same, shards, train, unlike
from strategies import CONTRIB, METHODS

from exogym import NodeMesh, Placement
from exogym.callbacks import Every
from exogym.core.clock import StepTime
from exogym.core.combinations import check
from exogym.core.refusals import UNTRIED
from exogym.core.training.checking import checked_options
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import (
    DecoupledDiLoCoStrategy,
    DittoStrategy,
    FedAsyncStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedPerStrategy,
    FedRepStrategy,
    HALoSStrategy,
    HeLoCoStrategy,
    OptimSpec,
    PULSELoCoStrategy,
    QFedAvgStrategy,
    Strategy,
)
from exogym.strategy.registry import parse_strategy

# A reference, or an identity: those a method states in `identities`, in order, and the test of each, with a control

IDENTITIES: dict[str, list[str]] = {
    "acco": [
        "test_acco::test_n_nodes_are_one_node_with_n_batches",
        "test_acco::test_of_gradients_that_do_not_change_it_is_ddp_with_half_the_steps",
    ],
    "decoupled_diloco": [
        "test_decoupled::test_a_full_quorum_is_diloco",
        "test_decoupled::test_one_at_a_time_is_the_naive_rule",
    ],
    "desloc": [
        "test_desloc::test_without_averages_of_moments_it_is_fedavg",
        "test_desloc::test_of_sgd_with_momentum_every_step_is_ddp",
        "test_desloc::test_equal_data_are_one_node",
    ],
    "dion": [
        "test_dion::test_n_nodes_are_one_node_with_n_batches",
        "test_dion::test_the_sum_of_gradients_is_what_was_taken_out_and_what_is_kept",
        "test_dion::test_under_a_constant_gradient_the_direction_becomes_orthonormal",
    ],
    "ditto": [
        "test_personal::test_ditto_without_its_term_trains_clients_alone",
        "test_personal::test_dittos_theta_does_not_know_lambda",
    ],
    "edit": [
        "test_edit::test_edit_without_rejection_weights_and_clipping_is_diloco",
        "test_edit::test_equal_data_are_one_node",
    ],
    "fedbn": [
        "test_personal::test_without_batch_normalization_fedbn_is_fedavg",
        "test_personal::test_of_equal_data_all_is_shared_anyway",
    ],
    "feddyn": [
        "test_federated::test_the_first_round_of_feddyn_is_fedprox_with_a_server_step_of_two",
        "test_federated::test_feddyns_h_is_the_mean_of_all_clients_terms",
        "test_federated::test_the_minimum_of_all_is_found_where_others_are_drawn_aside",
    ],
    "fednova": ["test_federated::test_fednova_of_equal_work_is_fedavg"],
    "fedper": [
        "test_personal::test_fedper_of_nothing_is_fedavg",
        "test_personal::test_of_equal_data_all_is_shared_anyway",
    ],
    "fedrep": [
        "test_personal::test_fedrep_without_head_steps_is_fedavg_of_a_frozen_head",
        "contrib/test_laws::test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter",
    ],
    "gpa": [
        "test_outer_steps::test_gpa_without_averaging_is_ddp",
        "test_outer_steps::test_gpa_of_sgd_with_equal_shares_is_nesterovs_method",
    ],
    "choco": [
        "test_error_memory::test_choco_that_sends_all_is_gossip",
        "test_error_memory::test_choco_of_one_node_is_the_inner_optimizer_and_sends_nothing",
        "test_error_memory::test_choco_keeps_the_mean_and_brings_nodes_together",
    ],
    "ef21": [
        "test_error_memory::test_ef21_that_sends_all_is_ddp",
        "test_error_memory::test_ef21_of_constant_gradients_finds_their_mean",
        "test_error_memory::test_ef21_steps_along_the_mean_of_the_estimates",
    ],
    "onebit_adam": [
        "test_error_memory::test_onebit_adam_that_warms_up_to_the_end_is_ddp_with_adam",
        "test_error_memory::test_onebit_adam_of_one_node_is_adam_whose_variance_is_frozen",
        "test_error_memory::test_onebit_adam_sends_in_all_what_it_keeps_the_rest_of",
    ],
    "cocktail": [
        "test_error_memory::test_cocktail_that_sends_all_is_an_average_at_every_step",
        "test_error_memory::test_cocktail_of_one_node_is_the_inner_optimizer",
        "test_error_memory::test_cocktail_keeps_the_mean_and_what_servers_hold_back",
    ],
    "fedasync": [
        "test_async::test_fedasync_of_one_node_is_its_optimizer_or_the_naive_rule",
        "test_async::test_fedasync_of_one_node_is_its_optimizer_or_the_naive_rule",
        "test_async::test_fedasync_without_discount_is_constant",
    ],
    "halos": [
        "test_halos::test_one_island_below_a_server_that_takes_all_is_asynchronous_diloco",
        "test_halos::test_islands_that_merge_nothing_are_fleets_of_their_own",
    ],
    "heloco": ["test_async::test_heloco_without_correction_and_momentum_is_the_naive_rule"],
    "pier": [
        "test_outer_steps::test_pier_without_warm_up_and_decay_is_diloco",
        "test_outer_steps::test_pier_that_warms_up_to_the_end_is_ddp",
    ],
    "pulseloco": [
        "test_pulseloco::test_where_every_change_is_sent_it_is_diloco_bit_for_bit",
        "test_pulseloco::test_what_is_sent_and_what_is_kept_add_up_to_all_differences",
        "contrib/test_laws::test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter",
    ],
    "qfedavg": [
        "test_qfedavg::test_without_q_it_is_fedavg_with_equal_weights",
        "test_qfedavg::test_one_client_takes_a_step_toward_its_result",
        "test_qfedavg::test_quadratic_clients_go_to_the_fair_minimum",
    ],
    "qreduce": [
        "test_compressed::test_a_quantised_mean_is_off_by_half_a_step_on_each_way",
        "test_compressed::test_numbers_on_the_grid_are_averaged_exactly",
    ],
    "sgp": [
        "test_decentralised::test_push_on_a_complete_graph_is_ddp_with_sgd",
        "test_decentralised::test_push_keeps_the_sums_and_finds_the_mean",
        "test_decentralised::test_push_keeps_the_sums_and_finds_the_mean",
        "test_decentralised::test_push_of_one_node_is_the_inner_optimizer",
    ],
    "slowmo": ["test_outer::test_slowmo_without_momentum_is_fedavg_and_with_a_constant_rate_diloco"] * 2,
    "snoo": [
        "test_outer_steps::test_snoo_with_outer_rate_1_and_no_momentum_is_the_inner_optimizer",
        "test_outer_steps::test_snoo_of_one_node_is_diloco_of_one_node",
    ],
}


def test_every_identity_has_its_test() -> None:
    stated = {name: kind.identities for name, kind in METHODS.items()}
    assert untested(stated, IDENTITIES) == []
    assert all(stated.values())


ALIKE: dict[str, Callable[[], Strategy]] = {
    "pulseloco": lambda: PULSELoCoStrategy("adamw", H=4, lr=2e-3),
    "qfedavg": lambda: QFedAvgStrategy("sgd", 1.0, 4, lr=0.02),
    "ditto": lambda: DittoStrategy("adamw", 0.5, 4, lr=0.02),
    "fedper": lambda: FedPerStrategy("adamw", 1, 4, lr=0.02),
    "fedrep": lambda: FedRepStrategy("adamw", 1, 4, body_steps=2, lr=0.02),
    "fedbn": lambda: FedBNStrategy("adamw", 4, lr=0.02),
    "feddyn": lambda: FedDynStrategy("adamw", 0.1, 4, lr=0.02),
    "fednova": lambda: FedNovaStrategy(OptimSpec("sgd", momentum=0.9), 4, lr=0.01, keep_inner_state=False),
}


@pytest.mark.parametrize("name", ALIKE)
def test_with_the_same_data_everywhere_the_number_of_nodes_does_not_matter(name: str) -> None:
    one = train(ALIKE[name](), shards(1, same=True), 1)
    for num_nodes in (2, 3):
        many = train(ALIKE[name](), shards(num_nodes, same=True), num_nodes)
        same(many.rows, one.rows.expand_as(many.rows))
        same(many.model, one.model)
    unlike(train(ALIKE[name](), shards(3), 3).model, one.model)


# Bytes equal a formula


def sharded(P: int, n: int) -> float:
    piece = math.ceil(P / n)
    return math.ceil(piece * 4 / 8) + 4 * math.ceil(piece / 10)


def drawn(w: int) -> int:
    """CocktailSGD with half of a shard of w entries, of these two in five, in 4 bits: a bit each, codes, scales."""
    m = round(0.5 * w)
    k = max(1, int(0.4 * m))
    return math.ceil(m / 8) + math.ceil(k * 4 / 8) + 4 * math.ceil(k / 3)


# text; (shapes of the tensors, P, N) -> payload of a node; what it sends, as a multiple of that
BYTES: dict[str, Formula] = {
    "edit": (
        "edit:H=3:temperature=none:reject=none:clip=1",
        lambda t, P, n: 2 * P * B,
        ring,
    ),
    "feddyn": ("feddyn:H=2", lambda t, P, n: 3 * P * B, ring),
    "fedper": ("fedper:H=2", lambda t, P, n: 3 * (P - math.prod(t[2]) - math.prod(t[3])) * B, ring),  # not the last
    "fedrep": ("fedrep:H=3", lambda t, P, n: 2 * (P - math.prod(t[2]) - math.prod(t[3])) * B, ring),
    "fedbn": ("fedbn:H=3", lambda t, P, n: 2 * P * B, ring),  # of a model without batch normalization
    "ditto": ("ditto:H=3", lambda t, P, n: 2 * P * B, ring),
    "slowmo": ("slowmo:H=3", lambda t, P, n: 2 * P * B, ring),
    "pier": ("pier:H=2:warmup=0.5", lambda t, P, n: (4 + 1) * P * B, ring),
    "acco": ("acco", lambda t, P, n: STEPS * P * B, ring),
    "gpa": ("gpa", lambda t, P, n: STEPS * P * B, ring),
    "snoo": ("snoo:H=2", lambda t, P, n: STEPS * P * B, ring),
    "desloc": ("desloc:H=1:H_u=2:H_v=3", lambda t, P, n: (6 + 3 + 2) * P * B, ring),
    "qfedavg": ("qfedavg:H=3", lambda t, P, n: 2 * (P * B + 8), ring),
    "fednova": ("fednova:H=3", lambda t, P, n: 2 * (P * B + 8), ring),
    # at this rate BF16 sees every entry change
    "pulseloco": ("pulseloco:H=3:lr=0.1", lambda t, P, n: 2 * (8 + P * (B + 4)), gather),
    "ef21": ("ef21:density=0.3", lambda t, P, n: STEPS * round(0.3 * P) * (B + 4), gather),
    # the compressed steps have another factor: test_onebit_adam_sends_bits_and_scales
    "onebit_adam": ("onebit_adam:warmup=1", lambda t, P, n: STEPS * P * B, ring),
    "cocktail": (
        "cocktail:p=0.5:topk=0.4:bucket=3",
        lambda t, P, n: STEPS * (n + 1) * drawn(math.ceil(P / n)),
        lambda n: 2 * (n - 1) / (n + 1),
    ),
    "qreduce": (  # a piece for each, and then one's own to all
        "qreduce:bits=4:bucket=10",
        lambda t, P, n: STEPS * (n + 1) * sharded(P, n),
        lambda n: 2 * (n - 1) / (n + 1),
    ),
    "dion": (  # the first matrix, of rank 2, is worth it in two factors, the rest is sent as it is
        "dion:rank_fraction=0.25",
        lambda t, P, n: STEPS * (2 * sum(t[0]) + P - math.prod(t[0])) * B,
        ring,
    ),
    "choco": ("choco:H=2:density=0.3", lambda t, P, n: 3 * degree(n) * round(0.3 * P) * (B + 4), once),
    "sgp": ("sgp:H=2", lambda t, P, n: 3 * (P * B + 8), once),
    "fedasync": ("fedasync:H=2", lambda t, P, n: 3 * P * B, once),
    "halos": ("halos:H=2:island_size=1:accumulation=3", lambda t, P, n: 4 * P * B, once),  # every third D
    "heloco": ("heloco:H=2", lambda t, P, n: 3 * P * B, once),
    "decoupled_diloco": ("decoupled_diloco:H=2:quorum=1", lambda t, P, n: 3 * P * B, once),
}


def test_every_method_has_its_formula() -> None:
    assert set(BYTES) == set(METHODS)


@pytest.mark.parametrize("n", each([1, 2, 3, 5, 8], fast=[1, 3, 8]))
@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_formula(name: str, n: int) -> None:
    check_bytes(BYTES[name], n)


# A run repeats, goes on, and has the same bits in several processes

CLOCKED: dict[str, Callable[[], Strategy]] = {
    "decoupled_diloco": lambda: DecoupledDiLoCoStrategy(lr=0.02, H=5, quorum=2, grace_s=0.04, lr_scheduler="cosine"),
    "fedasync": lambda: FedAsyncStrategy(lr=0.05, H=5, discount="hinge", a=2.0, b=1),
    "halos": lambda: HALoSStrategy(lr=0.02, H=5, island_size=1, accumulation=2),
    "heloco": lambda: HeLoCoStrategy(lr=0.02, H=5, outer_lr=0.3),
}
SAMPLED: dict[str, Callable[[], Strategy]] = {
    "fednova sampling": lambda: FedNovaStrategy(lr=0.1, H=4, client_fraction=0.5),
    "feddyn sampling": lambda: FedDynStrategy(lr=0.1, H=4, client_fraction=0.5),
    "qfedavg sampling": lambda: QFedAvgStrategy("sgd", 1.0, H=4, lr=0.1, client_fraction=0.5),
    "fedper sampling": lambda: FedPerStrategy(lr=0.1, H=4, client_fraction=0.5),
    "fedbn sampling": lambda: FedBNStrategy(lr=0.1, H=4, client_fraction=0.5),
}
SPEEDS = StepTime([0.1, 0.05, 0.02, 0.03], sigma=0.3)
MAKERS = {name: entry.make for name, entry in CONTRIB.items()} | CLOCKED | SAMPLED


def test_every_method_is_run() -> None:
    assert {type(make()) for make in MAKERS.values()} == set(METHODS.values())


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_repeats_goes_on_after_a_stop_and_has_the_same_bits_in_two_processes(name: str, tmp_path: Path) -> None:
    """Nodes of unequal speed, stopped inside of a round in two processes, and gone on with in one.

    The control: another seed, other bits.
    """

    def run(stops: bool = False, **options: Any) -> Any:
        look = Every(13, lambda loop: stops)
        timed = {"network": "1Gbps,1ms", "step_seconds": SPEEDS, "val_interval": 7}
        return outcome(train_small(MAKERS[name](), max_steps=24, callbacks=[look], **timed | options))

    wanted = run()
    run(stops=True, save_dir=tmp_path, processes=2)
    for got, want in zip(run(save_dir=tmp_path, resume=True), wanted, strict=True):
        assert got == want
    assert run(seed=1)[0] != wanted[0]


@pytest.mark.parametrize("name", CONTRIB)
def test_a_method_learns_and_sends_its_payload(name: str) -> None:
    assert battery(name).learns() and battery(name).bytes()


# What was not tried is refused

GIVEN: dict[str, dict[str, Any]] = {
    "faults": {"faults": Faults(absent={1: [(2, 3)]})},
    "bad_nodes": {"faults": Faults(bad_nodes=[1])},
    "balance": {"balance": "nodes"},
    'compute="vmap"': {"compute": "vmap"},
    'precision="fp16"': {"precision": "fp16"},
    'on_nonfinite="skip"': {"on_nonfinite": "skip"},
    "node": {"node": NodeMesh(shard=2)},
    "engine": {"placement": Placement(engine="ray")},
    "client_state_memory": {"placement": Placement(client_state_memory=0), "save_dir": "kept"},
}
ASKED = ("attach", "min_hosts", "node in several processes")  # no options of `fit`


def refused(kind: type[Strategy], feature: str) -> str:
    """Return why a method is refused with a feature; "" if it is not."""
    options = FitOptions(kind(), num_nodes=4, batch_size=8)
    try:
        if feature in ASKED:
            check(options.features() | {feature: feature})
        else:
            checked_options(dataclasses.replace(options, **GIVEN[feature]))
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_does_not_list_is_refused_before_training(name: str) -> None:
    kind, told = METHODS[name], "has not been tried: use a strategy of the core (docs/promises.md), or leave "
    assert "tried" in vars(kind) and set(kind.tried) <= set(UNTRIED)
    assert {*GIVEN, *ASKED} == set(UNTRIED)
    for feature in UNTRIED:
        said = refused(kind, feature)
        if feature in kind.tried:
            assert said == ""
        else:
            assert said.startswith(f"{kind.__name__} with ") and told in said, (feature, said)


def test_a_strategy_of_the_core_is_tried_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = type(parse_strategy("ddp"))
    assert ddp.tried is None and [refused(ddp, feature) for feature in UNTRIED] == [""] * len(UNTRIED)
    monkeypatch.setattr(ddp, "tried", ("faults",))
    assert [feature for feature in UNTRIED if not refused(ddp, feature)] == ["faults"]


def test_what_every_run_has_is_not_refused(tmp_path: Path) -> None:
    options = {"network": "1Gbps", "step_seconds": 0.1, "gradient_accumulation": 2, "minibatch_size": 4}
    options |= {"max_steps": 3, "run_dir": tmp_path / "run", "precision": "bf16", "partitioner": "iid"}
    for kind in METHODS.values():
        checked_options(FitOptions(kind(), num_nodes=4, batch_size=8, processes=2, **options))
