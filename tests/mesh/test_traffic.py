"""What devices of a node say to each other: the formulas, against torch's own splits in real process groups."""

import collections
import copy

import pytest
import torch
from processes import in_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from exogym import LocalTrainer, NodeMesh, PipelineParallel, Stage
from exogym.errors import ModelError
from exogym.mesh.splits import blocks_of, cuts, tensor_plan
from exogym.mesh.traffic import InsideTraffic
from exogym.models import MLP, CharGPT, SmallCNN
from exogym.strategy import SimpleReduceStrategy

EXAMPLES = 12
KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "send": "send",
}
STYLES = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
}


class Heard(TorchDispatchMode):
    """Adds up the bytes that this process gives to collectives of torch, by kind."""

    def __init__(self):
        super().__init__()
        self.bytes = collections.Counter()

    def sent(self, n):
        """Return the bytes that a process sends, where all groups have n processes."""
        factors = {"all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n, "send": 1}
        return sum(factors[kind] * count for kind, count in self.bytes.items())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._overloadpacket.__name__) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind is not None:
            given = args[1] if func.namespace == "c10d" and kind in ("all_gather", "reduce_scatter") else args[0]
            given = given[0] if isinstance(given, list) else given
            self.bytes[kind] += given.numel() * given.element_size()
        return out


def gpt(**changes):
    torch.manual_seed(0)
    return CharGPT(**{"vocab_size": 17, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, **changes})


def tokens(examples=EXAMPLES):
    x = torch.randint(17, (examples, 8), generator=torch.Generator().manual_seed(0))
    return x, x


def predicted(model, batch, mesh):
    """What a node's devices send each other in a step of the whole batch."""
    traffic = InsideTraffic(model, mesh)
    with traffic.watching():
        model(batch)["loss"].backward()
    return traffic.tx_bytes(len(batch[0]))


@pytest.mark.parametrize(("shard", "frozen"), [(2, False), (3, False), (2, True)])
def test_shards_say_what_fully_sharded_ones_do(tmp_path, shard, frozen):
    """Of three devices some parameters are padded: 17 rows to 18, 16 to 18. What is frozen, each device has."""
    model, (x, _) = gpt(), tokens()
    model.positions.requires_grad_(not frozen)
    expected = predicted(copy.deepcopy(model), tokens(), NodeMesh(shard=shard))

    def body(rank):
        mesh = init_device_mesh("cpu", (shard,))
        ignored = {p for p in model.parameters() if not p.requires_grad}
        for block in blocks_of(model).values():
            fully_shard(block, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
        with Heard() as heard:
            model((x[rank::shard], x[rank::shard]))["loss"].backward()
        assert shard * heard.sent(shard) == pytest.approx(expected, rel=1e-12)

    in_groups(shard, tmp_path, body)


@pytest.mark.parametrize("make", [gpt, lambda: MLP([8, 12, 12, 3])], ids=["gpt", "mlp"])
def test_layers_say_what_parallel_ones_do(tmp_path, make):
    model = make()
    batch = tokens() if isinstance(model, CharGPT) else (torch.randn(EXAMPLES, 8), torch.zeros(EXAMPLES).long())
    norms_embeddings, bias_last = (5 + 17 + 8) * 16, 12 + 13 * 3
    held = 4 * (norms_embeddings if isinstance(model, CharGPT) else bias_last)
    # without what is not cut: of no concern to torch, which lets each step its own
    expected = predicted(make(), batch, NodeMesh(tensor=2)) - held

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {name: STYLES[style] for name, style in tensor_plan(model).items()})
        with Heard() as heard:
            model(batch)["loss"].backward()
        assert 2 * heard.sent(2) == expected

    in_groups(2, tmp_path, body)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_stages_say_what_torchs_pipelines_do(tmp_path, schedule):
    layers = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1)]
    whole, x, y = nn.Sequential(*layers), torch.randn(EXAMPLES, 8), torch.randn(EXAMPLES, 1)
    assert cuts(whole, 2) == ["1"]  # 108 of 193 parameters are in the first layer
    traffic = InsideTraffic(whole, NodeMesh(stages=2, microbatches=4))
    with traffic.watching():
        nn.functional.mse_loss(whole(x), y).backward()

    def body(rank):
        stage = PipelineStage(whole[:2] if rank == 0 else whole[2:], rank, 2, torch.device("cpu"))
        run = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        for _ in range(2):  # in the first step the stages tell each other shapes
            with Heard() as heard:
                run.step(x) if rank == 0 else run.step(target=y)
        assert heard.sent(2) == traffic.tx_bytes(EXAMPLES) / 2 == 12 * 12 * 4

    in_groups(2, tmp_path, body)


