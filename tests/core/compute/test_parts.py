"""Batches in micro-batches: results as of whole batches, or an error before training that says what was found."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import exogym.core.compute.parts
import exogym.core.training.assembly
import exogym.core.training.choices
from exogym import LocalTrainer, NodeMesh
from exogym.core.base.batches import batch_examples
from exogym.core.base.devices import Device
from exogym.data import Partitioner
from exogym.errors import ModelError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0])


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def examples(count=64):
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(4, (count,), generator=draw))


def run(loss_fn=nn.functional.cross_entropy, model=network, data=None, **given):
    """Return the trainer after four steps of two nodes, with batches of 8."""
    torch.manual_seed(0)
    data = examples() if data is None else data
    trainer = LocalTrainer(model(), data, examples(50), loss_fn=loss_fn)
    options = {"strategy": SimpleReduceStrategy("sgd", lr=0.1), "num_nodes": 2, "batch_size": 8, "max_steps": 4}
    trainer.fit(**options | given)
    return trainer


def numbers(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def weighted(p, y):
    return nn.functional.cross_entropy(p, y, weight=CLASS_WEIGHTS)


def contrastive(p, y):
    return nn.functional.cross_entropy(p @ p.t(), torch.arange(len(p)))


OTHERS = {
    "class weights": weighted,
    "a sum": nn.CrossEntropyLoss(reduction="sum"),
    "pairs in a batch": contrastive,
    "a class left out": lambda p, y: nn.functional.cross_entropy(p, y, ignore_index=0),
}
PARTS = {
    "minibatch_size=4": {"minibatch_size": 4},
    "minibatch_size=2": {"minibatch_size": 2},
    "minibatch_size=1": {"minibatch_size": 1},
    "node=shard=2": {"node": NodeMesh(shard=2)},
    "node=stages=2": {"node": NodeMesh(stages=2)},
}


@pytest.mark.parametrize("asked", PARTS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_no_mean_over_examples_is_refused(name, asked):
    with pytest.raises(ModelError, match=rf"{asked}: the gradients of a batch's parts.* or leave {asked[:4]}\w* out"):
        run(OTHERS[name], **PARTS[asked])


def test_it_is_where_a_limit_of_memory_asks_for_parts(monkeypatch):
    """Else results would follow the limit: 10 rows and the activations of a few examples fit."""
    row = sum(p.numel() for p in network().parameters()) * 4
    monkeypatch.setattr(Device, "total_bytes", lambda self: 10 * row)
    limited = {"num_nodes": 1, "batch_size": 64, "max_memory_usage": 0.7}
    with pytest.raises(
        ModelError, match=r"max_memory_usage=0.7 \(micro-batches of \d+\): the gradients of a batch's parts"
    ):
        run(weighted, **limited)
    monkeypatch.setattr(Device, "total_bytes", lambda self: 1000 * row)
    assert torch.equal(numbers(run(weighted, **limited)), numbers(run(weighted, num_nodes=1, batch_size=64)))


def test_it_is_in_forked_processes():
    with pytest.raises(ModelError, match="minibatch_size=2: the gradients of a batch's parts"):
        run(weighted, minibatch_size=2, processes=2)


WEIGHED = {
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS), network),
    "and a class left out": (nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=1), network),
    "a class left out": (nn.CrossEntropyLoss(ignore_index=0), network),
    "smoothed": (nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), network),
    "log probabilities": (nn.NLLLoss(CLASS_WEIGHTS), lambda: nn.Sequential(*network(), nn.LogSoftmax(1))),
    "a function's": (partial(nn.functional.cross_entropy, weight=CLASS_WEIGHTS), network),
    "a function of a function's": (
        partial(partial(nn.functional.nll_loss, weight=CLASS_WEIGHTS), ignore_index=1),
        lambda: nn.Sequential(*network(), nn.LogSoftmax(1)),
    ),
}


@pytest.mark.parametrize("asked", PARTS)
@pytest.mark.parametrize("name", WEIGHED)
def test_torchs_own_class_weights_weigh_the_parts(name, asked):
    loss_fn, model = WEIGHED[name]
    whole, parts = run(loss_fn, model), run(loss_fn, model, **PARTS[asked])
    torch.testing.assert_close(numbers(parts), numbers(whole), rtol=0, atol=1e-6)
    assert parts.history.last["val_loss"] == pytest.approx(whole.history.last["val_loss"], rel=1e-5)


class OfLists(nn.Module):
    """Gets a list with an item for each example: a text with its number, or a tensor."""

    def __init__(self, read):
        super().__init__()
        self.layers, self.read = network(), read

    def forward(self, items):
        return self.layers(torch.stack([self.read(item) for item in items]))


def in_a_list(batch):
    return [x for x, _ in batch], torch.stack([y for _, y in batch])


def test_lists_of_a_batch_are_divided_with_its_tensors():
    """Texts, and tensors that stay apart: in steps and in evaluations."""
    whole = run(minibatch_size=3, val_size=21)
    x, y = examples().tensors
    texts = [(str(i), label) for i, label in enumerate(y)]
    read = {"texts": lambda text: x[int(text)], "tensors": lambda row: row}
    for name, data, more in (
        ("texts", texts, {}), ("tensors", examples(), {"dataloader_kwargs": {"collate_fn": in_a_list}}),
    ):  # fmt: skip
        torch.manual_seed(0)
        trainer = LocalTrainer(OfLists(read[name]), data, data, loss_fn=nn.functional.cross_entropy)
        options = {"num_nodes": 2, "batch_size": 8, "max_steps": 4, "minibatch_size": 3, "val_size": 21}
        trainer.fit(SimpleReduceStrategy("sgd", lr=0.1), **options, **more)
        torch.testing.assert_close(numbers(trainer), numbers(whole), rtol=0, atol=1e-6)
    assert batch_examples(in_a_list([(row, y[0]) for row in x[:3]])) == 3


def soft(data):
    x, y = data.tensors
    return TensorDataset(x, nn.functional.one_hot(y, 4) * 0.8 + 0.05)


def test_targets_that_are_probabilities_count_as_their_examples():
    """So torch takes their mean, whatever the classes weigh."""
    made = [
        run(nn.CrossEntropyLoss(CLASS_WEIGHTS), data=soft(examples()), **given) for given in ({}, {"minibatch_size": 3})
    ]
    torch.testing.assert_close(*map(numbers, made), rtol=0, atol=1e-6)


def test_evaluations_have_the_same_loss_in_parts():
    """Where targets are left out, more in one part than in another."""
    data = examples()
    data.tensors[1][:20] = -100
    found = []
    for given in ({}, {"minibatch_size": 3}):
        torch.manual_seed(0)
        trainer = LocalTrainer(network(), examples(), data, loss_fn=lambda p, y: nn.functional.cross_entropy(p, y))
        trainer.fit(SimpleReduceStrategy("sgd", lr=0.1), batch_size=8, max_steps=1, **given)
        found.append(trainer.history.last)
    assert found[1]["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-5)
    assert found[1]["val_accuracy"] == found[0]["val_accuracy"]


@pytest.mark.parametrize("loss_fn", [weighted, nn.CrossEntropyLoss(CLASS_WEIGHTS), contrastive])
def test_accumulated_gradients_are_the_mean_over_batches_whatever_the_loss(loss_fn):
    """Micro-batches inside of these are another thing, and refused where they change it."""
    data = examples(8)
    torch.manual_seed(0)
    model = network()
    x, y = data.tensors
    (sum(loss_fn(model(x[k : k + 4]), y[k : k + 4]) for k in (0, 4)) / 2).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    given = {
        "data": data,
        "shuffle": False,
        "num_nodes": 1,
        "batch_size": 4,
        "gradient_accumulation": 2,
        "max_steps": 1,
    }
    found = numbers(run(loss_fn, **given))
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in model.parameters()]), rtol=0, atol=1e-6)
    for size in (2, 8):
        with pytest.raises(ModelError, match=f"minibatch_size={size}: the gradients of a batch's parts"):
            run(loss_fn, minibatch_size=size, **given)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_accumulated_batches_weigh_as_many_targets_as_they_count(ignored):
    data = examples()
    data.tensors[1][::3] = ignored
    loss_fn = nn.CrossEntropyLoss(ignore_index=ignored)
    whole, summed = (run(loss_fn, data=data, **given) for given in ({}, {"batch_size": 4, "gradient_accumulation": 2}))
    torch.testing.assert_close(numbers(summed), numbers(whole), rtol=0, atol=1e-6)


# What is refused by mistake, and what is missed


class Restless(nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return self.body(x + torch.randn_like(x))


class OwnLoss(nn.Module):
    """Gives its loss in training mode only."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, batch):
        out = self.body(batch[0])
        return {"loss": nn.functional.cross_entropy(out, batch[1])} if self.training else out


