"""Load shared out by speed: what changes, what stays exact, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from battery import in_turn
from problems import BATCH, Regressor, examples, loss_of, put, same, shards, train, unlike, unwarned, vector
from processes import world
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Placement
from exogym.balance import Balance, share_out, speeds_of
from exogym.callbacks import Every
from exogym.core.base import rng
from exogym.core.clock import StepTime
from exogym.core.communicator import Communicator
from exogym.core.engine.engines import place
from exogym.core.training import balancing
from exogym.data.stream import Stream
from exogym.errors import ArgumentError, CheckpointError
from exogym.faults import Faults
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.strategy.sparta import SparseCommunicator
from exogym.testing import fingerprint, small_problem

SGD = {"inner_optim": "sgd", "lr": 0.05}
OUTER = OptimSpec("sgd", lr=1.0)


class Mine(Strategy):
    weighted_means = True

    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


class Silent(Mine):
    weighted_means = False


def fit(strategy: Strategy, **options: Any) -> LocalTrainer:
    """Train a network with dropout and batch normalisation."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss)
    trainer.fit(strategy, **{"num_nodes": 3, "max_steps": 13, "batch_size": 8, "device": "cpu"} | options)
    return trainer


# Numbers


def test_shares_keep_the_total_and_nobody_could_be_done_earlier() -> None:
    g = np.random.default_rng(0)
    for n, total in itertools.product((1, 2, 3), range(1, 10)):
        if total < n:
            continue
        for _ in range(5):
            speed = g.uniform(0.1, 4, n).round(2).tolist()
            counts = share_out(total, speed)
            assert sum(counts) == total and min(counts) >= 1
            others = [c for c in itertools.product(range(1, total + 1), repeat=n) if sum(c) == total]
            best = min(max(c / v for c, v in zip(other, speed, strict=True)) for other in others)
            assert max(c / v for c, v in zip(counts, speed, strict=True)) == best
    assert share_out(10**6, [1.0] * 3) == [333334, 333333, 333333]
    assert share_out(6, [1.0, 1e-300, 1e-9]) == [4, 1, 1]
    for nodes, processes in ((5, 2), (7, 3), (4, 4), (9, 1)):  # with equal speeds as ever
        assert place(nodes, processes) == [x.tolist() for x in np.array_split(np.arange(nodes), processes)]


def test_measured_speeds_are_relative_with_three_digits() -> None:
    assert speeds_of([0.0123, 0.0246, 0.0377]) == [1.0, 0.5, 0.326]
    assert speeds_of([5.0]) == [1.0]


# Who holds which nodes


@pytest.mark.parametrize(
    "given, held",
    [([1, 4], [[0], [1, 2, 3, 4]]), ([5, 1, 1], [[0, 1, 2], [3], [4]]), ([1.0, 1.0], [[0, 1, 2], [3, 4]])],
)
def test_dealing_nodes_changes_the_placement_and_no_bit(given: list[float], held: list[list[int]]) -> None:
    def run(**options: Any) -> LocalTrainer:
        return fit(FedAvgStrategy("adamw", lr=0.02, H=5), num_nodes=5, **options)

    alone = run()
    dealt = run(processes=len(given), balance=Balance("nodes", given))
    assert dealt.description["placement"] == {"processes": len(given), "nodes": held, "speeds": given}
    assert fingerprint(dealt.model) == fingerprint(alone.model)
    assert "balance" not in dealt.description and "speeds" not in dealt.description["chosen"]
    assert fingerprint(run(balance=Balance("nodes", given)).model) == fingerprint(alone.model)


def test_nodes_are_dealt_by_the_speeds_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=5)
    measured = fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=5, processes=2, balance="nodes")
    assert fingerprint(measured.model) == fingerprint(alone.model)
    found = measured.description["placement"]
    assert max(found["speeds"]) == 1.0 and found["nodes"] == place(5, 2, found["speeds"])
    monkeypatch.setattr(balancing, "step_seconds", lambda worker, stream, node: [0.03, 0.01][node])
    stop = [Every(4, lambda loop: True)]
    capfd.readouterr()
    options = {"num_nodes": 5, "save_dir": tmp_path, "balance": "nodes"}
    dealt = fit(DiLoCoStrategy(H=4, lr=0.01), processes=2, callbacks=stop, **options)
    assert dealt.description["placement"]["nodes"] == [[0], [1, 2, 3, 4]]
    assert "speeds are 0.333, 1; they hold 1, 4 nodes" in capfd.readouterr().err
    resumed = fit(DiLoCoStrategy(H=4, lr=0.01), processes=1, resume=True, **options)  # another layout will do
    assert fingerprint(resumed.model) == fingerprint(alone.model)
    fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=2, processes=2, balance="nodes")
    assert "changes nothing: each of 2 processes has one node" in capfd.readouterr().err


