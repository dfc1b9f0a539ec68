"""Nodes of several processes each, with the model sharded inside: their run is that of dense nodes."""

import subprocess
import sys

import pytest
import torch
from averages import TimeAverage
from battery import asked, each
from paths import TESTS
from splits import (
    ADAM,
    MADE,
    PIPELINES,
    SGD,
    WARY,
    Still,
    apart,
    assert_alike,
    by_hand,
    fit,
    split,
    still_line,
    text_trainer,
    trainer,
    wary,
)

from exogym import NodeMesh
from exogym.balance import Balance
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy

OF_NAMES = (
    "test_two_processes_for_a_node_train_what_one_would",
    "test_what_looks_at_a_whole_row_sees_it_in_parts",
)
DILOCO = "DiLoCoStrategy('sgd', H=3, lr=0.1)"


@pytest.fixture(scope="module")
def halves(request, tmp_path_factory):
    """What 2 nodes of 2 processes come to, by name."""
    names, warily = ([params["name"] for params in asked(request, test)] for test in OF_NAMES)
    body = f"""
from exogym.balance import Balance
from averages import TimeAverage
from exogym.faults import Faults
found = {{name: fit(trainer(), make(), node=NodeMesh(shard=2)) for name in {names!r} for make, _ in [MADE[name]]}}
for split in ("shard=2", "shard=2, zero=2"):
    found[split] = fit(text_trainer(), {DILOCO}, node=eval(f"NodeMesh({{split}})"), max_steps=4)
found["lengths"] = PIPELINES["lengths"](lambda **given: {{"node": NodeMesh(**given)}})
for name in {warily!r}:
    found[name] = wary(name, node=NodeMesh(shard=2))
found["native"] = fit(trainer(), {DILOCO}, node=NodeMesh(shard=2), placement=Placement(reduction="native"), max_steps=4)
speeds = Balance("batch", speeds=[1, 3])
found["speeds"] = fit(trainer(), {DILOCO}, node=NodeMesh(shard=2), balance=speeds, max_steps=4)
for name, step_seconds in (("clock", "10ms"), ("measured", None)):
    made, linked = trainer(), NodeMesh(shard=2)
    fit(made, {DILOCO}, node=linked, network="100Mbps,5ms", step_seconds=step_seconds, save_dir=name)
    found[name] = list(made.history.column("time_s")[1])
found["still"] = fit(trainer(Still), {DILOCO}, node=NodeMesh(shard=2), max_steps=4)
found["still stages"] = by_hand(lambda **given: {{"node": NodeMesh(**given), "max_steps": 4}}, still_line)
made = trainer()
before = dict(made.model.named_parameters())
hooks = lambda: [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.model.modules()]
fit(made, {DILOCO}, node=NodeMesh(shard=2), callbacks=[TimeAverage(0.5)], faults=Faults(absent={{1: [(2, 4)]}}))
if rank() == 0:
    found["watched"] = list(made.history.column("average_val_loss")[1])
after = dict(made.model.named_parameters())
assert type(made.model) is Tied and not any(hooks())
if rank() == 0:
    assert all(after[name] is p for name, p in before.items())
else:  # nobody takes numbers for the final ones that are not
    assert all(p.is_meta == p.requires_grad for p in after.values())
keep(found)
"""
    return split(tmp_path_factory.mktemp("halves"), 4, body)


@pytest.mark.parametrize("name", each(MADE, fast=("demo", "muloco")))
def test_two_processes_for_a_node_train_what_one_would(name, halves):
    make, tolerance = MADE[name]
    assert_alike(halves[name], fit(trainer(), make()), tolerance)


def test_callbacks_and_absent_nodes_are_as_ever(halves):
    made = trainer()
    away = Faults(absent={1: [(2, 4)]})
    fit(made, DiLoCoStrategy("sgd", H=3, lr=0.1), callbacks=[TimeAverage(0.5)], faults=away)
    values = list(made.history.column("average_val_loss")[1])
    assert len(values) > 1 and halves["watched"] == pytest.approx(values, rel=1e-5)


def test_the_clock_says_what_it_says_in_one_process(halves):
    made, linked = trainer(), NodeMesh(shard=2)
    given = {"node": linked, "network": "100Mbps,5ms"}
    fit(made, DiLoCoStrategy("sgd", H=3, lr=0.1), step_seconds="10ms", **given)
    assert halves["clock"] == list(made.history.column("time_s")[1])
    away = trainer()
    fit(away, DiLoCoStrategy("sgd", H=3, lr=0.1), step_seconds="20ms", **given)
    assert halves["clock"] != list(away.history.column("time_s")[1])  # the control
    assert len(halves["measured"]) > 1 and halves["measured"] == sorted(halves["measured"])


@pytest.mark.parametrize("name", each(WARY, fast=("krum",)))
def test_what_looks_at_a_whole_row_sees_it_in_parts(name, halves):
    """The vector closest to its neighbours, norms, and noise as long as the update of a bad node."""
    assert_alike(halves[name], wary(name), ADAM)
    assert apart(halves[name], wary("plain")) > 100 * SGD  # the control: it makes a difference


