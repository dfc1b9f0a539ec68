"""A loop of the user's own with `exogym.attach`: the bits of `LocalTrainer` with the same batches and optimizer."""

import copy
import itertools
import json
import os
import signal

import pytest
import torch
from adapters import STRATEGIES
from processes import told_in_groups as in_world
from strategies import CORE
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

import exogym.core.progress
from exogym import LocalTrainer, attach
from exogym.callbacks import Every
from exogym.errors import ArgumentError, CheckpointError, ModelError, TrainingError
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    MuLoCoStrategy,
    PeriodicModule,
    SimpleReduceStrategy,
)
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint

STEPS, BATCH, PARTS, LR = 50, 8, 2, 0.02


class Tied(nn.Module):
    """Dropout, BatchNorm, two layers with one weight, a frozen layer, and a layer that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight
        self.frozen, self.unused, self.last = nn.Linear(16, 16), nn.Linear(3, 3), nn.Linear(16, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        x = torch.relu(self.one(x)) + torch.tanh(self.frozen(self.other(x)))
        return self.last(x)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(320, 6, generator=draw)
    return TensorDataset(x, torch.tanh(x @ torch.randn(6, 2, generator=draw)))


def simulated(strategy, num_nodes, **options):
    trainer = LocalTrainer(Tied(), data(), loss_fn=mse_loss)
    wanted = {"max_steps": STEPS, "batch_size": BATCH, "gradient_accumulation": PARTS, "device": "cpu"}
    trainer.fit(strategy, num_nodes=num_nodes, **wanted | options)
    return trainer


def loop(nodes, model, steps=STEPS, parts=PARTS, after=lambda: None):
    """The user's training loop."""
    loader = nodes.loader(data(), BATCH, gradient_accumulation=parts)
    while nodes.step_count < steps:
        for batches in loader:
            nodes.reseed()
            total = 0.0
            batches = batches if parts > 1 else [batches]
            count = sum(len(x) for x, _ in batches)
            for x, y in batches:  # an epoch's last batches may be smaller
                loss = mse_loss(model(x), y) * (len(x) / count)
                loss.backward()
                total = total + loss.detach()
            nodes.step(total)
            after()
            if nodes.step_count == steps:
                break


def outcome(nodes, model):
    rows = [(r["step"], r["node"], r["train_loss"], r["lr"], r["tx_bytes"], r["payload_bytes"]) for r in nodes.history]
    return [fingerprint(model), [row for row in rows if row[0] > 0]]


def described(name):
    inner = ("adamw",) if name in ("topk", "gossip") else ()
    options = {"H": 7} if name == "diloco" else {}
    return STRATEGIES[name](*inner, lr=LR, lr_scheduler="cosine", warmup_steps=3, **options)