# Larger batches


@pytest.mark.parametrize("strategy", [SimpleReduceStrategy, Mine], ids=["DDP", "written for one node"])
def test_gradients_averaged_over_uneven_batches_are_those_of_the_union(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = examples(40)  # five steps of eight
    union = train(SimpleReduceStrategy(**SGD), data, 1, steps=12, batch_size=2 * BATCH)
    balance = Balance("batch", speeds=[1, 3])
    uneven = train(strategy(**SGD), data, 2, steps=12, balance=balance)
    same(uneven.model, union.model)
    same(train(strategy(**SGD), data, 2, steps=12, balance=balance, minibatch_size=2).model, union.model)
    monkeypatch.setattr(Communicator, "share", lambda *args: None)  # the control: the plain mean
    unlike(train(strategy(**SGD), data, 2, steps=12, balance=balance).model, union.model)


def test_missing_nodes_leave_the_union_of_the_others() -> None:
    balance = Balance("batch", speeds=[1, 3, 4])
    data = examples(96)
    absent = train(SimpleReduceStrategy(**SGD), data, 3, 1, balance=balance, faults=Faults(absent={1: [(1, None)]}))
    stream = Stream(data, 3, batch_size=BATCH)
    stream.share_out(balance.counts(3 * BATCH))
    seen = np.concatenate([stream.indices(node, 0)[0] for node in (0, 2)])
    model = Regressor()
    loss_of(model, *data[seen]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.05 * p.grad)
    same(absent.rows[0], vector(model))


# Oracles of whole rounds


def oracle(
    data: Sequence[TensorDataset], steps: int, H: int, sizes: Sequence[int], shares: Sequence[Fraction], weights: Any
) -> Tensor:
    """SGD on each node's own batches, `shares` of the steps, and a weighted mean of all parameters every H steps."""
    models = [Regressor() for _ in data]
    taken = [0] * len(data)
    for step in range(1, steps + 1):
        for i, model in enumerate(models):
            if math.floor(shares[i] * step) > math.floor(shares[i] * (step - 1)):
                batch = slice(taken[i] * sizes[i], (taken[i] + 1) * sizes[i])
                taken[i] += 1
                model.zero_grad()
                loss_of(model, *data[i][batch]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.05 * p.grad)
        if step % H == 0:
            w = torch.tensor(weights, dtype=torch.float64)
            mean = (w / w.sum()) @ torch.stack([vector(model) for model in models])
            for model in models:
                put(model, mean)
    return vector(models[0])


AVERAGES = {
    "DiLoCo": (lambda: DiLoCoStrategy(outer_optim=OUTER, H=4, **SGD), 4),
    "FedAvg": (lambda: FedAvgStrategy(H=4, **SGD), 4),
    "SPARTA": (lambda: SPARTAStrategy(p_sparta=1.0, interval=2, **SGD), 2),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_weigh_what_a_node_has_done(name: str) -> None:
    make, H = AVERAGES[name]
    data, one = shards(3, count=7 * 8), [Fraction(1)] * 3
    sizes = [1, 4, 7]  # in proportion to the speeds
    by_batch = train(make(), data, 3, 8, balance=Balance("batch", speeds=[1, 4, 7]))
    same(by_batch.rows[0], oracle(data, 8, H, sizes, one, sizes))
    unlike(by_batch.rows[0], oracle(data, 8, H, sizes, one, [1, 1, 1]))
    shares = [Fraction(1, 3), Fraction(1, 2), Fraction(1)]
    by_steps = train(make(), data, 3, 8, balance=Balance("steps", speeds=[2, 3, 6]))
    same(by_steps.rows[0], oracle(data, 8, H, [BATCH] * 3, shares, [2, 3, 6]))
    unlike(by_steps.rows[0], oracle(data, 8, H, [BATCH] * 3, shares, [1, 1, 1]))
    assert np.isfinite(by_steps.losses).sum(1).tolist() == [2, 4, 8]
    assert np.isfinite(by_batch.losses).all()


def test_weights_by_examples_are_not_weighed_again() -> None:
    data = [examples(20), examples(60, seed=1)]
    run = train(FedAvgStrategy(H=3, **SGD), data, 2, 3, balance=Balance("batch", speeds=[3, 1]))
    one = [Fraction(1)] * 2
    same(run.rows[0], oracle(data, 3, 3, [6, 2], one, [20, 60]))
    unlike(run.rows[0], oracle(data, 3, 3, [6, 2], one, [6 * 20, 2 * 60]))


def test_a_shard_smaller_than_the_batch_weighs_what_it_holds() -> None:
    data = [examples(2), examples(60, seed=1)]
    run = train(SimpleReduceStrategy(**SGD), data, 2, 1, balance=Balance("batch", speeds=[3, 1]))
    model = Regressor()
    x, y = (torch.cat(parts) for parts in zip(data[0][:2], data[1][:2], strict=True))
    loss_of(model, x, y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.05 * p.grad)
    same(run.rows[0], vector(model))


def test_the_mean_at_the_end_and_buffers_are_weighted() -> None:
    model, data = small_problem()
    seen: dict[str, Any] = {}

    def look(loop: Any) -> None:
        rows = {**{"params": loop.fleet.blocks[0].params}, **loop.fleet.buffers}
        seen.update({name: x.clone() for name, x in rows.items()})
        seen["mean"], seen["buffers"] = loop.fleet.average()[0], loop.fleet.average_buffers()

    trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
    trainer.fit(
        CommunicateOptimizeStrategy("sgd", [], lr=0.1), num_nodes=2, max_steps=3, batch_size=8, device="cpu",
        callbacks=[look], balance=Balance("batch", [1, 3]),
    )  # fmt: skip
    w = torch.tensor([0.25, 0.75])
    assert torch.equal(seen["mean"], (seen["params"] * w[:, None]).sum(0))
    assert torch.equal(seen["buffers"]["1.running_mean"], (seen["1.running_mean"] * w[:, None]).sum(0))
    unlike(seen["mean"], seen["params"].mean(0))


# Laws


LAWFUL: dict[str, tuple[Any, tuple[str, ...]]] = {
    "DDP": (lambda: SimpleReduceStrategy(lr=0.02), ("batch",)),
    "DiLoCo": (lambda: DiLoCoStrategy(H=4, lr=0.01), ("batch", "steps")),
    "islands": (lambda: FedAvgStrategy("adamw", lr=0.02, H=3, island_size=2), ("batch", "steps")),
    "clients": (lambda: FedAvgStrategy("adamw", lr=0.02, client_fraction=0.6, local_epochs=1), ("batch", "steps")),
    "quantised": (lambda: SPARTAStrategy(lr=0.02, p_sparta=0.3, quantization_bits=8), ("batch", "steps")),
    "SPARTA + DiLoCo": (lambda: SPARTADiLoCoStrategy(lr=0.02, H=4, p_sparta=0.3), ("steps",)),
}


@pytest.mark.parametrize(
    "name, kind", [case for name, (_, kinds) in LAWFUL.items() for case in in_turn([name], kinds[::-1])]
)
def test_placement_and_stretches_change_nothing(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, balance = LAWFUL[name][0], Balance(kind, speeds=[1, 3, 2.5])
    alone = fit(make(), balance=balance)
    assert fingerprint(alone.model) != fingerprint(fit(make()).model)
    assert fingerprint(fit(make(), balance=Balance(kind, speeds=[7, 7, 7])).model) == fingerprint(fit(make()).model)
    for processes in (2, 3):
        assert fingerprint(fit(make(), balance=balance, processes=processes).model) == fingerprint(alone.model)
    tree, native = (nn.utils.parameters_to_vector(t.model.parameters()).detach() for t in (
        alone, fit(make(), balance=balance, processes=2, placement=Placement(reduction="native")),
    ))  # fmt: skip
    assert torch.allclose(native, tree, rtol=1e-3, atol=1e-3 if name == "quantised" else 1e-4)
    monkeypatch.setattr(LocalTrainer, "max_stretch", 1)
    assert fingerprint(fit(make(), balance=balance).model) == fingerprint(alone.model)


def test_faults_and_slow_nodes_come_on_top() -> None:
    shares = [Fraction(1, 3), Fraction(1)]
    there = Faults(slow={0: 0.5}).bind(2, shares=shares)
    assert there.steps_between(0, 60).tolist() == [10, 60]
    faults = Faults(absent={1: [(3, 7)]}, slow={0: 0.5})
    options = {"balance": Balance("steps", [1, 2, 3]), "faults": faults}
    alone = fit(DiLoCoStrategy(H=4, lr=0.01), **options)
    assert fingerprint(fit(DiLoCoStrategy(H=4, lr=0.01), processes=2, **options).model) == fingerprint(alone.model)


@pytest.mark.parametrize("kind", ["batch", "steps"])
def test_measured_speeds_are_kept_and_replay_the_run(kind: str, tmp_path: Path) -> None:
    def run(**options: Any) -> LocalTrainer:
        return fit(DiLoCoStrategy(H=4, lr=0.01), **{"balance": kind} | options)

    measured = run(processes=2, save_dir=tmp_path, callbacks=[Every(6, lambda loop: True)])
    found = measured.description["chosen"]["speeds"]
    assert len(found) == 3 and max(found) == 1.0 and measured.description["balance"] == kind
    resumed = run(save_dir=tmp_path, resume=True)  # in one process, where nothing could be measured
    assert resumed.description["chosen"]["speeds"] == found
    again = run(balance=Balance(kind, found))
    assert fingerprint(resumed.model) == fingerprint(again.model)
    assert resumed.history.column("train_loss", 1)[1].tolist() == again.history.column("train_loss", 1)[1].tolist()
    for other, words in ((Balance(kind, [1, 2, 3]), "speeds"), (None, "balance")):
        with pytest.raises(CheckpointError, match=words):
            run(save_dir=tmp_path, resume=True, balance=other)


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=2, processes=2)
    taken = balancing.step_seconds

    def as_fast(*args: Any) -> float:
        assert taken(*args) > 0
        return 0.01

    monkeypatch.setattr(balancing, "step_seconds", as_fast)
    measured = fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=2, processes=2, balance="batch")
    assert measured.description["chosen"]["speeds"] == [1.0, 1.0]
    assert fingerprint(measured.model) == fingerprint(equal.model)
    halved = fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=3, processes=2, balance="batch")
    assert halved.description["chosen"]["speeds"] == [0.5, 0.5, 1.0]  # two nodes of a process take turns


