"""The laws, over every strategy; and for each law a strategy that breaks it and must be caught."""

import functools

import pytest
import torch
from battery import battery, each
from strategies import STRATEGIES, Broken

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy import CommunicateOptimizeStrategy, FedAvgStrategy, PeriodicModule, SimpleReduceStrategy
from exogym.strategy.registry import parse_strategy
from exogym.testing import LAWS, check_strategy, fingerprint, small_problem


@pytest.mark.parametrize("name", each(STRATEGIES))
def test_the_laws_hold(name):
    """All but "repeatable": stretches, and a stop, are runs again that end in the same bits."""
    for law in LAWS[1:]:
        if law != "single node" or STRATEGIES[name].alone:
            assert getattr(battery(name), law.replace(" ", "_"))(), law


class Idle(torch.nn.Module):
    """The small problem's model, and a layer that no example uses."""

    def __init__(self):
        super().__init__()
        self.net, self.idle = small_problem()[0], torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.net(x)


MAKERS = {name: entry.make for name, entry in STRATEGIES.items() if entry.on_rows} | {
    f"{name}:weight_decay": functools.partial(parse_strategy, f"{name}:weight_decay=0.5", lr=0.02)
    for name in ("onebit_adam", "demo")
}
ROUNDED = ("sparta partitioned 4 bit",)  # averages of values that are rounded to few bits


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ROUNDED])
def test_a_parameter_that_no_node_uses_stays_as_it_is(name):
    """Weight decay too passes it over, as in torch's loop."""
    model, data = Idle(), small_problem()[1]
    before = [p.detach().clone() for p in model.idle.parameters()]
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(MAKERS[name](), num_nodes=4, max_steps=8, batch_size=8, device="cpu", progress=False)
    for p, x in zip(model.idle.parameters(), before, strict=True):
        assert torch.allclose(p, x, rtol=1e-6, atol=0)  # a mean of equal values may round


class Counting(PeriodicModule):
    """Averages every second time it is asked, by a plain counter."""

    interval_steps = 5
    counters = ("asked",)

    def __init__(self):
        super().__init__()
        self.asked = 0

    def communicate(self, fleet, step):
        self.asked += 1
        if self.asked % 2:
            for block in fleet.blocks:
                fleet.comm.all_reduce(block.params, "mean", out=block.params)


def test_a_number_that_changes_and_is_not_declared_is_refused_when_a_run_is_saved(tmp_path):
    class Undeclared(Counting):
        counters = ()

    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    strategy = CommunicateOptimizeStrategy("adamw", [Undeclared()], lr=0.02)
    with pytest.raises(StrategyError, match=r"Undeclared.asked .* counters = \('asked',\)"):
        trainer.fit(strategy, num_nodes=4, max_steps=20, batch_size=8, device="cpu", save_dir=tmp_path)


def test_two_modules_of_a_class_keep_their_state_apart(tmp_path):
    """Each has its own count: one that took the other's would average at the wrong times."""

    def train(*callbacks, **options):
        model, data = small_problem()
        trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
        modules = [Counting(), Counting()]
        modules[1].interval_steps = 3
        strategy = CommunicateOptimizeStrategy("adamw", modules, lr=0.02)
        trainer.fit(strategy, num_nodes=4, max_steps=20, batch_size=8, device="cpu", callbacks=callbacks, **options)
        return fingerprint(model)

    train(Every(10, lambda loop: True), save_dir=tmp_path)
    assert train(save_dir=tmp_path, resume=True) == train()


def test_the_sound_version_passes(capfd):
    seen = check_strategy(
        lambda: CommunicateOptimizeStrategy("adamw", [Broken()], lr=0.02),
        payload_bytes=lambda row, steps: row * steps / 3,
    )
    assert tuple(seen) == LAWS and capfd.readouterr() == ("", "")


NUMBER = r"\d\.?\d*(e-\d+)?"
SIZES = {
    "repeatable": rf"differ by up to {NUMBER} \(the largest is {NUMBER}\)",
    "stretches": rf"differ by up to {NUMBER} \(the largest is {NUMBER}\)",
    "stopping": rf"differ by up to {NUMBER} \(the largest is {NUMBER}\)",
    "placement": rf"differ by up to {NUMBER}",
    "single node": r"sends \d+ bytes",
    "bytes": r"was \d+\.\d bytes, but payload_bytes\(712, 24\) returned \d+\.\d",
    "learns": rf"from {NUMBER} to {NUMBER}",
}


@pytest.mark.parametrize("law", LAWS)
def test_a_broken_law_is_caught_and_its_size_said(law):
    with pytest.raises(StrategyError, match=f"law '{law}'.*{SIZES[law]}"):
        check_strategy(
            lambda: CommunicateOptimizeStrategy("adamw", [Broken(law)], lr=0.02),
            payload_bytes=lambda row, steps: row * steps / 3,
        )


def test_the_law_of_bytes_says_if_only_the_final_synchronization_is_missing():
    with pytest.raises(StrategyError, match="one model: the final synchronization"):
        check_strategy(lambda: FedAvgStrategy(H=10, lr=0.02), payload_bytes=lambda row, steps: row * (steps // 10))
    check_strategy(lambda: FedAvgStrategy(H=10, lr=0.02), payload_bytes=lambda row, steps: row * -(-steps // 10))


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (SimpleReduceStrategy(), {}, "must be a function that returns a new strategy"),
        (SimpleReduceStrategy, {"payload_bytes": 100}, "payload_bytes=100 must be a function"),
        (SimpleReduceStrategy, {"skip": ("lerns",)}, "did you mean 'learns'"),
    ],
)
def test_what_cannot_be_held_against_the_laws_is_said(factory, options, words):
    with pytest.raises(ArgumentError, match=words):
        check_strategy(factory, **options)