RIGHT = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
    "batch statistics": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    "no gradient": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(1)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", RIGHT)
def test_models_that_are_random_or_look_at_their_batch_are_trained(name, size, capfd):
    if name == "batch statistics" and size in (1, 7):
        return  # torch refuses to take statistics of one example
    run(model=RIGHT[name], minibatch_size=size)
    assert "could not test" not in capfd.readouterr().err


def test_what_cannot_be_tried_is_said_and_trained(capfd):
    run(model=Restless, minibatch_size=4)
    assert "minibatch_size=4: could not test whether" in (said := capfd.readouterr().err)
    assert "draws random numbers in evaluation mode too" in said
    torch.manual_seed(0)
    LocalTrainer(OwnLoss(), examples()).fit(SimpleReduceStrategy(), batch_size=8, minibatch_size=4, max_steps=1)
    assert "whole batch's gradient (ModelError: model(batch) must return a loss" in capfd.readouterr().err


class ByClass(Partitioner):
    """Node 0 has the examples of class 0, the others share the rest."""

    def split(self, dataset, num_nodes, seed):
        y = dataset.tensors[1]
        rest = (y > 0).nonzero()[:, 0].numpy()
        return [(y == 0).nonzero()[:, 0].numpy(), *(rest[k :: num_nodes - 1] for k in range(num_nodes - 1))]


