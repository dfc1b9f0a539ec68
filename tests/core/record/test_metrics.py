"""Evaluations: means over targets, however the validation set is cut into batches."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import exogym.core.training.assembly
from exogym import LocalTrainer
from exogym.strategy import SimpleReduceStrategy

F = nn.functional
LENGTH, WORDS = 6, 5


def texts(count, lengths=(2, 6)):
    """First all texts of the first length, then all of the next; -100 after each text's end."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(WORDS, (count, LENGTH), generator=draw)
    y = x.clone()
    for k in range(count):
        y[k, lengths[k * len(lengths) // count] :] = -100
    return [{"words": a, "labels": b} for a, b in zip(x, y, strict=True)]


class Writer(nn.Module):
    """Returns its own loss, a mean of the kind that it is given."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(WORDS, WORDS)
        with torch.no_grad():  # the first words of a text are guessed worse than the others
            self.table.weight.copy_(torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(5)))

    def forward(self, words, labels):
        scores = self.table(words) * torch.arange(1, LENGTH + 1)[None, :, None]
        if self.kind == "shifted":
            scores, labels = scores[:, :-1], labels[:, 1:]
        each = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        if self.kind == "examples":
            return {"loss": each.sum(1).mean()}
        return {"loss": each.sum() / (labels >= 0).sum()}


def whole(data, kind):
    batch = torch.utils.data.default_collate(data)
    with torch.no_grad():
        return float(Writer(kind)(**batch)["loss"])


def first(model, data, val, **given):
    """Return the evaluation before training."""
    loss_fn, metrics = given.pop("loss_fn", None), given.pop("metrics", None)
    trainer = LocalTrainer(model, data, val, loss_fn=loss_fn, metrics=metrics)
    trainer.fit(SimpleReduceStrategy("sgd", lr=0.1), **{"max_steps": 1, "batch_size": 4} | given)
    return trainer.history.rows(node=None)[0]


@pytest.mark.parametrize("kind", ["targets", "shifted", "examples"])
@pytest.mark.parametrize("size", [1, 5, 10, 16, None])
def test_the_loss_is_the_mean_over_all_targets(kind, size):
    """Also where all texts of a batch are equally long (10), and where a batch is one text (1)."""
    val = texts(20)
    assert first(Writer(kind), val, val, val_batch_size=size)["val_loss"] == pytest.approx(whole(val, kind), rel=1e-5)


@pytest.mark.parametrize("given", [{"val_batch_size": 8}, {"minibatch_size": 2}, {"gradient_accumulation": 2}])
def test_a_batch_without_targets_does_not_count(given):
    val = texts(24, (6, 4, 0))
    found = first(Writer("targets"), val[:8], val, **given)["val_loss"]
    assert found == pytest.approx(whole(val, "targets"), rel=1e-5)


def labelled(count):
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(4, (count,), generator=draw).sort()[0])


@pytest.mark.parametrize("size", [1, 7, None])
def test_class_weights_and_left_out_classes_weigh_the_whole_set(size):
    """And accuracy is the share of correct predictions among the targets that the loss counts."""
    loss_fn = partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 5.0, 0.5]), ignore_index=1)
    data = labelled(40)
    x, y = data.tensors
    for loss in (loss_fn, nn.CrossEntropyLoss(weight=loss_fn.keywords["weight"], ignore_index=1)):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        with torch.no_grad():
            wanted, right = float(loss(model(x), y)), (model(x).argmax(1) == y)[y != 1].float().mean().item()
        found = first(model, labelled(20), data, loss_fn=loss, val_batch_size=size)
        assert found["val_loss"] == pytest.approx(wanted, rel=1e-5)
        assert found["val_accuracy"] == pytest.approx(right)


def test_a_loss_of_no_known_mean_is_evaluated_as_before():
    """As a sum: training on whole batches takes it, so evaluations do, too."""
    data = texts(20)
    model = Writer("examples")
    model.forward = lambda words, labels: {
        "loss": F.cross_entropy(model.table(words).transpose(1, 2), labels, reduction="sum")
    }
    assert first(model, data, data)["val_loss"] > 0


class Wide(nn.Module):
    """Makes `width` numbers of each example, and notes how many examples it gets at once."""

    def __init__(self, width, frozen=False):
        super().__init__()
        self.out, self.width, self.sizes = nn.Linear(6, 4), width, []
        self.wide = nn.Linear(6, width).requires_grad_(not frozen)
        self.frozen = frozen

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.sizes.append(len(x))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            extra = self.wide(x).relu().mean(1, keepdim=True)
        return self.out(x) + extra


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("width", "given", "most"),
    [
        (10, {}, 256),
        (10, {"minibatch_size": 2}, 2),
        (10, {"batch_size": 300}, 300),
        (10, {"val_batch_size": 7}, 7),
        (2**10, {}, 16),  # the limit below holds 8 to 16 examples
        (2**10, {"batch_size": 64}, 64),
        (2**10, {"val_batch_size": 20}, 20),
    ],
)
def test_an_evaluation_takes_as_many_examples_as_memory_bears(width, given, most, frozen, monkeypatch):
    assert exogym.core.training.assembly.EVALUATION_BYTES == 2**26
    monkeypatch.setattr(exogym.core.training.assembly, "EVALUATION_BYTES", 2**16)
    model = Wide(width, frozen)
    first(model, labelled(300), labelled(300), loss_fn=F.cross_entropy, **given)
    assert most / 2 <= max(model.sizes) <= most