def begun(name="diloco", own=True, steps=STEPS, **options):
    """Return a model, its optimizer and the attached nodes."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True) if own and name != "demo" else None
    return model, optimizer, attach(model, optimizer, described(name), total_steps=steps, **options)


def attached(name, own, steps):
    """Train with the strategy called `name`; return what the run comes to."""
    model, _, nodes = begun(name, own, steps)
    loop(nodes, model, steps)
    return outcome(nodes, nodes.finish())


def holds_the_law(num_nodes, names, steps, folder):
    cases = [(name, own) for name in names for own in (False, True) if name != "demo" or not own]
    ranks = in_world(num_nodes, folder, lambda rank: [attached(name, own, steps) for name, own in cases])
    for name in names:
        trainer = simulated(described(name), num_nodes, max_steps=steps)
        wanted = json.loads(json.dumps(outcome(trainer, trainer.model)))
        for rank, seen in enumerate(ranks):
            assert all(found == wanted for case, found in zip(cases, seen, strict=True) if case[0] == name), (
                name,
                rank,
            )


def test_an_attached_loop_has_the_bits_of_a_simulation(tmp_path):
    """With dropout, BatchNorm, tied weights, frozen and unused ones, a schedule, clipping and accumulation."""
    holds_the_law(2, ("ddp", "streaming diloco", "demo", "noloco"), 14, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_every_strategy_has_the_bits_of_a_simulation(num_nodes, tmp_path):
    holds_the_law(num_nodes, STRATEGIES, STEPS, tmp_path)


# Every strategy by its name

CLOCKED = {"async_diloco"}  # nobody orders the nodes of a loop
OWN_OPTIMIZER = {"demo", "muloco"}  # bring their own rule


REASONS = ("no virtual clock", "pass optimizer=None", "leave inner_optim out")


def begun_by_name(name, own, steps):
    strategy = parse_strategy(name, lr=LR, H=3, max_norm=0.5, inner_optim="adamw")
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True) if own else None
    return model, attach(model, optimizer, strategy, total_steps=steps)


def is_refused(name, own):
    try:
        assert begun_by_name(name, own, 5)[1].step_count == 0
    except ArgumentError as error:
        assert any(reason in str(error) for reason in REASONS), error
        return True
    return False


@pytest.mark.parametrize("name", CORE)
def test_every_strategy_is_attached_or_refused_before_training(name):
    refused = [is_refused(name, own) for own in (False, True)]
    assert refused in ([True, True], [False, True], [False, False])
    if name in CLOCKED | OWN_OPTIMIZER | {"ddp", "diloco"}:
        assert refused == [name in CLOCKED, name in CLOCKED | OWN_OPTIMIZER]


@pytest.mark.slow
def test_every_attached_strategy_has_the_bits_of_a_simulation(tmp_path):
    """With a known length and an optimizer of the user's, and without both."""
    steps, cases = 7, [(name, own) for name in CORE for own in (False, True) if not is_refused(name, own)]

    def body(rank):
        found = []
        for name, own in cases:
            model, nodes = begun_by_name(name, own, steps if own else None)
            loop(nodes, model, steps)
            found.append(outcome(nodes, nodes.finish()))
        return found

    ranks = in_world(2, tmp_path, body)
    for name in dict(cases):
        strategy = parse_strategy(name, lr=LR, H=3, max_norm=0.5, inner_optim="adamw")
        trainer = simulated(strategy, 2, max_steps=steps)
        wanted = json.loads(json.dumps(outcome(trainer, trainer.model)))
        unlike = [case for k, case in enumerate(cases) if case[0] == name for own in ranks if own[k] != wanted]
        assert unlike == [], unlike


def test_a_script_alone_is_one_node_with_a_schedule_of_its_own():
    """A torch scheduler of the user's has the bits of the same schedule of the strategy's."""
    factor = lambda step: 0.9**step  # noqa: E731
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    nodes = attach(model, optimizer, DiLoCoStrategy(H=7))
    loop(nodes, model, 20, after=scheduler.step)
    trainer = simulated(DiLoCoStrategy(H=7, lr=LR, lr_scheduler=factor), 1, max_steps=20)
    assert outcome(nodes, nodes.finish()) == outcome(trainer, trainer.model)


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.cycle(data())


def test_a_loop_over_an_iterable_without_an_end():
    model, _, nodes = begun(own=False, steps=10)
    loader = nodes.loader(Endless(), BATCH)
    with pytest.raises(ArgumentError, match=r"an iterable without a length.*: pass exogym\.data\.IterableData"):
        len(loader)
    assert isinstance(ArgumentError(), TypeError), "progress bars ask for a length and do without"
    for x, y in loader:
        nodes.reseed()
        loss = mse_loss(model(x), y)
        loss.backward()
        nodes.step(loss.detach())
        if nodes.step_count == 10:
            break
    trainer = LocalTrainer(Tied(), Endless(), loss_fn=mse_loss)
    trainer.fit(described("diloco"), max_steps=10, batch_size=BATCH, device="cpu")
    assert outcome(nodes, nodes.finish()) == outcome(trainer, trainer.model)


