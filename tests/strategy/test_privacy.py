"""Private clients: updates are clipped, the mean is blurred, and what is spent is what `dp-accounting` says."""

import logging
import math
from typing import Any

import dp_accounting
import pytest
import torch
from battery import outcome, plain_model, train
from dp_accounting import rdp
from problems import Regressor, dyadic, fleet_of, run_of
from wrapped import made

from exogym.balance import Balance
from exogym.contrib import NormCap
from exogym.data import QuantitySkew
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedProxStrategy,
    ScaffoldStrategy,
)
from exogym.strategy.privacy import DifferentialPrivacy

WIDTH = sum(p.numel() for p in Regressor().parameters())
NOISE = DifferentialPrivacy(1.0, 1.0, 1e-3)
RUN = {"max_steps": 12, "val_interval": 4, "batch_size": 4, "num_nodes": 6}


def private(clip: float = 1.0, z: float = 1.0, delta: float = 1e-3, **options: Any) -> FedAvgStrategy:
    given = {"H": 2, "lr": 0.05, "privacy": DifferentialPrivacy(clip, z, delta)} | options
    return made(FedAvgStrategy, "adamw", **given)


def accounted(rate: float, z: float, rounds: int, delta: float) -> float:
    """The paper's epsilon, by the accountant itself: one event after the other."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = rdp.RdpAccountant()
    for _ in range(rounds):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)))
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("rate", "z", "rounds"), [(0.5, 1.0, 3), (1.0, 2.0, 3), (0.1, 0.8, 2)])
def test_epsilon_is_the_accountants(rate: float, z: float, rounds: int) -> None:
    spent = DifferentialPrivacy(1.0, z, 1e-5).epsilon(rate, rounds)
    assert spent == pytest.approx(accounted(rate, z, rounds, 1e-5), rel=1e-9)
    assert spent > DifferentialPrivacy(1.0, z, 1e-5).epsilon(rate, rounds - 1)
    assert spent > DifferentialPrivacy(1.0, 2 * z, 1e-5).epsilon(rate, rounds)
    tight = dp_accounting.pld.PLDAccountant()  # another way to count, which is closer: RDP must not say less
    tight.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), rounds)
    assert 0.5 * spent < tight.get_epsilon(1e-5) < spent


def test_the_ends_of_epsilon() -> None:
    assert DifferentialPrivacy(1.0, 1.0).epsilon(0.5, 0) == 0
    assert DifferentialPrivacy(1.0, 0.0).epsilon(0.5, 1) == math.inf


def meeting(strategy: FedAvgStrategy, steps: torch.Tensor, seed: int = 0, present: Any = None) -> tuple[Any, Any, Any]:
    """Move the rows by `steps` from one point and meet; return modules at work, the point, the round's clients."""
    n, width = steps.shape
    start = dyadic(1, width)
    fleet = fleet_of(start.expand(n, -1), model=Regressor())
    acting = strategy.on(fleet, run_of(n, seed=seed))
    module = strategy.communication_modules[0]
    fleet.blocks[0].params += steps
    if present is not None:
        fleet.comm.present = present
    acting.communicate(2)
    return acting, start[0], module.clients(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("clip", [0.5, 2.0, 1e6])
def test_updates_are_clipped_and_summed_over_the_clients_in_the_mean(clip: float) -> None:
    steps = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    steps *= torch.linspace(0.3, 4, 8)[:, None] / steps.norm(dim=1, keepdim=True)
    counts = set()
    for seed in range(6):
        strategy = private(clip, 0.0, client_fraction=0.5)
        acting, start, clients = meeting(strategy, steps, seed)
        clipped = steps[clients] * (clip / steps[clients].norm(dim=1, keepdim=True)).clamp(max=1)
        theta = start + clipped.sum(0) / (0.5 * 8)  # not over those who happened to come
        torch.testing.assert_close(acting.consensus()[0], theta, rtol=0, atol=1e-12)  # type: ignore[index]
        counts.add(len(clients))
    assert len(counts) > 1


def test_no_clip_no_noise_and_everyone_is_fedavg() -> None:
    wanted = train(FedAvgStrategy("adamw", H=2, lr=0.05), model=plain_model(), **RUN)
    got = train(private(1e9, 0.0), model=plain_model(), **RUN)
    assert got.history.last["val_loss"] == pytest.approx(wanted.history.last["val_loss"], rel=1e-5)
    clipped = train(private(0.01, 0.0), model=plain_model(), **RUN)
    assert clipped.history.last["val_loss"] > 1.1 * wanted.history.last["val_loss"]


def test_noise_has_the_size_that_is_accounted_and_is_added_where_nobody_came() -> None:
    clip, z, n, rate = 3.0, 2.0, 4, 0.25
    found = []
    for seed in range(60):
        acting, start, clients = meeting(private(clip, z, client_fraction=rate), torch.zeros(n, WIDTH).double(), seed)
        found.append((len(clients), fleet_theta(acting.fleet) - start))
    noise = torch.stack([x for _, x in found])
    assert {0, 1, 2} <= {count for count, _ in found}
    sigma = z * clip / (rate * n)
    assert noise.std().item() == pytest.approx(sigma, rel=0.03) and abs(noise.mean().item()) < 0.1 * sigma
    empty = torch.stack([x for count, x in found if not count])
    assert empty.std().item() == pytest.approx(sigma, rel=0.06)
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 0.3  # of another seed, other noise


def fleet_theta(fleet: Any) -> torch.Tensor:
    return fleet.state.parts["AveragingCommunicator"].shared_state["theta.0"][0]


def test_clients_of_a_round_that_did_not_come_count_as_zeros() -> None:
    steps = dyadic(8, WIDTH, seed=1)
    strategy = private(1e9, 0.0, client_fraction=0.75)
    present = [0, 1, 2, 3]
    acting, start, clients = meeting(strategy, steps, present=present)
    came = [i for i in clients if i in present]
    assert 0 < len(came) < len(clients)
    wanted = start + steps[came].sum(0) / (0.75 * 8)
    torch.testing.assert_close(fleet_theta(acting.fleet), wanted, rtol=0, atol=1e-12)


def test_the_history_says_what_was_spent() -> None:
    trainer = train(private(client_fraction=0.5), model=plain_model(), **RUN)
    rows = trainer.history.rows(node=None)
    spent = {row["step"]: row["epsilon"] for row in rows if row.get("epsilon") is not None}
    assert list(spent) == [0, 4, 8, 12] and spent[0] == 0 and trainer.history.last["epsilon"] == spent[12]
    assert spent[4] == pytest.approx(accounted(0.5, 1.0, 2, 1e-3)) and spent[4] < spent[8] < spent[12]
    assert spent[12] == pytest.approx(DifferentialPrivacy(9.0, 1.0, 1e-3).epsilon(0.5, 6))
    other = train(FedAvgStrategy("adamw", H=2, client_fraction=0.5), model=plain_model(), **RUN)
    assert "epsilon" not in other.history.columns


@pytest.mark.parametrize("secure", [False, True])
def test_no_layout_and_no_stop_changes_anything(secure: bool, tmp_path: Any) -> None:
    faults = Faults({4: [(3, 6)]}, lost={0: [4]})

    def run(**options: Any) -> Any:
        strategy = private(client_fraction=1.0 if secure else 0.7, secure_aggregation=secure)
        trainer = train(strategy, model=plain_model(), **RUN | {"faults": faults} | options)
        return outcome(trainer)

    wanted = run()
    assert run(processes=2) == wanted
    run(max_steps=7, save_dir=tmp_path)
    (bits, rows, traffic), (got, theirs, sent) = wanted, run(save_dir=tmp_path, resume=True, max_stretch=1)
    assert (got, sent) == (bits, traffic) and theirs[-1]["epsilon"] == rows[-1]["epsilon"]
    assert run(seed=1)[0] != bits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": 0.0}, "clip=0.0 must be a number over 0"),
        ({"z": -1}, "noise_multiplier=-1 must be a number of at least 0"),
        ({"delta": 1}, "delta=1 must be a number over 0 and under 1"),
        ({"island_size": 2}, "islands have no server"),
        ({"privacy": 3}, "privacy=3 must be a DifferentialPrivacy"),
        ({"transport": "ring"}, "next round's clients, which may not have averaged"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        private(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"robust": "krum"},
        {"robust": "median"},
        {"robust": "trimmed_mean"},
        {"robust": "norm_cap"},
        {"robust": NormCap(1.0)},
        {"tuner": 1e9},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [FedAvgStrategy, FedProxStrategy, FedOptStrategy])
def test_what_epsilon_does_not_count_is_refused(make: Any, options: dict[str, Any]) -> None:
    """A rule takes the value of one client, so one changes it by C and not C/(qN); a tuner reads their number."""
    with pytest.raises(ArgumentError, match=f"privacy=.* with {next(iter(options))}=.*; leave "):
        made(make, H=2, client_fraction=0.5, privacy=DifferentialPrivacy(1.0, 1e-9), **options)


def test_clients_that_weigh_more_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"privacy=.* with balance='batch': .* bounds each client's influence"):
        train(private(), model=plain_model(), balance=Balance("batch", [1, 1, 1, 5]))


