"""A loop of the real Accelerate with `ExoGymNode`: the bits of `LocalTrainer`, killed and resumed too."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from adapters import (
    BATCH,
    KILLED,
    LONG,
    PARTS,
    SHORT_STEPS,
    STRATEGIES,
    Net,
    Plain,
    adamw,
    described,
    ends_where_fit_does,
    examples,
    holds_the_law,
    in_world,
    kill,
    short,
)
from adapters import schedule as scheduled
from adapters import simulated as simulate

from exogym.errors import ArgumentError
from exogym.integrations.accelerate import ExoGymNode
from exogym.strategy import DeMoStrategy, DiLoCoStrategy
from exogym.testing import fingerprint


def forgotten():
    """Accelerate keeps one state for a process; a world trains several times."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trained(name, rank, steps, folder=None, killed=None, resume=False, make=Net, data=examples):
    forgotten()
    own = name != "demo"
    node = ExoGymNode(STRATEGIES[name]() if own else described(name, steps))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = make()
    optimizer = adamw(model) if own else node.optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduled(optimizer, steps)) if own else None
    nodes = node.attach(accelerator, model, optimizer)
    if resume:
        accelerator.load_state(folder / f"node-{rank}")
        assert nodes.step_count == 8
    loader = node.loader(data(), BATCH)
    while nodes.step_count < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            if killed and accelerator.sync_gradients and nodes.step_count == 8:
                accelerator.save_state(folder / f"node-{rank}")
            if killed and nodes.step_count == killed:
                kill()
            if nodes.step_count == steps:
                break
    model = nodes.finish()
    return model if make is Plain else (fingerprint(model), nodes.history.last["tx_bytes"])


def test_a_loop_of_accelerate_has_the_bits_of_a_simulation(tmp_path):
    """Over three epochs; with dropout, BatchNorm, tied weights, a schedule, clipping and accumulation."""
    holds_the_law(trained, ["ddp", "diloco", "demo"], 2, 14, tmp_path)


def test_a_short_last_step_weights_examples_as_fit_does(monkeypatch):
    ends_where_fit_does(lambda: trained("ddp", 0, SHORT_STEPS, make=Plain, data=short), monkeypatch)


def test_no_weight_is_left_after_an_epoch():
    forgotten()
    node = ExoGymNode(DiLoCoStrategy(H=2))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = Plain()
    node.attach(accelerator, model, adamw(model))
    sizes = [len(batch["x"]) for batch in node.loader(short(), BATCH)]
    assert sizes == [4, 4, 2, 3]
    model.last.bias.sum().backward()
    assert torch.equal(model.last.bias.grad, torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_every_strategy_in_accelerate_has_the_bits_of_a_simulation(num_nodes, tmp_path):
    holds_the_law(trained, list(STRATEGIES), num_nodes, LONG, tmp_path)


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_loop_goes_on_with_the_same_bits(name, tmp_path):
    """From the Accelerator's own checkpoint, in mid-epoch and mid-round."""

    def train(rank, **options):
        return trained(name, rank, 14, tmp_path, **options)[0]

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path / "killed", lambda rank: train(rank, killed=10))
    assert in_world(2, tmp_path / "again", lambda rank: train(rank, resume=True)) == [simulate(name, 2, 14)] * 2


def test_what_cannot_be_right_is_refused(tmp_path):
    def attach(given=None, strategy=None, before=lambda: None, **options):
        forgotten()
        early = Accelerator(cpu=True) if given else None
        node = ExoGymNode(strategy or DiLoCoStrategy(H=2))
        accelerator = early or Accelerator(cpu=True, **options)
        with pytest.raises(ArgumentError, match="attach the model first"):
            node.loader(examples())
        model = Net()
        return accelerator, node.attach(accelerator, model, adamw(model))

    with pytest.raises(ArgumentError, match="its own update rule"):
        attach(strategy=DeMoStrategy())

    def body(rank):
        with pytest.raises(ArgumentError, match="create the ExoGymNode before the Accelerator"):
            attach(given=True)
        accelerator, _ = attach()
        shared = tmp_path / "shared"
        try:
            accelerator.save_state(shared)
            return "saved"
        except ArgumentError as error:
            assert "use one folder per node" in str(error)
            return "refused"

    assert sorted(in_world(2, tmp_path / "world", body)) == ["refused", "saved"]


def test_a_scheduler_of_an_optimizer_that_does_not_step_is_an_error():
    forgotten()
    node = ExoGymNode(DiLoCoStrategy(H=2))
    accelerator, model = Accelerator(cpu=True), Net()
    optimizer = node.optimizer(model)
    with pytest.raises(ArgumentError, match="before training"):
        optimizer.step()
    scheduler = scheduled(optimizer, 4)
    node.attach(accelerator, model, optimizer)
    for batch in node.loader(examples()[:8], 4):
        accelerator.backward(model(**batch)["loss"])
        if node.nodes.step_count == 1:
            with pytest.raises(ArgumentError, match="pass lr_scheduler to the strategy"):
                optimizer.step()
            return
        optimizer.step()
        scheduler.step()