READ: list[int] = []


class Placed(IterableDataset):
    """An endless iterable that knows its place, and notes which examples are read from it or its copies."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            READ.append(self.at - 1)
            yield torch.full((6,), float(self.at % 7)), torch.full((2,), float(self.at % 5))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("is_loaded_first", [False, True])
def test_a_loop_over_an_iterable_goes_on_at_its_place(is_loaded_first):
    """With the loader made before or after the state is loaded. Without the place it would read from the start."""

    def run(source, steps, state=None):
        model, _, nodes = begun(own=False, steps=8)
        if is_loaded_first and state is not None:
            nodes.load_state_dict(state)
        loader = nodes.loader(source, 256, shuffle=False)
        if not is_loaded_first and state is not None:
            nodes.load_state_dict(state)
        for x, y in loader:
            nodes.reseed()
            loss = mse_loss(model(x), y)
            loss.backward()
            nodes.step(loss.detach())
            if nodes.step_count == steps:
                return nodes, model
        raise AssertionError

    nodes, _ = run(Placed(), 8)
    whole = outcome(nodes, nodes.finish())
    nodes, _ = run(Placed(), 6)
    state = nodes.state_dict()
    assert any(name.startswith("data.") for name in state["shared"])
    READ.clear()
    nodes, _ = run(Placed(), 8, state)
    assert outcome(nodes, nodes.finish()) == whole and min(READ) > 5 * 256
    READ.clear()
    state["shared"] = {name: x for name, x in state["shared"].items() if not name.startswith("data.")}
    nodes, _ = run(Placed(), 8, state)
    assert outcome(nodes, nodes.finish()) == whole and min(READ) == 0


def test_dropped_last_batches_are_those_of_fit():
    """And without it, a batch normalization that would get a single example is told of."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    x = torch.randn(17, 4, generator=torch.Generator().manual_seed(0))
    data, strategy = TensorDataset(x, x.sum(1, keepdim=True)), DiLoCoStrategy("sgd", H=3, lr=0.1)
    trainer = LocalTrainer(copy.deepcopy(model), data, loss_fn=mse_loss)
    trainer.fit(strategy, num_epochs=2, batch_size=8, dataloader_kwargs={"drop_last": True}, device="cpu")
    nodes = attach(model, None, strategy)
    with pytest.warns(UserWarning, match=r"node 0 gets 1 example at the end of an epoch \(17 .* 8\): .*drop_last"):
        nodes.loader(data, 8)
    loader = nodes.loader(data, 8, dataloader_kwargs={"drop_last": True})
    assert len(loader) == 2
    for x, y in itertools.chain(loader, loader):
        mse_loss(model(x), y).backward()
        nodes.step()
    assert fingerprint(nodes.finish()) == fingerprint(trainer.model) and trainer.history.last["step"] == 4


def test_other_random_numbers_or_batches_give_other_bits():
    """Controls: the comparisons above see a step without its seed, and a batch of another step."""
    wanted = fingerprint(simulated(described("diloco"), 1, max_steps=8).model)
    found = []
    for reseeds, parts in ((True, PARTS), (False, PARTS), (True, 1)):
        model, _, nodes = begun(steps=8)
        if not reseeds:
            nodes.reseed = lambda: None
        loop(nodes, model, 8, parts)
        found.append(fingerprint(nodes.finish()))
    assert [got == wanted for got in found] == [True, False, False]


def test_an_optimizer_that_another_trainer_steps_takes_the_nodes_steps():
    model, optimizer, nodes = begun(steps=16)
    nodes.follow_optimizer()
    nodes.step = lambda loss: optimizer.step()
    loop(nodes, model, 16)
    wanted = simulated(described("diloco"), 1, max_steps=16)
    assert fingerprint(nodes.finish()) == fingerprint(wanted.model)
    assert [row["step"] for row in nodes.history.rows(None) if row["step"]] == list(range(1, 17))
    before = fingerprint(model)
    model(data().tensors[0]).sum().backward()  # the optimizer is the user's again
    optimizer.step()
    assert fingerprint(model) != before


