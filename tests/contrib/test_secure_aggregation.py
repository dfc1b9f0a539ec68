"""Secure aggregation: masks cancel exactly, drop-outs are unmasked by their shares, and all that is sent is counted."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from battery import outcome, plain_model, train
from wrapped import made, parsed

from exogym.contrib.secure_sums import PRIME, SecureAggregation, Seeds, recovered
from exogym.core.communicator import Communicator
from exogym.errors import ArgumentError, TrainingError
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy

SIZES = (1, 2, 3, 5, 8)
WIDTH = 7


def secure(n: int, **options: Any) -> Communicator:
    comm = Communicator(range(n), n)
    comm.secure = SecureAggregation(**options)
    return comm


def fixed_mean(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The mean of the values rounded to fixed point, with no masks anywhere."""
    scale = 2.0**bits
    return (x.double() * scale).round().sum(0) / scale / len(x)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("bits", "fraction"), [(64, 40), (32, 16)])
def test_masks_cancel_exactly(n: int, bits: int, fraction: int) -> None:
    x = torch.randn(n, WIDTH, dtype=torch.float64) * 3
    got = secure(n, bits=bits).all_reduce(x)
    assert torch.equal(got[0], fixed_mean(x, fraction))
    torch.testing.assert_close(got[0], x.mean(0), rtol=0, atol=2.0 ** -(fraction + 1))
    for seed in (1, 2):  # no key changes a bit
        assert torch.equal(secure(n, bits=bits, seed=seed).all_reduce(x), got)


