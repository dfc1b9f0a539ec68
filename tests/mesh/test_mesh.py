"""A node that is several devices, as a value; and the same line of code in one process."""

import importlib

import pytest
import torch
from torch import nn

from exogym import LocalTrainer, NodeMesh, PipelineParallel, Placement, Stage
from exogym.errors import ArgumentError
from exogym.mesh.nodes import MeshNodes
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint


def trainer(examples: int = 32) -> LocalTrainer:
    torch.manual_seed(0)
    x = torch.randn(examples, 6)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)


def fit(strategy=None, **options) -> str:
    given = {"num_nodes": 2, "max_steps": 6, "batch_size": 8} | options
    return fingerprint(trainer().fit(strategy or DiLoCoStrategy("adamw", H=3, lr=0.01), **given))


# The value

PARTS = PipelineParallel([nn.Linear(4, 4), nn.Linear(4, 4)], micro_batch_size=3)


def test_devices_stand_in_the_order_of_the_axes():
    mesh = NodeMesh(shard=2, tensor=3, stages=2)
    where = torch.arange(mesh.size).reshape(tuple(mesh.axes.values()))
    for device in range(mesh.size):
        at = mesh.coordinates(device)
        assert list(at) == list(mesh.axes) and where[tuple(at.values())] == device


def test_every_example_is_computed_once():
    for examples in range(1, 40):
        for shard, stages in ((1, 1), (3, 1), (2, 2), (4, 3)):
            mesh = NodeMesh(shard=shard, stages=stages)
            shares = mesh.shares(examples)
            assert len(shares) == shard and sum(shares) == examples and max(shares) - min(shares) <= 1
            assert all(sum(mesh.micro_batches(share)) == share for share in shares)
            assert mesh.at_once(examples) == max(size for share in shares for size in mesh.micro_batches(share))


@pytest.mark.parametrize(
    ("mesh", "bubble"),
    [
        (NodeMesh(shard=4), 0.0),
        (NodeMesh(stages=4, microbatches=8), 3 / 11),
        (NodeMesh(stages=PARTS), 1 / 12),  # 32 examples in 11 micro-batches
    ],
)
def test_the_bubble_is_that_of_the_papers(mesh, bubble):
    assert mesh.bubble(32) == pytest.approx(bubble)


def test_stages_may_say_their_device():
    pipeline = PipelineParallel([Stage(layers=[nn.Linear(4, 4)], device=k) for k in range(3)])
    assert (pipeline.size, NodeMesh(stages=pipeline).depth) == (3, 3)


def test_a_world_is_told_which_ones_fit():
    nodes = MeshNodes.of(NodeMesh(shard=2, tensor=2), 3)
    assert [nodes.processes(world) for world in (4, 8, 12)] == [1, 2, 3]
    for world in (6, 16):
        with pytest.raises(ArgumentError, match=f"{world} processes .* shard=2 x tensor=2 needs 4.* start 4, 8, 12$"):
            nodes.processes(world)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NodeMesh(shard=0), "shard=0 must be a whole number of at least 1"),
        (lambda: NodeMesh(stages=[nn.Linear(1, 1)]), r"PipelineParallel\(stages="),
        (lambda: NodeMesh(shard=2, zero=4), "zero=4 must be 2 or 3"),
        (lambda: NodeMesh(tensor=2, zero=2), "set shard above 1"),
        (lambda: NodeMesh(shard=2, microbatches=4), "microbatches=4 needs a pipeline"),
        (lambda: NodeMesh(stages=4, microbatches=3), "fewer than the 4 stages"),
        (lambda: NodeMesh(stages=PARTS, microbatches=4), "omit one of them"),
        (lambda: NodeMesh(stages=2, schedule="gpipe"), "it is retired: pipelines always use 1F1B"),
        (lambda: NodeMesh(shard=2, zero=1), "zero=1 must be 2 or 3; use 2 instead of 1"),
        (lambda: NodeMesh(shard=2, network="nvlink"), "it is retired: pass the time of the node's step"),
        (lambda: NodeMesh(shards=2), "did you mean 'shard'"),
        (lambda: NodeMesh(parallelize=3), "must be a function"),
        (lambda: NodeMesh(probe="no"), "probe="),
        (lambda: PipelineParallel([nn.Linear(1, 1)]), "two or more stages"),
        (lambda: PipelineParallel([Stage([nn.ReLU()], device=0), nn.ReLU()]), "set the device of every stage"),
        (lambda: PipelineParallel([Stage([nn.ReLU()], device=k) for k in (1, 0)]), r"expected \[0, 1\]: one stage"),
        (lambda: Stage(layers=[]), "must be a list of modules"),
        (lambda: Stage(layers=[torch.relu]), "expected torch.nn.Module"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": 2}, "must be a NodeMesh"),
        ({"node": [NodeMesh()]}, "1 NodeMeshes for 2 nodes"),
        ({"node": NodeMesh(shard=2), "compute": "vmap"}, "leave compute, processes and engine out"),
        ({"node": NodeMesh(shard=2), "processes": 2}, "leave compute, processes and engine out"),
        ({"node": NodeMesh(shard=2), "placement": Placement(engine="ray")}, "leave compute, processes and engine out"),
        ({"node": NodeMesh(shard=9)}, "batch_size=8 is smaller than shard=9"),
        ({"node": NodeMesh(stages=2), "precision": "fp16"}, "fp16"),
        ({"node": NodeMesh(stages=5), "batch_size": 4}, "fewer than the 5 stages"),
        ({"node": NodeMesh(stages=PARTS), "batch_size": 3}, "a smaller micro_batch_size"),
    ],
)
def test_a_fit_refuses_before_training(options, message):
    with pytest.raises(ArgumentError, match=message):
        fit(**options)