# Checkpoints, and a look at the averaged model


def checkpoint(nodes, optimizer, file):
    state = {"nodes": nodes.state_dict(), "optimizer": None if optimizer is None else optimizer.state_dict()}
    torch.save(state, file)


@pytest.mark.parametrize("name", ["streaming diloco", "topk"])
def test_a_killed_run_goes_on_with_the_same_bits(name, tmp_path):
    """From the user's own file, in mid-round, with the history."""
    steps, at = 20, 13

    def run(rank, killed=False, resumed=False):
        model, optimizer, nodes = begun(name, own=name == "topk", steps=steps)
        file = tmp_path / f"saved-{rank}.pt"
        if resumed:
            state = torch.load(file, weights_only=True)
            nodes.load_state_dict(state["nodes"])
            if optimizer is not None:
                optimizer.load_state_dict(state["optimizer"])
            assert nodes.step_count == at

        def after():
            if killed and nodes.step_count == at:
                checkpoint(nodes, optimizer, file)
            if killed and nodes.step_count == at + 2:
                os.kill(os.getpid(), signal.SIGKILL)

        loop(nodes, model, steps, after=after)
        return outcome(nodes, nodes.finish())

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path / "killed", lambda rank: run(rank, killed=True))
    resumed = in_world(2, tmp_path / "resumed", lambda rank: run(rank, resumed=True))
    trainer = simulated(described(name), 2, max_steps=steps)
    wanted = json.loads(json.dumps(outcome(trainer, trainer.model)))
    assert resumed == [wanted, wanted]


def test_the_averaged_model_in_mid_run_is_that_of_a_simulation(tmp_path):
    def body(rank):
        model, _, nodes = begun(steps=16)
        seen = []

        def after():
            if nodes.step_count == 10:
                seen.extend(fingerprint(nodes.model_of(k)) for k in (None, 0, 1))
                seen.append(fingerprint(model))

        loop(nodes, model, 16, after=after)
        return [*seen, fingerprint(nodes.finish())]

    vectors = []
    trainer = simulated(
        described("diloco"), 2, max_steps=16, callbacks=[Every(10, lambda loop: vectors.extend(loop.average()[0]))]
    )
    outer, one, other, *_ = (seen := in_world(2, tmp_path, body))[0]
    assert seen[0][:3] == seen[1][:3] and len({outer, one, other}) == 3
    assert [seen[0][3], seen[1][3]] == [one, other]
    assert seen[0][4] == seen[1][4] == fingerprint(trainer.model)
    model, _, nodes = begun()
    assert fingerprint(nodes.model_of(None)) == fingerprint(model)


def test_a_state_of_another_run_is_refused(tmp_path):
    model, _, nodes = begun(steps=8)
    fresh = nodes.state_dict()
    loop(nodes, model, 3)
    state = nodes.state_dict()
    with pytest.raises(CheckpointError, match="before the first step"):
        nodes.load_state_dict(fresh)
    with pytest.raises(CheckpointError, match="the state is not from nodes"):
        nodes.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match="belongs to node 1, but this process is node 0"):
        nodes.load_state_dict(state | {"node": 1})
    other = begun("ddp", steps=8)[2]
    with pytest.raises(CheckpointError, match="from a run with strategy="):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="from a run with total_steps=8, not 9"):
        begun(steps=9)[2].load_state_dict(state)
    damaged = state | {"row": {name: x for name, x in state["row"].items() if name != "fleet.params.0"}}
    with pytest.raises(CheckpointError, match="does not fit this run"):
        begun(steps=8)[2].load_state_dict(damaged)


