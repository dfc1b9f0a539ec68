"""What failed on accelerators before it was tried on one: each test stands for a kind of fault."""

import pytest
import torch
from battery import train
from device.small import fit, network, weights_of
from processes import launch
from strategies import CONTRIB, STRATEGIES
from torch import nn

from exogym.callbacks import Every
from exogym.core.base.devices import Device
from exogym.core.engine import world
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy

# Each computes in float64 somewhere: norms, quantization, weights, measurements
WIDE = ("ddp", "diloco", "streaming diloco 4 bit", "sparseloco", "fedavg sampling", "edit", "qfedavg", "gradient push")


@pytest.mark.parametrize("name", WIDE)
def test_a_device_without_float64_trains(name, fake):
    fake.device.set_draws_as_cpu(True)
    make = (STRATEGIES | CONTRIB)[name].make
    here = train(make(), device="cpu")
    fake.device.set_float64(False)
    there = train(make(), device="fake")
    assert float((weights_of(here) - weights_of(there)).abs().max()) < 0.05  # a norm in float32 may turn a code
    for figure in ("val_loss", "consensus_distance", "correlation"):
        assert there.history.last[figure] == pytest.approx(here.history.last[figure], rel=0.02)


def test_a_loss_with_tensors_moves_to_the_device(fake):
    losses = [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])) for _ in range(2)]
    here, there = (fit(network(), device, loss) for device, loss in zip(("cpu", "fake"), losses, strict=True))
    assert torch.equal(weights_of(here), weights_of(there))


def test_lazy_modules_draw_the_same_weights_as_on_the_cpu(fake):
    made = []
    for device in ("cpu", "fake"):
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
        made.append(weights_of(fit(model, device, max_steps=1, strategy=SimpleReduceStrategy("sgd", lr=0.0))))
    assert torch.equal(*made)


def test_dropout_is_seen_and_a_resumed_run_is_the_same(fake, tmp_path):
    """Its generator is the device's own: it must be seeded for each step, and looked at for draws."""
    runs = {}
    for name, options in {"whole": {}, "stopped": {"callbacks": [Every(4, lambda loop: True)]}}.items():
        folder = {"save_dir": tmp_path / name, "checkpoint_interval": 2}
        runs[name] = fit(network(nn.Dropout(0.5)), "fake", **folder, **options)
    runs["resumed"] = fit(network(nn.Dropout(0.5)), "fake", save_dir=tmp_path / "stopped", resume=True)
    assert torch.equal(weights_of(runs["whole"]), weights_of(runs["resumed"]))
    assert not torch.equal(weights_of(runs["whole"]), weights_of(runs["stopped"]))
    torch.rand(3, device="fake")
    assert torch.equal(weights_of(runs["whole"]), weights_of(fit(network(nn.Dropout(0.5)), "fake")))


@pytest.mark.parametrize(("first", "then"), [("cpu", "fake"), ("fake", "cpu")])
def test_a_run_resumes_on_another_kind_of_device(first, then, fake, tmp_path):
    fake.device.set_draws_as_cpu(True)
    folder = {"save_dir": tmp_path / "saved", "run_dir": tmp_path / "run"}
    fit(network(), first, **folder, checkpoint_interval=2, callbacks=[Every(4, lambda loop: True)])
    resumed = fit(network(), then, **folder, resume=True)
    assert torch.equal(weights_of(resumed), weights_of(fit(network(), "cpu")))


def test_random_state_outside_a_run_stays_as_it_was(fake):
    model = network(nn.Dropout(0.5))
    before = Device(torch.device("fake", 0)).random_states()
    fit(model, "fake", max_steps=3)
    assert all(map(torch.equal, before, Device(torch.device("fake", 0)).random_states()))


@pytest.mark.parametrize("options", [{"network": "home"}, {"processes": 1}])
def test_a_measured_time_waits_for_the_device(options, fake):
    """Without a wait a step takes the time of its launches."""
    fake.reset()
    fit(network(), "fake", **options)
    assert (fake.count("sync device") > 0) == ("network" in options)


def test_a_backend_that_this_torch_lacks_is_not_chosen(fake, monkeypatch):
    assert Device(torch.device("fake", 0)).backend == "gloo"
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "nccl")
    assert Device(torch.device("cuda", 0)).backend == "gloo"
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    assert Device(torch.device("cuda", 0)).backend == "nccl"
    chosen = []
    monkeypatch.setattr(world, "join_group", chosen.append)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    world.join_world(torch.device("fake", 0))
    assert chosen == ["gloo"]


IN_TWO = """
import sys, warnings
sys.path.insert(0, sys.argv[2])
from device import fake
import torch
from device.small import fit, network, weights_of
from exogym import Placement
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy

warnings.simplefilter("ignore")
found = {}
for reduction in ("tree", "native"):
    for strategy in (SimpleReduceStrategy("sgd", lr=0.1), DiLoCoStrategy(lr=0.05, H=3)):
        placement = Placement(reduction=reduction)
        found[reduction, strategy.name] = weights_of(fit(network(), "auto", strategy=strategy, placement=placement))
torch.save(found, f"{sys.argv[1]}/{torch.distributed.get_rank()}.pt")
"""


def test_two_processes_over_gloo(fake, tmp_path):
    """gloo takes none but the CPU's tensors, also where gradients are sent during the backward pass."""
    launcher = launch(2, tmp_path / "two", IN_TWO)
    assert launcher.wait() == 0, (tmp_path / "two" / "log").read_text()[-3000:]
    found = [torch.load(tmp_path / "two" / f"{rank}.pt") for rank in range(2)]
    for key, weights in found[0].items():
        assert torch.equal(weights, found[1][key])
        strategy = SimpleReduceStrategy("sgd", lr=0.1) if key[1] == "ddp" else DiLoCoStrategy(lr=0.05, H=3)
        whole = weights_of(fit(network(), "cpu", strategy=strategy))
        assert torch.equal(weights, whole) if key[0] == "tree" else torch.allclose(weights, whole, atol=1e-6)
