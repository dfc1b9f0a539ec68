"""Nodes of several processes in the hands of somebody who means no good: odd losses and models, forged pieces."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from splits import apart, fit, split
from torch import nn

from exogym import LocalTrainer
from exogym.core.compute.weights import Weights
from exogym.core.fleet.cuts import Cut
from exogym.core.saving import parts
from exogym.core.saving.parts import as_file, joined_pieces
from exogym.errors import CheckpointError, ModelError
from exogym.strategy import SimpleReduceStrategy

# What the parts of a batch count in its loss


class Tokens(nn.Sequential):
    """Three classes of four for each example."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12))


def over_targets(p, y):
    return nn.functional.cross_entropy(p.view(-1, 4), y.reshape(-1))


def over_examples(p, y):
    each = nn.functional.cross_entropy(p.view(-1, 4, 3), y, reduction="none").sum(1)
    return (each / (y >= 0).sum(1).clamp(min=1)).mean()


def weighted(p, y):
    return nn.functional.cross_entropy(p.view(-1, 4), y.reshape(-1), weight=torch.tensor([0.1, 1.0, 2.0, 5.0]))


def by_class(**given):
    """Train with torch's own class weights, which are known."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=draw), torch.randint(4, (32,), generator=draw))
    weights = torch.tensor([0.1, 1.0, 2.0, 5.0])
    made = LocalTrainer(nn.Linear(6, 4), data, data, loss_fn=nn.CrossEntropyLoss(weights))
    return fit(made, SimpleReduceStrategy("sgd", lr=0.1), **{"num_nodes": 1, "max_steps": 4} | given)


def rare(**given):
    """Train with a function's class weights; the only class of another weight comes in the 64th batch."""
    torch.manual_seed(0)
    x, y = torch.randn(512, 6), torch.randint(3, (512,))
    y[508] = 3
    weights = torch.tensor([1.0, 1.0, 1.0, 8.0])
    data = torch.utils.data.TensorDataset(x, y)
    made = LocalTrainer(Tokens(), data, data, loss_fn=lambda p, y: nn.functional.cross_entropy(p[:, :4], y, weights))
    options = {"num_nodes": 1, "max_steps": 64, "batch_size": 8, "shuffle": False, "val_interval": 64}
    return fit(made, SimpleReduceStrategy("sgd", lr=0.1), **options | given)


def run(loss, strategy=None, **given):
    """Train on targets of which some are left out, of one example all; in the first batch none is."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(4, (32, 3))
    y[9::2, 1:] = -100
    y[13] = -100
    data = torch.utils.data.TensorDataset(x, y)
    made = LocalTrainer(Tokens(), data, data, loss_fn=loss)
    options = {"num_nodes": 1, "max_steps": 5, "shuffle": False, "val_interval": 2}
    return fit(made, strategy or SimpleReduceStrategy("sgd", lr=0.1), **options | given)


LOSSES = {"targets": over_targets, "examples": over_examples}


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """What nodes of two processes come to, or say."""
    body = """
from mesh.test_split_hostile import LOSSES, Experts, Mixed, Normed, Penalty, Restless
from mesh.test_split_hostile import by_class, rare, run, trained, weighted
from exogym.errors import ModelError
found = {}
for name, loss in LOSSES.items():
    for mesh in ("shard=2", "shard=2, zero=2", "stages=2"):
        found[name, mesh] = run(loss, node=eval(f"NodeMesh({mesh})"))
found["experts"] = trained(Experts, node=NodeMesh(shard=2, zero=2))
tries = {
    "weighted": lambda: run(weighted, node=NodeMesh(shard=2)),
    "rare": lambda: rare(node=NodeMesh(shard=2)),
    "rare in stages": lambda: rare(node=NodeMesh(stages=2, microbatches=2)),
    "experts": lambda: trained(Experts, node=NodeMesh(shard=2)),
    "restless": lambda: trained(Restless, node=NodeMesh(shard=2)),
    "mixed": lambda: trained(Mixed, node=NodeMesh(shard=2)),
    "penalty": lambda: trained(Penalty, node=NodeMesh(stages=2)),
}
found["by class"] = by_class(node=NodeMesh(shard=2))
found["normed"] = trained(Normed, save_dir="normed", node=NodeMesh(stages=2, microbatches=2))
for name, act in tries.items():
    try:
        act()
    except ModelError as error:
        found["said", name] = str(error)
