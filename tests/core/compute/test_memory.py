"""The check of memory before a run: what it counts is what rows keep, and what does not fit is refused unmade."""

import re
import resource

import pytest
import torch
from strategies import STRATEGIES
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.base import devices
from exogym.core.fleet.layout import hidden_matrices
from exogym.errors import ArgumentError
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    FedAsyncStrategy,
    FedAvgStrategy,
    HALoSStrategy,
    HeLoCoStrategy,
    OptimSpec,
    SimpleReduceStrategy,
)

STRATEGY = SimpleReduceStrategy(lr=0.1)  # AdamW
ON_THEIR_WAY = ("diloco eager",)
NUMBERS = re.compile(r"need ([\d.e+-]+) GB .*?\((.*?); without")


def network(width=8):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 8), nn.Linear(8, 4))


def train(strategy=STRATEGY, model=None, **options):
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=draw), torch.randint(4, (64,), generator=draw))
    trainer = LocalTrainer(network() if model is None else model, data, loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, **{"num_nodes": 2, "max_steps": 2, "batch_size": 4, "device": "cpu"} | options)
    return trainer


def free(monkeypatch, size):
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: int(size))


def counted(monkeypatch, strategy, **given):
    """Return the bytes that the message says a run needs, all together and one by one, but without temporary tensors.

    `tests/device/test_memory.py` measures those.
    """
    with monkeypatch.context() as patch, pytest.raises(ArgumentError) as caught:
        free(patch, 1)
        train(strategy, **given)
    total, listed = NUMBERS.search(str(caught.value)).groups()
    pairs = (one.rsplit(" ", 1) for one in listed.split(", "))
    each = {name: float(size) * 1e9 for name, size in pairs}
    return float(total) * 1e9 - each.pop("temporary tensors", 0.0), each