def test_examples_of_one_class_do_not_hide_it():
    """Where data are sorted the first batch is of one class, in which all weigh the same; so may be a node's share."""
    x, y = examples().tensors
    order = y.argsort()
    for given in ({"shuffle": False, "batch_size": 6}, {"partitioner": ByClass()}):
        with pytest.raises(ModelError, match="minibatch_size=4: the gradients of a batch's parts"):
            run(weighted, data=TensorDataset(x[order], y[order]), minibatch_size=4, **given)


def test_the_trial_is_small_and_leaves_nothing_behind(monkeypatch):
    """Two micro-batches at once, no more than a batch altogether; buffers, gradients and the result are as without."""
    sizes = []

    def model():
        made = RIGHT["batch statistics"]()
        made.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if not module.training else None)
        return made

    given = {"model": model, "batch_size": 32, "minibatch_size": 2, "strategy": DiLoCoStrategy("sgd", H=2, lr=0.1)}
    monkeypatch.setattr(exogym.core.training.assembly, "_evaluator", lambda *given: None)
    found = run(**given)
    assert max(sizes) == 4 and sum(sizes) <= 32 and all(p.grad is None for p in found.model.parameters())
    monkeypatch.setattr(exogym.core.compute.parts, "check_parts", lambda *given: None)
    for name, x in run(**given).model.state_dict().items():
        assert torch.equal(x, found.model.state_dict()[name]), name


@pytest.mark.parametrize("given", [{}, {"minibatch_size": 8}, {"batch_size": 4, "gradient_accumulation": 2},
                                   {"node": NodeMesh(tensor=1)}])  # fmt: skip
