"""The memory that a run is said to need before it begins, against the most that it held on the device."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.base.devices import Device
from exogym.errors import ArgumentError
from exogym.strategy.registry import parse_strategy

NODES, TOLERANCE = 8, 0.25
RUNS = [
    *(
        "ddp",
        "diloco:H=3",
        "diloco:H=3 vmap",
        "fedavg:H=3",
        "sparta",
        "streaming_diloco:H=6",
        "muloco:H=3",
        "demo",
        "qsgd",
    ),
    *("signsgd", "topk", "powersgd", "gossip", "noloco:H=3", "sparseloco:H=3", "scaffold:H=3"),
]


def fit(run):
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, 64, generator=draw), torch.randint(10, (256,), generator=draw))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 480), nn.ReLU(), nn.Linear(480, 480), nn.ReLU(), nn.Linear(480, 10))
    name, _, compute = run.partition(" ")
    LocalTrainer(model, data, loss_fn=nn.functional.cross_entropy).fit(
        parse_strategy(name, lr=0.01), num_nodes=NODES, max_steps=6, batch_size=8, device="fake", progress=False,
        compute=compute or "loop",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*outer steps? in 6 steps")
@pytest.mark.parametrize("run", RUNS)
def test_the_estimate_is_close_to_the_peak(run, fake, monkeypatch):
    """Reductions take columns in pieces, which are small for large models, so they are small here, too."""
    monkeypatch.setattr("exogym.core.communicator.wire.MOST_ELEMENTS", 1 << 16)
    with monkeypatch.context() as full:
        full.setattr(Device, "free_bytes", lambda self: 1)
        with pytest.raises(ArgumentError) as refused:
            fit(run)
    said = float(re.search(r"need ([\d.e+-]+) GB", str(refused.value))[1]) * 1e9
    fake.reset()
    before = fake.device.memory()[0]
    fit(run)
    peak = fake.device.memory()[1] - before
    assert abs(said / peak - 1) < TOLERANCE, f"said {said / 1e6:.1f} MB, held {peak / 1e6:.1f} MB"
