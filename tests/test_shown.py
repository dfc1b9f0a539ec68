"""Objects that a user prints say what they are: no address in memory. Errors show the user's line."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exogym import LocalTrainer
from exogym.data import digits
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy, OptimSpec, Strategy, communicate
from exogym.strategy.registry import STRATEGIES
from exogym.study import runs


def test_a_strategy_shows_the_call_that_made_it() -> None:
    for made in STRATEGIES.values():
        assert repr(made()) == f"{made.__name__}()"
    spec = OptimSpec(torch.optim.SGD, lr=0.7)
    assert repr(DiLoCoStrategy(H=10, outer_optim=spec)) == "DiLoCoStrategy(outer_optim=OptimSpec(SGD, lr=0.7), H=10)"
    assert repr(Faults({1: [(2, 3)]}, seed=4)) == "Faults(absent={1: [(2, 3)]}, seed=4)"
    assert len(repr(Faults({node: [(2, 3)] for node in range(1000)}))) < 200


def test_trainers_clocks_sources_and_runs_show_what_they_hold(tmp_path: Path) -> None:
    source = digits()
    assert repr(source).startswith("<Source: 1,438 to train, 359 to validate, 10 classes, from ")
    trainer = LocalTrainer(torch.nn.Linear(64, 10), source.train, source.val, loss_fn=torch.nn.functional.cross_entropy)
    assert repr(trainer) == "<LocalTrainer of Linear with 650 parameters>"
    trainer.fit(DiLoCoStrategy(H=5), num_nodes=2, max_steps=10, network="1Gbps,1ms", run_dir=tmp_path / "a")
    assert repr(trainer) == "<LocalTrainer of Linear with 650 parameters, trained to step 10>"
    assert repr(trainer.clock).startswith("<Clock of 2 nodes on Network('1 Gbps', '1 ms'): 10 steps, ")
    assert repr(runs.load(tmp_path / "a")).startswith(f"<Run '{tmp_path}/a': done, ")


def depth(call: Callable[[], Any]) -> int:
    with pytest.raises(ArgumentError) as found:
        call()
    return len(traceback.extract_tb(found.value.__traceback__))


def test_the_traceback_of_a_mistake_ends_at_the_users_call() -> None:
    data = [(torch.ones(1), torch.ones(1))]
    trainer = LocalTrainer(torch.nn.Linear(1, 1), data, loss_fn=torch.nn.functional.mse_loss)

    class Asks(Strategy):
        def step(self) -> None:
            communicate.all_reduce(torch.ones(1), op="summ")

    options: Any = {"max_steps": 1, "batch_size": 1}
    # depth's call and the lambda
    assert depth(lambda: trainer.fit(DiLoCoStrategy(), num_nodes=0, **options)) == 2
    assert depth(lambda: trainer.fit(Asks(), num_nodes=1, **options)) > 5  # a user's frame is inside


def test_a_mistake_beside_another_error_shows_both() -> None:
    with pytest.raises(ArgumentError) as found:
        try:
            raise KeyError("the user's own")
        except KeyError:
            LocalTrainer(torch.nn.Linear(1, 1), val_data=None)  # type: ignore[call-arg]
    assert "the user's own" in "".join(traceback.format_exception(found.value))