def test_a_damaged_state_is_refused():
    model, _, nodes = begun(steps=8)
    loop(nodes, model, 3)
    state = nodes.state_dict()
    part = {"node": 0, "row": {}, "shared": {}, "meta": {}}
    for wrong in (
        {}, part, part | {"meta": None}, part | {"row": {"a": 1}, "meta": {"step": 3}}, state | {"row": [1]},
        state | {"row": {name: 1 for name in state["row"]}}, state | {"meta": state["meta"] | {"description": 3}},
        *(
            state | {"meta": {k: x for k, x in state["meta"].items() if k != name}}
            for name in ("step", "examples", "rates", "description")
        ),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"the state (is not from nodes|does not fit|is from a run with)"):
            begun(steps=8)[2].load_state_dict(wrong)
    begun(steps=8)[2].load_state_dict(state)
    nodes.finish()
    with pytest.raises(ArgumentError, match="is over"):
        nodes.state_dict()


# Where it starts, and what is refused


def test_a_torch_scheduler_beside_the_strategys_schedule_is_refused():
    for options in ({"warmup_steps": 4}, {"lr_scheduler": "cosine"}):
        for follows in (False, True):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
            nodes = attach(model, optimizer, DiLoCoStrategy(H=5, **options), total_steps=8)
            if follows:
                nodes.follow_optimizer()
            with pytest.raises(ArgumentError, match=r"the strategy's schedule set it to .*: use either the strategy's"):
                for _ in range(3):
                    model(torch.ones(1, 2)).sum().backward()
                    (optimizer if follows else nodes).step()
                    scheduler.step()


def test_a_loss_of_several_numbers_is_refused_before_the_step():
    model = nn.Linear(2, 1)
    nodes = attach(model, None, DILOCO)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ArgumentError, match=r"must be a single number, but has the shape \(2,\)"):
        nodes.step(torch.ones(2))
    nodes.step(torch.ones(1, 1))
    assert nodes.step_count == 1


def test_few_outer_steps_for_the_default_momentum_are_said_if_the_length_is_known(capfd, monkeypatch):
    monkeypatch.setattr(exogym.core.progress, "_printed", set())
    for steps in (None, 6):
        model = nn.Linear(2, 1)
        nodes = attach(model, None, DiLoCoStrategy(H=3, lr=0.1), total_steps=steps)
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            nodes.step()
        nodes.finish()
        assert ("takes 2 outer steps in 6 steps" in capfd.readouterr().err) == (steps is not None)


def test_nodes_start_with_the_model_of_node_0(tmp_path):
    def body(rank):
        model = Tied()
        with torch.no_grad():
            model.frozen.weight.add_(rank)
            model.last.bias.add_(rank)
        nodes = attach(model, None, SimpleReduceStrategy(lr=LR))
        start = fingerprint(model)
        loop(nodes, model, 3)
        return [start, fingerprint(nodes.finish())]

    first, second = in_world(2, tmp_path, body)
    assert first == second and first[0] == fingerprint(Tied())

    def other(rank):
        with pytest.raises(ModelError, match="node 1 has other names"):
            attach(nn.Linear(2, 1 + rank), None, SimpleReduceStrategy())

    in_world(2, tmp_path / "other", other)


