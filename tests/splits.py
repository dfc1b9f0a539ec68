"""Runs that are trained twice: by nodes of one process, here, and by nodes of several, in a world of forked ranks."""

import os
from pathlib import Path

import processes
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from wrapped import made

from exogym import LocalTrainer, PipelineParallel, Stage
from exogym.contrib import NormCap
from exogym.faults import Faults
from exogym.models import CharGPT
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    MuLoCoStrategy,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    TopKStrategy,
)

SGD, ADAM = 1e-6, 1e-4  # how far from the dense run's parameters may be
MUON = 5e-3  # whose steps are in bf16, so rounding grows by a factor of 1e5 in each
# of the table: where rounding may turn a choice, and with it an end
CHOOSES = ["demo", "demo clipped", "topk", "qsgd", "signsgd", "ef-signsgd", "sparseloco"]
CHOOSES += ["streaming diloco 4 bit", "sparta partitioned 4 bit", "sparta topk 8 bit"]
MADE = {
    "diloco sgd": (lambda: DiLoCoStrategy("sgd", H=3, lr=0.1), SGD),
    "diloco clipped": (lambda: DiLoCoStrategy(H=3, lr=0.01, max_norm=0.5), ADAM),
    "ddp clipped": (lambda: SimpleReduceStrategy(lr=0.01, max_norm=0.1), ADAM),
    "demo": (lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=8), ADAM),
    "topk": (lambda: TopKStrategy(lr=0.1, density=0.1), ADAM),
    "muloco": (lambda: MuLoCoStrategy(lr=0.02, H=3, outer_lr=0.7), MUON),
    "sparta diloco": (lambda: SPARTADiLoCoStrategy(H=3, lr=0.01, p_sparta=0.2), ADAM),
}


class Tied(nn.Module):
    """An embedding that is the head too, blocks in a list, a frozen layer, sizes that devices do not share evenly."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 9)) for _ in range(2))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(9, 11)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x).mean(1)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.frozen(h))


class Still(Tied):
    """The same with dropout that the user keeps in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5).eval()

    def forward(self, x):
        return self.dropout(super().forward(x))


def trainer(model=Tied, loss=True):
    torch.manual_seed(1)
    made = model()
    torch.manual_seed(0)
    x = torch.randint(11, (96, 5))
    data = torch.utils.data.TensorDataset(x, x.sum(1) % 11)
    return LocalTrainer(made, data, data, loss_fn=nn.functional.cross_entropy if loss else None)


def text_trainer(layers=2):
    """A character model on its text."""
    torch.manual_seed(1)
    model = CharGPT(vocab_size=12, block_size=8, n_layer=layers, n_head=2, n_embd=8)
    torch.manual_seed(0)
    x = torch.randint(12, (64, 9))
    data = torch.utils.data.TensorDataset(x[:, :-1], x[:, 1:])
    return LocalTrainer(model, data, data)


def fit(made, strategy, **given):
    """Fit; return parameters, columns of the history, and the bytes between nodes."""
    options = {"num_nodes": 2, "max_steps": 7, "batch_size": 8, "val_interval": 3, "progress": False} | given
    made.fit(strategy, **options)
    columns = {name: list(made.history.column(name)[1]) for name in ("val_loss", "consensus_distance")}
    columns |= {f"train {n}": list(made.history.column("train_loss", node=n)[1]) for n in range(options["num_nodes"])}
    return {name: x.clone() for name, x in made.model.state_dict().items()}, columns, made.traffic


def line():
    """Layers one after the other."""
    return nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(30, 9), nn.Tanh(), nn.Linear(9, 11))


def still_line():
    """The same with dropout that the user keeps in evaluation mode."""
    return line().insert(3, nn.Dropout(0.5).eval())


def by_hand(mesh, model=line):
    made, strategy = trainer(model), MADE["diloco sgd"][0]()
    *body, last, head = made.model
    stages = PipelineParallel([Stage(body), Stage([last, head])], micro_batch_size=3)
    return fit(made, strategy, **mesh(stages=stages))


def pipelined(strategy="diloco sgd", layers=4, given=None, **mesh):
    made = MADE[strategy][0]
    return lambda node: fit(text_trainer(layers), made(), **(given or {}), **node(stages=2, **mesh))


def short(pairs):
    """A batch of texts as long as the first one's first character says."""
    x, y = (torch.stack(side) for side in zip(*pairs, strict=True))
    end = 6 + int(x[0, 0]) % 3
    return x[:, :end], y[:, :end]


