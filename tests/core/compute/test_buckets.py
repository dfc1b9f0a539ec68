"""Gradients leave in buckets while backward runs: with one node per process and torch's own all-reduce."""

import json

import pytest
from processes import world

from exogym.errors import ArgumentError
from exogym.strategy import SimpleReduceStrategy

SCRIPT = """
import json, os, torch
from torch import nn
from exogym import LocalTrainer, Placement
from exogym.core.compute.buckets import Buckets
from exogym.strategy import SimpleReduceStrategy
from exogym.testing import small_problem

class Uneven(nn.Module):  # one layer that nobody uses, and one that only node 0 uses
    def __init__(self):
        super().__init__()
        self.a, self.unused, self.sometimes = nn.Linear(6, 2), nn.Linear(3, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.a(x) + (self.sometimes(x) if os.environ["RANK"] == "0" else 0)

counts = {}
send = Buckets._send

def counted(self, until):
    key = "in backward" if self.armed else "after it"
    counts[key] = counts.get(key, 0) + until - self._next
    send(self, until)

Buckets._send = counted
found = {}
for name, model, given, fit in [
    ("tree", "uneven", {}, {"placement": Placement(reduction="tree")}),
    ("whole", "uneven", {"bucket_size_mb": 25}, {}),
    ("small", "uneven", {"bucket_size_mb": 1e-6}, {}),
    ("micro", "uneven", {"bucket_size_mb": 1e-6}, {"minibatch_size": 4}),
    ("clipped", "net", {"bucket_size_mb": 1e-4, "max_norm": 0.1}, {}),
    ("clipped tree", "net", {"max_norm": 0.1}, {"placement": Placement(reduction="tree")}),
    ("fp16", "net", {"bucket_size_mb": 1e-4}, {"precision": "fp16"}),
]:
    torch.manual_seed(0)
    net, data = small_problem()
    net = Uneven() if model == "uneven" else net
    before = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    counts.clear()
    trainer = LocalTrainer(net, data, loss_fn=nn.functional.mse_loss)
    options = {"placement": Placement(reduction="native"), "max_steps": 6, "batch_size": 8, "device": "cpu"} | fit
    trainer.fit(SimpleReduceStrategy(lr=0.02, **given), num_nodes=int(os.environ["WORLD_SIZE"]), **options)
    after = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    found[name] = {"at": after.tolist(), "moved": float((after - before).abs().max()), "counts": dict(counts),
                   "traffic": trainer.traffic}
if os.environ["RANK"] == "0":
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    status, log = world(2, folder, SCRIPT)
    assert status == 0, log[-3000:]
    return json.loads((folder / "found.json").read_text())


def distance(found, a, b):
    return max(abs(x - y) for x, y in zip(found[a]["at"], found[b]["at"], strict=True))


@pytest.mark.parametrize("name", ["whole", "small", "micro"])
def test_the_result_is_that_of_the_tree_up_to_rounding(found, name):
    assert distance(found, name, "tree") < 1e-6 < found[name]["moved"]
    assert found[name]["traffic"] == found["tree"]["traffic"]


def test_clipping_acts_on_the_average(found):
    assert distance(found, "clipped", "clipped tree") < 1e-6 < found["clipped"]["moved"]


def test_small_buckets_leave_during_backward_and_one_large_one_after_it(found):
    """`sometimes` is last and node 1 does not use it, but node 0 sends it in backward; all leave in one order."""
    assert found["small"]["counts"]["in backward"] > 0
    assert found["small"]["counts"]["in backward"] + found["small"]["counts"]["after it"] == 6 * 6
    assert found["whole"]["counts"] == {"in backward": 0, "after it": 6}
    assert found["tree"]["counts"] == {}


def test_micro_batches_but_the_last_send_nothing(found):
    assert found["micro"]["counts"] == found["small"]["counts"]


def test_scaled_gradients_wait_until_they_are_unscaled(found):
    assert found["fp16"]["counts"] == {} and found["fp16"]["moved"] > 0


@pytest.mark.parametrize("size", [0, -1, "25", True, float("nan")])
def test_a_size_that_cannot_be(size):
    with pytest.raises(ArgumentError, match="bucket_size_mb"):
        SimpleReduceStrategy(bucket_size_mb=size)