# In one process


@pytest.mark.parametrize(
    ("mesh", "at_once"),
    [
        (NodeMesh(), 8),
        (NodeMesh(tensor=2, parallelize=lambda model, mesh: None), 8),
        (NodeMesh(shard=2), 4),
        (NodeMesh(stages=2, microbatches=2), 4),
        (NodeMesh(stages=2, shard=2, microbatches=2), 2),
        ([NodeMesh(shard=2), NodeMesh(stages=2, microbatches=2)], 4),
    ],
)
def test_one_process_computes_what_one_device_would(mesh, at_once):
    """The bits of dense nodes in micro-batches of a device's size; other micro-batches have others."""
    assert fit(node=mesh) == fit(minibatch_size=at_once)
    assert fit(node=mesh) != fit(minibatch_size=3)


def test_a_nodes_micro_batch_is_shared_out_too():
    assert fit(node=NodeMesh(shard=2), gradient_accumulation=2) == fit(gradient_accumulation=2, minibatch_size=4)
    assert fit(node=NodeMesh(shard=2), minibatch_size=4) == fit(minibatch_size=2)


def test_a_run_goes_on_under_another_split(tmp_path):
    """The split changes rounding only, so a checkpoint may be gone on from under another one."""
    whole = fit(node=NodeMesh(shard=2))
    fit(node=NodeMesh(shard=2), save_dir=tmp_path, max_steps=3)
    assert fit(node=NodeMesh(stages=2, microbatches=2), save_dir=tmp_path, resume=True) == whole


def test_bytes_and_time_are_those_of_dense_nodes():
    """`step_seconds` is the time of a node's step, however many devices take it."""
    dense, split = trainer(), trainer()
    for one, node in ((dense, None), (split, NodeMesh(shard=2))):
        one.fit(
            DiLoCoStrategy("sgd", H=3, lr=0.01), num_nodes=2, max_steps=6, batch_size=8, node=node,
            network="1Gbps,1ms", step_seconds=0.02,
        )  # fmt: skip
    assert split.traffic == dense.traffic
    for name in ("tx_bytes", "time_s"):
        assert split.history.last[name] == dense.history.last[name] > 0
    assert "inside_bytes" not in split.history.last


# Earlier names


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("exogym.attached.shards", "exogym.mesh.attached"),
        ("exogym.data.speech", "exogym.home.speech"),
    ],
)
def test_a_module_of_before_names_the_new_one(before, now):
    with pytest.raises(ModuleNotFoundError, match=f"moved to {now}"):
        importlib.import_module(before)


def test_the_columns_names_of_before_say_the_new_ones():
    import exogym.communicator

    with pytest.raises(ImportError, match=r"Inside.*use Columns"):
        exogym.communicator.Inside  # noqa: B018
    with pytest.raises(AttributeError, match="use Columns"):
        exogym.communicator.Wire([0]).inside  # noqa: B018
