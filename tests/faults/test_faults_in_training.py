"""Nodes that drop out and come back, in whole runs: the laws hold, and the history shows who was there."""

import pytest
import torch
from battery import battery, in_turn, train
from strategies import OF_EACH_KIND, STRATEGIES
from torch import nn

from exogym.callbacks import Every
from exogym.errors import ArgumentError, CheckpointError
from exogym.faults import Faults
from exogym.strategy import SimpleReduceStrategy, Strategy
from exogym.testing import fingerprint, small_problem

ABSENT = {1: [(4, 9)], 0: [(12, 20)], 3: [(22, None)]}


def faults(name, **given):
    slow = {} if STRATEGIES[name].every_step else {2: 0.5}
    return Faults(absent=ABSENT, lost={2: [10]}, slow=slow, **given)


def fit(name, **given):
    """Train a strategy of the table, or another, 24 steps; return the trainer."""
    strategy = STRATEGIES[name].make() if isinstance(name, str) else name
    return train(strategy, **{"max_steps": 24, "val_interval": None} | given)


@pytest.mark.parametrize(
    ("name", "processes"),
    in_turn([name for name, entry in STRATEGIES.items() if entry.on_rows], (2, 4), fast=OF_EACH_KIND),
)
def test_the_laws_hold_with_faults(name, processes, tmp_path):
    """With two processes, stopping too; with four, stretches."""
    one, given = battery(name), {"faults": faults(name)}
    wanted = one.outcome(**given)
    assert wanted[0] != one.wanted[0]
    assert one.outcome(processes=processes, **given) == wanted
    if processes == 4:
        assert one.outcome(max_stretch=1, **given)[0] == wanted[0]
        return
    one.train(save_dir=tmp_path, callbacks=[Every(14, lambda loop: True)], processes=3, **given)
    mark, _, traffic = one.outcome(save_dir=tmp_path, resume=True, **given)
    assert (mark, traffic) == (wanted[0], wanted[2])


def test_the_laws_hold_for_a_strategy_of_one_node(tmp_path):
    one, given = battery("one node"), {"faults": faults("one node")}
    wanted = one.outcome(**given)
    assert wanted[0] != one.wanted[0]
    assert one.outcome(max_stretch=1, **given)[:2] == wanted[:2]
    one.train(save_dir=tmp_path, callbacks=[Every(14, lambda loop: True)], **given)
    assert one.outcome(save_dir=tmp_path, resume=True, **given)[0] == wanted[0]


def test_the_history_shows_who_was_there():
    rows = fit("diloco", faults=Faults(absent=ABSENT)).history
    there = {step: {r["node"] for r in rows if r["step"] == step} - {None} for step in range(1, 25)}
    for step, nodes in there.items():
        away = {node for node, spans in ABSENT.items() for a, b in spans if a <= step and (b is None or step < b)}
        assert nodes == {0, 1, 2, 3} - away, step


class OwnDDP(Strategy):
    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def test_ddp_of_ones_own_is_ddp_with_faults_too():
    ends = []
    for strategy in (OwnDDP(lr=0.02), SimpleReduceStrategy(lr=0.02)):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        ends.append(fingerprint(fit(strategy, model=model, faults=Faults(absent=ABSENT, lost={2: [10]})).model))
    assert ends[0] == ends[1]


def test_with_nobody_else_there_a_node_trains_alone():
    alone = Faults(absent={node: [(1, None)] for node in (1, 2, 3)})
    trainer = fit("diloco", faults=alone)
    assert {r["node"] for r in trainer.history} == {None, 0}
    assert sum(row["tx_bytes"] for row in trainer.traffic.values()) == 0


def test_with_nobody_there_nothing_happens():
    nobody = Faults(absent={node: [(1, None)] for node in range(4)})
    before = small_problem()[0]
    trainer = fit("fedavg", faults=nobody)
    assert fingerprint(trainer.model) == fingerprint(before) and trainer.traffic == {}
    assert {r["node"] for r in trainer.history} == {None}


def test_another_plan_of_faults_is_another_run(tmp_path):
    fit("diloco", faults=faults("diloco"), save_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"faults.seed: saved 0, now 1"):
        fit("diloco", faults=faults("diloco", seed=1), save_dir=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("diloco", {"faults": 0.1}, "must be an exogym.faults.Faults"),
        ("diloco", {"faults": Faults(absent={4: [(1, 2)]})}, "node 4"),
        ("ddp", {"faults": Faults(slow={1: 0.5})}, "all nodes take every step together"),
        ("stacked", {"faults": Faults(absent=ABSENT)}, "without stacked = True"),
        ("one node", {"faults": Faults(absent=ABSENT), "processes": 2}, "in one process"),
    ],
)
def test_faults_that_cannot_be(name, given, message):
    with pytest.raises(ArgumentError, match=message):
        fit(name, **given)