def normed():
    """Layers one after the other that keep what they have seen."""
    return nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(30, 9), nn.BatchNorm1d(9), nn.Linear(9, 11))


def seen(node):
    """In micro-batches of four, of which what is kept depends."""
    given = node(stages=2, microbatches=2) or {"minibatch_size": 4}
    return fit(trainer(normed), MADE["diloco sgd"][0](), **given)


# each called with what makes `node=` of a mesh, or nothing of it
PIPELINES = {
    "uneven": pipelined(given={"batch_size": 7}, microbatches=3),
    "passes": pipelined(given={"minibatch_size": 5}, microbatches=2),
    "lengths": pipelined(given={"dataloader_kwargs": {"collate_fn": short}}, microbatches=2),
    "line": lambda node: fit(trainer(line), MADE["diloco sgd"][0](), **node(stages=2)),
    "by hand": by_hand,
    "buffers": seen,
} | {name: pipelined(name, layers=2) for name in ("demo", "topk", "ddp clipped", "sparta diloco", "muloco")}


class Sent(TorchDispatchMode):
    """Adds up the bytes of floats that this process sends, where all groups are of two: of sums that is what it gives.

    So of an all-gather, which it gives to one other, and of an all-reduce, 2 (k-1)/k of it; of a reduce-scatter half,
    and of a broadcast, which one of the two sends.
    """

    WHOLE = ("send", "allgather_", "_allgather_base_", "all_gather_into_tensor", "all_reduce", "allreduce_")
    HALF = ("_reduce_scatter_base_", "reduce_scatter_tensor", "broadcast_")

    def __init__(self):
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in self.WHOLE + self.HALF:
            given = args[1] if name in ("allgather_", "_allgather_base_", "_reduce_scatter_base_") else args[0]
            given = given[0] if isinstance(given, list) else given
            if not given.is_meta and given.dtype not in (torch.float64, torch.int64):  # what processes agree on
                self.bytes += given.numel() * given.element_size() * (0.5 if name in self.HALF else 1)
        return out


def counted(made, *given, **options):
    """Return what `fit` does, the bytes that all processes sent for gradients, and those that formulas say."""
    from exogym.mesh.devices import NodeDevices

    gradient, sent = NodeDevices.gradient, []

    def heard(self, worker, batch, row):
        with Sent() as mode:
            found = gradient(self, worker, batch, row)
        sent.append(mode.bytes)
        return found

    NodeDevices.gradient = heard
    try:
        found = fit(made, *given, **options)
    finally:
        NodeDevices.gradient = gradient
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, sum(sent))
    said = made.history.last["inside_bytes"] if rank() == 0 else None
    return found, sum(everyones), said


# what looks at all of a node's row, of five nodes of which one is bad
WARY = {
    "krum": {"robust": "krum"},
    "capped": {"robust": NormCap()},
    "capped at": {"robust": NormCap(0.05)},
}


def wary(name, **given):
    strategy = made(DiLoCoStrategy, "sgd", H=3, lr=0.1, **WARY.get(name, {}))
    bad = {} if name == "plain" else {"faults": Faults(bad_nodes=[1], attack="noise", attack_factor=2.0)}
    return fit(trainer(), strategy, num_nodes=5, **bad, **given)


def rank():
    return int(os.environ["RANK"])


def keep(found, name="found"):
    """In a world: leave what the main process has found to the test."""
    if rank() == 0:
        torch.save(found, name)


def split(folder, count, body):
    """Run `body`, with all of this file at hand, in a world of `count` ranks; return what it has kept."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\nfrom splits import *\nfrom exogym import NodeMesh, Placement\n"
    )
    status, log = processes.world(count, Path(folder), script + body)
    assert status == 0, log
    return torch.load(Path(folder) / "found", weights_only=False)


def apart(one, other):
    """Return the largest difference of two runs' parameters."""
    return max(float((one[0][name] - other[0][name]).abs().max()) for name in one[0])


def assert_alike(found, dense, tolerance):
    """The same parameters and history, up to rounding, and exactly the same bytes between nodes."""
    assert found[0].keys() == dense[0].keys() and apart(found, dense) <= tolerance
    for name, values in dense[1].items():
        assert torch.allclose(torch.tensor(found[1][name]), torch.tensor(values), rtol=1e-3, atol=1e-4), name
    assert found[2] == dense[2]