keep(found)
"""
    return split(tmp_path_factory.mktemp("in_two"), 2, body)


@pytest.mark.parametrize("mesh", ["shard=2", "shard=2, zero=2", "stages=2"])
@pytest.mark.parametrize("name", LOSSES)
def test_targets_that_are_left_out_count_as_in_the_whole_batch(name, mesh, in_two):
    """A mean over shares of a batch that have as many examples and not as many targets is another number."""
    dense, found = run(LOSSES[name]), in_two[name, mesh]
    assert apart(found, dense) < 1e-6
    assert found[1]["val_loss"] == pytest.approx(dense[1]["val_loss"], rel=1e-5)
    assert found[1]["train 0"] == pytest.approx(dense[1]["train 0"], rel=1e-5)


@pytest.mark.parametrize("options", [{"minibatch_size": 3}, {"minibatch_size": 1}, {"gradient_accumulation": 2}])
@pytest.mark.parametrize("name", LOSSES)
def test_and_in_micro_batches_of_one_process(name, options):
    whole = {"batch_size": 16} if "gradient_accumulation" in options else {}
    assert apart(run(LOSSES[name], max_steps=2, **options), run(LOSSES[name], max_steps=2, **whole)) < 1e-6


def test_a_loss_that_its_parts_do_not_make_up_is_refused(in_two):
    """Where classes weigh differently a part counts as its weights do, which nobody knows but the loss."""
    assert "split by shard=2, the model has wrong gradients" in in_two["said", "weighted"]
    with pytest.raises(ModelError, match="the gradients of a batch's parts do not add up"):
        run(weighted, minibatch_size=4)
    with pytest.raises(ModelError, match="not the mean of its parts' losses: two examples with targets below 0"):
        run(weighted, batch_size=4, gradient_accumulation=2)


@pytest.mark.parametrize("name", ["rare", "rare in stages"])
def test_the_weight_of_a_class_that_comes_later_ends_the_run(name, in_two):
    """No batch before it shows that the loss is no mean of its parts; the 64th is tried."""
    assert "examples is not the mean of its parts at step 64 of node 0" in in_two["said", name]


def test_torchs_own_class_weights_weigh_the_shares(in_two):
    dense, found = by_class(), in_two["by class"]
    assert apart(found, dense) < 1e-6
    assert found[1]["val_loss"] == pytest.approx(dense[1]["val_loss"], rel=1e-5)


def test_models_that_shift_their_targets_are_known_by_it():
    y = torch.tensor([[1, 2, 3, 0], [1, -100, -100, 2], [-100, -100, 1, 1]])
    values = torch.tensor([[5.0, 1.0, 2.0, 3.0], [4.0, 1.0, 7.0, 1.0], [2.0, 2.0, 2.0, 9.0]])

    def ask(batch):
        v, t = batch
        counts = (t[:, 1:] >= 0).float()
        return float((v[:, 1:] * counts).sum() / counts.sum())

    parts = Weights().parts(ask, (values, y), [(0, 1), (1, 3)])
    assert [weight for _, weight in parts] == pytest.approx([3 / 6, 3 / 6])
    assert sum(ask(part) * weight for part, weight in parts) == pytest.approx(ask((values, y)))


# Models whose devices go different ways


class Experts(nn.Module):
    """Each example asks one of three experts, so the devices of a node do not all ask the same."""

    def __init__(self):
        super().__init__()
        self.body, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x):
        out = self.body(x)
        which = (x[:, 0] > 0.8).long() + (x[:, 0] > -0.8).long()
        found = out.clone()
        for k, expert in enumerate(self.experts):
            if (asked := which == k).any():
                found[asked] = out[asked] + expert(x[asked])
        return found


class Restless(nn.Module):
    """Leaves out layers at random in training, in each process others, which are all of one size."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 4)

    def forward(self, x):
        left_out = int(torch.randint(4, (8,)).sum()) % 4 if self.training else None
        for k, layer in enumerate(self.layers):
            x = x if k == left_out else x + torch.tanh(layer(x))
        return self.head(x)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x.double()).float())


