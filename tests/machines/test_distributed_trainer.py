"""`DistributedTrainer`, and the blocks of the document that planned it, in which a language of its own is Python's."""

import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from exogym import DistributedTrainer, LocalTrainer, NodeMesh, PipelineParallel, Stage
from exogym.errors import ArgumentError
from exogym.strategy import OptimSpec, SimpleReduceStrategy
from exogym.testing import fingerprint

TRAINER = """
from shared.training import DistributedTrainer

fn main() raises:
    var model = LeNet5()
    var optimizer = SGD(lr=0.01)

    # Automatic multi-GPU distribution
    var trainer = DistributedTrainer(
        model=model,
        optimizer=optimizer,
        num_gpus=4,
        backend="nccl"
    )

    trainer.train(train_loader, epochs=100)
"""
PIPELINE = """
var pipeline = PipelineParallel(
    stages=[
        Stage(layers=[conv1, conv2], device=0),
        Stage(layers=[conv3, conv4], device=1),
        Stage(layers=[fc1, fc2], device=2),
    ],
    micro_batch_size=8
)
"""


def python_of(block):
    for pattern, python in ((r"\bfn ", "def "), (r" raises:", ":"), (r"\bvar ", ""), ("shared.training", "exogym")):
        block = re.sub(pattern, python, block)
    return block


class LeNet5(nn.Module):
    """Of the size of the test; returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(16, 3)

    def forward(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.out(images.flatten(1)), labels)


def loader(shuffle=True, **options):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(40, 4, 4), torch.arange(40) % 3)
    return DataLoader(data, shuffle=shuffle, **{"batch_size": 8, **options})


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def test_the_trainer_of_the_document(capsys):
    models = []
    scope = {"train_loader": loader(), "SGD": functools.partial(OptimSpec, "sgd")}
    scope["LeNet5"] = lambda: models.append(LeNet5()) or models[-1]
    exec(python_of(TRAINER).replace("epochs=100", "epochs=2"), scope)
    scope["main"]()
    alone = LocalTrainer(LeNet5(), scope["train_loader"].dataset)
    strategy = SimpleReduceStrategy("sgd", lr=0.01)
    assert fingerprint(models[0]) == fingerprint(alone.fit(strategy, num_epochs=2, batch_size=8, minibatch_size=2))
    assert "simulates 4 devices" in capsys.readouterr().err


def test_the_pipeline_of_the_document():
    convs = [nn.Conv2d(1 if k == 0 else 2, 2, 3, padding=1) for k in range(4)]
    fcs = [nn.Sequential(nn.Flatten(), nn.Linear(32, 5)), nn.Linear(5, 3)]
    names = ("conv1", "conv2", "conv3", "conv4", "fc1", "fc2")
    scope = {"PipelineParallel": PipelineParallel, "Stage": Stage} | dict(zip(names, [*convs, *fcs], strict=True))
    exec(python_of(PIPELINE), scope)
    data = TensorDataset(torch.randn(48, 1, 4, 4), torch.arange(48) % 3)
    model = nn.Sequential(*convs, *fcs)
    trainer = DistributedTrainer(
        model, sgd(model), num_gpus=3, node=scope["pipeline"], loss_fn=nn.functional.cross_entropy
    )
    begun = copy.deepcopy(model)
    trained = fingerprint(trainer.train(DataLoader(data, batch_size=24)))
    alone = LocalTrainer(begun, data, loss_fn=nn.functional.cross_entropy)
    given = {"batch_size": 24, "minibatch_size": 8, "shuffle": False}
    assert trained == fingerprint(alone.fit(SimpleReduceStrategy("sgd", lr=0.1), **given))


def test_what_it_does_is_what_one_device_does():
    ends = []
    for trained in ("loop", "trainer"):
        model, batches = LeNet5(), loader(shuffle=False)
        optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
        if trained == "loop":
            for images, labels in [*batches, *batches]:
                optimizer.zero_grad()
                model((images, labels)).backward()
                optimizer.step()
        else:
            trainer = DistributedTrainer(model, optimizer, num_gpus=2, backend="gloo")
            trainer.train(batches, epochs=2, val_loader=batches)
            assert trainer.history.last["val_loss"] < trainer.history.rows(node=None)[0]["val_loss"]
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*ends, rtol=1e-5, atol=1e-6)


def test_steps_of_several_batches():
    """Four batches make one step, as a loop that steps after every fourth does; the loss is the mean."""
    one, other = LeNet5(), LeNet5()
    DistributedTrainer(one, sgd(one), 1).train(loader(shuffle=False), accumulation_steps=5)
    images, labels = loader().dataset.tensors
    optimizer = sgd(other)
    other((images, labels)).backward()
    optimizer.step()
    assert torch.allclose(one.out.weight, other.out.weight, atol=1e-6)


def test_a_loader_may_leave_out_its_last_batch():
    given, model = loader(drop_last=True, batch_size=7), LeNet5()
    trainer = DistributedTrainer(model, sgd(model), 2)
    trainer.train(given)
    assert trainer.history.last["step"] == len(given) < len(loader(batch_size=7))


def stepped(model):
    optimizer = sgd(model, momentum=0.9)
    model((torch.ones(1, 4, 4), torch.zeros(1).long())).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: DistributedTrainer(m, sgd(m), 2, node=NodeMesh(shard=3)), "num_gpus=2, but node= has 3 devices"),
        (lambda m: DistributedTrainer(m, sgd(m), 0), "num_gpus=0 must be"),
        (lambda m: DistributedTrainer(m, sgd(m), 2, "mpi"), "is not one of 'auto', 'nccl', 'gloo'"),
        (lambda m: DistributedTrainer(m, sgd(m), 2, "nccll"), "did you mean 'nccl'"),
        (lambda m: DistributedTrainer(m, sgd(LeNet5()), 2), "does not hold the model's trained parameters"),
        (lambda m: DistributedTrainer(m, stepped(m), 2), "has already taken steps"),
        (
            lambda m: DistributedTrainer(
                m, torch.optim.SGD([{"params": [m.out.weight]}, {"params": [m.out.bias]}], 0.1)
            ),
            r"2 parameter groups.* OptimSpec\(SGD, groups=",
        ),
        (lambda m: DistributedTrainer(m, sgd(m), 2).train([1, 2]), "must be a torch.utils.data.DataLoader, not list"),
        (lambda m: DistributedTrainer(m, sgd(m), 2).train(with_sampler()), "no batch_size"),
        (lambda m: DistributedTrainer(m, sgd(m), 2).train(with_replacement()), "its own RandomSampler"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make(LeNet5())


def with_sampler():
    data = loader().dataset
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))


def with_replacement():
    data = loader().dataset
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True))