def test_axes_multiply():
    """Of shard x tensor each group of shards has a part of the layers; a tied parameter goes to its other stage."""
    model, batch = gpt(), tokens()
    in_layers, norms, embeddings = 2 * 12 * 16 * 16, 5 * 16, (17 + 8) * 16  # elements
    shards = 2 * (in_layers / 2 + norms + embeddings + 16)  # two groups; with a row of padding
    gathered_twice = shards + 2 * (in_layers / 2 + 4 * 16)  # the blocks, with two norms each
    alone = predicted(model, batch, NodeMesh(tensor=2))
    assert predicted(model, batch, NodeMesh(shard=2, tensor=2)) == alone + 4 * (gathered_twice + shards)
    piped = predicted(model, batch, NodeMesh(stages=2, microbatches=2))
    assert piped == 2 * 4 * (12 * 8 * 16 + 17 * 16)


def test_zero_says_what_is_gathered():
    """A reduce-scatter of the gradients, and an all-gather of the parameters."""
    batch = torch.randn(EXAMPLES, 8), torch.zeros(EXAMPLES).long()
    assert predicted(MLP([8, 12, 2]), batch, NodeMesh(shard=2, zero=2)) == 2 * 4 * (108 + 26)


# What a model says of itself


def test_a_model_is_cut_evenly():
    assert cuts(gpt(n_layer=4), 2) == ["blocks.1"] and cuts(gpt(n_layer=4), 4) == ["blocks.0", "blocks.1", "blocks.2"]
    assert cuts(SmallCNN(), 2) == []
    with pytest.raises(ModelError, match="fewer than 3 stages"):
        cuts(gpt(), 3)


def test_a_plan_of_hugging_face_is_taken():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plan = tensor_plan(model)
    assert plan["model.layers.1.self_attn.q_proj"] == "colwise" and plan["model.layers.0.mlp.down_proj"] == "rowwise"
    assert list(blocks_of(model)) == ["model.layers.0", "model.layers.1"]


def dataset(x):
    return torch.utils.data.TensorDataset(*x)


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (SmallCNN(), NodeMesh(tensor=2), "no plan to split the layers of SmallCNN"),
        (SmallCNN(), NodeMesh(stages=2), "no place to cut SmallCNN is known"),
        (gpt(), NodeMesh(stages=3), "fewer than 3 stages"),
        (gpt(), NodeMesh(stages=PipelineParallel([nn.ReLU(), nn.ReLU()])), "no stage .* 'tokens.weight'"),
    ],
)
def test_a_split_that_is_not_known_is_refused(model, mesh, message):
    with pytest.raises(ModelError, match=message):
        LocalTrainer(model, dataset(tokens())).fit(SimpleReduceStrategy(), node=mesh, batch_size=6)


def test_a_foreign_parameter_in_a_stage_is_refused():
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    pipeline = PipelineParallel([Stage(layers[:1]), Stage([layers[1], nn.Linear(1, 1)])])
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    trainer = LocalTrainer(nn.Sequential(*layers), data, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ModelError, match="a parameter that is not in the model"):
        trainer.fit(SimpleReduceStrategy(), node=NodeMesh(stages=pipeline), batch_size=8)
