"""`exogym.attach(node=)`: a node of several processes, whose model the user has sharded with `fully_shard`."""

import json
import os
import signal

import pytest
import torch
from paths import ROOT
from processes import told_in_groups, world
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from exogym import LocalTrainer, NodeMesh, attach
from exogym.errors import ArgumentError, CheckpointError, ModelError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoStrategy,
    MuLoCoStrategy,
    SimpleReduceStrategy,
    Strategy,
    TopKStrategy,
)
from exogym.strategy.registry import parse_strategy

STEPS, BATCH, LR = 9, 8, 0.02
GIVEN = {"lr": LR, "lr_scheduler": "cosine", "max_norm": 0.5}
STRATEGIES = {  # whose modules act on elements, on gradients, and on the whole row
    "diloco": lambda: DiLoCoStrategy(H=4, **GIVEN),
    "ddp": lambda: SimpleReduceStrategy(**GIVEN),
    "topk": lambda: TopKStrategy("adamw", density=0.2, **GIVEN),
}


class Net(nn.Module):
    """Dropout, BatchNorm, tied, frozen and unused layers, and sizes that two processes do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.norm, self.drop = nn.Linear(6, 15), nn.BatchNorm1d(15), nn.Dropout(0.1)
        self.one, self.other = nn.Linear(15, 15), nn.Linear(15, 15)
        self.other.weight = self.one.weight
        self.frozen, self.unused, self.last = nn.Linear(15, 15), nn.Linear(3, 3), nn.Linear(15, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.last(torch.relu(self.one(x)) + torch.tanh(self.frozen(self.other(x))))


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(128, 6, generator=draw)
    return TensorDataset(x, torch.tanh(x.sum(1, keepdim=True)))


def in_world(folder, body, processes=4):
    """Run `body(rank, mesh)` in processes of nodes of two; return what each process returned, as JSON."""

    def with_mesh(rank):
        return body(rank, init_device_mesh("cpu", (processes // 2, 2), mesh_dim_names=("node", "shard")))

    return told_in_groups(processes, folder, with_mesh)


def sharded(mesh, model=None):
    model = Net() if model is None else model
    frozen = {p for p in model.parameters() if not p.requires_grad}
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=frozen)


def begun(mesh, name="diloco", own=True, model=None, **options):
    model = sharded(mesh, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True) if own else None
    return model, optimizer, attach(model, optimizer, STRATEGIES[name](), total_steps=STEPS, node=mesh, **options)


def loop(nodes, model, parts=1, step=None, after=lambda: None):
    loader = nodes.loader(data(), BATCH // parts, gradient_accumulation=parts)
    while nodes.step_count < STEPS:
        for batches in loader:
            nodes.reseed()
            total = 0.0
            for k, (x, y) in enumerate([batches] if parts == 1 else batches):
                model.set_requires_gradient_sync(k == parts - 1)
                loss = mse_loss(model(x), y) * (1 / parts)
                loss.backward()
                total = total + loss.detach()
            nodes.step(total) if step is None else step()
            after()
            if nodes.step_count == STEPS:
                break


def numbers(tensors):
    """Return the whole tensors' numbers, on the main process; all processes of a node make this call."""
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
    return torch.cat([x.detach().double().flatten() for x in whole]).tolist()


def outcome(model, history, is_here=True):
    rows = [(r["step"], r["node"], r["train_loss"], r["lr"], r["tx_bytes"]) for r in history if r["step"] > 0]
    return json.loads(json.dumps([numbers(model.state_dict().values()) if is_here else None, rows]))


def simulated(name, **options):
    """The same in these processes by LocalTrainer: the main process gets the model."""
    trainer = LocalTrainer(Net(), data(), loss_fn=mse_loss)
    wanted = {"num_nodes": 2, "max_steps": STEPS, "batch_size": BATCH, "device": "cpu", "node": NodeMesh(shard=2)}
    trainer.fit(STRATEGIES[name](), **wanted | options)
    return trainer