class Sometimes(nn.Module):
    """A layer that only some batches reach, so a step may give its gradient on one node and not on the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, 2), nn.Linear(2, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(h) if x[0, 0] > 0 else h


def test_a_parameter_without_a_gradient_on_some_nodes(tmp_path):
    kinds = {SimpleReduceStrategy: {}, DiLoCoStrategy: {"H": 3}}

    def train(kind, given):
        model = Sometimes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        nodes, missed = attach(model, optimizer, kind(**given)), 0
        for x, y in nodes.loader(data(), BATCH):
            mse_loss(model(x), y).backward()
            missed += model.last.weight.grad is None
            nodes.step()
            if nodes.step_count == 8:
                break
        return [missed, fingerprint(nodes.finish())]

    ranks = in_world(2, tmp_path, lambda rank: [train(*each) for each in kinds.items()])
    for (kind, given), (some, one), (others, other) in zip(kinds.items(), *ranks, strict=True):
        trainer = LocalTrainer(Sometimes(), data(), loss_fn=mse_loss)
        trainer.fit(kind(lr=LR, **given), num_nodes=2, max_steps=8, batch_size=BATCH, device="cpu")
        assert one == other == fingerprint(trainer.model) and 0 < some < 8 and some != others


def test_if_a_process_dies_the_others_end(tmp_path):
    """They raise an error where they wait for it, and neither hang nor go on without it."""

    def body(rank):
        model, _, nodes = begun("ddp")

        def after():
            if nodes.step_count == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RuntimeError, match=r"[Cc]onnection|peer|timed out"):
            loop(nodes, model, after=after)
        (tmp_path / "ended").write_text(str(nodes.step_count))
        os._exit(0)  # the group is broken

    with pytest.raises(AssertionError, match="-9"):
        in_world(2, tmp_path, body)
    assert (tmp_path / "ended").read_text() == "3"


def test_if_loops_end_after_other_numbers_of_steps_all_nodes_say_so(tmp_path):
    """In a round and between rounds, before the first step too. Nobody waits, or takes a message for another."""
    cases = [("diloco", 3, 9), ("diloco", 3, 5), ("diloco", 7, 8), ("diloco", 0, 1), ("ddp", 1, 2), ("gossip", 4, 2)]

    def body(rank):
        found = []
        for name, *stops in cases:
            model, _, nodes = begun(name)
            with pytest.raises(TrainingError) as raised:
                if stops[rank]:
                    loop(nodes, model, stops[rank])
                nodes.finish()
            found.append(str(raised.value).partition(":")[0])
        return found

    few, at = (3, 3, 7, 0, 1, 2), (7, 5, 8, 1, 2, 4)
    first = [int(case[2] < case[1]) for case in cases]
    wanted = [
        f"node {one} ended after {a} steps, but node {1 - one} is at step {b}"
        for one, a, b in zip(first, few, at, strict=True)
    ]
    assert in_world(2, tmp_path, body) == [wanted, wanted]


def line():
    return nn.Linear(2, 1)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": LR} | options)


def mixed():
    model = nn.Sequential(line(), line())
    return model, torch.optim.SGD(model[0].parameters(), lr=0.1)


def metal():
    return nn.Linear(2, 1, device="meta")


DILOCO = DiLoCoStrategy(H=2)


class Reads(PeriodicModule):
    """A module whose equation needs the inner optimizer's rate and the number of steps."""

    interval_steps, needs_length = 2, True

    def communicate(self, fleet, step):
        pass


def reading():
    module = Reads()
    strategy = CommunicateOptimizeStrategy("adamw", [module])
    module.inner = strategy.inner
    return strategy


