"""Models that keep more than parameters: N nodes equal N plain loops bit for bit, or the model is refused.

docs/getting_started.md names the kinds of models in the two batteries here.
"""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.base.rng import stream_seed
from exogym.data.stream import Stream
from exogym.errors import DataError, ModelError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SPARTAStrategy

NODES, STEPS, BATCH = 3, 6, 8


def data(rank, num_nodes, is_train):
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(5 * BATCH, 6, generator=g) + 0.2 * rank
    return TensorDataset(x, (x.sum(1) > 0).long())


class Net(nn.Module):
    """6 features to 2 classes, with something awkward on the hidden ones."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
        self.setup()

    def setup(self):
        pass

    def awkward(self, h):
        return h

    def forward(self, x):
        return self.out(self.awkward(torch.tanh(self.first(x))))


# A single example, on which batch normalization cannot train


def normalized(layer):
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Flatten(), nn.LazyLinear(2))


def fit_lengths(lengths, layer=None, strategy=None, **options):
    """Train nodes with so many examples for 6 steps of 4."""

    def own(rank, num_nodes, is_train):
        x = torch.randn(lengths[rank], 6, generator=torch.Generator().manual_seed(rank))
        return TensorDataset(x, (x.sum(1) > 0).long())

    trainer = LocalTrainer(normalized(layer or nn.BatchNorm1d(8)), own, loss_fn=F.cross_entropy)
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1) if strategy is None else strategy
    trainer.fit(strategy, **{"num_nodes": len(lengths), "max_steps": 6, "batch_size": 4, "progress": False} | options)
    return trainer


SINGLE = {  # examples of the nodes, options; message
    "the rest": ([9, 8, 13], {}, r"nodes 0, 2 get 1 example at the end of an epoch \(9 .* 4\): .*\"drop_last\": True"),
    "one in all": ([1, 9], {}, "node 0 has 1 example in all: provide more"),
    "batches of one": ([8, 8], {"batch_size": 1}, "nodes 0, 1 take 1 example per step: use a larger batch_size"),
    "parts of one": ([8, 8], {"minibatch_size": 3}, r"nodes 0, 1 compute 1 example at once \(4 examples in parts"),
    "accumulation": ([9, 8], {"batch_size": 2, "gradient_accumulation": 2}, "node 0 gets 1 .* in parts of 2"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_example_under_batch_normalization_is_named_before_training(name):
    lengths, options, words = SINGLE[name]
    seen = []
    with pytest.raises(DataError, match="needs at least 2 examples at once, but " + words):
        fit_lengths(lengths, callbacks=[lambda loop: seen.append(loop.step)], **options)
    assert not seen


def test_the_remedies_for_a_single_example_train():
    fit_lengths([9, 8, 13], dataloader_kwargs={"drop_last": True})
    fit_lengths([8, 8], minibatch_size=2)
    fit_lengths([9, 8], layer=nn.GroupNorm(2, 8))
    fit_lengths([9, 8], batch_size=2, gradient_accumulation=2, dataloader_kwargs={"drop_last": True})


def test_single_examples_that_do_no_harm_train():
    fit_lengths([13, 9], max_steps=2)  # an epoch's last batch is never reached
    fit_lengths([9, 8], layer=nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2)))  # 4 values per channel


def test_a_single_example_of_a_sampled_client_is_named_when_its_length_is_known():
    lengths = [8] * 39 + [9]
    strategy = FedAvgStrategy("sgd", H=3, lr=0.1, client_fraction=0.1)
    fit_lengths([8] * 40, strategy=strategy, max_steps=60)
    with pytest.raises(DataError, match="node 39 gets 1 example at the end of an epoch"):
        fit_lengths(lengths, strategy=strategy, max_steps=60)
    fit_lengths(lengths, strategy=strategy, max_steps=60, dataloader_kwargs={"drop_last": True})


# Right


class BufferCounter(Net):
    def setup(self):
        self.register_buffer("count", torch.zeros(()))

    def awkward(self, h):
        if self.training:
            self.count += 1
        return h / (1 + 0.1 * self.count)


class AllowedCounter(Net):
    shared_attributes = ("calls",)

    def setup(self):
        self.calls = 0

    def awkward(self, h):
        self.calls += 1
        return h


class CachedMask(Net):
    def setup(self):
        self.mask, self.by_size = None, {}

    def awkward(self, h):
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, h.shape[1])
        if len(h) not in self.by_size:
            self.by_size[len(h)] = torch.ones(len(h), 1) * 0.9
        return h * self.mask * self.by_size[len(h)]


class KeepsTheLastOutput(Net):
    def awkward(self, h):
        self.last = {"hidden": h.detach(), "norm": float(h.detach().norm())}
        return h + 0.1 * self.last["hidden"]


class LateBuffer(Net):
    def awkward(self, h):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((h.shape[1],), 0.5))
        return h * self.scale


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2))


class WeightNorm(Net):
    def setup(self):
        parametrizations.weight_norm(self.first)


class OldWeightNorm(Net):
    def setup(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.first)


class SpectralNorm(Net):
    def setup(self):
        parametrizations.spectral_norm(self.first)


class OldSpectralNorm(Net):
    def setup(self):
        nn.utils.spectral_norm(self.first)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class OwnParametrization(Net):
    def setup(self):
        self.middle = nn.Linear(8, 8)
        nn.utils.parametrize.register_parametrization(self.middle, "weight", Symmetric())

    def awkward(self, h):
        return self.middle(h)


class Orthogonal(Net):
    def setup(self):
        self.middle = parametrizations.orthogonal(nn.Linear(8, 8))

    def awkward(self, h):
        return self.middle(h)


class Tied(Net):
    def setup(self):
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight

    def awkward(self, h):
        return self.third(torch.tanh(self.second(h)))


class Frozen(Net):
    def setup(self):
        self.first.requires_grad_(False)


class LoRA(nn.Module):
    """y = W x + B A x, W frozen; `quantised` keeps W as int8 codes and a scale, in buffers."""

    def __init__(self, base, rank=2, quantised=False):
        super().__init__()
        self.bias = base.bias.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        w = base.weight.detach()
        scale = w.abs().max() / 127 if quantised else torch.ones(())
        self.register_buffer("codes", (w / scale).round().to(torch.int8) if quantised else w)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, self.codes.to(x.dtype) * self.scale, self.bias) + x @ self.a.T @ self.b.T


class OwnLoRA(Net):
    def setup(self):
        self.first = LoRA(self.first)


class Int8Base(Net):
    def setup(self):
        self.first = LoRA(self.first, quantised=True)


def dynamic_int8():
    """torch's own dynamically quantised linear layer, which has no gradient, under a head that is trained."""
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.first = torch.ao.quantization.quantize_dynamic(nn.Sequential(net.first), {nn.Linear}, torch.qint8)
    return net


