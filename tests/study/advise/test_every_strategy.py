"""The formula of `advise` and the clock of a run agree for every strategy and library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.errors import ExoGymError
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.strategy.traffic import ModelSize
from exogym.study.advise import advise

STEPS, NODES = 48, 4
OURS = sorted(name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym."))
ROUGH = {  # predicted over clock's time may differ by this share in such a short run, and why
    "async_diloco": 0.03, "fedasync": 0.03, "heloco": 0.03, "decoupled_diloco": 0.05, "acco": 0.03, "halos": 0.01,
    "sparta": 0.02, "sparta_diloco": 0.02,  # the run's ends
    "fedper": 0.03, "fedrep": 0.03, "onebit_adam": 0.02, "dion": 0.02,  # the formula knows the size, not each tensor
    "pier": 0.1, "edit": 0.3, "post_local_sgd": 0.6,  # the first steps are a warm-up, in which all steps communicate
    "pulseloco": 0.5,  # its bytes depend on the values
}  # fmt: skip


def with_short_rounds(name: str) -> str:
    try:
        parse_strategy(f"{name}:H=4")
    except ExoGymError:  # it communicates at every step
        return name
    return f"{name}:H=4"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))


@pytest.mark.parametrize("name", OURS)
def test_the_formula_is_the_clocks_time(name):
    text, size = with_short_rounds(name), ModelSize.of([p.shape for p in model().parameters()])
    data = TensorDataset(torch.randn(96, 32), torch.randint(0, 10, (96,)))
    seen = {}
    for library in ("gloo", "nccl"):  # test_unlike.py has textbooks' times
        network = f"20Mbps,2ms,library={library}"
        given = {"parameters": size, "num_nodes": NODES, "network": network, "step_seconds": "10ms"}
        told = advise(**given, strategies=[text], algorithm="recorded").rows[0].seconds_per_step
        trainer = LocalTrainer(model(), data, loss_fn=F.cross_entropy)
        options = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": 4, "device": "cpu", "final_sync": False}
        trainer.fit(parse_strategy(text), **options, network=network, step_seconds="10ms")
        seen[library] = told / (trainer.clock.last_s / STEPS)
    assert list(seen.values()) == pytest.approx([1.0] * 2, rel=1e-3 + ROUGH.get(name, 0.0)), seen
