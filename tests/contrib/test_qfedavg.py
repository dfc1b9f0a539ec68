"""q-FedAvg beside a plain loop after the authors' code, what it is equal to, and where it ends."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    BATCH,
    FEATURES,
    Regressor,
    examples,
    fleet_of,
    loss_of,
    put,
    run_of,
    same,
    sgd,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Placement
from exogym.errors import ArgumentError, TrainingError
from exogym.strategy import FedAvgStrategy, OptimSpec, QFedAvgStrategy

H, LR = 4, 0.05
SGD = OptimSpec("sgd", lr=LR)
WHOLE = [examples(BATCH, i, 0.3 * i) for i in range(4)]  # one batch each, so a loss is the client's own F
PARTS = [examples(BATCH * (2 + i), i, 0.3 * i) for i in range(4)]


def by_hand(
    data: list[TensorDataset], q: float, L: float, steps: int, clients: list[list[int]], optimizer: Callable[[Any], Any]
) -> Tensor:
    """The authors' server: sums of F^q times the scaled change, over the sum of the estimates h."""
    theta, taken = vector(Regressor()), [0] * len(data)
    for begin in range(0, steps, H):
        deltas, hs = [], []
        for i in clients[begin // H]:
            model = Regressor()
            put(model, theta)
            stepping, F = optimizer(model.parameters()), None
            for _ in range(H):
                x, y = data[i].tensors
                at = taken[i] % (len(x) // BATCH) * BATCH
                taken[i] += 1
                stepping.zero_grad()
                loss = loss_of(model, x[at : at + BATCH], y[at : at + BATCH])
                F = float(loss.detach().float()) + 1e-10 if F is None else F  # a history holds losses in fp32
                loss.backward()
                stepping.step()
            assert F is not None
            gradient = L * (theta - vector(model))
            deltas.append(np.float_power(F, q) * gradient)
            hs.append(q * np.float_power(F, q - 1) * float(gradient.square().sum()) + L * np.float_power(F, q))
        theta = theta - sum(deltas) / sum(hs)
    return theta


def clients_of(strategy: Any) -> list[list[int]]:
    average = copy.deepcopy(strategy).communication_modules[1]
    average.start(fleet_of(torch.zeros(4, 57)), run_of(4))
    return [average.clients(r) for r in range(4)]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("q", "L"), [(0.5, None), (2.0, None), (1.0, 3.0)])
def test_q_fedavg_is_the_authors_loop(q: float, L: float | None, fraction: float) -> None:
    for data in (WHOLE, PARTS):
        strategy = QFedAvgStrategy(SGD, q, H, L=L, client_fraction=fraction, keep_inner_state=False)
        wanted = by_hand(data, q, 1 / LR if L is None else L, 12, clients_of(strategy), sgd)
        same(train(strategy, data).model, wanted)
        unlike(train(QFedAvgStrategy(SGD, q + 0.5, H, L=L, client_fraction=fraction), data).model, wanted)


def test_evaluations_and_stops_within_a_round_change_nothing(tmp_path: Any) -> None:
    """The loss of a round's first step is in an earlier stretch, or in an earlier process."""
    given: dict[str, Any] = {"steps": 14, "final_sync": True}
    whole = train(QFedAvgStrategy(SGD, 2.0, H), PARTS, **given)
    saved = {"checkpoint_interval": 3, "save_dir": tmp_path / "all", "placement": Placement(keep_checkpoints=9)}
    assert torch.equal(train(QFedAvgStrategy(SGD, 2.0, H), PARTS, **given, **saved).model, whole.model)
    shutil.copytree(tmp_path / "all/step_0000000006", tmp_path / "one/step_0000000006")
    on = train(QFedAvgStrategy(SGD, 2.0, H), PARTS, save_dir=tmp_path / "one", resume=True, **given)
    assert torch.equal(on.model, whole.model)


def test_without_q_it_is_fedavg_with_equal_weights() -> None:
    for fraction in (1.0, 0.5):
        fedavg = train(FedAvgStrategy(SGD, H=H, weighting="uniform", client_fraction=fraction), PARTS)
        ours = train(QFedAvgStrategy(SGD, 0.0, H, client_fraction=fraction), PARTS)
        assert torch.equal(ours.rows, fedavg.rows)
        unlike(train(QFedAvgStrategy(SGD, 0.1, H, client_fraction=fraction), PARTS).rows, fedavg.rows)


def test_one_client_takes_a_step_toward_its_result() -> None:
    """From theta, by F / (F + q L d^2), where d is the length of the client's change."""
    start, result = vector(Regressor()), train(FedAvgStrategy(SGD, H=H), WHOLE[:1], 1, H).rows[0]
    F = float(loss_of(Regressor(), *WHOLE[0].tensors).detach())
    ours = {q: train(QFedAvgStrategy(SGD, q, H), WHOLE[:1], 1, H).model for q in (1.0, 3.0)}
    for q, model in ours.items():
        share = F / (F + q / LR * float((result - start).square().sum()))
        same(model, start + share * (result - start), 1e-7)  # F of a history is fp32
    unlike(ours[1.0], ours[3.0])


def test_quadratic_clients_go_to_the_fair_minimum() -> None:
    """Three clients with (b - 0)^2 and one with (b - 1)^2: b is 1/(1 + 3^(1/(2q+1))), from the mean toward a half."""
    nothing = torch.zeros(BATCH, FEATURES, dtype=torch.float64)
    data = [TensorDataset(nothing, torch.full((BATCH, 1), float(i == 3), dtype=torch.float64)) for i in range(4)]
    for q in (0.0, 1.0, 4.0):
        model = nn.Linear(FEATURES, 1).double()
        ours = train(QFedAvgStrategy(SGD, q, 2), data, steps=160, model=model).model
        assert float(ours[-1]) == pytest.approx(1 / (1 + 3 ** (1 / (2 * q + 1))), rel=1e-4)


def test_powers_of_losses_that_no_number_holds_are_refused() -> None:
    x = WHOLE[0].tensors[0]
    near = Regressor()(x).detach() + 1e-6
    for y, q, lr in ((near * 1e11, 15.0, 1e-12), (near, 40.0, 0.05)):
        with pytest.raises(TrainingError, match=r"divides by the sum of h_i, which is (inf|0) .* use a smaller q"):
            train(QFedAvgStrategy("sgd", q, 2, lr=lr), [TensorDataset(x, y)] * 2, 2, 2)


def test_losses_that_are_not_positive_are_refused() -> None:
    trainer = LocalTrainer(Regressor(), WHOLE[0], loss_fn=lambda out, y: out.mean() - 100.0)
    with pytest.raises(TrainingError, match="needs a positive loss, but node 0 had -"):
        trainer.fit(QFedAvgStrategy(SGD, 1.0, 2), num_nodes=1, max_steps=2, batch_size=BATCH, progress=False)
    for wrong in ({"q": -1}, {"L": 0.0}, {"weighting": "examples"}, {"personal": "second.*"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            QFedAvgStrategy(**wrong)