REFUSED = [
    (lambda: attach(3, None, DILOCO), "not int"),
    (lambda: attach(nn.DataParallel(line()), None, DILOCO), "wrapped in DataParallel"),
    (lambda: attach(nn.Sequential(nn.ReLU()), None, DILOCO), "no trainable parameter"),
    (lambda: attach(metal(), None, DILOCO), "meta device"),
    (lambda: attach(nn.LazyLinear(2), None, DILOCO), "has no shape yet"),
    (lambda: attach(line(), None, "diloco"), "must be an instance of a strategy"),
    (lambda: attach(line(), None, AsyncDiLoCoStrategy(H=2)), "no virtual clock orders the steps"),
    (lambda: attach(line(), None, FedAvgStrategy(H=2, client_fraction=0.5)), "cannot pause"),
    (lambda: attach(line(), None, FedAvgStrategy(H=2, local_steps=[1])), "cannot pause"),
    (lambda: attach(line(), None, DiLoCoStrategy(H=2, lr_scheduler="cosine")), "pass total_steps to attach"),
    (lambda: attach(line(), None, DiLoCoStrategy(H=lambda r: 2)), "pass total_steps to attach"),
    (lambda: attach(line(), None, DILOCO, total_steps=0), "total_steps=0"),
    (lambda: attach(line(), None, DILOCO, seed=0.5), "seed=0.5"),
    (lambda: attach(line(), None, DILOCO, step_seconds=1), r"retired: use LocalTrainer\.fit"),
    (lambda: attach(line(), None, DILOCO, steps=3), "no argument 'steps': did you mean 'total_steps'"),
    (lambda: attach(line(), "adam", DILOCO), "not str"),
    (lambda: attach(line(), adam(line()), DILOCO), "not parameters of the model"),
    (lambda: attach(m := line(), [adam(m)], DILOCO), "must be a torch.optim.Optimizer, .* not list"),
    (lambda: attach(*mixed(), DILOCO), "lacks 2 trainable parameters, such as '1.weight'"),
    (lambda: attach(m := line(), torch.optim.LBFGS(m.parameters()), DILOCO), "LBFGS cannot be used"),
    (lambda: attach(m := line(), adam(m), DeMoStrategy()), "its own update rule"),
    (lambda: attach(m := line(), adam(m), reading(), total_steps=4), "settings or state"),
    (lambda: attach(line(), None, reading()), "equation depends on the run's length: pass total_steps to attach"),
    (lambda: attach(m := line(), adam(m), MuLoCoStrategy(H=2)), "the optimizer is AdamW"),
    (lambda: attach(m := line(), adam(m), DiLoCoStrategy("sgd", H=2, lr=0.1)), "the optimizer is AdamW"),
    (lambda: attach(m := line(), adam(m), DiLoCoStrategy(H=2, lr=0.5)), "lr=0.02, but"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_attached_is_refused(given, said):
    with pytest.raises((ArgumentError, ModelError), match=said):
        given()


def test_steps_that_cannot_be_right_are_refused():
    model, optimizer, nodes = begun(steps=4)
    x, y = data()[:8]
    with pytest.raises(ModelError, match="no parameter has a gradient"):
        nodes.step()
    mse_loss(model(x), y).backward()
    with pytest.raises(ArgumentError, match="takes the step: call nodes"):
        optimizer.step()
    nodes.step()
    model.frozen.requires_grad_(True)
    mse_loss(model(x), y).backward()
    with pytest.raises(ModelError, match="was frozen when attach was called"):
        nodes.step()
    model.frozen.requires_grad_(False)
    model.frozen.weight.grad = model.frozen.bias.grad = None
    nodes.step()
    (mse_loss(model(x), y) * torch.inf).backward()
    with pytest.raises(TrainingError, match="not finite"):
        nodes.step()
        nodes.finish()


def test_a_parameter_in_other_memory_is_refused():
    model, _, nodes = begun()
    x, y = data()[:8]
    mse_loss(model(x), y).backward()
    model.last.weight.data = model.last.weight.data.clone()
    with pytest.raises(ModelError, match="training moved parameter"):
        nodes.step()


def test_a_run_has_an_end():
    model, optimizer, nodes = begun(steps=2)
    loop(nodes, model, 2)
    x, y = data()[:8]
    mse_loss(model(x), y).backward()
    with pytest.raises(ArgumentError, match="step 3 is beyond total_steps=2"):
        nodes.step()
    nodes.finish()
    for late in (nodes.step, nodes.finish, nodes.follow_optimizer, lambda: nodes.load_state_dict({})):
        with pytest.raises(ArgumentError, match="the run is over"):
            late()
    assert fingerprint(nodes.model_of()) == fingerprint(model)
    assert attach(model, optimizer, DILOCO).step_count == 0  # another run may begin


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("strategy", [DILOCO, SimpleReduceStrategy()], ids=["diloco", "ddp"])
def test_attach_again_ends_a_run_that_was_interrupted(strategy, follows):
    """A notebook's cell that was stopped in mid step, and run again: as a loop that begins there."""

    def cell(model, optimizer, stop=None):
        nodes = attach(model, optimizer, strategy)
        if follows:
            nodes.follow_optimizer()
        for k in range(6):
            x, y = data()[8 * k : 8 * k + 8]
            nodes.reseed()
            mse_loss(model(x), y).backward()
            if k == stop:
                raise KeyboardInterrupt(nodes)
            optimizer.step() if follows else nodes.step()
        return nodes.finish()

    model = Tied()
    optimizer = adam(model)
    with pytest.raises(KeyboardInterrupt) as stopped:
        cell(model, optimizer, stop=3)
    (old,) = stopped.value.args
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    other = adam(fresh)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    cell(model, optimizer)
    assert fingerprint(model) == fingerprint(cell(fresh, other))
    assert old.is_over
    for late in (old.step, old.finish, old.state_dict):
        with pytest.raises(ArgumentError, match="because attach was called again with its model or optimizer"):
            late()
    optimizer.step()  # nobody watches it any more
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_attach_again_with_another_optimizer_or_without_one_ends_the_run_too():
    model, optimizer, nodes = begun()
    loop(nodes, model, 2)
    second = attach(model, None, DILOCO)
    assert nodes.is_over and not second.is_over
    optimizer.step()
    third = attach(model, optimizer, DILOCO)
    assert second.is_over and not third.is_over
    apart = attach(line(), None, DILOCO)  # the control: another model's run goes on
    loop(third, model, 2)
    third.finish()
    assert not apart.is_over


def test_sparse_gradients_are_refused_where_a_row_or_a_norm_needs_dense_ones():
    def steps(sparse, strategy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 1))
        nodes = attach(model, torch.optim.SGD(model.parameters(), 0.1), strategy)
        for _ in range(3):
            model(torch.arange(3)).sum().backward()
            nodes.step()
        return nodes.finish().state_dict()

    for strategy in (SimpleReduceStrategy(), DiLoCoStrategy("sgd", H=2, lr=0.1, max_norm=0.1)):
        steps(False, strategy)
        with pytest.raises(ModelError, match=r"gradient of '0.weight' must be dense, but is sparse: create the layer"):
            steps(True, strategy)
    found, wanted = (steps(sparse, DiLoCoStrategy("sgd", H=2, lr=0.1)) for sparse in (True, False))
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x)


