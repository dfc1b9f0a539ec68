"""The virtual clock where a server asks some of the nodes: a round begins when the one before has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clients import CLIENTS, MOMENTUM, SAMPLED, WITH_A_SERVER, same, trained

from exogym.faults import Devices, Faults, Profile, Trace
from exogym.network import Network
from exogym.strategy import FedAvgStrategy, ScaffoldStrategy

LINE, STEP_S, ROUNDS, H = "1Mbps,10ms", 0.01, 6, 4
FREE = Network(1e30)  # sending takes no time
ON_TIME = {"network": LINE, "step_seconds": STEP_S, "max_steps": ROUNDS * H}


@pytest.mark.parametrize("name", WITH_A_SERVER)
def test_no_round_begins_before_the_last_one_has_ended(name):
    """Nobody computes while a client sends, all stand at the end of the round, and no bit of training changes."""
    found = trained(WITH_A_SERVER[name](), timeline=True, **ON_TIME)
    computing, sending = ([s for s in found.clock.spans if s.kind == kind] for kind in ("compute", "send"))
    assert computing and sending
    ends, begins = (np.array([getattr(s, at) for s in computing])[:, None] for at in ("end_s", "start_s"))
    sent_s, done_s = (np.array([getattr(s, at) for s in sending])[None] for at in ("start_s", "end_s"))
    assert ((ends <= sent_s) | (begins >= done_s)).all()
    assert np.ptp(found.clock.time_s) == 0
    assert same(trained(WITH_A_SERVER[name](), max_steps=ROUNDS * H), found)


def test_a_sampled_run_takes_what_its_rounds_take(tmp_path: Path):
    """Equal nodes: a round is H steps and a collective; who sits out waits. Rows, and a stop, change nothing."""
    make = lambda: FedAvgStrategy(MOMENTUM, **SAMPLED)  # noqa: E731
    found = trained(make(), **ON_TIME)
    size = sum(p.numel() * p.element_size() for p in found.model.parameters())
    cost_s = Network.of(LINE).cost("all_reduce", size, CLIENTS // 10, "server").seconds
    assert found.clock.last_s == pytest.approx(ROUNDS * (H * STEP_S + cost_s), abs=1e-6)
    assert found.clock.share("computing").mean() == pytest.approx(0.1 * ROUNDS * H * STEP_S / found.clock.last_s)
    for more in ({"faults": Faults()}, {"processes": 2}):
        assert trained(make(), **ON_TIME | more).clock.time_s.tolist() == found.clock.time_s.tolist()
    trained(make(), save_dir=tmp_path, final_sync=False, **ON_TIME | {"max_steps": 10})
    resumed = trained(make(), save_dir=tmp_path, resume=True, **ON_TIME)
    assert resumed.clock.time_s.tolist() == found.clock.time_s.tolist()


@pytest.mark.parametrize("make", [FedAvgStrategy, ScaffoldStrategy], ids=lambda cls: cls.name)
def test_the_clock_waits_for_late_reports_as_the_server_does(make):
    """Where sending takes no time, the clock of the network says what the server's says of slow clients."""
    fleet = Devices({"fast": Profile(1, 1.0, 0.5, 1.0), "slow": Profile(1, 0.3, 0.9, 5.0)})
    strategy = make("sgd", **SAMPLED)
    found = trained(
        strategy,
        network=FREE,
        step_seconds=np.linspace(0.1, 0.3, CLIENTS),
        max_steps=24,
        faults=Faults(trace=fleet),
    )
    server_s = found.history.last["server_time_s"]
    assert server_s > 6 * 0.4
    assert found.clock.last_s == pytest.approx(server_s, abs=1e-6)


def test_rounds_that_are_given_up_take_their_time(tmp_path: Path):
    (tmp_path / "trace.csv").write_text("client,from,to,speed\n0,0,1,1\n")
    fleet = Faults(trace=Trace(tmp_path / "trace.csv"))
    strategy = FedAvgStrategy("sgd", **SAMPLED)
    found = trained(strategy, network=FREE, step_seconds=1.0, max_steps=24, faults=fleet)
    assert found.history.last["failed_rounds"] == 6
    assert found.clock.last_s == found.history.last["server_time_s"] == 24.0
