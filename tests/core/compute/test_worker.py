"""Models as users write them, held against a plain PyTorch loop; and those that cannot be a row of the fleet.

`plain` trains one model by hand on the batches that node 0 of 1 gets. Every model that works must give its bits.
"""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.base.rng import stream_seed
from exogym.core.compute.outputs import Loss, accuracy
from exogym.core.fleet import Fleet
from exogym.data.stream import Stream
from exogym.errors import CheckpointError, ModelError
from exogym.strategy import FedAvgStrategy, OptimSpec, SimpleReduceStrategy, Strategy
from exogym.testing import fingerprint

STEPS, BATCH = 12, 8


def examples(count=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


class DDPByHand(Strategy):
    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        super().step()


SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)
STRATEGIES = {
    "ddp": lambda: SimpleReduceStrategy(SGD),
    "local steps": lambda: FedAvgStrategy(SGD, H=5),
    "one node": lambda: DDPByHand(SGD),
}


def plain(model, steps=STEPS, begin=lambda model: model.train()):
    """Train `model` by hand, with the generators where a node's step finds them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = not any(p.dtype.itemsize == 2 for p in parameters)  # in bf16 torch's kernel skips elements
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)
    begin(model)
    for step, (x, y) in enumerate(Stream(examples(), 1, batch_size=BATCH).batches(0, 0, steps)):
        seed = stream_seed(0, "step", 0, step)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def fit(model, strategy, num_nodes=1, max_stretch=None, **options):
    trainer = LocalTrainer(model, examples(), options.pop("val", None), loss_fn=F.cross_entropy)
    trainer.max_stretch = max_stretch
    return trainer.fit(
        strategy, **({"num_nodes": num_nodes, "max_steps": STEPS, "batch_size": BATCH, "device": "cpu"} | options)
    )


def bits(x):
    return x.contiguous().flatten().view(torch.uint8)


def made(build):
    torch.manual_seed(1)
    return build()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()))


class Reassigning(nn.Module):
    """Buffers, one of whole numbers, that forward puts new tensors in the place of."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.count = self.count + 1
        return self.out(x - self.mean) / (1 + 0.01 * self.count)


