"""Nodes of several processes whose model is cut into stages, which are sharded or computed together in their turn."""

import pytest
from battery import asked, each
from splits import ADAM, CHOOSES, MADE, MUON, PIPELINES, SGD, apart, assert_alike, fit, split, text_trainer
from strategies import STRATEGIES

from exogym.strategy import DiLoCoStrategy

DILOCO = "DiLoCoStrategy('sgd', H=3, lr=0.1)"
QUARTERS = {  # of four processes that are one node
    "stages=2, shard=2": {},
    "stages=2, shard=2, zero=2, microbatches=3": {"batch_size": 7},
    "stages=2, shard=2, zero=2": {"minibatch_size": 5},
    "stages=2, tensor=2": {},
    "shard=2, tensor=2, zero=2": {},
    "shard=2, tensor=2": {},
}
FAST = ("stages=2, shard=2, zero=2, microbatches=3", "shard=2, tensor=2, zero=2")
WRONG = {  # what of `exogym.mesh.replicated` goes wrong
    "gradients of other shards": "scatter_sums = lambda along, x: [g.chunk(2)[along.part].clone() for g in x]",
    "rows of other shards": "gather = lambda along, pieces, wholes: None",
    "what two stages hold": "hand_on = lambda *given: ()",
}


@pytest.fixture(scope="module")
def quarters(request, tmp_path_factory):
    """What one node of 4 processes comes to, by its split, with what they sent for gradients and what formulas say."""
    meshes = [
        params["mesh"]
        for params in asked(request, "test_four_processes_for_a_node_train_what_one_would_and_send_what_formulas_say")
    ]
    body = f"""
from exogym.mesh import replicated
from exogym.errors import ModelError
made = MADE["diloco clipped"][0]
found, right = {{}}, dict(vars(replicated))
for split, given in { {mesh: QUARTERS[mesh] for mesh in meshes}!r}.items():
    given = given | {{"num_nodes": 1, "max_steps": 4, "node": eval(f"NodeMesh({{split}})")}}
    found[split] = counted(text_trainer(), {DILOCO}, **given)
given = {{"num_nodes": 1, "save_dir": "kept", "final_sync": False}}
fit(text_trainer(), made(), node=NodeMesh(stages=2, shard=2), max_steps=4, **given)
fit(text_trainer(), made(), node=NodeMesh(shard=2, tensor=2), max_steps=5, resume=True, **given)
for name, line in {WRONG!r}.items():
    exec(line, vars(replicated))
    try:
        fit(text_trainer(), made(), num_nodes=1, node=NodeMesh(stages=2, shard=2))
    except ModelError as error:
        found[name] = str(error)
    vars(replicated).update(right)
keep(found)
"""
    folder = tmp_path_factory.mktemp("quarters")
    return split(folder, 4, body) | {"folder": folder}


@pytest.mark.parametrize("mesh", each(QUARTERS, fast=FAST))
def test_four_processes_for_a_node_train_what_one_would_and_send_what_formulas_say(mesh, quarters):
    found, sent, said = quarters[mesh]
    given = QUARTERS[mesh] | {"num_nodes": 1, "max_steps": 4}
    assert_alike(found, fit(text_trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), **given), SGD)
    assert sent == pytest.approx(said, rel=1e-9)


def test_a_run_of_stages_that_were_sharded_goes_on_under_another_split(quarters):
    make, given = MADE["diloco clipped"][0], {"num_nodes": 1, "final_sync": False}
    found = fit(text_trainer(), make(), save_dir=quarters["folder"] / "kept", resume=True, **given)
    assert_alike(found, fit(text_trainer(), make(), **given), ADAM)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_split_of_stages_is_found_before_training(wrong, quarters):
    assert "split by stages=2 x shard=2, the model has wrong gradients: the gradient of " in quarters[wrong]


@pytest.mark.slow
def test_choices_are_the_same_where_nothing_is_rounded(tmp_path):
    """In double precision no rounding turns one: all who choose end where dense nodes do, with the same bytes."""
    body = f"""
from strategies import STRATEGIES
found = {{}}
for name in {CHOOSES!r}:
    made = text_trainer()
    made.model.double()
    found[name] = fit(made, STRATEGIES[name].make() if name in STRATEGIES else MADE[name][0](), NODE)
keep(found)
"""
    found = split(tmp_path, 8, body.replace("NODE", "node=NodeMesh(stages=2, shard=2)"))
    for name in CHOOSES:
        made = text_trainer()
        made.model.double()
        dense = fit(made, STRATEGIES[name].make() if name in STRATEGIES else MADE[name][0]())
        assert apart(found[name], dense) < 1e-8 and found[name][2] == dense[2], name


@pytest.mark.slow
def test_pipelines_of_every_kind(tmp_path):
    """Schedules, uneven micro-batches, passes, stages by hand, what is dealt; a head that is not summed is found."""
    body = """
from exogym.mesh.replicated import Replicated
from exogym.errors import ModelError
found = {name: run(lambda **given: {"node": NodeMesh(**given)}) for name, run in PIPELINES.items()}
given = {"save_dir": "kept", "final_sync": False}
fit(text_trainer(), MADE["diloco clipped"][0](), node=NodeMesh(stages=2), max_steps=4, **given)
made = fit(text_trainer(), MADE["diloco clipped"][0](), node=NodeMesh(tensor=2), save_dir="kept", resume=True)
found["resumed"] = made
lay_out = Replicated._lay_out
def apart(self):
    lay_out(self)
    self._gives["stages"] = self._takes["stages"] = [[], []]
Replicated._lay_out = apart
try:
    fit(text_trainer(), MADE["diloco sgd"][0](), node=NodeMesh(stages=2))
except ModelError as error:
    found["said"] = str(error)
keep(found)
"""
    found = split(tmp_path, 4, body)
    assert "has wrong gradients: the gradient of 'tokens.weight'" in found.pop("said")
    dense = {name: run(lambda **given: {}) for name, run in PIPELINES.items()}
    dense["resumed"] = fit(text_trainer(), MADE["diloco clipped"][0]())
    for name, run in found.items():
        assert_alike(run, dense[name], MUON if name == "muloco" else ADAM if name in MADE else 1e-5)


@pytest.mark.slow
def test_three_axes(tmp_path):
    body = """
node = NodeMesh(stages=2, shard=2, tensor=2, microbatches=4)
keep(fit(text_trainer(4), MADE["diloco sgd"][0](), node=node, batch_size=16))
"""
    dense = fit(text_trainer(4), MADE["diloco sgd"][0](), batch_size=16)
    assert_alike(split(tmp_path, 8, body), dense, SGD)


@pytest.mark.slow
def test_two_nodes_of_four_processes_are_stopped_and_go_on_as_others(tmp_path):
    """From stages that are sharded to layers computed together, to columns shared out, and to dense nodes."""
    given = {"save_dir": "kept", "final_sync": False, "resume": True}
    make = MADE["sparta diloco"][0]
    meshes = {"stages=2, shard=2": 8, "tensor=2": 4, "shard=2": 4, "stages=2": 4}
    for steps, (mesh, processes) in enumerate(meshes.items(), start=3):
        body = f"""
fit(text_trainer(), MADE["sparta diloco"][0](), node=NodeMesh({mesh}), max_steps={steps}, **{given})
keep(0)
"""
        split(tmp_path, processes, body)
    found = fit(text_trainer(), make(), save_dir=tmp_path / "kept", resume=True, final_sync=False)
    assert_alike(found, fit(text_trainer(), make(), final_sync=False), ADAM)