def in_both_ways(rank, mesh, name, own, parts, how):
    model, optimizer, nodes = begun(mesh["shard"], name, own)
    if how == "followed":
        nodes.follow_optimizer()
    reseed = nodes.reseed
    if how == "unseeded":
        nodes.reseed = lambda: None
    loop(nodes, model, parts, optimizer.step if how == "followed" else None)
    nodes.reseed = reseed
    nodes.finish()
    options = {"batch_size": BATCH // parts, "gradient_accumulation": parts}
    trainer = simulated(name, **options)
    seen, wanted = outcome(model, nodes.history), outcome(trainer.model, trainer.history, rank == 0)
    if how == "followed" or parts > 1:  # nobody tells the losses, or the loop adds them up in another precision
        seen[1], wanted[1] = [[[row[k] for k in (0, 3, 4)] for row in x[1] if row[1] is None] for x in (seen, wanted)]
    return [rank > 0 or seen == wanted, seen, repr(nodes)]  # LocalTrainer's model and history are in the main process


def holds_the_law(folder, cases):
    seen = in_world(folder, lambda rank, mesh: [in_both_ways(rank, mesh, *case) for case in cases])
    for case, ranks in zip(cases, zip(*seen, strict=True), strict=True):
        assert [own[0] for own in ranks] == [case[3] != "unseeded", True, True, True], case
        assert all(own[1] == ranks[0][1] for own in ranks)
    assert seen[3][0][2].startswith("<Nodes: process 1 of 2, node 1 of 2, step 9, TopKStrategy")


def test_a_node_of_processes_has_the_bits_of_a_split_run(tmp_path):
    """With the strategy's clipping of the whole node, accumulation, BatchNorm, dropout, tied and frozen layers."""
    holds_the_law(tmp_path, [("topk", True, 2, "followed")])


@pytest.mark.slow
def test_other_nodes_of_processes_have_the_bits_of_a_split_run(tmp_path):
    """A control without the seeds of the steps differs."""
    cases = [("topk", False, 1, ""), ("ddp", False, 2, ""), ("diloco", True, 1, ""), ("diloco", False, 1, "unseeded")]
    holds_the_law(tmp_path, cases)


@pytest.mark.slow
def test_a_killed_run_of_sharded_nodes_goes_on_with_the_same_bits(tmp_path):
    """Each process saves its part; the state of another process is refused. An evaluation changes nothing."""

    def run(rank, mesh, killed=False, resumed=False):
        model, optimizer, nodes = begun(mesh["shard"])
        file = tmp_path / f"saved-{rank}.pt"
        seen = []
        if resumed:
            state = torch.load(file, weights_only=False)
            with pytest.raises(CheckpointError, match=r"belongs to node 0, process \d, but this process is node \d, "):
                nodes.load_state_dict(state["nodes"] | {"node": 0, "part": 7})
            nodes.load_state_dict(state["nodes"])
            optimizer.load_state_dict(state["optimizer"])

        def after():
            if killed and nodes.step_count == 6:
                torch.save({"nodes": nodes.state_dict(), "optimizer": optimizer.state_dict()}, file)
                with nodes.evaluating():
                    model(data().tensors[0])
                os.kill(os.getpid(), signal.SIGKILL)
            if nodes.step_count == 7:
                for node in (None, 0, 1):
                    with nodes.evaluating(node) as same:
                        assert not torch.is_grad_enabled() and same is model and not model.training
                        seen.append(mse_loss(model(data().tensors[0]), data().tensors[1]).item())
                assert model.training and torch.is_grad_enabled()

        loop(nodes, model, after=after)
        assert nodes.finish() is model
        return [*outcome(model, nodes.history), seen]

    with pytest.raises(AssertionError, match="-9"):
        in_world(tmp_path / "killed", lambda rank, mesh: run(rank, mesh, killed=True))
    ranks = in_world(tmp_path / "resumed", lambda rank, mesh: run(rank, mesh, resumed=True))
    assert all(own == ranks[0] for own in ranks) and len({*ranks[0][2]}) == 3
    whole = in_world(tmp_path / "whole", lambda rank, mesh: run(rank, mesh))
    assert ranks == whole


class Unsaid(CommunicationModule):
    def next_event(self, step):
        return step + 1

    def communicate(self, fleet, step):
        pass


def line():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_what_a_node_of_processes_cannot_be_is_refused(tmp_path):
    """Before training, in every process; after a refusal the same processes can still make a node."""

    def body(rank, mesh):
        own, diloco = mesh["shard"], DiLoCoStrategy(H=2)

        def refused(said, model, *, optimizer=None, strategy=diloco, node=own, error=ArgumentError, **options):
            with pytest.raises(error, match=said):
                attach(model, optimizer, strategy, node=node, **options)

        whole = fully_shard(line(), mesh=own)
        refused("but each process is a whole node", whole, node=None, error=ModelError)
        refused("node=3 must be", whole, node=3)
        refused("expected a mesh with one axis", whole, node=mesh)
        refused("same number of consecutive ranks", whole, node=mesh["node"])
        refused("not sharded, so each process", line(), error=ModelError)
        part = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=own), nn.Linear(4, 4))
        refused("'1.weight' is not sharded", part, error=ModelError)
        layers = parallelize_module(line(), own, {"0": ColwiseParallel(), "1": ColwiseParallel()})
        refused("Tensor parallelism", layers, error=ModelError)
        refused("copies inside a node", fully_shard(line(), mesh=mesh), error=ModelError)
        refused("sharded over the processes", fully_shard(line(), mesh=mesh["node"]), error=ModelError)
        offloaded = fully_shard(line(), mesh=own, offload_policy=CPUOffloadPolicy(pin_memory=False))
        refused("without CPUOffloadPolicy", offloaded, error=ModelError)
        refused("does not say what it acts on", whole, strategy=CommunicateOptimizeStrategy("sgd", [Unsaid()], lr=0.1))
        refused("ExoGym cannot change, split", whole, strategy=Strategy("sgd", lr=0.1))
        outer = DiLoCoStrategy(H=2, outer_optim="muon", outer_lr=0.1)
        refused("treats each element separately", whole, strategy=outer)
        matrices = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        matrices = fully_shard(matrices, mesh=own)
        muon = torch.optim.Muon(matrices.parameters(), lr=0.1)
        refused("Muon needs whole tensors", matrices, optimizer=muon, strategy=MuLoCoStrategy(H=2))
        nodes = attach(whole, None, diloco, node=mesh["shard"].get_group())
        with pytest.raises(ArgumentError, match="divided evenly over the 2 processes of a node"):
            nodes.loader(data(), 7)
        with pytest.raises(ArgumentError, match="last batch of an epoch has 7 examples"):
            nodes.loader([data()[k] for k in range(46)], 8)
        with pytest.raises(ArgumentError, match="torch can't copy"):
            nodes.model_of(None)
        whole(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ModelError, match="of an unfinished step"), nodes.evaluating():
            pass
        nodes.step()
        nodes.finish()

    in_world(tmp_path, body)