def compiled():
    torch._dynamo.reset()
    return torch.compile(BufferCounter(), backend="eager")


RIGHT = {
    "counter in a buffer": BufferCounter,
    "counter that is allowed": AllowedCounter,
    "cached constant tensor": CachedMask,
    "last output kept in an attribute": KeepsTheLastOutput,
    "buffer made in the first step": LateBuffer,
    "lazy modules": Lazy,
    "weight norm (parametrization)": WeightNorm,
    "weight norm (`torch.nn.utils.weight_norm`)": OldWeightNorm,
    "spectral norm (parametrization)": SpectralNorm,
    "spectral norm (`torch.nn.utils.spectral_norm`)": OldSpectralNorm,
    "custom parametrization": OwnParametrization,
    "orthogonal parametrization": Orthogonal,
    "tied weights": Tied,
    "frozen layers": Frozen,
    "LoRA, written by hand": OwnLoRA,
    "LoRA on an int8 base": Int8Base,
    "dynamically quantized int8 layer": dynamic_int8,
    "`torch.compile`": compiled,
}


def made(make):
    torch.manual_seed(5)
    return make()


def plain(make, node):
    """Train a model by hand on the batches of `node`, with the generators where its steps find them."""
    model = made(make)
    stream = Stream(data, NODES, batch_size=BATCH)
    if any(map(nn.parameter.is_lazy, model.parameters())):
        torch.manual_seed(stream_seed(0, "lazy"))
        with torch.no_grad():
            model.eval()(next(iter(stream.batches(0, 0, 1)))[0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model.train()
    for step, (x, y) in enumerate(stream.batches(node, 0, STEPS)):
        seed = stream_seed(0, "step", node, step)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.named_parameters()) | dict(model.named_buffers())


def simulated(make, strategy=None):
    """Train all nodes; return the parameters and buffers of each by name, and the model."""
    with torch.random.fork_rng():
        model = made(make)
    seen = []

    def look(loop):
        for node in range(NODES):
            vectors, buffers = loop.driver.model(node)
            named = dict(model.named_parameters()) | dict(model.named_buffers())
            for block, vector in zip(loop.fleet.blocks, vectors, strict=True):
                named |= {slot.name: slot.of(vector) for slot in block.layout}
            seen.append({name: x.detach().clone() for name, x in (named | buffers).items()})

    alone = SPARTAStrategy(OptimSpec("sgd", lr=0.1, momentum=0.9, fused=False), p_sparta=0.0)
    LocalTrainer(model, data, loss_fn=F.cross_entropy).fit(
        strategy or alone, num_nodes=NODES, max_steps=STEPS, batch_size=BATCH, device="cpu", final_sync=False,
        callbacks=[look],
    )  # fmt: skip
    return seen[-NODES:], model


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
@pytest.mark.parametrize("name", RIGHT)
def test_nodes_equal_plain_loops(name):
    nodes, model = simulated(RIGHT[name])
    for node, mine in enumerate(nodes):
        with torch.random.fork_rng():
            expected = plain(RIGHT[name], node)
        assert mine.keys() == expected.keys() and any(x.requires_grad for x in expected.values())
        for key, x in expected.items():
            assert torch.equal(mine[key], x), (node, key)
    trained = [key for key, x in expected.items() if x.requires_grad]
    assert any(not torch.equal(nodes[0][key], nodes[1][key]) for key in trained)  # the nodes went apart
    assert getattr(model, "calls", 0) in (0, NODES * STEPS)  # the trial step is undone


# Refused


class Counter(Net):
    def setup(self):
        self.count = 0

    def awkward(self, h):
        if self.training:
            self.count += 1
        return h / (1 + 0.1 * self.count)


class TensorCounter(Net):
    def setup(self):
        self.count = torch.zeros(())

    def awkward(self, h):
        self.count += 1
        return h


class RunningMean(Net):
    def setup(self):
        self.mean = torch.zeros(8)

    def awkward(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class PreviousBatch(Net):
    def setup(self):
        self.before = None

    def awkward(self, h):
        before, self.before = self.before, h.detach()
        return h if before is None else h + (h - before)


class StatisticsOfTheFirstBatch(Net):
    def setup(self):
        self.mean = None

    def awkward(self, h):
        if self.mean is None:
            self.mean = h.detach().mean(0)
        return h - self.mean


class CachedWeight(Net):
    def setup(self):
        self.first_weight = None

    def awkward(self, h):
        if self.first_weight is None:
            self.first_weight = self.first.weight.detach().clone()
        return h + self.first_weight.sum()


class ListOfOutputs(Net):
    def setup(self):
        self.outputs = []

    def awkward(self, h):
        self.outputs.append(h.detach().mean())
        return h


class State:
    def __init__(self):
        self.steps = [0]


class StateObject(Net):
    def setup(self):
        self.state = State()

    def awkward(self, h):
        self.state.steps[0] += 1
        return h * 0.9 ** self.state.steps[0]


class Submodule(Net):
    def setup(self):
        self.middle = Counter()

    def awkward(self, h):
        return h + self.middle(h[:, :6]).sum()


REFUSED = {
    "counter in `forward`": (Counter, "count"),
    "tensor counter in `forward`": (TensorCounter, "count"),
    "running mean in an attribute": (RunningMean, "mean"),
    "previous batch in an attribute": (PreviousBatch, "before"),
    "statistics cached from the first batch": (StatisticsOfTheFirstBatch, "mean"),
    "cached copy of trained weights": (CachedWeight, "first_weight"),
    "growing list of outputs": (ListOfOutputs, "outputs"),
    "counter in a plain object": (StateObject, "state"),
    "counter in a submodule": (Submodule, "middle.count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_shared_is_refused_with_a_remedy(name):
    make, attribute = REFUSED[name]
    with pytest.raises(ModelError, match=rf"changes the attribute '{attribute}'.*register_buffer.*shared_attributes"):
        simulated(make)
    with torch.random.fork_rng():
        model, owner = made(make), None
    before = repr({key: value for key, value in vars(model).items() if key not in vars(nn.Module())})
    with pytest.raises(ModelError):
        LocalTrainer(model, data, loss_fn=F.cross_entropy).fit(
            DiLoCoStrategy(H=2), num_nodes=2, max_steps=2, batch_size=BATCH, device="cpu"
        )
    owner = model.state.steps if name == "counter in a plain object" else [0]
    after = {key: value for key, value in vars(model).items() if key not in vars(nn.Module())}
    assert repr(after) == before and owner == [0]  # the trial steps are undone


def test_two_nodes_would_have_gone_through_one_counter():
    """The control: allowed though it matters, the counter of the nodes is one, and they are not plain loops."""

    class Allowed(Counter):
        shared_attributes = ("count",)

    nodes, model = simulated(Allowed)
    assert model.count == NODES * STEPS
    with torch.random.fork_rng():
        expected = plain(Counter, 1)
    assert not torch.equal(nodes[1]["first.weight"], expected["first.weight"])


def test_a_submodule_s_attribute_may_be_allowed_by_the_model():
    class Allowed(Submodule):
        shared_attributes = ("middle.count",)

    assert simulated(Allowed)[1].middle.count == NODES * STEPS


@pytest.mark.parametrize("listed", ["count", "x_count", 5, [3], None])
def test_a_list_of_harmless_attributes_that_is_none_is_refused(listed):
    """A bare name would be taken letter by letter."""

    class Allowed(Counter):
        shared_attributes = listed

    with pytest.raises(ModelError, match=r"shared_attributes of Allowed must be a tuple of names"):
        simulated(Allowed)
