"""Planned faults: who is there at each step, and how much each node works."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from problems import fleet_of, run_of

from exogym.core.base.rng import numpy_generator, stream_seed
from exogym.core.training.options import describe
from exogym.errors import ArgumentError
from exogym.faults import NEVER, Attendance, Faults
from exogym.faults import planned as faults_module
from exogym.strategy.federated_averaging import AveragingCommunicator

P = 57

# Who is there


def stormy(**changes: Any) -> Faults:
    given: dict[str, Any] = {"absent": {1: [(3, 9), (30, None)]}, "drop_rate": 0.05, "mean_outage_steps": 4.0}
    return Faults(**(given | {"lost": {0: [4, 8]}, "lost_rate": 0.1, "slow": {2: 0.29}, "seed": 3} | changes))


def test_a_schedule_says_who_is_there() -> None:
    there = Faults(absent={2: [(4, 6), (6, 7), (9, None)], 0: [(5, 10)]}, lost={1: [5, 8], 2: [5]}).bind(3)
    up = [there.up(step) for step in range(12)]
    assert up[:4] == [[0, 1, 2]] * 4 and up[4] == [0, 1] and up[5] == up[6] == [1]
    assert up[7] == up[8] == [1, 2] and up[9] == [1] and up[10] == up[11] == [0, 1]
    assert there.present(4) == [0, 1] and there.present(5) == [] and there.present(8) == [2]
    assert there.returning(7) == ([2], 1) and there.returning(10) == ([0], 1)
    assert [there.returning(step) for step in (1, 2, 4, 6, 9)] == [([], None)] * 5
    assert [there.next_change(step) for step in (0, 3, 4, 5, 6, 8, 9)] == [3, 4, 6, 6, 8, 9, NEVER - 1]
    everyone = Faults().bind(2)
    assert everyone.up(10**12) == [0, 1] and everyone.next_change(5) == NEVER - 1


def test_who_comes_back_takes_the_state_of_those_who_were_last_there() -> None:
    together = Faults(absent={0: [(3, 9)], 1: [(5, 9)], 2: [(2, 12)]}).bind(3)
    assert together.up(8) == [] and together.returning(9) == ([0, 1], 1)  # node 1 was there up to step 4
    assert together.returning(12) == ([2], 0)
    apart = Faults(absent={0: [(3, 6)], 1: [(5, 9)]}).bind(2)
    assert apart.returning(6) == ([0], 0)  # the one that knew more is away
    assert apart.returning(9) == ([1], 0)
    never_begun = Faults(absent={0: [(1, 4)], 1: [(1, 4)]}).bind(2)
    assert never_begun.returning(4) == ([0, 1], 0)


@pytest.mark.parametrize("lockstep", [False, True])
def test_answers_are_pure(lockstep: bool) -> None:
    steps = list(range(1, 400))
    given = stormy(slow=None) if lockstep else stormy()

    def answers(there: Attendance, order: Sequence[int]) -> dict[int, tuple[Any, ...]]:
        return {
            t: (
                there.up(t),
                there.present(t),
                there.returning(t),
                there.next_change(t),
                there.steps_between(t - 1, t + 3).tolist(),
            )
            for t in order
        }

    once = answers(given.bind(5, lockstep), steps)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    shuffled = np.random.default_rng(0).permutation(steps).tolist()
    assert answers(given.bind(5, lockstep), shuffled) == once
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    far = given.bind(5, lockstep)
    far.up(10**5)
    assert answers(far, steps) == once
    wide = given.bind(9, lockstep)  # a node's luck does not depend on how many others there are
    for step in steps:
        assert [i for i in wide.up(step) if i < 5] == once[step][0]
        assert [i for i in wide.present(step) if i < 5] == once[step][1]
    assert answers(stormy(seed=4, slow=given.slow).bind(5, lockstep), steps) != once


def test_looking_far_ahead_changes_no_answer() -> None:
    """A planned outage may end in a drawn one that nobody has asked for yet."""
    for seed in range(10):
        given = Faults(absent={0: [(1000, 2100)], 1: [(9000, None)]}, drop_rate=0.05, mean_outage_steps=20.0, seed=seed)
        far = given.bind(1 + 1)
        far.steps_between(0, 10**5)
        for step in (900, 1500, 2040, 8000, 9500):
            change = far.next_change(step)
            assert given.bind(2).next_change(step) == change
            assert given.bind(2).returning(change + 1) == far.returning(change + 1)


def test_all_chance_comes_from_named_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def noted(seed: int, purpose: str, *ids: int) -> np.random.Generator:
        asked.add((seed, purpose, ids))
        return numpy_generator(seed, purpose, *ids)

    monkeypatch.setattr(faults_module, "numpy_generator", noted)
    there = stormy().bind(3)
    there.present(7), there.steps_between(0, 50)
    assert asked == {(3, "lost", (7,))} | {(3, "outages", (node,)) for node in range(3)}
    assert stream_seed(3, "lost", 1) != stream_seed(3, "outages", 1)
    asked.clear()
    Faults(absent={0: [(2, 4)]}, lost={1: [1]}, slow={0: 0.5}).bind(3).present(1)
    assert not asked


def test_steps_are_additive_and_stretches_do_not_matter() -> None:
    there = stormy().bind(5)
    cuts = np.random.default_rng(1).integers(0, 300, (60, 3))
    for a, b, c in np.sort(cuts):
        assert (there.steps_between(a, b) + there.steps_between(b, c) == there.steps_between(a, c)).all()
    for step in range(1, 300):
        one = there.steps_between(step - 1, step)
        assert ((one == 0) | (one == 1)).all() and all(one[i] == 0 for i in range(5) if i not in there.up(step))
        end = there.next_change(step)
        assert end > step and all(there.up(t) == there.up(step + 1) for t in range(step + 1, min(end, step + 50) + 1))
        assert there.up(end + 1) != there.up(end)
    up_steps = sum(2 in there.up(step) for step in range(1, 301))
    assert there.steps_between(0, 300)[2] == up_steps * 29 // 100
    exact = Faults(slow={0: 0.29, 1: 0.1, 2: 1.0}).bind(3)  # 0.29 * 100 is a little less than 29 in binary
    assert exact.steps_between(0, 100).tolist() == [29, 10, 100]


@pytest.mark.parametrize("options", [{"local_steps": [5, 3, 1, 4]}, {"client_fraction": 0.5}, {}])
def test_a_strategy_s_own_plan_and_the_faults_both_hold(options: dict[str, Any]) -> None:
    module = AveragingCommunicator(5, **options)
    module.start(fleet_of(torch.zeros(4, P)), run_of(4))
    for given in (stormy(), stormy(slow=None), Faults(slow={0: 0.5, 3: 0.4})):
        there = given.bind(4)
        for first in range(0, 60, 5):
            whole = there.steps_between(first, first + 5, module.local_steps)
            ones = [there.steps_between(t, t + 1, module.local_steps) for t in range(first, first + 5)]
            assert (whole == sum(ones)).all()
            alone = module.local_steps(first, first + 5)
            assert (whole <= (5 if alone is None else alone)).all()
    assert Faults(slow={0: 0.5}).bind(4).steps_between(0, 5, module.local_steps).tolist()[0] <= 2


def test_rates_are_what_they_say() -> None:
    rate, mean, nodes, steps = 0.02, 8.0, 150, 3000
    there = Faults(drop_rate=rate, mean_outage_steps=mean, lost_rate=0.3).bind(nodes)
    up = np.zeros((nodes, steps + 1), bool)
    for step in range(steps + 1):
        up[there.up(step), step] = True
    drops = up[:, :-1] & ~up[:, 1:]
    backs = ~up[:, :-1] & up[:, 1:]
    assert drops.sum() / up[:, :-1].sum() == pytest.approx(rate, rel=0.05)
    assert backs.sum() / (~up[:, :-1]).sum() == pytest.approx(1 / mean, rel=0.05)
    assert 1 - up[:, 500:].mean() == pytest.approx(rate * mean / (1 + rate * mean), rel=0.05)
    assert np.abs(np.corrcoef(up[:, 500:])[np.triu_indices(nodes, 1)]).mean() < 0.1  # each node for itself
    kept = [len(there.present(step)) / max(1, len(there.up(step))) for step in range(1, 500)]
    assert np.mean(kept) == pytest.approx(0.7, rel=0.02)
    always = Faults(drop_rate=1.0, mean_outage_steps=1.0).bind(1)
    assert always.steps_between(0, 10).tolist() == [5] and always.up(1) == [] and always.up(2) == [0]
    assert Faults(lost_rate=1.0).bind(2).present(3) == []


def test_in_lockstep_a_lost_synchronisation_is_a_missed_step() -> None:
    there = Faults(lost={1: [3, 4]}, absent={0: [(4, 6)]}).bind(3, lockstep=True)
    assert [there.up(t) for t in (2, 3, 4, 5)] == [[0, 1, 2], [0, 2], [2], [1, 2]]
    assert there.present(4) == [2] and there.returning(5) == ([1], 2) and there.returning(6) == ([0], 1)
    assert there.steps_between(0, 6).tolist() == [4, 4, 6] and there.next_change(0) == 1
    all_lose = Faults(lost={0: [3], 1: [2, 3]}).bind(2, lockstep=True)
    assert all_lose.up(3) == [] and all_lose.returning(4) == ([0, 1], 0)  # node 1 missed step 2 already
    with pytest.raises(ArgumentError, match=r"slow=.* with a strategy that takes every step of all nodes together"):
        Faults(slow={1: 0.5}).bind(3, lockstep=True)


def test_faults_are_described_as_json() -> None:
    text = json.dumps(describe(stormy()))
    assert '"absent": {"1": [[3, 9], [30, null]]}' in text and '"drop_rate": 0.05' in text and '"2": 0.29' in text
    assert describe(stormy()) == describe(stormy()) != describe(stormy(seed=5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"absents": {}}, "did you mean 'absent'"),
        ({"absent": [3]}, "must map nodes"),
        ({"absent": {"3": [(1, 2)]}}, "each node of absent='3'"),
        ({"absent": {3: (1, 2)}}, "a list of \\(first, back\\) steps"),
        ({"absent": {3: [(0, 2)]}}, "first step of an outage of node 3=0"),
        ({"absent": {3: [(5, 5)]}}, "node 3 returns=5 must be a whole number of at least 6"),
        ({"drop_rate": 1.5}, "drop_rate=1.5 must be a number of at least 0 and at most 1"),
        ({"lost_rate": "0.1"}, "lost_rate='0.1'"),
        ({"mean_outage_steps": 0.5}, "mean_outage_steps=0.5"),
        ({"lost": {1: 5}}, "must be a list of steps"),
        ({"lost": {1: [0]}}, "at least 1"),
        ({"slow": {1: 0}}, "over 0 and at most 1"),
        ({"slow": {1: 1.5}}, "over 0 and at most 1"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Faults(**arguments)


@pytest.mark.parametrize("given", [{"absent": {4: [(1, 2)]}}, {"lost": {4: [1]}}, {"slow": {4: 0.5}}])
def test_nodes_must_be_of_the_fleet(given: dict[str, Any]) -> None:
    Faults(**given).bind(5)
    with pytest.raises(ArgumentError, match=r"Faults\(.*=...\) names node 4, but num_nodes=4: nodes are 0 to 3"):
        Faults(**given).bind(4)