class RareEvent(nn.Module):
    """A buffer that is written at every step, and by chance of the data changes in few."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        self.seen.logical_or_(x.max() > 2.9)
        return self.out(x) * (1.5 if self.seen else 1.0)


class PythonRandom(nn.Module):
    """Skips a layer by Python's dice, within it drops by torch's, and scales by numpy's."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        if self.training and random.random() < 0.5:
            x = F.dropout(self.inner(x), 0.5)
        if self.training and np.random.rand() < 0.3:
            x = x * 0.5
        return self.out(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(2, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.cells(x.view(-1, 3, 2))[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.out = nn.Linear(6, 6), nn.Linear(16, 2)
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x):
        return self.out(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class Closure(nn.Module):
    """A function, and a hook, that hold a parameter itself."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        weight = self.a.weight
        self.extra = lambda x: F.linear(x, weight * 0.5)
        self.out.register_forward_hook(lambda module, args, y: y + args[0][:, :2] * weight[0, 0])
        self.a.register_full_backward_hook(lambda module, grad_in, grad_out: tuple(g * 1.5 for g in grad_in))

    def forward(self, x):
        return self.out(self.a(x * self.a.weight[0]).relu() + self.extra(x))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.unused = nn.Linear(6, 2), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(x)


class Mixed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6).to(dtype), nn.Linear(6, 2)
        self.dtype = dtype

    def forward(self, x):
        return self.out(self.b(self.a(x).to(self.dtype)).float())


class Adapter(nn.Module):
    """A frozen base and a low-rank trainable side path."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.out = nn.Linear(6, 2)
        for p in [*self.base.parameters(), *self.out.parameters()]:
            p.requires_grad_(False)

    def forward(self, x):
        return self.out(self.base(x) + self.up(self.down(x)))


class OddBase(nn.Module):
    """Frozen parameters of kinds that cannot be added up, and one with a hole in it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)
        self.eighths = nn.Parameter(torch.ones(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.bytes = nn.Parameter(torch.ones(6, dtype=torch.uint8), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(6, dtype=torch.complex64), requires_grad=False)
        self.hole = nn.Parameter(torch.tensor([1.0, float("nan")]), requires_grad=False)

    def forward(self, x):
        return self.out(x @ self.eighths.float() * self.bytes * self.waves.real * self.hole[0])


class Unregistered(nn.Module):
    """A layer in a plain list: torch does not see it, and nothing trains it."""

    def __init__(self):
        super().__init__()
        self.layers, self.out = [nn.Linear(6, 6)], nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.layers[0](x))


class FromEmbedding(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 6, sparse=sparse), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.table((x[:, 0] * 3).abs().long().clamp(max=9)))


def batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def dropout():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


MODELS = {  # parametrizations, late buffers and compiled models are in test_awkward_models.py
    "tied weights": Tied,
    "BatchNorm": batch_norm,
    "buffers re-assigned": Reassigning,
    "rare event": RareEvent,
    "dropout": dropout,
    "python and numpy dice": PythonRandom,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "checkpointing": lambda: Checkpointed(False),
    "reentrant checkpointing": lambda: Checkpointed(True),
    "closures and hooks": Closure,
    "unused parameter": Unused,
    "fp32 and fp64": lambda: Mixed(torch.float64),
    "fp32 and bf16": lambda: Mixed(torch.bfloat16),
    "frozen base": Adapter,
    "frozen base of odd kinds": OddBase,
    "unregistered layer": Unregistered,
    "embedding": lambda: FromEmbedding(False),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_one_node_trains_as_a_plain_loop_does(name, strategy):
    expected = plain(made(MODELS[name])).state_dict()
    model = made(MODELS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = fit(model, STRATEGIES[strategy]()).state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(bits(found[key]), bits(value)), key
    assert any(not torch.equal(found[key], value) for key, value in before.items())  # the loop did train


@pytest.mark.parametrize("name", MODELS)
def test_neither_stretches_nor_other_nodes_change_a_bit(name):
    """Three nodes in whole stretches and one step at a time; what a node does hangs on (seed, node, step) alone."""
    ends = []
    for max_stretch in (None, 1):
        model = made(MODELS[name])
        fit(model, FedAvgStrategy(SGD, H=5), num_nodes=3, max_stretch=max_stretch)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]


def rows_of(loop):
    return torch.cat([block.params for block in loop.fleet.blocks], 1).clone()


@pytest.mark.parametrize("name", ["dropout", "python and numpy dice"])
def test_random_numbers_hang_on_seed_and_node_and_step_only(name):
    def ends(reverse=False, seed=0):
        rows = []

        def look(loop):
            if loop.step == 0 and reverse:
                take, loop.driver.compute.steps = (
                    loop.driver.compute.steps,
                    lambda spans, *rest: take(spans[::-1], *rest),
                )
            rows.append(rows_of(loop))

        same_data = lambda rank, num_nodes, is_train: examples(BATCH)  # noqa: E731
        trainer = LocalTrainer(made(MODELS[name]), same_data, examples(8), loss_fn=F.cross_entropy)
        strategy = FedAvgStrategy(SGD, H=STEPS)
        trainer.fit(
            strategy, num_nodes=3, max_steps=2 * STEPS, batch_size=BATCH, val_interval=STEPS - 1, shuffle=False,
            callbacks=[look], seed=seed, device="cpu",
        )  # fmt: skip
        return rows[1]  # before the first average

    there, back, other = ends(), ends(reverse=True), ends(seed=1)
    assert torch.equal(there, back)
    assert not torch.equal(there, other)
    assert not torch.equal(there[0], there[1])  # same data, other dice


# What a node has of its own, and what all share


def test_tied_weights_are_one_range_of_columns():
    fleet = Fleet(Tied(), range(2), 2, torch.device("cpu"))
    assert fleet.blocks[0].layout.numel == 36 + 12 + 2
    model = made(Tied)
    fit(model, SimpleReduceStrategy(SGD), num_nodes=2)
    assert model.a.weight is model.b.weight


def test_frozen_parameters_have_no_columns_and_stay():
    fleet = Fleet(Adapter(), range(64), 64, torch.device("cpu"))
    assert fleet.blocks[0].layout.numel == 2 * 6 + 6 * 2
    model = made(Adapter)
    base, before = model.base.weight, model.base.weight.clone()
    fit(model, SimpleReduceStrategy(SGD), num_nodes=3)
    assert model.base.weight is base and torch.equal(base, before)


class Mask(nn.Module):
    """BatchNorm, and a constant mask."""

    def __init__(self):
        super().__init__()
        self.body, self.out = batch_norm(), nn.Linear(2, 2)
        self.register_buffer("mask", torch.tril(torch.ones(2, 2)))

    def forward(self, x):
        return self.out(self.body(x) @ self.mask)


def test_only_buffers_that_training_changes_have_rows():
    seen = {}

    def look(loop):
        if loop.step == 10:
            seen.update({name: rows.clone() for name, rows in loop.fleet.buffers.items()})

    model = made(Mask)
    fit(model, FedAvgStrategy(SGD, H=STEPS), num_nodes=3, val=examples(8), val_interval=5, callbacks=[look],
        max_steps=STEPS + 5)  # fmt: skip
    assert set(seen) == {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    assert model.body[1].num_batches_tracked.item() == STEPS + 5
    alone = seen["body.1.running_mean"]
    assert not torch.equal(alone[0], alone[1])


class Near(nn.Module):
    """A layer, and a mean over features that a constant buffer, perhaps sparse, describes."""

    def __init__(self, pack=lambda x: x, seed=0):
        super().__init__()
        self.out = nn.Linear(6, 2)
        draw = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("near", pack(draw * (draw > 0.5)))

    def forward(self, x):
        return self.out((self.near @ x.T).T)


def sparse_csr(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them beta
        return x.to_sparse_csr()


@pytest.mark.parametrize("pack", [torch.Tensor.to_sparse, sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("options", [{}, {"processes": 2}, {"minibatch_size": 4}, {"max_memory_usage": 0.9}], ids=str)
def test_a_model_with_a_sparse_buffer_trains(pack, options):
    runs = []
    for model in (made(lambda: Near(pack)), made(Near)):
        fit(model, FedAvgStrategy(SGD, H=3), num_nodes=2, val=examples(8), **options)
        runs.append(model)
    sparse, dense = runs
    assert sparse.near.layout != torch.strided and fingerprint(sparse) != fingerprint(made(lambda: Near(pack)))
    torch.testing.assert_close(sparse.out.weight, dense.out.weight, rtol=1e-3, atol=1e-4)


def test_a_resumed_run_needs_the_same_sparse_buffer(tmp_path):
    given = {"save_dir": tmp_path, "num_nodes": 2}
    fit(made(lambda: Near(torch.Tensor.to_sparse)), FedAvgStrategy(SGD, H=3), **given)
    fit(made(lambda: Near(torch.Tensor.to_sparse)), FedAvgStrategy(SGD, H=3), resume=True, **given)
    with pytest.raises(CheckpointError, match="shared"):
        fit(made(lambda: Near(torch.Tensor.to_sparse, seed=1)), FedAvgStrategy(SGD, H=3), resume=True, **given)


def test_a_sparse_buffer_that_training_changes_is_refused():
    class Grows(Near):
        def forward(self, x):
            self.near = self.near * 1.1
            return super().forward(x)

    with pytest.raises(ModelError, match="changes the sparse buffer 'near', but a node's own buffers are dense"):
        fit(made(lambda: Grows(torch.Tensor.to_sparse)), FedAvgStrategy(SGD, H=3), num_nodes=2)


def test_a_parameter_without_gradient_is_left_alone():
    """AdamW's weight decay would shrink it."""
    for strategy in (SimpleReduceStrategy(lr=0.1), FedAvgStrategy("adamw", lr=0.1, H=3), DDPByHand(lr=0.1)):
        model = made(Unused)
        before = model.unused.weight.clone()
        fit(model, strategy, num_nodes=2)
        assert torch.equal(model.unused.weight, before)


class Routed(nn.Module):
    """Which layer is trained hangs on the batch, so nodes differ in what has a gradient."""

    def __init__(self):
        super().__init__()
        self.experts, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.experts[int(x[0, 0] > 0)](x))


@pytest.mark.parametrize("optimizer", [SGD, OptimSpec("sgd", lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
                                       OptimSpec("adamw", lr=0.1)], ids=str)  # fmt: skip
def test_nodes_may_differ_in_what_has_a_gradient(optimizer):
    """Zeros stand for a missing gradient where another node has one, as in DDP(find_unused_parameters=True)."""
    ends = []
    for strategy in (SimpleReduceStrategy(optimizer), DDPByHand(optimizer)):
        model = made(Routed)
        fit(model, strategy, num_nodes=3)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    model = made(Routed)
    parameters = list(model.parameters())
    torch_optimizer = optimizer.cls(parameters, **optimizer.kwargs)
    stream = Stream(examples(), 3, batch_size=BATCH)
    for step in range(STEPS):
        grads = []
        for node in range(3):
            ((x, y),) = stream.batches(node, step, 1)
            torch_optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            grads.append([p.grad for p in parameters])
        for p, of_nodes in zip(parameters, zip(*grads, strict=True), strict=True):
            there = [torch.zeros_like(p) if g is None else g for g in of_nodes]
            p.grad = None if all(g is None for g in of_nodes) else sum(there) / 3
        torch_optimizer.step()
    reference = made(Routed)
    fit(reference, SimpleReduceStrategy(optimizer), num_nodes=3)
    for found, expected in zip(reference.parameters(), parameters, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))

    def forward(self, x):
        return self.body(x)


def test_lazy_models_start_from_the_seed_and_with_fresh_statistics():
    start = {}

    def look(loop):
        if loop.step == 0:
            start.update({name: value.clone() for name, value in loop.fleet.buffers.items()})
            start["rows"] = rows_of(loop)

    ends = []
    for callers in (1, 2):
        torch.manual_seed(callers)  # the caller's random state does not matter
        model = Lazy()
        fit(model, SimpleReduceStrategy(SGD), num_nodes=2, callbacks=[look], val=examples(8))
        ends.append((fingerprint(model), start["rows"]))
    assert ends[0][0] == ends[1][0] and torch.equal(ends[0][1], ends[1][1])
    assert start["body.1.num_batches_tracked"].tolist() == [0, 0]
    assert not start["body.1.running_mean"].any()


def test_each_module_keeps_its_mode():
    model = made(batch_norm)
    model.train()
    model[1].eval()
    fit(model, SimpleReduceStrategy(SGD), num_nodes=2, val=examples(8))
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    model.eval()
    fit(model, SimpleReduceStrategy(SGD), num_nodes=2, val=examples(8))
    assert not any(module.training for module in model.modules())


def partly_still():
    """Dropout that acts, and then a BatchNorm and a dropout that the user keeps in evaluation mode."""
    return nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6).eval(), nn.Dropout(0.5).eval(), nn.Linear(6, 2)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("val", [False, True])
def test_a_submodule_in_evaluation_mode_trains_as_in_a_plain_loop(strategy, val):
    model = fit(
        made(partly_still), STRATEGIES[strategy](), val=examples(8) if val else None, val_interval=3 if val else None
    )
    wanted = plain(made(partly_still), begin=lambda model: None)
    assert fingerprint(model) == fingerprint(wanted)
    assert model[2].num_batches_tracked == 0
    assert fingerprint(model) != fingerprint(plain(made(partly_still)))  # the control: all in training mode


@pytest.mark.parametrize("given", [{"processes": 2}, {"compute": "vmap"}, {"minibatch_size": 4}], ids=str)
def test_a_submodule_stays_in_evaluation_mode_in_every_way_of_computing(given):
    def ending(build, **options):
        model = made(build)
        model[1].eval()  # vmap refuses dropout that acts
        fit(model, FedAvgStrategy(SGD, H=3), num_nodes=2, val=examples(8), val_interval=2, **options)
        assert [module.training for module in model] == [True, False, False, False, True]
        return torch.nn.utils.parameters_to_vector(model.parameters())

    found, wanted = ending(partly_still, **given), ending(partly_still)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_wholly_in_evaluation_mode_is_trained_in_training_mode():
    """As from_pretrained of transformers returns models; a root in evaluation mode around others stays so."""
    wanted = fingerprint(fit(made(dropout), SimpleReduceStrategy(SGD), val=examples(8)))
    model = made(dropout).eval()
    assert fingerprint(fit(model, SimpleReduceStrategy(SGD), val=examples(8))) == wanted
    assert not any(module.training for module in model.modules())
    seen = []
    model = made(partly_still).eval()
    model[0].train()
    look = Every(4, lambda loop: seen.append([module.training for module in model.modules()]))
    fit(model, SimpleReduceStrategy(SGD), val=examples(8), val_interval=3, callbacks=[look])
    assert seen == [[False, True, False, False, False, False]] * 3


def test_what_stays_in_evaluation_mode_is_said_once(capsys):
    model = made(partly_still)
    fit(model, SimpleReduceStrategy(SGD), num_nodes=2, processes=2)
    assert (
        capsys.readouterr().err.count("in evaluation mode during training, as given: '2', '3'; call model.train()") == 1
    )
    fit(made(dropout).eval(), SimpleReduceStrategy(SGD))
    assert capsys.readouterr().err == ""


def test_a_train_method_of_the_model_is_called():
    """The usual way to keep a BatchNorm still: a train() that leaves it in evaluation mode."""

    class Still(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(6, 2), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(self.body(x))

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    model = fit(made(Still), SimpleReduceStrategy(SGD), val=examples(8), val_interval=3)
    assert model.norm.num_batches_tracked == 0 and model.norm.training
    assert fingerprint(model) == fingerprint(plain(made(Still)))


def test_parameters_are_the_same_objects_in_their_own_memory_after():
    model = made(dropout)
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    fit(model, FedAvgStrategy(SGD, H=3), num_nodes=3)
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.data_ptr() == before[name][1] and p.grad is None
    copy.deepcopy(model)(torch.randn(2, 6)).sum().backward()


# What cannot be a row


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        self.out.weight.data = self.out.weight.data * 0.99
        return self.out(x)


class Replaced(Moved):
    def forward(self, x):
        self.out.weight = nn.Parameter(self.out.weight.detach() * 0.99)
        return self.out(x)


class MovingTarget(nn.Module):
    """A momentum encoder as a frozen parameter: all nodes would share, and change, one."""

    def __init__(self):
        super().__init__()
        self.online, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        return self.out(self.online(x) + self.target(x))


class LateStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.out(x - self.mean)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return self.out(x)


class Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        whole = torch.randn(3, 6)
        self.a, self.b = nn.Parameter(whole[:2]), nn.Parameter(whole[1:])

    def forward(self, x):
        return F.linear(x, self.a) + F.linear(x, self.b)


def all_frozen():
    return nn.Linear(6, 2).requires_grad_(False)


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(x).detach()


REFUSED = {
    "moved": (Moved, "moved parameter 'out.weight'"),
    "replaced": (Replaced, "replaced parameter 'weight' of Linear"),
    "frozen but changed": (MovingTarget, "changes 'target.weight'"),
    "late statistics": (LateStatistics, "create them in __init__"),
    "growing buffer": (Growing, "create them in __init__"),
    "overlapping": (Overlapping, "'a' and 'b' overlap"),
    "sparse gradient": (
        lambda: FromEmbedding(True),
        "the gradient of 'table.weight' must be dense, but is sparse: create the layer without sparse=True",
    ),
    "all frozen": (all_frozen, "depend on any trainable parameter"),
    "detached": (Detached, "depend on any trainable parameter"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name, strategy):
    build, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        fit(made(build), STRATEGIES[strategy](), num_nodes=2)


def test_a_refused_model_keeps_its_statistics():
    """The step that finds out is undone."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Detached8())
    with pytest.raises(ModelError):
        fit(model, SimpleReduceStrategy(SGD))
    assert model[1].num_batches_tracked.item() == 0 and not model[1].running_mean.any()


class Detached8(nn.Module):
    def forward(self, x):
        return x[:, :2].detach()


# Hugging Face


def test_gpt2_with_dict_batches_is_trained_as_by_hand():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    g = torch.Generator().manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 20, (24, 8), generator=g)]
    expected, model = (made(lambda: transformers.GPT2LMHeadModel(config)) for _ in range(2))
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    expected.train()
    for batch in Stream(rows, 1, batch_size=4).batches(0, 0, 6):
        optimizer.zero_grad()
        expected(**batch).loss.backward()
        optimizer.step()
    trainer = LocalTrainer(model, rows, rows)
    trainer.fit(SimpleReduceStrategy("adamw", lr=1e-2), max_steps=6, batch_size=4, device="cpu")
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6, msg=name)
    last = list(trainer.history.rows(node=None))[-1]
    assert last["val_loss"] < trainer.history[0]["val_loss"]
    ids = torch.stack([row["labels"] for row in rows])
    guess = model.eval()(input_ids=ids).logits.argmax(-1)
    assert last["val_accuracy"] == pytest.approx((guess[:, :-1] == ids[:, 1:]).float().mean().item(), rel=1e-6)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_accuracy_of_gpt2_leaves_out_what_its_loss_leaves_out():
    """One label is counted right where the loss is that of one token; metrics see what faces each other."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = made(lambda: transformers.GPT2LMHeadModel(config)).eval()
    ids = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        labels = torch.full_like(ids, -100)
        labels[1, 5] = logits[1, 4].argmax()  # the guess of position 4 for the next one
        output = Loss(model, None).of(model, {"input_ids": ids, "labels": labels})
    assert accuracy(output) == (1, 1)
    torch.testing.assert_close(output.loss, F.cross_entropy(logits[1, 4:5], labels[1, 5:6]))
    torch.testing.assert_close(F.cross_entropy(output.predictions.flatten(0, 1), output.targets.flatten()), output.loss)
    labels[1, 5] = (labels[1, 5] + 1) % 20
    with torch.no_grad():
        assert accuracy(Loss(model, None).of(model, {"input_ids": ids, "labels": labels})) == (0, 1)

    class Wrapped(nn.Module):
        """Calls it with labels of its own: who has shifted them is not known, so there is no accuracy."""

        def __init__(self):
            super().__init__()
            self.inside = model

        def forward(self, batch):
            return self.inside(input_ids=batch[0], labels=batch[1])

    wrapped = Wrapped()
    assert accuracy(Loss(wrapped, None).of(wrapped, [ids, ids])) is None


def test_a_compiled_model_takes_dict_batches_too():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 2)

        def forward(self, features, labels):
            return {"loss": F.cross_entropy(self.out(features), labels)}

    rows = [{"features": x, "labels": y} for x, y in examples()]
    ends = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):
        model = made(Words)
        LocalTrainer(wrap(model), rows).fit(SimpleReduceStrategy(SGD), max_steps=4, batch_size=8, device="cpu")
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
