"""How far nodes are apart is measured before a synchronisation of the same step, in every layout, and after it too."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.record.metrics import spread
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.strategy.communicate import all_reduce
from exogym.testing import small_problem

NEVER = 1000
PLAIN = OptimSpec("sgd", lr=0.05)


class ByHand(Strategy):
    """FedAvg with H = 4, written for one node."""

    def step(self):
        self.update_parameters()
        super().step()
        if self.local_step % 4 == 0:
            for p in self.model.parameters():
                all_reduce(p.data, op="mean")


STRATEGIES = {
    "fedavg": lambda: FedAvgStrategy(PLAIN, H=4),
    "diloco": lambda: DiLoCoStrategy(PLAIN, H=4),
    "by hand": lambda: ByHand(PLAIN),
    "async, all wait": lambda: AsyncDiLoCoStrategy(PLAIN, H=4, grace_s=math.inf),
}


def distances(strategy, max_stretch=None, steps=12, name="consensus_distance", **options):
    """Return {step: value} of the averaged model."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=F.mse_loss)
    trainer.max_stretch = max_stretch
    trainer.fit(strategy, **{"num_nodes": 3, "max_steps": steps, "batch_size": 8, "val_interval": 2} | options)
    at, values = trainer.history.column(name)
    return dict(zip(at.tolist(), values.tolist(), strict=True))


def silent(steps, **options):
    """Return the distances of nodes that never meet."""
    with pytest.warns(UserWarning, match="first communicates after"):
        return distances(FedAvgStrategy(PLAIN, H=NEVER), steps=steps, final_sync=False, **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_before_the_first_synchronisation_nodes_are_as_far_apart_as_if_there_were_none(name):
    alone, found = silent(4), distances(STRATEGIES[name]())
    assert found[4] == alone[4] > 0 and found[2] == alone[2]
    after = distances(STRATEGIES[name](), name="consensus_distance_after")
    assert after[2] == found[2] and after[4] < 1e-6  # the old reading


@pytest.mark.parametrize("name", STRATEGIES)
def test_neither_layout_nor_stretches_nor_stopping_change_it(name, tmp_path):
    make = STRATEGIES[name]
    whole = distances(make())
    assert set(whole) == {0, 2, 4, 6, 8, 10, 12} and whole[8] > 0
    assert distances(make(), max_stretch=1) == whole
    assert distances(make(), processes=2) == whole
    for stop in (3, 4):
        folder = tmp_path / str(stop)
        distances(make(), save_dir=folder, callbacks=[Every(stop, lambda loop: True)])
        assert distances(make(), save_dir=folder, resume=True) == whole
    assert distances(make(), steps=4, save_dir=tmp_path / "short") == {k: whole[k] for k in (0, 2, 4)}
    assert distances(make(), save_dir=tmp_path / "short", resume=True) == whole  # evaluated at 4 when it goes on


def test_where_a_callback_ends_the_training_at_a_synchronisation():
    whole = distances(FedAvgStrategy(PLAIN, H=5), val_interval=5, steps=10)
    stopped = distances(FedAvgStrategy(PLAIN, H=5), val_interval=3, callbacks=[Every(5, lambda loop: True)])
    assert stopped[5] == whole[5] > 0


@pytest.mark.parametrize(("may_end", "measured"), [(True, [1, 2, 3, 4]), (False, [4])])
def test_a_callback_that_never_ends_the_training_costs_no_measurement(may_end, measured, monkeypatch):
    """Between hosts it moves all rows: at the start, the end, and where an evaluation may follow."""
    seen, steps = [], []

    def look(loop):
        steps.append(loop.step)

    monkeypatch.setattr("exogym.core.training.loop.spread", lambda fleet: seen.append(1) or spread(fleet))
    distances(FedAvgStrategy(PLAIN, H=5), val_interval=NEVER, steps=20, callbacks=[Every(5, look, may_end=may_end)])
    assert steps == [5, 10, 15, 20]
    assert len(seen) == 2 + len(measured)  # beside those before a synchronisation, the first and the last evaluation


def test_a_callback_that_says_it_never_ends_the_training_and_does_is_an_error():
    with pytest.raises(ArgumentError, match="Every returned True, but has may_end=False"):
        distances(FedAvgStrategy(PLAIN, H=5), callbacks=[Every(5, lambda loop: True, may_end=False)])


def test_the_last_synchronisation_counts_like_any_other():
    options = {"steps": 10, "val_interval": 5}
    before = distances(FedAvgStrategy(PLAIN, H=4), **options)
    without = distances(FedAvgStrategy(PLAIN, H=4), final_sync=False, **options)
    assert before == without and before[10] > 0
    assert distances(FedAvgStrategy(PLAIN, H=4), name="consensus_distance_after", **options)[10] < 1e-6
    # SPARTA averages a part after each step and everything at the end: the first of these counts
    sparta = [
        distances(SPARTAStrategy(PLAIN, p_sparta=1.0), final_sync=sync, steps=4, val_interval=2)
        for sync in (True, False)
    ]
    assert sparta[0] == sparta[1] and sparta[0][4] > 1e-3


def test_replicas_of_ddp_are_never_apart():
    assert max(distances(SimpleReduceStrategy(PLAIN)).values()) < 1e-6


def test_those_that_are_there_are_measured_whoever_misses_the_synchronisation():
    """A node that loses the synchronisation is in the measure before it."""
    lost = distances(FedAvgStrategy(PLAIN, H=4), faults=Faults(lost={1: [4]}), steps=4)
    assert lost == silent(4)


def test_one_node_and_no_validation_set():
    assert set(distances(DiLoCoStrategy(PLAIN, H=4), num_nodes=1).values()) == {0.0}
    torch.manual_seed(0)
    _, data = small_problem()
    trainer = LocalTrainer(nn.Linear(6, 2), data, loss_fn=F.mse_loss)
    trainer.fit(FedAvgStrategy(PLAIN, H=4), num_nodes=3, max_steps=8, batch_size=8)
    assert trainer.history.last["consensus_distance"] > 1e-3 > trainer.history.last["consensus_distance_after"]
