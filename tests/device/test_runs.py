"""Runs on a device that isn't the CPU end with the CPU's bits, if its generators draw the CPU's numbers."""

import pytest
from battery import train
from strategies import STRATEGIES

from exogym.testing import fingerprint


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_has_the_cpus_bits(name, fake):
    fake.device.set_draws_as_cpu(True)
    here, there = (train(STRATEGIES[name].make(), device=device) for device in ("cpu", "fake"))
    assert fingerprint(here.model) == fingerprint(there.model)
    assert there.history.last["val_loss"] == pytest.approx(here.history.last["val_loss"], rel=1e-6)
    assert next(there.model.parameters()).device.type == "fake"