OTHERS = [
    ["demo", "gossip", "muloco", "powersgd"],  # these act on whole tensors, or meet in pairs
    ["scaffold", "sparta_diloco", "streaming_diloco"],
]


@pytest.mark.slow
@pytest.mark.parametrize("names", OTHERS, ids=lambda names: names[0])
def test_strategies_on_sharded_nodes_are_as_in_a_split_run(names, tmp_path):
    """With the same bits, or refused with the same words."""

    def body(rank, mesh):
        found = []
        for name in names:
            strategy = parse_strategy(name, lr=LR, H=2, max_norm=0.5, inner_optim="adamw")
            trainer = LocalTrainer(Net(), data(), loss_fn=mse_loss)
            options = {"num_nodes": 2, "max_steps": 5, "batch_size": BATCH, "device": "cpu", "node": NodeMesh(shard=2)}
            said = []
            try:
                trainer.fit(strategy, **options)
            except ArgumentError as error:
                said.append(str(error).partition(": ")[2])
            model = sharded(mesh["shard"])
            try:
                nodes = attach(model, None, strategy, total_steps=5, node=mesh["shard"])
            except ArgumentError as error:
                said.append(str(error).partition(": ")[2])
            if said:
                found.append([said[0] == said[-1] and len(said) == 2, said])
                continue
            for x, y in nodes.loader(data(), BATCH):
                nodes.reseed()
                mse_loss(model(x), y).backward()
                nodes.step()
                if nodes.step_count == 5:
                    break
            nodes.finish()
            own = numbers(model.state_dict().values())
            found.append([rank > 0 or own == numbers(trainer.model.state_dict().values()), own[:3]])
        return found

    ranks = in_world(tmp_path, body)
    assert [(name, told) for own in ranks for name, (same, told) in zip(names, own, strict=True) if not same] == []


class Counted(IterableDataset):
    def __iter__(self):
        return ((torch.full((4,), float(k)), torch.ones(4)) for k in range(64))