def test_one_process_has_nothing_to_measure(capfd: pytest.CaptureFixture[str]) -> None:
    plain = fit(SimpleReduceStrategy(lr=0.02))
    balanced = fit(SimpleReduceStrategy(lr=0.02), balance="batch")
    assert "one process holds all nodes" in capfd.readouterr().err
    assert fingerprint(balanced.model) == fingerprint(plain.model)


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
import test_balance as t

torch.set_num_threads(1)
seen = {}
for name in ("DDP", "DiLoCo"):
    for reduction in ("tree", "native"):
        placement, balance = t.Placement(reduction=reduction), t.Balance("batch", [1, 3])
        trainer = t.fit(t.LAWFUL[name][0](), num_nodes=2, balance=balance, placement=placement)
        weights = t.nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()
        seen[f"{name} {reduction}"] = [t.fingerprint(trainer.model), weights]
nodes = t.fit(t.DiLoCoStrategy(H=4, lr=0.01), num_nodes=5, balance="nodes")
seen["nodes"] = [t.fingerprint(nodes.model), nodes.description["placement"]]
measured = t.fit(t.DiLoCoStrategy(H=4, lr=0.01), balance="steps")
seen["steps"] = [t.fingerprint(measured.model), measured.description["chosen"]["speeds"]]
if torch.distributed.get_rank() == 0:
    Path("seen.json").write_text(json.dumps(seen))