class Penalty(nn.Sequential):
    """Its loss has a small penalty on all parameters, of which a stage has a part; too small to see in a gradient."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return super().forward(x) + 1e-7 * sum(p.square().sum() for p in self.parameters())


class Normed(nn.Sequential):
    """With statistics of batches in both stages, and counts of these."""

    def __init__(self):
        super().__init__(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        )


def trained(model, **given):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(4, (32,)))
    made = LocalTrainer(model(), data, data, loss_fn=nn.functional.cross_entropy)
    return fit(made, SimpleReduceStrategy("sgd", lr=0.1), **{"num_nodes": 1, "max_steps": 4} | given)


def test_devices_that_go_different_ways_are_told_so_before_they_train(in_two):
    for name in ("experts", "restless"):
        assert "the devices of a node use the model differently" in in_two["said", name]
    assert apart(in_two["experts"], trained(Experts)) < 1e-6  # as the message says, with zero=2


def test_what_torch_would_only_find_out_in_training_is_refused_with_its_names(in_two):
    assert "'body.weight' is torch.float64 and 'head.weight' is torch.float32" in in_two["said", "mixed"]
    assert "parameter '0.weight' is used outside its own stage" in in_two["said", "penalty"]


def test_statistics_of_batches_are_those_of_the_stage_that_took_them(in_two):
    dense, found = trained(Normed, minibatch_size=4), in_two["normed"]
    assert apart(found, dense) < 1e-6


# Pieces of checkpoints, forged: the sums fit


def pieces(folder):
    """A tensor of 6 x 2 of nodes 0 and 1, by rows in two files."""
    folder.mkdir()
    for part in (0, 1):
        cut = Cut((6, 2), (3, 2), torch.arange(6) + 6 * part)
        held = {f"{node}/w": (torch.arange(6.0).view(3, 2) + 6 * part + 100 * node, cut) for node in (0, 1)}
        tensors, told = as_file(held)
        save_file(tensors, folder / f"rows-0-1.part-{part}.safetensors", told)
    return sorted(folder.glob("*"))


def joined(files):
    return joined_pieces(files, lambda node: True)


def forge(file, change):
    """Let `change` have the tensors of a file, and what it says of them."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["cuts"])
    tensors = load_file(file)
    change(tensors, told)
    save_file({name: x.clone() for name, x in tensors.items()}, file, {"cuts": json.dumps(told)})


def ranges(x):
    return lambda tensors, told: tensors.update({"cut/0": torch.tensor(x)})


def shape(*sides):
    return lambda tensors, told: told["0/w"].__setitem__(1, list(sides))


FORGED = {
    "elsewhere": (ranges([[4, 10]]), "are missing or doubled at element 4"),
    "a hole": (ranges([[6, 9], [10, 13]]), "does not fit its ranges"),
    "backwards": (ranges([[12, 6]]), "invalid ranges"),
    "negative": (ranges([[-6, 0]]), "invalid ranges"),
    "overlapping": (ranges([[6, 10], [8, 10]]), "overlapping ranges"),
    "numbers with a point": (ranges([[6.0, 12.0]]), "invalid ranges"),
    "terabytes of places": (ranges([[6, 1 << 42]]), "does not fit its ranges"),
    "terabytes": (shape(1 << 42), "the tensor 'w' has dtype F32"),
    "a shape below 0": (shape(-6, -2), "has the wrong shape"),
    "a shape that is none": (lambda tensors, told: told["0/w"].__setitem__(1, "62"), "has the wrong shape"),
    "axes": (lambda tensors, told: told["0/w"].__setitem__(2, 9), "has the wrong shape"),
    "another dtype": (lambda t, told: t.update({"0/w": t["0/w"].double()}), "dtype F64"),
    "more rows": (lambda t, told: t.update({"0/w": t["0/w"].repeat(4, 1)}), "does not fit its ranges"),
    "another node": (lambda t, told: (t.update({"7/w": t["0/w"]}), told.update({"7/w": told["0/w"]})), "of a node"),
    "no node": (
        lambda t, told: (t.update({"w": t["0/w"]}), told.update({"w": told["0/w"]})),
        "of a node",
    ),
    "a stranger": (lambda t, told: t.update({"0/v": t["0/w"].clone()}), "its tensors and its description differ"),
    "told of only": (lambda t, told: t.pop("0/w"), "its tensors and its description differ"),
    "no cut": (lambda t, told: told["0/w"].__setitem__(0, "5"), "is not a file of a checkpoint's tensors"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_pieces_are_refused_by_the_name_of_their_file(name, tmp_path):
    files = pieces(tmp_path / "saved")
    change, said = FORGED[name]
    forge(files[1], change)
    with pytest.raises(CheckpointError, match=said) as caught:
        joined(files)
    assert str(tmp_path / "saved") in str(caught.value)


def test_files_of_pieces_are_opened_twice_however_much_they_hold(tmp_path, monkeypatch):
    """Once for what they say, once for their numbers; to open one for each tensor took the square of the tensors."""
    opened, real = [], parts.safe_open
    monkeypatch.setattr(parts, "safe_open", lambda file, **given: opened.append(file) or real(file, **given))
    files = pieces(tmp_path / "saved")
    joined(files)
    assert sorted(opened) == sorted([*files, *files])


def test_pieces_that_are_whole_are_joined_and_others_missed(tmp_path):
    files = pieces(tmp_path / "saved")
    assert torch.equal(joined(files)[1, "w"], torch.arange(12.0).view(6, 2) + 100)
    for some in (files[:1], files[1:]):
        with pytest.raises(CheckpointError, match="are missing"):
            joined(some)
    files[0].write_bytes(files[0].read_bytes()[:50])
    with pytest.raises(CheckpointError, match="is not a file of a checkpoint's tensors"):
        joined(files)