def test_torchs_own_sums_and_loads_by_speed_are_as_ever(halves):
    assert_alike(halves["native"], fit(trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), max_steps=4), SGD)
    speeds = Balance("batch", speeds=[1, 3])
    dense = fit(trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), balance=speeds, max_steps=4)
    assert_alike(halves["speeds"], dense, SGD)
    assert apart(halves["speeds"], halves["native"]) > 100 * SGD  # the control


@pytest.mark.parametrize("split", ["shard=2", "shard=2, zero=2"])
def test_halves_give_the_bits_of_micro_batches_of_half_the_size(split, halves):
    dense = fit(text_trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), minibatch_size=4, max_steps=4)
    assert apart(halves[split], dense) == 0.0
    assert halves[split][1]["train 0"] == dense[1]["train 0"]


def test_submodules_in_evaluation_mode_stay_there_when_split(halves):
    dense = fit(trainer(Still), DiLoCoStrategy("sgd", H=3, lr=0.1), max_steps=4)
    assert apart(dense, fit(trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), max_steps=4)) == 0.0  # nothing is dropped
    assert_alike(halves["still"], dense, SGD)
    one_process = by_hand(lambda **_: {"max_steps": 4}, still_line)
    assert_alike(halves["still stages"], one_process, SGD)


def test_batches_of_other_shapes_go_through_the_same_stages(halves):
    assert_alike(halves["lengths"], PIPELINES["lengths"](lambda **given: {}), SGD)


def test_a_run_goes_on_under_another_split(tmp_path):
    """Saved by nodes of two processes that share out columns, it is taken up by those that share layers, and dense."""
    make, dense = MADE["diloco clipped"][0], fit(text_trainer(), MADE["diloco clipped"][0]())
    body = """
given = {"save_dir": "kept", "final_sync": False}
fit(text_trainer(), MADE["diloco clipped"][0](), node=NodeMesh(shard=2), max_steps=4, **given)
found = fit(text_trainer(), MADE["diloco clipped"][0](), node=NodeMesh(tensor=2), max_steps=5, resume=True, **given)
keep(found)
"""
    split(tmp_path, 4, body)
    assert_alike(fit(text_trainer(), make(), save_dir=tmp_path / "kept", resume=True), dense, ADAM)


def test_a_wrong_split_is_found_before_training(tmp_path):
    """A batch that does not divide, each part counting the same, has other gradients; the loss does not show it."""
    body = """
from exogym.mesh.devices import NodeDevices
from exogym.errors import ModelError
right = NodeDevices._passes
NodeDevices._passes = lambda *of: [[(part, 1 / 3) for part, _ in some] for some in right(*of)]
made, said = trainer(), ""
try:
    fit(made, MADE["diloco sgd"][0](), node=NodeMesh(shard=3))
except ModelError as error:
    said = str(error)
whole = trainer().model.state_dict()
assert all(torch.equal(x, whole[name]) for name, x in made.model.state_dict().items())
keep((said, fit(trainer(), MADE["diloco sgd"][0](), node=NodeMesh(shard=3, probe=False))))
"""
    said, wrong = split(tmp_path, 3, body)
    assert "split by shard=3, the model has wrong gradients: the gradient of " in said
    assert apart(wrong, fit(trainer(), MADE["diloco sgd"][0]())) > 100 * SGD  # it would have mattered