"""


def test_processes_started_apart_agree(tmp_path: Path) -> None:
    """In a world: the bits of one process, and native sums, begun while backward runs, close to them."""
    status, log = world(2, tmp_path / "world", SCRIPT)
    assert status == 0, log
    seen = json.loads((tmp_path / "world" / "seen.json").read_text())
    for name in ("DDP", "DiLoCo"):
        alone = fit(LAWFUL[name][0](), num_nodes=2, balance=Balance("batch", [1, 3]))
        (bits, tree), (_, native) = seen[f"{name} tree"], seen[f"{name} native"]
        assert bits == fingerprint(alone.model)
        assert np.allclose(native, tree, rtol=1e-3, atol=1e-4)
    bits, where = seen["nodes"]
    assert bits == fingerprint(fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=5).model)
    assert where["nodes"] == place(5, 2, where["speeds"])
    bits, measured = seen["steps"]
    assert bits == fingerprint(fit(DiLoCoStrategy(H=4, lr=0.01), balance=Balance("steps", measured)).model)


# The data


@pytest.mark.parametrize("sizes", [[2, 6], [3, 5], [1, 4, 7], [4, 4], [4, 4, 4], [8, 8, 2, 2]])
@pytest.mark.parametrize("total", [5, 40, 97])
def test_every_example_is_seen_once_and_each_step_holds_them_in_proportion(sizes: list[int], total: int) -> None:
    n = len(sizes)
    stream = Stream(torch.arange(total), n, batch_size=sum(sizes) // n, seed=3)
    before = stream.steps_per_epoch
    stream.share_out(sizes)
    unit = sum(sizes) // math.gcd(*sizes)
    rounded = -(-total // unit) * unit
    for epoch in (0, 2):
        perm = torch.randperm(total, generator=rng.generator(3, "shuffle", epoch))
        whole = np.resize(perm.numpy(), rounded)
        steps = [[stream.indices(i, epoch * before + t)[0] for i in range(n)] for t in range(before)]
        for t, parts in enumerate(steps):
            assert [len(part) * sum(sizes) for part in parts] == [b * sum(map(len, parts)) for b in sizes]
            block = whole[t * sum(sizes) : (t + 1) * sum(sizes)]
            assert sorted(np.concatenate(parts).tolist()) == sorted(block.tolist())
        if len(set(sizes)) == 1:  # as torch's DistributedSampler
            assert all((np.concatenate([s[i] for s in steps]) == whole[i::n]).all() for i in range(n))
    assert stream.examples.sum() == rounded and stream.indices(0, before)[1] == 1
    together = [torch.cat(list(stream.batches(i, 0, before + 1))).tolist() for i in range(n)]
    apart = [np.concatenate([stream.indices(i, t)[0] for t in range(before + 1)]).tolist() for i in range(n)]
    assert together == apart


# What is seen of it


def test_the_predicted_clock_knows_how_much_a_step_holds() -> None:
    def seconds(balance: Balance | None) -> float:
        run = train(
            SimpleReduceStrategy(**SGD), examples(40), 2, 10, network="1Gbps,1ms", balance=balance,
            step_seconds=StepTime("10ms", speeds=[1, 3]),
        )  # fmt: skip
        return run.trainer.history[-1]["time_s"]

    assert seconds(None) - seconds(Balance("batch", [1, 3])) == pytest.approx(10 * 0.005, abs=1e-6)
    run = unwarned(
        DiLoCoStrategy(H=20, **SGD), None, 2, 10, network="1Gbps", step_seconds=0.01, balance=Balance("steps", [1, 2])
    )
    assert run.trainer.clock is not None and run.trainer.clock.steps.tolist() == [5, 10]


# What is refused


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Balance("speed"), "'speed' is not one of 'nodes', 'batch', 'steps'"),
        (lambda: Balance("batch", [1, 0]), "numbers over 0"),
        (lambda: Balance("batch", [1, math.nan]), "numbers over 0"),
        (lambda: Balance("batch", [1, math.inf]), "numbers over 0"),
        (lambda: Balance("batch", [1, True]), "numbers over 0"),
        (lambda: Balance("batch", []), "numbers over 0"),
        (lambda: Balance("batch", "12"), "numbers over 0"),
        (lambda: Balance("batch", speed=[1]), "did you mean 'speeds'"),
        (lambda: share_out(1, [1.0, 1.0]), "total=1 is too small for 2 speeds"),
        (lambda: fit(DiLoCoStrategy(), balance=2), "balance=2 must be one of"),
        (lambda: fit(DiLoCoStrategy(), balance="step"), "did you mean 'steps'"),
        (lambda: fit(DiLoCoStrategy(), balance=Balance("batch", [1, 2])), "2 speeds for 3 nodes"),
        (lambda: fit(DiLoCoStrategy(), processes=2, balance=Balance("nodes", [1, 2, 3])), "3 speeds for 2 processes"),
        (lambda: fit(DeMoStrategy(), balance="batch"), r"its own way \(DCTMomentum\)"),
        (lambda: fit(DeMoStrategy(), balance="steps"), "all nodes take every step together"),
        (lambda: fit(SimpleReduceStrategy(), balance="steps"), "use balance='batch' or 'nodes'"),
        (lambda: fit(Mine(), balance="steps"), "all nodes take every step together"),
        (lambda: fit(Silent(), balance="batch"), "weighted_means = True"),
        (lambda: fit(AsyncDiLoCoStrategy(), balance="batch"), "dylu=True"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_module_of_ones_own_has_to_say_that_its_means_are_the_communicators() -> None:
    class Own(SparseCommunicator):
        weighted_means = False

    with pytest.raises(ArgumentError, match="Own"):
        fit(CommunicateOptimizeStrategy("sgd", [Own(0.5)]), balance="batch")
    fit(CommunicateOptimizeStrategy("sgd", [SparseCommunicator(0.5)]), balance=Balance("batch", [1, 2, 3]))