@pytest.mark.slow
def test_a_sharded_node_reads_iterables_in_bf16(tmp_path):
    """The node's processes read the same examples, and each takes its part."""

    def body(rank, mesh):
        torch.manual_seed(3)
        model = fully_shard(line(), mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        nodes = attach(model, None, DiLoCoStrategy(H=2, lr=1e-3), node=mesh["shard"])
        seen = []
        for x, y in nodes.loader(Counted(), 8, shuffle=False):
            loss = mse_loss(model(x).float(), y)
            loss.backward()
            nodes.step(loss.detach())
            seen.append(x[:, 0].tolist())
            if nodes.step_count == 3:
                break
        assert any(name.startswith("data.") for name in nodes.state_dict()["shared"])
        nodes.finish()
        return [seen, numbers(model.parameters())]

    ranks = in_world(tmp_path, body)
    read = [own[0] for own in ranks]
    for k in range(3):
        assert sorted(number for own in read for number in own[k]) == [16.0 * k + j for j in range(16)]
    assert all(own[1:] == ranks[0][1:] for own in ranks)


@pytest.mark.slow
def test_sharded_nodes_start_with_the_model_of_node_0(tmp_path):
    def body(rank, mesh):
        model = Net()
        with torch.no_grad():
            model.last.bias.add_(mesh["node"].get_local_rank())
            model.frozen.weight.add_(mesh["node"].get_local_rank())
        model, optimizer, nodes = begun(mesh["shard"], model=model)
        start = numbers(model.parameters())
        loop(nodes, model)
        nodes.finish()
        gradient = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DTensors again, of the user's
        optimizer.step()
        other = Net()
        with torch.no_grad():
            other.norm.running_mean.add_(mesh["shard"].get_local_rank())
        with pytest.raises(ModelError, match="node 0's processes have different values"):
            begun(mesh["shard"], model=other)
        return [start, numbers(model.parameters()), float(gradient)]

    ranks = in_world(tmp_path, body)
    assert all(own == ranks[0] for own in ranks) and ranks[0][0] == numbers(Net().parameters())


# The script in run/, with torch's distributed checkpoints

SCRIPT = f"""
import os, runpy, signal, sys
from exogym.attached import Nodes
step, killed_at = Nodes.step, int(os.environ["KILLED_AT"])

def taken(nodes, loss):
    step(nodes, loss)
    if nodes.step_count == killed_at and os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)

Nodes.step = taken
sys.argv = ["sharded.py", "--steps", "12", "--H", "5", "--save_every", "4", "--data", "."]
runpy.run_path({str(ROOT / "run" / "sharded.py")!r}, run_name="__main__")
"""


def trained(folder, monkeypatch, killed_at=0):
    folder.mkdir(exist_ok=True)
    text = "\n\n".join(f"ANN:\nThe {i} bells of number {i * i} ring." for i in range(900))
    (folder / "tinyshakespeare.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("KILLED_AT", str(killed_at))
    status, log = world(4, folder, SCRIPT)
    return status, log, sorted(file.parent.name for file in folder.glob("sharded/*/.metadata"))


@pytest.mark.slow
def test_a_loop_like_torchtitans_is_killed_and_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    """From one distributed checkpoint of model, optimizer and nodes, by 2 nodes of 2 processes, in mid-round."""
    status, log, saved = trained(tmp_path / "killed", monkeypatch, killed_at=10)
    assert status == -signal.SIGKILL and saved == ["step-4", "step-8"], log
    ends = []
    for name in ("killed", "whole"):
        status, log, saved = trained(tmp_path / name, monkeypatch)
        assert status == 0 and len(saved) == 3, log
        dcp_to_torch_save(tmp_path / name / "sharded" / "step-12", tmp_path / f"{name}.pt")
        ends.append((torch.load(tmp_path / f"{name}.pt", weights_only=False), log))
    (one, said), (other, whole) = ends
    assert said == whole and "2 nodes of 2 processes, 12 steps: validation loss" in said
    nodes = [[dict(flat(end[f"node_{k}"])) for k in range(2)] for end in (one, other)]
    assert len(nodes[0][0]) > 60 and nodes[0][0].keys() == nodes[1][0].keys()
    equal = [[all(torch.equal(a[k], b[k]) for k in a) for b in nodes[1]] for a in nodes[0]]
    assert equal == [[True, False], [False, True]]  # in mid-round the nodes differ


def flat(state, prefix=""):
    for key, x in state.items():
        if isinstance(x, dict):
            yield from flat(x, f"{prefix}{key}.")
        elif isinstance(x, torch.Tensor):
            yield f"{prefix}{key}", x