def test_what_would_be_seen_in_the_clear_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"privacy=.* with training that changes the buffers 1\.running_mean"):
        train(private(), **RUN)
    with pytest.raises(ArgumentError, match="weighting='uniform'"):
        train(private(), model=plain_model(), partitioner=QuantitySkew(0.5), **RUN)


# Server optimizers


def server(rule: str, clip: float = 1.0, z: float = 1.0, **options: Any) -> FedOptStrategy:
    given = {"H": 2, "lr": 0.05, "client_fraction": 0.5, "privacy": DifferentialPrivacy(clip, z, 1e-3)} | options
    return made(FedOptStrategy, "adamw", rule, **given)


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad", "momentum"])
def test_a_server_optimizer_steps_along_the_blurred_mean(rule: str) -> None:
    """The D of a round is what private FedAvg adds to theta, noise alone where nobody came; then the paper's step."""
    n, eta, rounds = 4, 0.1, 8
    strategy = server(rule, server_lr=eta, client_fraction=0.25, weighting="uniform")
    start = dyadic(1, WIDTH)
    fleet = fleet_of(start.expand(n, -1), model=Regressor())
    acting = strategy.on(fleet, run_of(n))
    module = strategy.communication_modules[0]
    privacy = DifferentialPrivacy(1.0, 1.0, 1e-3)
    theta, m, v = start[0].clone(), torch.zeros(WIDTH).double(), torch.full((WIDTH,), 1e-6).double()
    came = []
    for round_ in range(rounds):
        clients = module.clients(round_)  # type: ignore[attr-defined]
        moves = torch.randn(n, WIDTH, dtype=torch.float64)
        fleet.blocks[0].params[:] = theta + moves
        acting.communicate(2 * (round_ + 1))
        clipped = moves[clients] * (1 / moves[clients].norm(dim=1, keepdim=True)).clamp(max=1)
        D = clipped.sum(0) / (0.25 * n) + privacy.noise(theta, 0.25 * n, 0, 0, round_)
        b1 = 0.0 if rule == "adagrad" else 0.9
        m = b1 * m + (D if rule == "momentum" else (1 - b1) * D)
        if rule == "adagrad":
            v = v + D**2
        elif rule != "momentum":
            v = 0.99 * v + 0.01 * D**2 if rule == "adam" else v - 0.01 * D**2 * (v - D**2).sign()
        theta = theta + eta * (m if rule == "momentum" else m / (v.sqrt() + 1e-3))
        torch.testing.assert_close(acting.consensus()[0], theta, rtol=0, atol=1e-10)  # type: ignore[index]
        for row in module.clients(round_ + 1):  # type: ignore[attr-defined]
            assert torch.equal(fleet.blocks[0].params[row], acting.consensus()[0])  # type: ignore[index]
        came.append(len(clients))
    assert 0 in came and max(came) > 0