@pytest.mark.parametrize("nodes", [10**7, 10**9, 10**12, 2**53])
def test_rows_that_have_no_room_are_refused_before_any_is_made(nodes, monkeypatch):
    free(monkeypatch, 16e9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArgumentError, match=rf"num_nodes={nodes}: .* need .* GB \(parameters .* nodes fit"):
        train(num_nodes=nodes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_so_are_rows_whose_parameters_alone_would_fit(monkeypatch):
    """200 rows of a million parameters are 800 MB; with gradients and AdamW 3.2 GB."""
    free(monkeypatch, 1e9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArgumentError, match=r"200 rows of 1500044 parameters need 5\.1\d GB .* at most 38 nodes fit"):
        train(model=network(100_000), num_nodes=200)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("strategy", [STRATEGY, DiLoCoStrategy(H=2), FedAvgStrategy("sgd", H=2)])
def test_what_fits_is_said_and_fits(strategy, monkeypatch):
    free(monkeypatch, 100_000)
    with pytest.raises(ArgumentError, match="at most") as caught:
        train(strategy, num_nodes=100)
    fit = int(re.search(r"at most (\d+) nodes fit", str(caught.value))[1])
    assert 2 < fit < 100
    with pytest.raises(ArgumentError, match=f"{fit + 3} rows of 164 parameters .* at most"):
        train(strategy, num_nodes=fit + 3)  # a few bytes for each node are kept once
    train(strategy, num_nodes=fit)
    free(monkeypatch, 3)
    with pytest.raises(ArgumentError, match="not even one node fits"):
        train(strategy, num_nodes=1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_counted_is_what_rows_keep(name, monkeypatch):
    """All that is registered of a row after a round, and the gradients of a strategy that wants all rows'."""
    strategy, nodes = STRATEGIES[name].make(), 4
    if strategy.driven_by != "rounds":
        return
    kept = {}

    def look(loop):
        rows = [x for row in range(nodes) for x in loop.fleet.state.row(row).values()]
        grads = [block.grads for block in loop.fleet.blocks if block.grads is not None]
        kept["bytes"] = sum(x.nbytes for x in rows)
        kept["gradients"] = nodes * loop.fleet.parameter_bytes if strategy.needs_gradients else 0
        assert strategy.needs_gradients or not grads

    options = {"model": network(64), "num_nodes": nodes}
    train(strategy, **options, max_steps=20, callbacks=[look])
    total, each = counted(monkeypatch, strategy, **options)
    assert each.get("gradients", 0) == pytest.approx(kept["gradients"], rel=0.01)
    objects = each.pop("Python's objects")
    on_its_way = each["parameters"] if name in ON_THEIR_WAY else 0  # for the time of a few steps
    assert sum(each.values()) + on_its_way == pytest.approx(kept["bytes"] + kept["gradients"], rel=0.03)
    assert total >= sum(each.values()) + objects - 1


CLOCKED = [
    AsyncDiLoCoStrategy("sgd", H=2), DecoupledDiLoCoStrategy("sgd", H=2), FedAsyncStrategy("sgd", H=2),
    HeLoCoStrategy("sgd", H=2), HALoSStrategy("sgd", H=2, island_size=3), HALoSStrategy("sgd", H=2, island_size=1),
]  # fmt: skip


@pytest.mark.parametrize("strategy", CLOCKED, ids=lambda one: f"{one.name}-{one.island_size}")
def test_servers_are_counted_too(strategy, monkeypatch):
    nodes, kept, options = 8, {}, {"model": network(64), "num_nodes": 8}

    def look(loop):
        kept["rows"] = sum(x.nbytes for row in range(nodes) for x in loop.fleet.state.row(row).values())
        shared = loop.fleet.state.shared().items()
        kept["servers"] = sum(x.nbytes for name, x in shared if re.match("server|global_server|relays", name))

    train(strategy, **options, max_steps=20, callbacks=[look])
    total, each = counted(monkeypatch, strategy, **options)
    gradient = each["parameters"] / nodes
    assert total - each["Python's objects"] - gradient == pytest.approx(kept["rows"] + kept["servers"], rel=0.03)
    assert each["servers"] == pytest.approx(kept["servers"], rel=0.03)
    free(monkeypatch, 100_000)
    with pytest.raises(ArgumentError, match="at most") as caught:
        train(strategy, num_nodes=100)
    fit = int(re.search(r"at most (\d+) nodes fit", str(caught.value))[1])
    train(strategy, num_nodes=fit)
    with pytest.raises(ArgumentError, match="nodes fit"):
        train(strategy, num_nodes=fit + 3)


@pytest.mark.parametrize("optim", ["sgd", "adam", "adafactor", "muon", "asgd", "rmsprop", "adadelta"])
def test_optimizers_are_counted_as_they_are(optim, monkeypatch):
    """Factored state too; narrow layers may not be taken for wide ones."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 2), nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = OptimSpec(optim).build(parameters, hidden=hidden_matrices(model))
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    _, each = counted(monkeypatch, DiLoCoStrategy(optim, H=2), model=model, num_nodes=1000)
    assert each.get("optimizer state", 0) == pytest.approx(1000 * kept, rel=0.01)


class Memory(nn.Module):
    """Keeps a table that each training step changes."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.register_buffer("table", torch.zeros(10_000))
        self.register_buffer("constant", torch.zeros(10_000))

    def forward(self, x):
        self.table += x.detach().mean()
        return self.body(x)


def test_buffers_that_training_changes_are_counted(monkeypatch):
    free(monkeypatch, 1e6)
    with pytest.raises(
        ArgumentError, match=r"40 rows of 164 parameters need .* buffers 0\.0016.* at most 1\d nodes fit"
    ):
        train(DiLoCoStrategy(H=2), Memory(), num_nodes=40)
    train(DiLoCoStrategy(H=2), Memory(), num_nodes=10)


def test_sampled_clients_need_rows_of_those_who_act(monkeypatch):
    free(monkeypatch, 1e6)
    sampled = FedAvgStrategy("sgd", lr=0.1, H=2, client_fraction=0.001)
    train(sampled, num_nodes=5000)
    free(monkeypatch, 6e4)
    with pytest.raises(ArgumentError, match=r"num_nodes=5000: 1\d rows of .* at most \d rows fit"):
        train(sampled, num_nodes=5000)


def test_a_run_with_plenty_of_memory_is_not_looked_at_closer(monkeypatch):
    monkeypatch.setattr("exogym.core.compute.memory._computing", lambda *given: pytest.fail("tried"))
    train()


GB = 10**9
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
NEW = ("memory.max", "memory.current", "")


def machine(folder, monkeypatch, groups, line, names):
    """Let this machine have 100 GB free, and groups: by folder its limit, and the GB used, of these in files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(f"MemAvailable: {100 * GB // 1024} kB\nSwapFree: 0 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(f"3:cpu:/other\n{line}\n")
    for name, (limit, used, of_files) in groups.items():
        place = folder / "groups" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text(f"{used * GB}\n")
        halves = f"{names[2]}inactive_file {of_files * GB // 2}\n{names[2]}active_file {of_files * GB // 2}\n"
        (place / "memory.stat").write_text(f"anon 1\ninactive_file 0\nactive_file 0\n{halves}")
    monkeypatch.setattr(devices, "PROC", folder / "proc")
    monkeypatch.setattr(devices, "GROUPS", folder / "groups")
    return devices.Device(devices.CPU).free_bytes()


@pytest.mark.parametrize(("groups", "line", "names", "free_gb"), [
    ({"": (16 * GB, 15, 14)}, "0::/", NEW, 15),  # a container that has read a large data set
    ({"": (16 * GB, 15, 0)}, "0::/", NEW, 1),
    ({"": ("max", 15, 0), "job": (16 * GB, 4, 2), "job/step": ("max", 4, 2)}, "0::/job/step", NEW, 14),
    ({"": (200 * GB, 15, 0)}, "0::/", NEW, 100),
    ({"": (16 * GB, 17, 0)}, "0::/", NEW, 0),
    ({"memory": (16 * GB, 15, 14)}, "4:memory,hugetlb:/of/the/host", OLD, 15),
    ({"memory": (2**63 - 4096, 15, 0), "memory/job": (16 * GB, 15, 4)}, "4:memory:/job", OLD, 5),
    ({}, "0::/", NEW, 100),
])  # fmt: skip
def test_memory_is_free_within_the_limits_of_groups_and_files_hold_none(
    groups, line, names, free_gb, tmp_path, monkeypatch
):
    assert machine(tmp_path, monkeypatch, groups, line, names) == pytest.approx(free_gb * GB, abs=2000)
