"""compute='vmap' is compute='loop' up to rounding, or is refused; 'auto' says and records which it took."""

import time

import pytest
import torch
import torch.nn.functional as F
from battery import in_turn
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.errors import ArgumentError, ModelError
from exogym.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    Strategy,
)


def examples(count=130, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def made(build):
    torch.manual_seed(1)
    return build()


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.out(self.b(self.a(self.frozen(x)).relu()))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(6, 6).double(), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.a(x.double()).float())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3), nn.Linear(12, 2)

    def forward(self, x):
        return self.out(self.norm(self.conv(x[:, None])).relu().flatten(1))


class ByHand(Strategy):
    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        super().step()


SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)
STRATEGIES = {
    "ddp": lambda: SimpleReduceStrategy(SGD, max_norm=1.0),
    "fedavg": lambda: FedAvgStrategy(SGD, H=3, max_norm=1.0, lr_scheduler="cosine"),
    "unequal work": lambda: FedAvgStrategy(SGD, H=4, local_steps=[1, 4, 2, *[3] * 9]),
    "diloco": lambda: DiLoCoStrategy(SGD, H=3),
    "by hand": lambda: ByHand(SGD),
}
MODELS = {"mlp": network, "tied and frozen": Tied, "two dtypes": Mixed, "convolutions": Convolutions}


def fit(compute, strategy, model=None, **options):
    trainer = LocalTrainer(made(network if model is None else model), examples(), loss_fn=F.cross_entropy)
    options = {"num_nodes": 12, "max_steps": 10, "batch_size": 4, "device": "cpu"} | options
    trainer.fit(strategy, compute=compute, **options)
    return trainer


@pytest.mark.parametrize(("name", "model"), in_turn(STRATEGIES, list(MODELS)))
def test_vmap_is_the_loop(name, model):
    """Twelve nodes: two chunks of rows. 130 examples: epochs of 11 for each node, so the last batches have 3."""
    loop, vmap = (fit(compute, STRATEGIES[name](), MODELS[model]) for compute in ("loop", "vmap"))
    for a, b in zip(loop.model.parameters(), vmap.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    for ours, theirs in zip(vmap.history, loop.history, strict=True):
        assert (ours["step"], ours["node"], ours["lr"]) == (theirs["step"], theirs["node"], theirs["lr"])
        if theirs["train_loss"] is not None:
            assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
    assert vmap.description["chosen"]["compute"] == "vmap"


def test_batches_of_unequal_size_go_together_by_size():
    """Shards of 3, 5 and 9 examples in batches of 4."""
    shards = [examples(n, seed=n) for n in (3, 5, 9)]
    ends = []
    for compute in ("loop", "vmap"):
        model = made(network)
        trainer = LocalTrainer(model, lambda rank, n, is_train: shards[rank], loss_fn=F.cross_entropy)
        trainer.fit(FedAvgStrategy(SGD, H=2), num_nodes=3, max_steps=7, batch_size=4, compute=compute, device="cpu")
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


def test_dict_batches_and_bf16():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, features, labels):
            return {"loss": F.cross_entropy(self.body(features), labels)}

    rows = [{"features": x, "labels": y} for x, y in examples(48)]
    for precision, tolerance in (("fp32", 1e-6), ("bf16", 0.02)):
        ends = []
        for compute in ("loop", "vmap"):
            model = made(Words)
            LocalTrainer(model, rows).fit(SimpleReduceStrategy(SGD), num_nodes=3, max_steps=5, batch_size=4,
                                          compute=compute, precision=precision, device="cpu")  # fmt: skip
            ends.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=tolerance)


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        weight = self.a.weight
        self.extra = lambda x: F.linear(x, weight)

    def forward(self, x):
        return self.out(self.a(x) + self.extra(x))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.unused = nn.Linear(6, 2), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(x) if x.sum() > 0 else self.out(-x)


def with_layer(layer):
    return nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 2))


class WithText(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)

    def forward(self, text, x):
        return super().forward(x)


REFUSED = {
    "dropout": (lambda: with_layer(nn.Dropout(0.1)), {}, "draws random numbers"),
    "BatchNorm": (lambda: with_layer(nn.BatchNorm1d(6)), {}, r"changes its buffers \(1.running_mean"),
    "micro-batches": (network, {"minibatch_size": 2}, "each with its whole batch"),
    "accumulation": (network, {"gradient_accumulation": 2}, "each with its whole batch"),
    "fp16": (network, {"precision": "fp16"}, "an unscaled loss"),
    "closure over a parameter": (Closure, {}, "gradient of 'a.weight' differs"),
    "unused parameter": (Unused, {}, "gives 'unused.weight' no gradient"),
    "branch on data": (Branching, {}, "use compute='loop'"),
}


@pytest.mark.parametrize(("name", "strategy"), in_turn(REFUSED, ["ddp", "fedavg", "by hand"]))
def test_refused_where_it_would_be_something_else(name, strategy, capsys):
    build, options, words = REFUSED[name]
    with pytest.raises((ArgumentError, ModelError), match=words):
        fit("vmap", STRATEGIES[strategy](), build, **options)
    fit("loop", STRATEGIES[strategy](), build, **options)  # the control: the loop trains it


def test_batches_with_texts_are_refused():
    data = [("to be", x, y) for x, y in zip(torch.randn(8, 6), torch.arange(8) % 2, strict=True)]
    trainer = LocalTrainer(WithText(), data, loss_fn=nn.functional.cross_entropy)
    options = {"num_nodes": 2, "max_steps": 3, "batch_size": 2}
    trainer.fit(STRATEGIES["fedavg"](), **options)
    with pytest.raises(ModelError, match=r"batches have more than tensors \(str\)"):
        trainer.fit(STRATEGIES["fedavg"](), **options, compute="vmap")


class Late(nn.Module):
    """Takes its time, once for all rows that are computed together."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        time.sleep(0.02)
        return self.out(x)


@pytest.mark.parametrize("strategy", ["ddp", "fedavg", "by hand"])
def test_computing_takes_its_time_on_a_network(strategy):
    """Each row its part of it: ten of twelve are computed together, then two."""
    trainer = fit("vmap", STRATEGIES[strategy](), Late, network="100Gbps,0ms")
    assert float(trainer.clock.time_s.min()) > 10 * 2 * 0.02 / 12