def test_a_sparse_buffer_may_be_in_the_model():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(4, 1)
            self.register_buffer("near", torch.eye(3).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.near, self.out(x))

    model, x = Graph(), torch.ones(3, 4)
    nodes = attach(model, torch.optim.SGD(model.parameters(), 0.1), DILOCO)
    model(x).sum().backward()
    nodes.step()
    assert nodes.state_dict()["meta"]["description"]["shared"]
    assert nodes.finish().near.is_sparse


def test_a_grad_scaler_is_refused():
    model, optimizer, nodes = begun()
    nodes.follow_optimizer()
    x, y = data()[:8]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mse_loss(model(x), y)).backward()
    with pytest.raises(ArgumentError, match="GradScaler skips a step"):
        scaler.step(optimizer)
    _, optimizer, nodes = begun()
    nodes.follow_optimizer()
    with pytest.raises(ArgumentError, match="take the node's step: remove the call"):
        nodes.step()
    with pytest.raises(ArgumentError, match="optimizer=None"):
        attach(line(), None, DILOCO).follow_optimizer()


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_computes_the_gradients_first(named):
    """As Lightning calls the optimizer. Without the closure: the same bits."""

    def train(by_closure):
        model, optimizer, nodes = begun("ddp", steps=4)
        nodes.follow_optimizer()
        (x, y), calls = data()[:8], []

        def closure():
            calls.append(nodes.step_count)
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            nodes.reseed()
            if by_closure:
                with torch.no_grad():  # torch's optimizers turn gradients on for a closure
                    loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
                assert loss.ndim == 0
            else:
                closure()
                optimizer.step()
        assert calls == [0, 1, 2, 3]
        return fingerprint(nodes.finish())

    assert train(True) == train(False)
