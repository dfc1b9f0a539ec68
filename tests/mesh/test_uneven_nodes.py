"""Nodes of different splits, each with processes of its own: their run is that of dense nodes."""

import pytest
from battery import asked, each
from splits import ADAM, MADE, SGD, apart, assert_alike, fit, split, text_trainer, trainer
from strategies import STRATEGIES

PROX = STRATEGIES["fedprox"].make


@pytest.fixture(scope="module")
def one_and_two(request, tmp_path_factory):
    """What a node of one process beside one of two comes to, by name, and the folder."""
    folder = tmp_path_factory.mktemp("three")
    names = [params["name"] for params in asked(request, "test_a_device_beside_two_trains_what_dense_nodes_do")]
    body = (
        f"NAMES = {names!r}"
        + """
from averages import TimeAverage
from exogym.mesh.recut import Recut
from strategies import STRATEGIES
PROX = STRATEGIES["fedprox"].make
nodes = {"node": [NodeMesh(), NodeMesh(shard=2)]}
found = {name: fit(trainer(), make(), **nodes) for name in NAMES for make, _ in [MADE.get(name, (PROX, ADAM))]}
given = {"save_dir": "kept", "final_sync": False}
clipped = MADE["diloco clipped"][0]
fit(trainer(), clipped(), max_steps=4, **nodes, **given)
fit(trainer(), clipped(), max_steps=5, node=[NodeMesh(shard=2), NodeMesh()], resume=True, **given)
made = trainer()
fit(made, clipped(), callbacks=[TimeAverage(0.5)], **nodes)
if rank() == 0:
    found["watched"] = list(made.history.column("average_val_loss")[1])
Recut.refresh = lambda self: self.within.refresh()  # the control: what training does to a row is not computed with
found["stale"] = fit(trainer(), MADE["diloco sgd"][0](), **nodes)
keep(found)
"""
    )
    return split(folder, 3, body), folder


@pytest.mark.parametrize("name", each([*MADE, "fedprox"], fast=("topk", "fedprox")))
def test_a_device_beside_two_trains_what_dense_nodes_do(name, one_and_two):
    make, tolerance = MADE.get(name, (PROX, ADAM))
    assert_alike(one_and_two[0][name], fit(trainer(), make()), tolerance)


def test_a_row_that_is_not_taken_would_be_seen(one_and_two):
    assert apart(one_and_two[0]["stale"], fit(trainer(), MADE["diloco sgd"][0]())) > 100 * SGD


def test_what_unequal_nodes_saved_others_and_dense_ones_go_on_from(one_and_two):
    make = MADE["diloco clipped"][0]
    resumed = fit(trainer(), make(), save_dir=one_and_two[1] / "kept", resume=True)
    assert_alike(resumed, fit(trainer(), make()), ADAM)


def test_callbacks_of_unequal_nodes_are_as_ever(one_and_two):
    from averages import TimeAverage

    made = trainer()
    fit(made, MADE["diloco clipped"][0](), callbacks=[TimeAverage(0.5)])
    values = list(made.history.column("average_val_loss")[1])
    assert len(values) > 1 and one_and_two[0]["watched"] == pytest.approx(values, rel=1e-4)


BESIDE = "[NodeMesh(shard=2), NodeMesh(shard=4)]"
MIXED = "[NodeMesh(stages=2), NodeMesh(shard=2, tensor=2)]"
STAGED = "[NodeMesh(shard=2), NodeMesh(stages=2, shard=2)]"


@pytest.mark.slow
@pytest.mark.parametrize("names", [["demo"], ["diloco clipped", "topk"]], ids=str)
def test_two_devices_beside_four(names, tmp_path):
    """Rows in two parts, of which the larger node has two copies; whole tensors, whole rows, norms and other splits."""
    body = f"""
found = {{name: fit(trainer(), MADE[name][0](), node={BESIDE}) for name in {names!r}}}
clipped, given = MADE["diloco clipped"][0], {{"save_dir": "kept", "final_sync": False}}
fit(text_trainer(), clipped(), node={MIXED}, max_steps=4, **given)
found["resumed"] = fit(text_trainer(), clipped(), node={BESIDE}, save_dir="kept", resume=True)
keep(found)
"""
    found = split(tmp_path, 6, body)
    for name in names:
        assert_alike(found[name], fit(trainer(), MADE[name][0]()), MADE[name][1])
    assert_alike(found["resumed"], fit(text_trainer(), MADE["diloco clipped"][0]()), ADAM)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [BESIDE, MIXED, STAGED])
def test_every_kind_of_strategy(nodes, tmp_path):
    names = ["ddp momentum", "sparta", "sparta diloco", "fedavg", "scaffold", "powersgd", "noloco"]
    body = f"""
from strategies import STRATEGIES
keep({{name: fit(text_trainer(), STRATEGIES[name].make(), node={nodes}) for name in {names!r}}})
"""
    found = split(tmp_path, 6, body)
    for name in names:
        assert_alike(found[name], fit(text_trainer(), STRATEGIES[name].make()), ADAM)