def test_weights() -> None:
    x, weights = torch.randn(4, 3, dtype=torch.float64), torch.tensor([1.0, 5.0, 2.0, 2.0])
    wanted = Communicator(range(4), 4).all_reduce(x, weights=weights)
    torch.testing.assert_close(secure(4).all_reduce(x, weights=weights), wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_those_who_drop_out_are_unmasked_and_left_out(n: int) -> None:
    x = torch.randn(n, WIDTH, dtype=torch.float64)
    for lost in range(n - (n // 2 + 1) + 1):
        comm = secure(n)
        comm.present = list(range(lost, n))  # type: ignore[misc]
        got = comm.all_reduce(x)
        assert torch.equal(got[-1], fixed_mean(x[lost:], 40))
        assert torch.equal(got[:lost], x[:lost])
        assert comm.ledger.tx_bytes[:lost].tolist() == [0.0] * lost
    comm.present = list(range(n // 2))  # type: ignore[misc]
    with pytest.raises(TrainingError, match=rf"{n // 2} of {n} nodes came through, but {n // 2 + 1} are needed"):
        comm.all_reduce(x)


def test_without_the_masks_of_those_who_dropped_out_the_sum_is_noise() -> None:
    """The control: what the server adds up before it unmasks anything, and with the wrong shares."""
    method, members, came = SecureAggregation(), list(range(5)), [0, 2, 3, 4]
    seeds = Seeds(0, 0, members)
    masked = torch.zeros(WIDTH, dtype=torch.int64)
    for u in came:
        masked += method._masks(seeds, u, WIDTH)
    left = method._unmasking(seeds, came, WIDTH)
    assert torch.equal(masked, left) and left.double().abs().min() > 2**40
    assert not torch.equal(masked, method._unmasking(Seeds(1, 0, members), came, WIDTH))


def test_what_one_node_sends_tells_nothing() -> None:
    """A masked vector is uniform over the ring, whatever is in it, and one member's masks alone do not cancel."""
    method, seeds = SecureAggregation(), Seeds(0, 0, [0, 1, 2])
    masks = [method._masks(seeds, u, 4000) for u in range(3)]
    for mask in masks:
        bits = np.unpackbits(mask.numpy().view(np.uint8))
        assert abs(bits.mean() - 0.5) < 0.01
    pairwise = sum(masks) - sum(method._drawn(seeds.own[u], 4000) for u in range(3))
    assert not pairwise.any() and (masks[0] - method._drawn(seeds.own[0], 4000)).any()


def test_secrets_come_back_from_any_t_shares_and_from_no_fewer() -> None:
    members = [3, 4, 7, 8, 9]
    seeds = Seeds(5, 2, members)
    shares, secret = seeds.shares_of_own(7), seeds.own[7]
    assert secret < PRIME and seeds.agreed(3, 9) == seeds.agreed(9, 3) != seeds.agreed(3, 8)
    for came in ([3, 4, 7], [4, 8, 9], [3, 7, 9], members):
        assert recovered(shares, came, members) == secret
    assert recovered(shares, [4, 8], members) != secret
    assert pow(3, recovered(seeds.shares_of_secret(8), [3, 4, 9], members), PRIME) == seeds.public[8]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("bits", "width"), [(64, 1), (64, 7), (32, 7)])
def test_bytes(n: int, bits: int, width: int) -> None:
    comm = secure(n, bits=bits)
    comm.all_reduce(torch.ones(n, width))
    up = 64 + 80 * (n - 1) + width * bits / 8 + 32 * (n - 1)
    down = 64 * (n - 1) + 80 * (n - 1) + width * 4
    assert comm.ledger.tx_bytes.tolist() == comm.ledger.payload_bytes.tolist() == [up if n > 1 else 0.0] * n
    assert comm.ledger.rx_bytes.tolist() == [down if n > 1 else 0.0] * n
    strategy = made(DiLoCoStrategy, H=10, secure_aggregation=SecureAggregation(bits=bits))
    traffic = strategy.plan(width, n, 4).traffic
    for kind, wanted in (("push", up), ("pull", down)):
        assert sum(t.payload_bytes for t in traffic if t.kind == kind) == wanted
    assert {t.every_steps for t in traffic} == {10}


def test_values_that_do_not_fit_are_refused() -> None:
    x = torch.full((4, 2), 9000.0)
    with pytest.raises(ArgumentError, match=r"a value of 9e\+03 does not fit. A sum of 4 values in 32 bits"):
        secure(4, bits=32).all_reduce(x)
    assert secure(4).all_reduce(x)[0, 0] == secure(4, bits=32, fraction_bits=8).all_reduce(x)[0, 0] == 9000
    for bad in (math.nan, math.inf):
        with pytest.raises(ArgumentError, match="does not fit"):
            secure(4).all_reduce(torch.full((4, 2), bad))


# Whole runs

RUN = {"max_steps": 9, "val_interval": None, "batch_size": 4}
NAMES = (
    "ddp", "diloco:H=3", "fedavg:H=3", "fedavg:H=3:island_size=2", "fedavg:H=3:client_fraction=0.8",
    "sparta:p_sparta=0.3",
)  # fmt: skip


def run(name: str, secure: bool = True, **options: Any) -> Any:
    """Train with SGD, which does not make much of rounding."""
    strategy = parsed(f"{name}:inner_optim=sgd:secure_aggregation={str(secure).lower()}", lr=0.1)
    return train(strategy, model=plain_model(), **RUN | options)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_the_plain_one_up_to_rounding(name: str) -> None:
    nodes = {"num_nodes": 3 if "island" not in name else 4}
    losses = [run(name, secure, **nodes).history.last["val_loss"] for secure in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", ["ddp", "diloco:H=3", "fedavg:H=3:client_fraction=0.8"])
def test_no_layout_no_stop_and_no_fault_changes_anything(name: str, tmp_path: Any) -> None:
    faults = Faults({3: [(4, 8)]}, lost={} if name == "ddp" else {1: [3]})
    wanted = run(name, faults=faults)
    other = run(name, faults=faults, processes=2)
    assert (outcome(other)[0], other.traffic) == (outcome(wanted)[0], wanted.traffic)
    run(name, faults=faults, max_steps=5, save_dir=tmp_path)
    again = run(name, faults=faults, save_dir=tmp_path, resume=True, max_stretch=1)
    assert (outcome(again)[0], again.traffic) == (outcome(wanted)[0], wanted.traffic)
    plain = run(name, secure=False, faults=faults)
    assert wanted.history.last["val_loss"] == pytest.approx(plain.history.last["val_loss"], rel=1e-5)


def test_where_too_few_come_through_the_run_says_so() -> None:
    with pytest.raises(TrainingError, match="2 of 4 nodes came through, but 3 are needed"):
        run("diloco:H=3", faults=Faults({2: [(2, None)], 3: [(2, None)]}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("demo:secure_aggregation=true", "does not send sums alone, but DCTMomentum, all_gather"),
        ("sparta:quantization_bits=8:secure_aggregation=true", "does not send sums alone, but all_gather"),
        (
            "diloco:secure_aggregation=true:robust=median",
            "has another way of averaging already: wrap it once",
        ),
        ("diloco:secure_aggregation=true:transport=ring", "transport='ring': .* leave transport out"),
        ("diloco:secure_aggregation=3", "settings=3 must be a SecureAggregation, or None"),
    ],
)
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        parsed(text)


@pytest.mark.parametrize("options", [{"bits": 16}, {"fraction_bits": -1}, {"bits": 32, "fraction_bits": 31}])
def test_bad_numbers_of_bits(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="bits"):
        SecureAggregation(**options)


def test_clients_that_are_not_drawn_hold_no_keys() -> None:
    trainer = train(made(FedAvgStrategy, H=3, lr=0.02, client_fraction=0.5, secure_aggregation=True), **RUN)
    pushes = trainer.traffic["server push"]
    elements = (16 * 6 + 16 + 32 + 34) * 8  # in 64 bits
    assert pushes["payload_bytes"] == 3 * 2 * (64 + 80 + elements + 32)