def test_a_plain_server_step_is_private_fedavg_and_fedprox_without_its_term_too() -> None:
    wanted = train(private(client_fraction=0.5), model=plain_model(), **RUN)
    same_ = [
        server("momentum", beta1=0.0, server_lr=1.0),
        made(FedProxStrategy, "adamw", 0.0, 2, lr=0.05, client_fraction=0.5, privacy=NOISE),
    ]
    others = [
        server("momentum", beta1=0.0, server_lr=0.5),
        made(FedProxStrategy, "adamw", 5.0, 2, lr=0.05, client_fraction=0.5, privacy=NOISE),
    ]
    for strategy in same_:
        got = train(strategy, model=plain_model(), **RUN)
        assert got.history.last["val_loss"] == pytest.approx(wanted.history.last["val_loss"], rel=1e-5)
        assert got.history.last["epsilon"] == wanted.history.last["epsilon"] > 0
    for strategy in others:
        got = train(strategy, model=plain_model(), **RUN)
        assert abs(got.history.last["val_loss"] / wanted.history.last["val_loss"] - 1) > 1e-4
        assert got.history.last["epsilon"] == wanted.history.last["epsilon"]


def test_where_it_is_not_taken_the_error_says_why() -> None:
    privacy = DifferentialPrivacy(1.0, 1.0)
    for make, why in (
        (ScaffoldStrategy, "control variate"),
        (FedDynStrategy, "the server's h"),
        (FedNovaStrategy, "clients' numbers of steps"),
        (DiLoCoStrategy, "use fedavg, fedopt"),
    ):
        with pytest.raises(ArgumentError, match=f"has no argument 'privacy': .*{why}"):
            made(make, privacy=privacy)
