"""The probe of a split: right splits pass, and the three that torch carries out wrongly without a word do not."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import in_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from exogym import NodeMesh
from exogym.errors import ModelError
from exogym.mesh.probing import refuse_others, squares
from exogym.mesh.splits import blocks_of
from exogym.models import CharGPT

EXAMPLES = 8


def check_gradients(dense, split, what):
    refuse_others(list(dense), squares(dense, split), what)


def problem():
    """A model, its gradients of a batch, and the batch."""
    torch.manual_seed(0)
    model = CharGPT(17, 8, n_layer=2, n_head=2, n_embd=16)
    x, y = torch.randint(17, (2, EXAMPLES, 8), generator=torch.Generator().manual_seed(0))
    whole = copy.deepcopy(model)
    whole((x, y))["loss"].backward()
    return model, {name: p.grad for name, p in whole.named_parameters()}, (x, y)


def together(model):
    """The gradients that the devices have come to, each whole."""
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    return {name: full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("weighs", [True, False])
def test_a_batch_that_does_not_divide(tmp_path, weighs):
    """8 examples over 3 shards: a mean of means is another one, and its gradients are off."""
    model, dense, (x, y) = problem()
    shares = NodeMesh(shard=3).shares(EXAMPLES)

    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        for block in blocks_of(model).values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        loss = model((x[mine], y[mine]))["loss"]
        (loss * (3 * shares[rank] / EXAMPLES if weighs else 1)).backward()
        found = together(model)
        if weighs:
            check_gradients(dense, found, "shard=3")
        else:
            with pytest.raises(ModelError, match="split by shard=3, the model has wrong gradients"):
                check_gradients(dense, found, "shard=3")

    in_groups(3, tmp_path, body)


@pytest.mark.parametrize("gathers", [True, False])
def test_queries_keys_and_values_in_one_layer(tmp_path, gathers):
    """Split in two by its outputs, it gives one device the queries and half of the keys, and the shapes are right."""
    model, dense, batch = problem()

    def body(rank):
        qkv = ColwiseParallel(output_layouts=Replicate()) if gathers else ColwiseParallel()
        out = RowwiseParallel(input_layouts=Replicate()) if gathers else RowwiseParallel()
        plan = {f"blocks.{k}.attend.{name}": style for k in (0, 1) for name, style in (("qkv", qkv), ("out", out))}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        model(batch)["loss"].backward()
        found = together(model)
        if gathers:
            check_gradients(dense, found, "tensor=2")
        else:
            with pytest.raises(ModelError, match=r"the gradient of 'blocks\.\d\.attend\.(qkv|out)\.weight' is off by"):
                check_gradients(dense, found, "tensor=2")

    in_groups(2, tmp_path, body)


class First(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.tokens, self.positions, self.block = gpt.tokens, gpt.positions, gpt.blocks[0]

    def forward(self, x):
        return self.block(self.tokens(x) + self.positions.weight[: x.shape[1]])


class Second(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.block, self.norm, self.head = gpt.blocks[1], gpt.norm, copy.deepcopy(gpt.head)

    def forward(self, h):
        return self.head(self.norm(self.block(h)))


@pytest.mark.parametrize("sums", [True, False])
def test_a_head_that_is_the_embedding_too(tmp_path, sums):
    """Each of the two stages that hold it has a part of its gradient, and only their sum is the gradient."""
    model, dense, (x, y) = problem()
    names = list(dense)
    ours = [{"block": "blocks.0"}, {"block": "blocks.1", "head": "tokens"}]

    def body(rank):
        part = (First, Second)[rank](model)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        loss = lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())  # noqa: E731
        run = Schedule1F1B(stage, 4, loss_fn=loss)
        run.step(x) if rank == 0 else run.step(target=y)
        found = {}
        for name, p in part.named_parameters():
            path = name.split(".")
            found[".".join([ours[rank].get(path[0], path[0]), *path[1:]])] = p.grad
        if sums:
            dist.all_reduce(found["tokens.weight"])
        if rank == 1:  # the first stage says what it is
            del found["tokens.weight"]
        here = squares({name: dense[name] if name in found else None for name in names}, found)
        dist.all_reduce(here)
        if sums:
            refuse_others(names, here, "stages=2")
        else:
            with pytest.raises(
                ModelError, match=r"the gradient of 'tokens\.weight' is off by .* NodeMesh\(probe=False"
            ):
                refuse_others(names, here, "stages=2")

    in_groups(2, tmp_path, body)


def test_what_is_zero_may_differ_by_rounding_only():
    dense = {"a": torch.ones(100), "b": torch.zeros(3), "c": None}
    check_gradients(dense, {"a": torch.ones(100), "b": torch.full((3,), 1e-6), "c": None}, "")
    for name, found in (("b", torch.full((3,), 1e-3)), ("c", torch.ones(1)), ("a", torch.full((100,), torch.nan))):
        with pytest.raises(ModelError, match=f"'{name}' is off"):
            check_gradients(dense, dense | {name: found}, "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_split_is_not_blamed_for_a_gradient_that_the_whole_model_cannot_compute(value):
    whole = {"a": torch.ones(2), "b": torch.tensor([1.0, value])}
    with pytest.raises(ModelError, match="the gradient of 'b' is not finite, even without the split"):
        check_gradients(whole, whole, "shard=2")
    finite = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(ModelError, match="split by shard=2, the model has wrong gradients: the gradient of 'b'"):
        check_gradients(finite, whole, "shard=2")