def test_whole_batches_are_not_tried(given, monkeypatch):
    monkeypatch.setattr(exogym.core.compute.parts, "check_parts", lambda *given: pytest.fail("tried"))
    run(weighted, **given)


def test_sampled_clients_are_tried_as_others_are():
    sampled = {"strategy": FedAvgStrategy("sgd", lr=0.1, H=2, client_fraction=0.01), "num_nodes": 300}
    run(data=examples(600), minibatch_size=1, batch_size=2, **sampled)
    with pytest.raises(ModelError, match="minibatch_size=1: the gradients of a batch's parts"):
        run(OTHERS["a sum"], data=examples(600), minibatch_size=1, batch_size=2, **sampled)


# What shows only later


def rare(count=400, every=25):
    """4 % of the examples have class 3."""
    x, y = examples(count).tensors
    y = y % 3
    y[every // 2 :: every] = 3
    return TensorDataset(x, y)


def with_weights(p, y):
    return nn.functional.cross_entropy(p, y, weight=torch.tensor([1.0, 1.0, 1.0, 8.0]))


def mean(p, y):
    return nn.functional.cross_entropy(p, y)


@pytest.mark.parametrize("asked", [{"minibatch_size": 2}, {"node": NodeMesh(shard=2)}])
def test_weights_of_a_rare_class_are_found(asked):
    """Before training, where the data set tells its labels."""
    with pytest.raises(ModelError, match="the gradients of a batch's parts do not add up"):
        run(with_weights, data=rare(), shuffle=False, **asked)
    run(mean, data=rare(), shuffle=False, **asked)


def test_labels_of_another_kind_are_not_looked_at():
    """Several for each example, as many as there are."""
    data = rare()
    data.labels = [[0], [1, 2]] * 200
    run(mean, data=data, minibatch_size=2)


class Later:
    """A mean, and after so many calls a mean and a term of pairs."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, p, y):
        self.left -= 1
        return mean(p, y) + (0.1 * contrastive(p, y) if self.left < 0 else 0.0)


@pytest.mark.parametrize("calls", [60, 400, 1000])
def test_a_term_that_begins_later_ends_the_run(calls):
    given = {"num_nodes": 1, "minibatch_size": 4, "max_steps": 300}
    with pytest.raises(
        ModelError, match=r"minibatch_size=4: the loss of \d examples is not the mean of its parts at step"
    ):
        run(Later(calls), **given)
    run(Later(10_000), **given)


def test_few_steps_are_tried_and_the_result_is_as_without(monkeypatch):
    """After 64 and 256 steps, and at the end."""
    tried = []
    trial = exogym.core.compute.parts.Trials._try
    monkeypatch.setattr(exogym.core.compute.parts.Trials, "_try", lambda *given: tried.append(0) or trial(*given))
    x = torch.randn(1300, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(1300))

    def loss_fn(p, y):
        return nn.functional.cross_entropy(p, y % 4)

    given = {"data": data, "batch_size": 4, "minibatch_size": 2, "max_steps": 300, "num_nodes": 1}
    given["model"] = RIGHT["dropout"]
    found = run(loss_fn, **given)
    assert len(tried) == 3
    monkeypatch.setattr(exogym.core.compute.parts.Trials, "see", lambda *given: None)
    assert torch.equal(numbers(run(loss_fn, **given)), numbers(found))
    del tried[:]
    run(nn.functional.cross_entropy, minibatch_size=2)
    run(partial(nn.functional.cross_entropy, weight=CLASS_WEIGHTS), minibatch_size=2)
    assert not tried  # they say what they divide by


@pytest.mark.parametrize("given", [{"minibatch_size": 4}, {"batch_size": 4, "gradient_accumulation": 4}])
def test_trials_before_training_take_no_more_examples_at_once_than_training(given):
    sizes = []

    def model():
        made = network()
        made.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if module.training else None)
        return made

    run(model=model, **{"batch_size": 32} | given)
    assert max(sizes) == 4
