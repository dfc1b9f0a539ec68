"""H as a function of the round, and the outer learning rate over rounds."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.errors import ArgumentError, CheckpointError
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SPARTADiLoCoStrategy,
    Strategy,
)
from exogym.strategy.communicate import all_reduce
from exogym.strategy.rounds import Rounds
from exogym.study.advise import advise
from exogym.testing import check_strategy, fingerprint, small_problem

PLAIN = OptimSpec("sgd", lr=0.05)
ENDS = [2, 5, 9, 14]


def growing(r):
    return r + 2


def fit(strategy, max_steps=12, **options):
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=F.mse_loss)
    trainer.fit(strategy, **{"num_nodes": 4, "max_steps": max_steps, "batch_size": 8} | options)
    return trainer


def test_where_rounds_end():
    for H in (3, lambda r: 3):
        rounds = Rounds(H)
        assert [rounds.end_after(s) for s in range(7)] == [3, 3, 3, 6, 6, 6, 9]
        assert [rounds.of_step(s) for s in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
        assert rounds.lengths(7) == [3, 3, 3] and rounds.lengths(6) == [3, 3]
    uneven = Rounds(growing)
    assert uneven.of_step(9) == 2 and uneven.of_step(10) == 3 and uneven.lengths(9) == [2, 3, 4]
    assert [uneven.end_after(s) for s in range(9)] == [2, 2, 5, 5, 5, 9, 9, 9, 9]


class ByHand(Strategy):
    """FedAvg after the steps of `ENDS`, and at the end."""

    def step(self):
        self.update_parameters()
        super().step()
        if self.local_step in ENDS or self.local_step == self.total_steps:
            for p in self.model.parameters():
                all_reduce(p.data, op="mean")


def test_rounds_of_other_lengths_are_those_by_hand():
    mine = fit(FedAvgStrategy(PLAIN, H=growing))
    for a, b in zip(mine.model.parameters(), fit(ByHand(PLAIN)).model.parameters(), strict=True):
        assert torch.equal(a, b)
    _, payload = mine.history.column("payload_bytes")
    row = payload[-1] / 4
    assert payload.tolist()[1:] == [row * (sum(s >= end for end in ENDS) + (s == 12)) for s in range(1, 13)]


def test_a_constant_function_is_the_number():
    for make in (
        lambda H: DiLoCoStrategy(PLAIN, H=H),
        lambda H: FedAvgStrategy(PLAIN, H=H, client_fraction=0.5, island_size=1),
        lambda H: FedAvgStrategy(PLAIN, H=H, client_fraction=0.5),
        lambda H: SPARTADiLoCoStrategy(PLAIN, H=H, p_sparta=0.1),
    ):
        one, other = fit(make(5)), fit(make(lambda r: 5))
        assert fingerprint(one.model) == fingerprint(other.model)
        assert one.history.last["tx_bytes"] == other.history.last["tx_bytes"]


UNEVEN = {
    "diloco": lambda: DiLoCoStrategy(
        PLAIN, H=growing, outer_lr_scheduler="cosine", outer_warmup_rounds=2, outer_lr=0.9
    ),
    "sparta_diloco": lambda: SPARTADiLoCoStrategy(
        PLAIN, H=growing, p_sparta=0.1, outer_lr_scheduler=lambda r: 1 / (r + 1)
    ),
    "clients": lambda: FedAvgStrategy(PLAIN, H=growing, client_fraction=0.5),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_the_laws_hold(name):
    check_strategy(UNEVEN[name], steps=10, skip=("learns", "single node"))
    one = fit(UNEVEN[name]())
    assert fingerprint(fit(UNEVEN[name](), processes=3).model) == fingerprint(one.model)


def test_the_outer_rate_follows_the_rounds():
    seen = {}

    def look(loop):
        module = loop.driver.algorithm.strategy.communication_modules[0]
        seen[loop.step] = module.outer.optimizer.param_groups[0]["lr"]

    options = {"outer_lr": 0.8, "outer_lr_scheduler": "cosine", "outer_warmup_rounds": 2}
    fit(DiLoCoStrategy(PLAIN, H=growing, **options), max_steps=16, callbacks=[Every(1, look)])
    wanted = [0.4, 0.8] + [0.4 * (1 + math.cos(math.pi * x / 3)) for x in range(3)]
    assert [seen[end] for end in ENDS] == pytest.approx(wanted[:4])
    decaying = torch.optim.lr_scheduler.ExponentialLR
    with pytest.raises(ArgumentError, match=r"ExponentialLR.*functools.partial"):
        DiLoCoStrategy(outer_lr_scheduler=decaying)
    with pytest.raises(ArgumentError, match=r"outer_lr_scheduler='cosin' is unknown: did you mean 'cosine'"):
        DiLoCoStrategy(outer_lr_scheduler="cosin")
    with pytest.raises(ArgumentError, match="outer_warmup_rounds=-1"):
        SPARTADiLoCoStrategy(outer_warmup_rounds=-1)


def test_a_function_as_the_rate_is_refused_by_name():
    for make in (DiLoCoStrategy, SPARTADiLoCoStrategy):
        with pytest.raises(
            ArgumentError, match=r"outer_lr=<function.*to change it over rounds, pass outer_lr_scheduler"
        ):
            make(outer_lr=lambda r: 0.7)
    with pytest.raises(ArgumentError, match=r"outer_lr='0.7' must be a number"):
        DiLoCoStrategy(outer_lr="0.7")


def test_the_rounds_are_kept_and_a_resumed_run_must_have_them(tmp_path):
    whole = fit(DiLoCoStrategy(PLAIN, H=growing))
    assert whole.description["rounds"] == {"0.DiLoCoCommunicator": [2, 3, 4, 5]}
    assert "rounds" not in fit(DiLoCoStrategy(PLAIN, H=3)).description
    fit(DiLoCoStrategy(PLAIN, H=growing), max_steps=7, save_dir=tmp_path)

    def other(r):
        return r + 2 if r < 2 else 9

    other.__qualname__ = growing.__qualname__
    with pytest.raises(CheckpointError, match=r"rounds.0.DiLoCoCommunicator: saved \[2, 3, 4\], now \[2, 3, 9\]"):
        fit(DiLoCoStrategy(PLAIN, H=other), save_dir=tmp_path, resume=True)
    resumed = fit(DiLoCoStrategy(PLAIN, H=growing), save_dir=tmp_path, resume=True)
    assert fingerprint(resumed.model) == fingerprint(whole.model)


def test_what_is_no_length_of_a_round():
    for H, message in (
        (lambda r: 0, r"H\(0\)=0 must be a whole number of at least 1"),
        (lambda r: 2.5, r"H\(0\)=2.5"),
        (lambda r: random.random() and random.randrange(1, 10**9), "H must be a pure function of the round"),
        ("5", "H='5' must be a whole number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            DiLoCoStrategy(H=H)
    with pytest.raises(ArgumentError, match=r"H\(2\)=-1"):  # before training
        fit(
            FedAvgStrategy(PLAIN, H=lambda r: 3 if r < 2 else -1), callbacks=[Every(1, lambda loop: pytest.fail("ran"))]
        )
    with pytest.raises(ArgumentError, match="rounds of one length"):
        FedAvgStrategy(H=growing, local_epochs=1)
    with pytest.raises(ArgumentError, match="each node has its own rounds; pass H as a number"):
        AsyncDiLoCoStrategy(H=growing)
    with pytest.raises(ArgumentError, match="H is a function of the round, but a formula needs a fixed H"):
        advise(parameters=1e6, num_nodes=4, network="100Mbps", step_seconds=0.1, strategies=[DiLoCoStrategy(H=growing)])
