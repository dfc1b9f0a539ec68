"""Every strategy of the core, and every optimizer, where a node is several processes: held against dense nodes.

With two shards of a batch a gradient is the sum of two numbers, in which order does not matter. So without fused
kernels, which round by where a number lies, and without clipping, which adds up a norm, all bits are those of dense
nodes in micro-batches of half the size: then methods that choose have equal inputs, and choose alike.
"""

import functools
import itertools

import pytest
import torch
from splits import ADAM, CHOOSES, MUON, SGD, apart, fit, split, text_trainer, trainer
from strategies import CORE, STRATEGIES

from exogym.strategy import CommunicateOptimizeStrategy, FedAvgStrategy, muon, optim

ROWS = [name for name, entry in STRATEGIES.items() if entry.on_rows]
OPTIMIZERS = [name for name in optim._NAMES if name not in ("lbfgs", "sparseadam")]
SOME = ["sgd", "adamw", "adafactor", "asgd", "muon"]  # without state, by element, by rows, by steps, by matrices
BITS = [
    "demo",
    "topk",
    "qsgd",
    "ef-signsgd",
    "sparseloco",
]  # of every kind of choice; all, where it may take minutes
LENGTH = {"num_nodes": 4, "val_interval": 7}


def table(made, names, node, **given):
    return {name: fit(made(), STRATEGIES[name].make(), node=node, **LENGTH, **given) for name in names}


def steps(optimizer, **given):
    strategy = FedAvgStrategy(optimizer, lr=0.01, H=2)
    return fit(trainer(), strategy, num_nodes=1, max_steps=3, val_interval=3, **given)


def without_fused_kernels():
    muon.can_fuse = optim.can_fuse = lambda parameters: False


def world(folder, size, body):
    return split(folder, size, f"from mesh.test_split_table import *\n{body}")


@pytest.fixture
def plain_kernels(monkeypatch):
    for module in (muon, optim):
        monkeypatch.setattr(module, "can_fuse", lambda parameters: False)


def is_clipped(name):
    return STRATEGIES[name].make().inner.max_norm is not None


def test_every_strategy_of_the_core_is_in_the_table():
    """But for the one with its own clock, which is for one process."""
    entered = {type(STRATEGIES[name].make()) for name in ROWS}
    assert {kind for kind in CORE.values() if kind.driven_by != "clock"} <= entered
    assert [name for name, kind in CORE.items() if kind.driven_by == "clock"] == ["async_diloco"]


@pytest.mark.parametrize(
    ("optimizers", "chooses"),
    [(SOME, ["demo", "qsgd", "ef-signsgd"]), pytest.param(OPTIMIZERS, BITS, marks=pytest.mark.slow)],
)
def test_halves_give_the_bits_of_every_optimizer_and_of_what_chooses(optimizers, chooses, tmp_path, plain_kernels):
    body = f"""
without_fused_kernels()
found = {{name: steps(name, node=NodeMesh(shard=2)) for name in {optimizers!r}}}
keep((found, table(trainer, {chooses!r}, NodeMesh(shard=2))))
"""
    by_optimizer, by_strategy = world(tmp_path, 2, body)
    assert {n: apart(x, steps(n, minibatch_size=4)) for n, x in by_optimizer.items()} == dict.fromkeys(optimizers, 0.0)
    dense = table(trainer, chooses, None, minibatch_size=4)
    assert {name: apart(x, dense[name]) for name, x in by_strategy.items()} == dict.fromkeys(chooses, 0.0)
    assert {name: x[2] for name, x in by_strategy.items()} == {name: x[2] for name, x in dense.items()}  # bytes
    assert apart(steps("adamw"), by_optimizer["adamw"]) > 0  # of whole batches they are others


# The table


@pytest.mark.slow
def test_halves_give_the_bits_of_every_strategy(tmp_path, plain_kernels):
    found = world(tmp_path, 2, "without_fused_kernels()\nkeep(table(trainer, ROWS, NodeMesh(shard=2)))")
    dense = table(trainer, ROWS, None, minibatch_size=4)
    unlike = {name: apart(found[name], dense[name]) for name in ROWS if apart(found[name], dense[name]) > 0}
    assert all(map(is_clipped, unlike)) and max(unlike.values()) <= SGD, unlike
    assert {name: found[name][2] for name in ROWS} == {name: dense[name][2] for name in ROWS}