def test_what_cannot_be_split_is_refused_before_training(tmp_path):
    body = """
from exogym.balance import Balance
from exogym.errors import ExoGymError
from exogym.strategy import AsyncDiLoCoStrategy, CommunicateOptimizeStrategy, PeriodicModule
class Scalar(Tied):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return super().forward(x) * self.scale
class Beside(Tied):
    cut_points = "blocks.*"
    def __init__(self):
        super().__init__()
        self.blocks.append(nn.Linear(9, 9))
class Own(PeriodicModule):
    def communicate(self, fleet, step):
        pass
def fully(model, mesh):
    torch.distributed.fsdp.fully_shard(model, mesh=mesh["shard"])
good = MADE["diloco sgd"][0]
tries = {
    "sizes": lambda: fit(trainer(), good(), node=NodeMesh(shard=2)),
    "batch": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), batch_size=2),
    "clock": lambda: fit(trainer(), AsyncDiLoCoStrategy(H=2, lr=0.1), node=NodeMesh(shard=3)),
    "balance": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), balance="batch"),
    "dealt": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), balance=Balance("nodes", [1, 1])),
    "memory": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), max_memory_usage=0.5),
    "secure": lambda: fit(trainer(), made(DiLoCoStrategy, lr=0.1, secure_aggregation=True), node=NodeMesh(shard=3)),
    "optimizer": lambda: fit(trainer(), DiLoCoStrategy(H=2, outer_optim="muon", outer_lr=0.1), node=NodeMesh(shard=3)),
    "module": lambda: fit(trainer(), CommunicateOptimizeStrategy("sgd", [Own()], lr=0.1), node=NodeMesh(shard=3)),
    "scalar": lambda: fit(trainer(Scalar), good(), node=NodeMesh(shard=3)),
    "cut": lambda: fit(trainer(Beside), good(), node=NodeMesh(stages=3)),
    "stages": lambda: fit(text_trainer(), good(), node=NodeMesh(stages=3)),
    "shards": lambda: fit(text_trainer(), good(), node=NodeMesh(shard=3, zero=2, parallelize=fully)),
    "layers": lambda: fit(trainer(), good(), node=NodeMesh(tensor=3)),
    "nodes": lambda: fit(trainer(), good(), node=[NodeMesh(shard=3), NodeMesh(shard=2)]),
}
said = {}
for name, run in tries.items():
    try:
        run()
        said[name] = "nothing"
    except ExoGymError as error:
        said[name] = str(error)
keep(said)
"""
    said = split(tmp_path, 3, body)
    wanted = {
        "sizes": "3 processes run this script, and a node of shard=2 needs 2: to train 2 nodes start 2, 4",
        "batch": "batch_size=2 is smaller than shard=3",
        "clock": "AsyncDiLoCoStrategy, which has no modules: ExoGym cannot change, split",
        "balance": "pass speeds",
        "dealt": "node= in several processes with balance='nodes'",
        "memory": "pass minibatch_size instead",
        "secure": "it needs a node's whole row or whole tensors",
        "optimizer": "looks at whole tensors",
        "module": "Own, which does not say what it acts on",
        "scalar": "parameter 'scale' is a scalar",
        "cut": "cut after 'blocks.0', but later code uses other tensors from before the cut",
        "stages": "fewer than 3 stages",
        "shards": "parallelize= has called fully_shard",
        "layers": "no plan to split the layers of Tied is known",
        "nodes": "3 processes run this script, but nodes of 3, 2 devices need 5, one per device: start 5",
    }
    assert {name: text in said[name] for name, text in wanted.items()} == dict.fromkeys(wanted, True), said


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shard=4", "stages=2, shard=2"])
def test_quarters_take_a_quarter_of_the_memory(mesh, tmp_path):
    """Of 10 million parameters with AdamW's state, between two steps."""
    body = """
import gc
from exogym.strategy import FedAvgStrategy
from exogym.core.training.driver import Driver
class Block(nn.Sequential):
    def forward(self, h):
        return h + super().forward(h)
class Wide(nn.Module):
    cut_points = "blocks.*"
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 512)
        made = (Block(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)) for _ in range(6))
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(512, 11)
    def forward(self, x):
        h = self.embed(x).mean(1)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
held, advance = [], Driver.advance
def looking(self, first, last):
    gone = advance(self, first, last)
    gc.collect()
    kept = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor):
            x = getattr(x, "_local_tensor", x)
            if x.device.type == "cpu":
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    held.append(sum(kept.values()))
    return gone
Driver.advance = looking
made = trainer(Wide)
count = sum(p.numel() for p in made.model.parameters())
fit(made, FedAvgStrategy("adamw", lr=1e-3, H=2), num_nodes=1, max_steps=4, node=MESH)
shares = [None] * 4
torch.distributed.all_gather_object(shares, held[-1] / (12 * count))
keep((count, shares))
"""
    count, shares = split(tmp_path, 4, body.replace("MESH", f"NodeMesh({mesh})"))
    assert count > 10e6 and max(shares) <= 0.3, shares


@pytest.mark.slow
def test_a_lost_process_is_started_again_with_the_others(tmp_path):
    """The launcher starts all again, and they go on from the last checkpoint: it ends as if nothing had been."""
    (tmp_path / "script.py").write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
from splits import *
from exogym import NodeMesh, Placement
from exogym.mesh.devices import NodeDevices
taken, gradient = [], NodeDevices.gradient
def dying(self, worker, batch, row):
    taken.append(row)
    if len(taken) == 6 and rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient(self, worker, batch, row)
NodeDevices.gradient = dying
given = {{"save_dir": "kept", "checkpoint_interval": 2, "resume": True, "placement": Placement(max_restarts=1)}}
keep(fit(text_trainer(), MADE["diloco clipped"][0](), node=NodeMesh(shard=2), **given))
"""
    )
    command = [sys.executable, "-m", "exogym.launch", "--nproc_per_node", "4", "--max_restarts", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "going on from step 4" in done.stdout + done.stderr
    found = torch.load(tmp_path / "found", weights_only=False)
    dense = fit(text_trainer(), MADE["diloco clipped"][0]())
    assert apart(found, dense) <= ADAM and found[2] == dense[2]


@pytest.mark.slow
def test_a_hundred_worlds_end(tmp_path):
    """None of them hangs: each is a node of two processes that trains, saves and ends."""
    body = f"keep(fit(trainer(), {DILOCO}, num_nodes=1, max_steps=2, save_dir='kept', node=NodeMesh(shard=2))[0])"
    first = split(tmp_path / "0", 2, body)
    for k in range(1, 100):
        found = split(tmp_path / str(k), 2, body)
        assert all(torch.equal(x, first[name]) for name, x in found.items())
