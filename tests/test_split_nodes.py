"""Nodes of several processes each, with the model sharded inside: their run is that of dense nodes."""

import pytest
from splits import ADAM, MADE, SGD, apart, assert_alike, fit, split, text_trainer, trainer
from strategies import STRATEGIES

from exogym.strategy import DiLoCoStrategy

DILOCO = "DiLoCoStrategy('sgd', H=3, lr=0.1)"


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """What 2 nodes of 2 processes come to, by name."""
    body = f"""
found = {{name: fit(trainer(), make(), node=NodeMesh(shard=2)) for name, (make, _) in MADE.items()}}
found["gpt"] = fit(text_trainer(), {DILOCO}, node=NodeMesh(shard=2))
made = trainer()
before = dict(made.model.named_parameters())
hooks = lambda: [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in made.model.modules()]
fit(made, {DILOCO}, node=NodeMesh(shard=2))
after = dict(made.model.named_parameters())
assert type(made.model) is Tied and not any(hooks())
if rank() == 0:
    assert all(after[name] is p for name, p in before.items())
else:  # nobody takes numbers for the final ones that are not
    assert all(p.is_meta == p.requires_grad for p in after.values())
keep(found)
"""
    return split(tmp_path_factory.mktemp("halves"), 4, body)


@pytest.mark.parametrize("name", MADE)
def test_two_processes_for_a_node_train_what_one_would(name, halves):
    make, tolerance = MADE[name]
    assert_alike(halves[name], fit(trainer(), make()), tolerance)


def test_halves_give_the_bits_of_micro_batches_of_half_the_size(halves):
    dense = fit(text_trainer(), DiLoCoStrategy("sgd", H=3, lr=0.1), minibatch_size=4)
    assert apart(halves["gpt"], dense) == 0.0
    assert halves["gpt"][1]["train 0"] == dense[1]["train 0"]


def test_a_run_goes_on_under_another_split(tmp_path):
    """Saved by nodes of two processes, it is taken up by dense ones, and by three processes for a node."""
    given = f"node=NodeMesh(shard=%d), max_steps=%d, save_dir={str(tmp_path / 'kept')!r}, resume=%s"
    make = MADE["diloco clipped"][0]
    call = "keep(fit(trainer(), MADE['diloco clipped'][0](), final_sync={}, {}))"
    split(tmp_path / "first", 4, call.format("False", given % (2, 4, "False")))
    going_on = {"save_dir": tmp_path / "kept", "resume": True}
    dense = fit(trainer(), make())
    assert_alike(fit(trainer(), make(), max_steps=5, final_sync=False, **going_on), fit_to(5), ADAM)
    assert_alike(split(tmp_path / "second", 3, call.format("True", given % (3, 7, "True"))), dense, ADAM)


def fit_to(steps):
    return fit(trainer(), MADE["diloco clipped"][0](), max_steps=steps, final_sync=False)


def test_a_wrong_split_is_found_before_training(tmp_path):
    """A batch that does not divide, each part counting the same, has other gradients; the loss does not show it."""
    body = """
from exogym.compute.split_worker import SplitWorker
from exogym.errors import ModelError
right = SplitWorker._parts
SplitWorker._parts = lambda self, batch: [(part, 1 / 3) for part, _ in right(self, batch)]
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
    assert "split by shard=3 the model has other gradients: that of " in said
    assert apart(wrong, fit(trainer(), MADE["diloco sgd"][0]())) > 100 * SGD  # it would have mattered


def test_what_cannot_be_split_is_refused_before_training(tmp_path):
    body = """
from exogym.errors import ExoGymError
from exogym.strategy import AsyncDiLoCoStrategy, CommunicateOptimizeStrategy, PeriodicModule
class Scalar(Tied):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return super().forward(x) * self.scale
class Own(PeriodicModule):
    def communicate(self, fleet, step):
        pass
good = MADE["diloco sgd"][0]
tries = {
    "sizes": lambda: fit(trainer(), good(), node=NodeMesh(shard=2)),
    "batch": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), batch_size=2),
    "clock": lambda: fit(trainer(), AsyncDiLoCoStrategy(H=2, lr=0.1), node=NodeMesh(shard=3)),
    "network": lambda: fit(trainer(), good(), node=NodeMesh(shard=3), network="1Gbps,1ms"),
    "optimizer": lambda: fit(trainer(), DiLoCoStrategy(H=2, outer_optim="muon", outer_lr=0.1), node=NodeMesh(shard=3)),
    "module": lambda: fit(trainer(), CommunicateOptimizeStrategy("sgd", [Own()], lr=0.1), node=NodeMesh(shard=3)),
    "scalar": lambda: fit(trainer(Scalar), good(), node=NodeMesh(shard=3)),
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
        "sizes": "3 processes run this script, and a node is 2 of them: 2 nodes can be trained by 2, 4",
        "batch": "batch_size=2 is smaller than shard=3",
        "clock": "AsyncDiLoCoStrategy is written for one node and does not say what it acts on",
        "network": "network with node= in several processes",
        "optimizer": "looks at whole tensors",
        "module": "Own does not say what it acts on",
        "scalar": "parameter 'scale' is one number without an axis",
        "nodes": "in several all have one split",
    }
    assert {name: text in said[name] for name, text in wanted.items()} == dict.fromkeys(wanted, True), said


@pytest.mark.slow
def test_quarters_take_a_quarter_of_the_memory(tmp_path):
    """Of 10 million parameters with AdamW's state, between two steps."""
    body = """
import gc
from exogym.training.driver import Driver
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 512)
        made = (nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)) for _ in range(5))
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(512, 11)
    def forward(self, x):
        h = self.embed(x).mean(1)
        for block in self.blocks:
            h = h + block(h)
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
fit(made, SimpleReduceStrategy("adamw", lr=1e-3), num_nodes=1, max_steps=2, node=NodeMesh(shard=4))
shares = [None] * 4
torch.distributed.all_gather_object(shares, held[-1] / (12 * count))
keep((count, shares))
"""
    count, shares = split(tmp_path, 4, body)
    assert count > 10e6 and max(shares) <= 0.3, shares


@pytest.mark.slow
@pytest.mark.parametrize("shard", [2, 3, 4])
def test_every_strategy_on_elements(shard, tmp_path):
    """All of the table that act on rows, on their own problem; what chooses or rounds has laws of its own."""
    names = [name for name, entry in STRATEGIES.items() if entry.on_rows]
    body = f"""
from strategies import STRATEGIES
keep({{name: fit(trainer(), STRATEGIES[name].make(), num_nodes=4, node=NodeMesh(shard={shard})) for name in {names!r}}})
"""
    found = split(tmp_path, 2 * shard, body)
    for name in names:
        assert_alike(found[name], fit(trainer(), STRATEGIES[name].make(), num_nodes=4), ADAM)