@functools.cache
def dense_table(made):
    return table(made, ROWS, None)


def tolerance(name):
    strategy = STRATEGIES[name].make()
    kind = strategy.inner.spec.cls if isinstance(strategy, CommunicateOptimizeStrategy) else None
    return MUON if kind is muon.MuonAdamW else SGD if kind is torch.optim.SGD else ADAM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "mesh", "size"),
    [
        (trainer, "shard=2", 2),
        (trainer, "shard=3", 3),
        (trainer, "shard=4", 4),
        (trainer, "shard=2, zero=2", 2),
        (trainer, "shard=3, zero=2", 3),
        (text_trainer, "tensor=2", 2),
        (text_trainer, "shard=2, tensor=2", 4),
        (text_trainer, "stages=2", 2),
        (text_trainer, "stages=2, shard=2", 4),
        (text_trainer, "stages=2, shard=2, zero=2", 4),
    ],
)
def test_every_strategy(made, mesh, size, tmp_path):
    """A choice that rounding turns may lead elsewhere: of those that choose, how many numbers end elsewhere is told."""
    found = world(tmp_path, 2 * size, f"keep(table({made.__name__}, ROWS, NodeMesh({mesh})))")
    dense = dense_table(made)
    assert {name: found[name][2] for name in ROWS} == {name: dense[name][2] for name in ROWS}  # bytes
    away = {name: apart(found[name], dense[name]) for name in ROWS}
    print({name: f"{away[name]:.0e}" for name in ROWS if name not in CHOOSES})
    print({name: f"{away[name]:.0e}, {elsewhere(found[name], dense[name]):.2%}" for name in CHOOSES})
    assert {n: x for n, x in away.items() if n not in CHOOSES and x > tolerance(n)} == {}


def elsewhere(one, other):
    """Return the share of numbers that are further apart than rounding."""
    far = [(one[0][name] - x).abs() > ADAM for name, x in other[0].items()]
    return float(torch.cat([x.flatten() for x in far]).float().mean())


# Going on under another split


def circuit(names):
    """Return a way that takes each step from one of `names` to another one once, and ends where it has begun."""
    ways = {name: [other for other in names if other != name] for name in names}
    stack, found = [names[0]], []
    while stack:
        if ways[stack[-1]]:
            stack.append(ways[stack[-1]].pop())
        else:
            found.append(stack.pop())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tolerance"), [("ddp momentum", SGD), ("diloco adam", ADAM), ("muloco", MUON), ("demo", ADAM)]
)
def test_a_run_goes_on_from_any_split_under_any_other(name, tolerance, tmp_path):
    """Each takes up what each of the others has saved, a step at a time, and then three shards, and one process."""
    order = circuit(splits := ["shard=2", "tensor=2", "stages=2", "shard=2, zero=2", ""])
    assert len({*itertools.pairwise(order)}) == 5 * 4
    order = splits if tolerance == MUON else order  # each once: its tolerance is for few steps
    steps = len(order)
    body = """
given = {"save_dir": "../kept", "resume": True, "final_sync": False, "val_interval": 100}
for steps, mesh in enumerate(ORDER, START):
    node = eval(f"NodeMesh({mesh})") if mesh else None
    fit(text_trainer(), STRATEGIES[NAME].make(), node=node, max_steps=steps, **given)
"""

    def take_up(size, order, start):
        world(tmp_path / f"{start}", size, f"ORDER, START, NAME = {order}, {start}, {name!r}\n{body}keep(0)")

    take_up(2, order, 1)
    take_up(3, ["shard=3", "shard=3, zero=2"], steps + 1)
    take_up(2, ["tensor=2"], steps + 3)
    last = {"final_sync": False, "val_interval": 100, "max_steps": steps + 4}
    found = fit(text_trainer(), STRATEGIES[name].make(), save_dir=tmp_path / "kept", resume=True, **last)
    dense = fit(text_trainer(), STRATEGIES[name].make(), **last)
    print(f"{apart(found, dense):.0e}")
    assert apart(found, dense) <= tolerance and found[2] == dense[2]
